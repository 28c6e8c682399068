// Small behaviours of every page: live refresh, ticking clocks, copy buttons, confirmations. No page needs them to work.
"use strict";

(() => {
  const MIN_REFRESH_MS = 400;
  let pending = null;
  let lastRefresh = 0;

  // Many events may come at once; the page is refreshed at most every MIN_REFRESH_MS, and always after the last one.
  function refreshSoon() {
    if (pending !== null) return;
    const wait = Math.max(60, lastRefresh + MIN_REFRESH_MS - performance.now());
    pending = setTimeout(() => {
      pending = null;
      lastRefresh = performance.now();
      document.body.dispatchEvent(new CustomEvent("refresh"));
    }, wait);
  }

  // What is being measured right now: on the study's page of any trial, on a trial's page of that one.
  function showProgress(text) {
    const target = document.getElementById("current-step");
    const progress = JSON.parse(text).data;
    if (!target || progress.step === undefined) return;
    if (target.dataset.trial !== undefined && Number(target.dataset.trial) !== progress.number) return;
    const what = { setup: "setting up", warmup: "warming up" }[progress.phase] || "measuring";
    const step = progress.phase === "setup" ? "" : ` · step ${progress.step}`;
    const time = progress.step_seconds ? ` · ${formatMilliseconds(progress.step_seconds * 1000)}` : "";
    const trial = target.dataset.trial === undefined && progress.number !== undefined ? `trial ${progress.number}: ` : "";
    target.textContent = `${trial}${what}${step}${time}`;
  }

  function formatMilliseconds(value) {
    return value >= 1000 ? `${(value / 1000).toPrecision(3)} s` : `${value.toPrecision(3)} ms`;
  }

  const FINAL = ["succeeded", "failed", "cancelled"];
  document.addEventListener("htmx:sse:after:message", (event) => {
    const message = event.detail.message;
    if (message.event === "trial_progress") { showProgress(message.data); return; }
    refreshSoon();
    // The stream ends with the study: without its element there is no connecting again.
    if (message.event === "state" && FINAL.includes(JSON.parse(message.data).data.state)) event.target.remove();
  });

  // Whatever happened before the stream stood is caught up with.
  document.addEventListener("htmx:sse:after:connection", () => { setConnected(true); refreshSoon(); });
  document.addEventListener("htmx:sse:error", () => setConnected(false));

  function setConnected(connected) {
    const notice = document.getElementById("connection");
    if (notice) notice.hidden = connected;
  }

  // A session that has ended leads to the log-in page, which belongs in the window, not into a part of this page.
  document.addEventListener("htmx:before:response", (event) => {
    const response = event.detail.ctx.response.raw;
    if (response.redirected && new URL(response.url).pathname === "/login") { event.preventDefault(); location.reload(); }
    if (response.status === 204) refreshSoon();
  });

  // Clocks: the server says how many seconds had passed when it made the page; from there they tick here.
  const clocks = new WeakMap();
  function tick() {
    for (const element of document.querySelectorAll("[data-elapsed]")) {
      const said = element.dataset.elapsed;
      let clock = clocks.get(element);
      if (!clock || clock.said !== said) {
        clock = { said, from: performance.now() - 1000 * Number(said) };
        clocks.set(element, clock);
      }
      element.textContent = formatDuration((performance.now() - clock.from) / 1000);
    }
  }
  function formatDuration(seconds) {
    const whole = Math.round(seconds);
    const two = (number) => String(number).padStart(2, "0");
    if (whole < 60) return `${whole} s`;
    if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
    return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  }
  setInterval(tick, 1000);

  // Times: the tooltip also tells the reader's own time zone.
  function localTimes() {
    for (const element of document.querySelectorAll("time[datetime]:not([data-local])")) {
      element.dataset.local = "";
      element.title = `${new Date(element.dateTime).toLocaleString()} (${element.title})`;
    }
  }
  document.addEventListener("DOMContentLoaded", localTimes);
  document.addEventListener("htmx:after:swap", () => { localTimes(); tick(); });

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const source = document.querySelector(button.dataset.copy);
    const label = button.querySelector("[data-label]");
    try {
      await navigator.clipboard.writeText(source.textContent);
      label.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(source);
      label.textContent = "Selected";
    }
    setTimeout(() => { label.textContent = "Copy"; }, 1800);
  });

  // The link printed at the start carries the token behind "#", which no server and no log ever sees.
  document.addEventListener("DOMContentLoaded", () => {
    const field = document.getElementById("token");
    const match = /^#token=(.+)$/.exec(location.hash);
    if (!field || !match) return;
    history.replaceState(null, "", location.pathname + location.search);
    field.value = decodeURIComponent(match[1]);
    field.form.requestSubmit();
  });

  document.addEventListener("submit", (event) => {
    const question = event.target.dataset.confirm;
    if (question && !confirm(question)) event.preventDefault();
  });

  // A select or checkbox that is a link in disguise: the form's own submit button is for pages without scripts.
  document.addEventListener("change", (event) => {
    const form = event.target.closest("form[data-auto]");
    if (form) form.requestSubmit();
  });
})();
