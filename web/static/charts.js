// Draws the figures that the server describes, in the colours of the present theme, and keeps them fresh.
"use strict";

(() => {
  const figures = new WeakMap();
  const latest = new WeakMap();

  // "var(--name)" in a figure stands for the style sheet's variable.
  function withColours(value, styles) {
    if (typeof value === "string") {
      const match = /^var\((--[\w-]+)\)$/.exec(value);
      return match ? styles.getPropertyValue(match[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => withColours(item, styles));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, withColours(item, styles)]));
    }
    return value;
  }

  function plotOf(element) {
    let plot = element.querySelector(".plot");
    if (!plot) {
      plot = document.createElement("div");
      plot.className = "plot";
      element.append(plot);
    }
    return plot;
  }

  const SHAPES = {
    circle: ["circle", { cx: 6, cy: 6, r: 4.5 }],
    "circle-open": ["circle", { cx: 6, cy: 6, r: 4.5, fill: "none" }],
    square: ["rect", { x: 2, y: 2, width: 8, height: 8 }],
    diamond: ["path", { d: "M6 .5 11.5 6 6 11.5 .5 6z" }],
    "triangle-up": ["path", { d: "M6 1.5 11 10.5H1z" }],
    "triangle-down": ["path", { d: "M6 10.5 1 1.5h10z" }],
    x: ["path", { d: "M2 2l8 8M10 2l-8 8", "stroke-width": 3 }],
    "line-ew-open": ["path", { d: "M1 6h10", "stroke-width": 2 }],
    line: ["path", { d: "M0 6h12", "stroke-width": 2 }],
  };

  function svgElement(tag, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  function swatch(trace) {
    const isLine = trace.mode.startsWith("lines");
    const colour = isLine ? trace.line.color : trace.marker.color;
    const [tag, attributes] = SHAPES[isLine ? "line" : trace.marker.symbol || "circle"];
    const svg = svgElement("svg", { width: 12, height: 12, viewBox: "0 0 12 12", "aria-hidden": "true" });
    svg.append(svgElement(tag, { fill: colour, stroke: colour, "stroke-width": 1.2, ...attributes }));
    return svg;
  }

  function drawLegend(element, data) {
    let list = element.querySelector(".chart-legend");
    if (!list) {
      list = document.createElement("ul");
      list.className = "chart-legend";
      element.prepend(list);
    }
    list.replaceChildren(...data.filter((trace) => trace.showlegend !== false).map((trace) => {
      const item = document.createElement("li");
      item.append(swatch(trace), trace.name);
      return item;
    }));
  }

  async function draw(element) {
    const figure = figures.get(element);
    if (!figure) return;
    const filled = figure.data.length > 0;
    element.classList.toggle("has-figure", filled);
    const plot = plotOf(element);
    if (!filled) { Plotly.purge(plot); drawLegend(element, []); return; }
    const { data, layout } = withColours(figure, getComputedStyle(document.documentElement));
    drawLegend(element, data);
    await Plotly.react(plot, data, layout, { displayModeBar: false, responsive: true, doubleClick: false });
    element.dataset.points = String(data.reduce((sum, trace) => sum + (trace.customdata || trace.x).length, 0));
    if (element.dataset.pointUrl && !plot.dataset.clickable) {
      plot.dataset.clickable = "true";
      plot.on("plotly_click", (event) => {
        const number = event.points[0] && event.points[0].customdata;
        if (number !== undefined) location.assign(element.dataset.pointUrl + number);
      });
    }
  }

  async function load(element) {
    const ticket = (latest.get(element) || 0) + 1;
    latest.set(element, ticket);
    let response;
    try { response = await fetch(element.dataset.chart, { headers: { Accept: "application/json" } }); } catch { return; }
    if (!response.ok) return;
    const figure = await response.json();
    if (latest.get(element) !== ticket) return;
    figures.set(element, figure);
    await draw(element);
  }

  const all = () => document.querySelectorAll("[data-chart]");
  document.addEventListener("DOMContentLoaded", () => all().forEach(load));
  document.addEventListener("DOMContentLoaded", () =>
    document.body.addEventListener("refresh", () => all().forEach(load)));
  document.addEventListener("htmx:after:swap", () => all().forEach((element) => {
    if (!figures.has(element) && !latest.has(element)) load(element);
  }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => all().forEach(draw));
})();
