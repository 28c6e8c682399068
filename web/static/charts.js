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
      plot.style.height = "100%";
      element.append(plot);
    }
    return plot;
  }

  async function draw(element) {
    const figure = figures.get(element);
    if (!figure) return;
    const filled = figure.data.length > 0;
    element.classList.toggle("has-figure", filled);
    const plot = plotOf(element);
    if (!filled) { Plotly.purge(plot); return; }
    const { data, layout } = withColours(figure, getComputedStyle(document.documentElement));
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
