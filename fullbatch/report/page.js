// Draws the curves and fills in the pictures.  Text only ever enters by textContent.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLORS = 7, HEIGHT = 216, MOST_IN_TIP = 12;
  const state = { x: "step", smooth: false, filter: data.filters.length > 1 ? data.filters[0] : null, hidden: new Set(), hover: null };
  const plots = [];

  // -- small things ---------------------------------------------------------------------------------------------------
  const element = (name, attributes = {}, text) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const svg = (name, attributes = {}, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const colorClass = (color) => (color < 0 ? "cb d1" : `c${color % COLORS} d${Math.floor(color / COLORS)}`);

  const plainNumber = (value) => {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 1e-3) return value.toExponential(1).replace(".0e", "e").replace("-", "−").replace("e-", "e−");
    if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
    return String(+value.toPrecision(4)).replace("-", "−");
  };
  const formatted = (value, format) => (format === "percent" ? `${plainNumber(+(100 * value).toPrecision(4))}%` : plainNumber(value));
  const timeUnit = (greatest) => (greatest < 180 ? [1, "s"] : greatest < 10800 ? [60, "min"] : [3600, "h"]);

  // -- scales ---------------------------------------------------------------------------------------------------------
  const niceStep = (span, count) => {
    const rough = span / count, power = 10 ** Math.floor(Math.log10(rough)), part = rough / power;
    return power * (part < 1.5 ? 1 : part < 3.5 ? 2 : part < 7.5 ? 5 : 10);
  };
  const linear = (low, high, count) => {
    const flat = 1e-9 * Math.max(Math.abs(low), Math.abs(high));  // dust of rounding is no range: its ticks would not end
    if (!(high - low > flat)) { const pad = Math.abs(low) * 0.1 || 1; low -= pad; high += pad; }
    const step = niceStep(high - low, count), ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(+(k * step).toPrecision(12));
    return { low, high, ticks, place: (value) => (value - low) / (high - low) };
  };
  const logarithmic = (low, high) => {
    if (!(high > low)) { low /= 1.5; high *= 1.5; }
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
    const decades = Math.log10(high / low), marks = decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
    const stride = decades > 6 ? Math.ceil(decades / 5) : 1;
    const ticks = [];
    for (let power = from; power <= to; power += stride)
      for (const mark of marks) {
        const value = +(mark * 10 ** power).toPrecision(6);
        if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value);
      }
    if (ticks.length < 2) return { low, high, ticks: [low, high], place: (v) => Math.log(v / low) / Math.log(high / low) };
    return { low, high, ticks, place: (value) => Math.log(value / low) / Math.log(high / low) };
  };

  const clocked = (steps, values, step) => {  // seconds, or pairs, at a step: from the nearest known ones
    let after = steps.findIndex((each) => each >= step);
    if (after < 0) after = steps.length - 1;
    if (after <= 0 || steps[after] === step) return values[Math.max(after, 0)] ?? 0;
    const share = (step - steps[after - 1]) / (steps[after] - steps[after - 1] || 1);
    return values[after - 1] + share * (values[after] - values[after - 1]);
  };
  const alongRun = (run, step) => {
    const [steps, seconds, pairs] = run.clock;
    if (state.x === "step") return step;
    return state.x === "samples" ? clocked(steps, pairs, step) : clocked(steps, seconds, step);
  };
  const alongX = (line, step) => (line.run < 0 ? step : alongRun(data.runs[line.run], step));
  const smoothed = (values) => {
    const keep = Math.max(0, 1 - 1 / Math.max(2, values.length / 20));
    let total = 0, weight = 0;
    return values.map((value) => { total = keep * total + (1 - keep) * value; weight = keep * weight + 1 - keep; return total / weight; });
  };

  // -- one chart ------------------------------------------------------------------------------------------------------
  class Plot {
    constructor(figure, chart) {
      this.figure = figure; this.chart = chart; this.log = chart.log;
      this.place = figure.querySelector(".plot");
      this.tip = element("div", { class: "tip", hidden: "" });
      const button = figure.querySelector(".log");
      button.addEventListener("click", () => {
        this.log = !this.log; button.setAttribute("aria-pressed", this.log); this.draw();
      });
      this.place.addEventListener("pointermove", (event) => this.hover(event));
      this.place.addEventListener("pointerdown", (event) => this.hover(event));
      this.place.addEventListener("pointerleave", () => setHover(null, null));
      new ResizeObserver(() => requestAnimationFrame(() => this.draw())).observe(this.place);
    }
    isPoints() { return this.chart.x !== "step"; }
    isArea() { return this.isPoints() && this.chart.shape === "area"; }
    isEven() { return !this.isPoints() || this.chart.shape !== "doubling"; }
    shades() {  // where steps left the weights as they were
      if (this.isPoints()) return [];
      const runs = new Set(this.visible().map((line) => data.runs[line.run]).filter((run) => run && run.recovery));
      return [...new Set([...runs].map((run) => alongRun(run, run.recovery)))];
    }
    visible() {
      return this.chart.lines.filter((line) =>
        !state.hidden.has(line.label) && (line.run < 0 || !state.filter || data.runs[line.run].filter === state.filter));
    }
    prepared() {
      return this.visible().map((line) => {
        const y = state.smooth && !this.isPoints() ? smoothed(line.y) : line.y;
        const usable = line.x.map((_, at) => at).filter((at) => !this.log || (y[at] > 0 && line.y[at] > 0));
        const pick = (list) => (list.length ? usable.map((at) => list[at]) : []);
        return { line, x: usable.map((at) => alongX(line, line.x[at])), y: pick(y), raw: pick(line.y), low: pick(line.low), high: pick(line.high) };
      }).filter((each) => each.x.length);
    }
    draw() {
      const width = Math.round(this.place.clientWidth);
      if (width < 60) return;
      const lines = this.prepared();
      const canvas = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": this.words(lines) });
      this.place.replaceChildren(canvas, this.tip);
      if (!lines.length) {
        const why = this.log && this.visible().length ? "no positive value to show on a log axis" : "nothing to show";
        canvas.append(svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle", class: "empty" }, why));
        this.shown = null; return;
      }
      const values = lines.flatMap((each) => [...each.y, ...(state.smooth ? each.raw : []), ...each.low, ...each.high])
        .concat(this.chart.marks.map((mark) => mark.y), this.chart.top ? [this.chart.top] : []).filter((v) => !this.log || v > 0);
      const xs = lines.flatMap((each) => each.x);
      let low = Math.min(...values), high = Math.max(...values);
      if (!this.log && high > low) { const pad = (high - low) * 0.06; const above = low >= 0; low -= pad; high += pad; if (above && low < 0) low = 0; }
      if (this.log && high > low) { const pad = (high / low) ** 0.05; low /= pad; high *= pad; }
      const yScale = this.log ? logarithmic(low, high) : linear(low, high, 5);
      const labels = yScale.ticks.map((tick) => formatted(tick, this.chart.format));
      const left = 12 + 6.4 * Math.max(...labels.map((label) => label.length)), right = 14, top = 10, bottom = 36;
      const points = this.isPoints(), inner = width - left - right;
      const even = this.isEven(), edge = this.isArea() || !points ? 0 : 14;
      const xLow = points ? Math.min(...xs) : 0, xHigh = Math.max(...xs);
      const [unit, unitName] = state.x === "time" && !points ? timeUnit(xHigh) : [1, ""];
      const count = Math.max(3, Math.floor(inner / 85));
      const xScale = even ? linear(xLow / unit, xHigh / unit, count) : logarithmic(xLow, xHigh);
      const xTicks = even ? xScale.ticks : [...new Set(xs)].sort((a, b) => a - b);
      const atX = (x) => left + edge + (inner - 2 * edge) * xScale.place(x / unit);
      const atY = (y) => top + (HEIGHT - top - bottom) * (1 - yScale.place(y));
      for (const end of this.shades()) {
        const right = Math.min(atX(end), left + inner);
        canvas.append(svg("rect", { class: "frozen", x: left, y: top, width: Math.max(right - left, 0), height: HEIGHT - top - bottom }));
        if (right - left > 58) canvas.append(svg("text", { x: left, y: top - 2 }, "recovery"));
      }
      yScale.ticks.forEach((tick, at) => {
        const y = atY(tick);
        if (y < top - 1 || y > HEIGHT - bottom + 1) return;
        canvas.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }));
        canvas.append(svg("text", { x: left - 7, y: y + 3.5, "text-anchor": "end" }, labels[at]));
      });
      canvas.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: HEIGHT - bottom, y2: HEIGHT - bottom }));
      let free = -Infinity;
      for (const tick of xTicks) {
        const x = atX(tick * unit);
        if (x < free || x > width - right + 4) continue;
        free = x + 34;
        canvas.append(svg("text", { x, y: HEIGHT - bottom + 15, "text-anchor": "middle" }, plainNumber(tick)));
      }
      const name = points ? this.chart.x : { step: "step", samples: "pairs seen", time: `time (${unitName})` }[state.x];
      canvas.append(svg("text", { x: width - right, y: HEIGHT - 5, "text-anchor": "end" }, name));
      for (const mark of this.chart.marks) {
        if (this.log && !(mark.y > 0)) continue;
        const y = atY(mark.y);
        canvas.append(svg("line", { class: "mark cb d1", x1: left, x2: width - right, y1: y, y2: y }));
        canvas.append(svg("text", { x: width - right, y: y - 4, "text-anchor": "end" }, `${mark.label} ${formatted(mark.y, this.chart.format)}`));
      }
      for (const each of lines) this.drawLine(canvas, each, atX, atY, points, lines.length <= 8);
      this.overlay = svg("g"); canvas.append(this.overlay);
      this.shown = { lines, atX, atY, left, right: width - right, width, unit, unitName };
    }
    drawLine(canvas, each, atX, atY, points, banded) {
      const look = colorClass(each.line.color), color = look.split(" ")[0];
      const path = (ys) => each.x.map((x, at) => `${at ? "L" : "M"}${atX(x).toFixed(1)} ${atY(ys[at]).toFixed(1)}`).join("");
      const floor = (y, at) => (this.log && !(y > 0) ? each.y[at] : y);
      const area = this.isArea();
      if (each.low.length && (area || (!points && banded))) {
        const back = each.x.map((x, at) => `L${atX(x).toFixed(1)} ${atY(floor(each.low[at], at)).toFixed(1)}`).reverse().join("");
        canvas.append(svg("path", { class: `band ${color}`, d: `${path(each.high)}${back}Z` }));
      }
      if (points && !area)
        each.low.forEach((low, at) => {
          if (each.high[at] === low) return;
          const x = atX(each.x[at]), a = atY(floor(low, at)), b = atY(each.high[at]);
          canvas.append(svg("path", { class: `error ${color}`, d: `M${x} ${a}V${b}M${x - 4} ${a}h8M${x - 4} ${b}h8` }));
        });
      if (state.smooth && !points) canvas.append(svg("path", { class: `line raw ${color}`, d: path(each.raw) }));
      canvas.append(svg("path", { class: `line ${look}`, d: path(each.y) }));
      if (!area && (points || each.x.length < 2 || (each.x.length < 16 && each.line.color >= 0)))
        each.x.forEach((x, at) => canvas.append(svg("circle", { class: `dot ${color}`, cx: atX(x), cy: atY(each.y[at]), r: points ? 4 : 3 })));
    }
    words(lines) {
      const said = lines.slice(0, 6).map((each) =>
        `${each.line.label} from ${formatted(each.y[0], this.chart.format)} to ${formatted(each.y[each.y.length - 1], this.chart.format)}`);
      return `${this.chart.title}: ${said.join("; ")}`;
    }
    hover(event) {
      if (!this.shown) return;
      const x = event.clientX - this.place.getBoundingClientRect().left;
      let nearest = null;
      for (const each of this.shown.lines)
        for (const value of each.x) {
          const away = Math.abs(this.shown.atX(value) - x);
          if (nearest === null || away < nearest.away) nearest = { away, value };
        }
      if (nearest) setHover(nearest.value, this);
    }
    showHover(value, leader) {
      if (!this.shown || !this.overlay) return;
      this.overlay.replaceChildren(); this.tip.hidden = true;
      if (value === null || (leader !== this && (this.isPoints() || leader.isPoints()))) return;
      const { lines, atX, atY, left, right, width, unit, unitName } = this.shown, x = atX(value);
      if (x < left - 1 || x > right + 1) return;
      this.overlay.append(svg("line", { class: "cross", x1: x, x2: x, y1: 10, y2: HEIGHT - 36 }));
      const found = [];
      for (const each of lines) {
        let at = 0;
        each.x.forEach((one, place) => { if (Math.abs(one - value) < Math.abs(each.x[at] - value)) at = place; });
        if (Math.abs(atX(each.x[at]) - x) > 24) continue;
        this.overlay.append(svg("circle", { class: `dot ${colorClass(each.line.color).split(" ")[0]}`, cx: atX(each.x[at]), cy: atY(each.y[at]), r: 4 }));
        found.push([each, at]);
      }
      if (leader !== this) return;
      const unitOf = this.isPoints() ? this.chart.x : { step: "step", samples: "pairs", time: unitName }[state.x];
      const head = element("div", {}, state.x === "time" && !this.isPoints() ? `${plainNumber(value / unit)} ${unitOf}` : `${unitOf} ${value.toLocaleString("en")}`);
      const rows = found.sort((a, b) => b[0].y[b[1]] - a[0].y[a[1]]).slice(0, MOST_IN_TIP).map(([each, at]) => {
        const row = element("div");
        row.append(swatch(each.line.color), element("span", { class: "name" }, each.line.label), element("b", {}, formatted(each.y[at], this.chart.format)));
        return row;
      });
      this.tip.replaceChildren(head, ...rows);
      if (found.length > MOST_IN_TIP) this.tip.append(element("div", {}, `and ${found.length - MOST_IN_TIP} more`));
      this.tip.hidden = false;
      const wide = this.tip.offsetWidth, beyond = x + 14 + wide > width;
      this.tip.style.left = `${Math.max(0, beyond ? x - 14 - wide : x + 14)}px`;
      this.tip.style.top = "6px";
    }
  }
  const setHover = (value, leader) => { for (const plot of plots) plot.showHover(value, leader); };
  const drawAll = () => { for (const plot of plots) plot.draw(); };

  // -- legends and controls -------------------------------------------------------------------------------------------
  const swatch = (color) => {
    const made = svg("svg", { class: `swatch ${colorClass(color).split(" ")[0]}`, viewBox: "0 0 20 8", "aria-hidden": "true" });
    made.append(svg("line", { x1: 0, x2: 20, y1: 4, y2: 4, class: colorClass(color).split(" ")[1] || "" }));
    return made;
  };
  const fillLegend = (place, lines) => {
    const labels = new Map(lines.map((line) => [line.label, line.color]));
    if (labels.size < 2) return;
    for (const [label, color] of labels) {
      const button = element("button", { type: "button", "aria-pressed": "true", "data-label": label });
      button.append(swatch(color), element("span", {}, label));
      button.addEventListener("click", () => {
        state.hidden.has(label) ? state.hidden.delete(label) : state.hidden.add(label);
        for (const each of document.querySelectorAll(".legend button"))
          if (each.dataset.label === label) each.setAttribute("aria-pressed", !state.hidden.has(label));
        drawAll();
      });
      place.append(button);
    }
  };
  const byKey = new Map(data.charts.map((chart) => [chart.key, chart]));
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = byKey.get(figure.dataset.chart);
    if (!chart) continue;
    plots.push(new Plot(figure, chart));
    if (!data.shared || !figure.closest("section").querySelector(".legend.shared")) fillLegend(figure.querySelector(".legend"), chart.lines);
  }
  if (data.shared)
    for (const place of document.querySelectorAll(".legend.shared")) {
      const keys = new Set([...place.closest("section").querySelectorAll("figure[data-chart]")].map((figure) => figure.dataset.chart));
      fillLegend(place, data.charts.filter((chart) => keys.has(chart.key)).flatMap((chart) => chart.lines));
    }
  for (const choice of document.querySelectorAll("[data-choice]")) {
    const buttons = [...choice.querySelectorAll("button")];
    for (const button of buttons)
      button.addEventListener("click", () => {
        state[choice.dataset.choice] = button.dataset.value;
        for (const each of buttons) each.setAttribute("aria-pressed", each === button);
        drawAll();
      });
  }
  for (const button of document.querySelectorAll("button.smooth"))
    button.addEventListener("click", () => {
      state.smooth = !state.smooth; button.setAttribute("aria-pressed", state.smooth); drawAll();
    });

  // -- pictures and theme ---------------------------------------------------------------------------------------------
  for (const image of document.querySelectorAll("img[data-picture]")) {
    const uri = data.pictures[Number(image.dataset.picture)];
    if (uri) image.src = uri;
    else image.replaceWith(element("span", { class: "missing" }, "left out"));
  }
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");
  try { const kept = localStorage.getItem("fullbatch-theme"); if (kept === "dark" || kept === "light") root.dataset.theme = kept; } catch { /* a file may have no storage */ }
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    try { localStorage.setItem("fullbatch-theme", root.dataset.theme); } catch { /* idem */ }
  });
  drawAll();
})();
