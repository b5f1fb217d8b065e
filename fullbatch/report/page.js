// Draws every chart of the page and fills in the pictures.  Text only ever enters by textContent.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const MOST_IN_TIP = 12, TOP = 10, RIGHT = 14, MOST_BANDS = 8, NEAR = 40;
  const state = { x: "step", smooth: false, filter: data.filters.length > 1 ? data.filters[0] : null, hidden: new Set() };
  const plots = [];

  // -- elements, text and numbers -------------------------------------------------------------------------------------
  const filled = (made, attributes, text) => {
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const element = (name, attributes = {}, text) => filled(document.createElement(name), attributes, text);
  const svg = (name, attributes = {}, text) => filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, text);
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  const widthOf = (text) => pen.measureText(text).width;
  const fitted = (text, room) => {
    if (widthOf(text) <= room) return text;
    let kept = text.length - 1;
    while (kept > 1 && widthOf(`${text.slice(0, kept)}…`) > room) kept--;
    return `${text.slice(0, kept).trimEnd()}…`;
  };
  const colorOf = (series) => series.look.split(" ")[0];
  const dashOf = (series) => series.look.split(" ")[1];

  const plainNumber = (value, digits = 4) => {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 1e-3) return value.toExponential(Math.max(1, digits - 3)).replace(/\.?0*e/, "e").replace(/-/g, "−");
    for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (size >= unit && size >= 1e4) return `${+(value / unit).toPrecision(Math.max(3, digits - 1))}${name}`;
    return String(+value.toPrecision(digits)).replace("-", "−");
  };
  const formatted = (value, axis, digits = 4) =>
    axis.percent ? `${plainNumber(+(100 * value).toPrecision(digits), digits)}%` : plainNumber(value, digits);
  const tickLabels = (ticks, axis) => {  // ticks that differ are written differently
    let labels = [];
    for (let digits = 4; digits < 15; digits++) {
      labels = ticks.map((tick) => formatted(tick, axis, digits));
      if (new Set(labels).size === ticks.length) break;
    }
    return labels;
  };
  const timeUnit = (greatest) => (greatest < 180 ? [1, "s"] : greatest < 10800 ? [60, "min"] : [3600, "h"]);

  // -- scales: `place` maps a value to 0..1 ---------------------------------------------------------------------------
  const linear = (low, high, count) => {
    const flat = 1e-9 * Math.max(Math.abs(low), Math.abs(high));  // dust of rounding is no range: its ticks would not end
    if (!(high - low > flat)) { const pad = Math.abs(low) * 0.1 || 1; low -= pad; high += pad; }
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough)), part = rough / power;
    const step = power * (part < 1.5 ? 1 : part < 3.5 ? 2 : part < 7.5 ? 5 : 10), ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(+(k * step).toPrecision(12));
    return { ticks, place: (value) => (value - low) / (high - low) };
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
    return { ticks: ticks.length < 2 ? [low, high] : ticks, place: (value) => Math.log(value / low) / Math.log(high / low) };
  };
  const inPlaces = (words) => ({ ticks: words.map((_, at) => at), place: (value) => (value + 0.5) / words.length });
  const padded = (low, high, log) => {
    if (!(high > low)) return [low, high];
    if (log) { const pad = (high / low) ** 0.05; return [low / pad, high * pad]; }
    const pad = (high - low) * 0.06;
    return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
  };

  const clocked = (steps, values, step) => {  // seconds, or pairs, at a step: from the nearest known ones
    let after = steps.findIndex((known) => known >= step);
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
  const smoothed = (values) => {
    const keep = Math.max(0, 1 - 1 / Math.max(2, values.length / 20));
    let total = 0, weight = 0;
    return values.map((value) => { total = keep * total + (1 - keep) * value; weight = keep * weight + 1 - keep; return total / weight; });
  };

  // -- a point: circles, and where the colours come again other shapes ------------------------------------------------
  const marker = (x, y, series, look, s) => {
    const attributes = { class: `dot ${look} ${colorOf(series)}` };
    if (look === "cross") return svg("path", { ...attributes, d: `M${x - s} ${y - s}l${2 * s} ${2 * s}m0 ${-2 * s}l${-2 * s} ${2 * s}` });
    const shape = {
      d1: `M${x - s} ${y - s}h${2 * s}v${2 * s}h${-2 * s}Z`,
      d2: `M${x} ${y - 1.2 * s}l${1.2 * s} ${2.1 * s}h${-2.4 * s}Z`,
      d3: `M${x} ${y - 1.3 * s}l${1.3 * s} ${1.3 * s}l${-1.3 * s} ${1.3 * s}l${-1.3 * s} ${-1.3 * s}Z`,
    }[dashOf(series)];
    return shape && series.style === "points" ? svg("path", { ...attributes, d: shape }) : svg("circle", { ...attributes, cx: x, cy: y, r: s });
  };

  // -- one chart ------------------------------------------------------------------------------------------------------
  class Plot {
    constructor(figure, chart) {
      Object.assign(this, { figure, chart, log: chart.y.scale === "log", rows: chart.y.words.length > 0 });
      this.isSteps = chart.x.scale === "step";
      this.hasTips = chart.series.some((series) => series.tips.length);
      this.place = figure.querySelector(".plot");
      this.place.classList.toggle("wide", chart.width > 0);
      this.tip = element("div", { class: "tip", hidden: "" });
      const button = figure.querySelector("button.log");
      if (button) button.addEventListener("click", () => {
        this.log = !this.log; button.setAttribute("aria-pressed", this.log); this.draw();
      });
      for (const event of ["pointermove", "pointerdown"]) this.place.addEventListener(event, (moved) => this.hover(moved));
      this.place.addEventListener("pointerleave", () => setHover(null, null));
      new ResizeObserver(() => requestAnimationFrame(() => this.draw())).observe(this.place);
    }
    shades() {  // where steps left the weights as they were
      if (!this.isSteps) return [];
      const runs = new Set(this.visible().map((series) => data.runs[series.run]).filter((run) => run && run.recovery));
      return [...new Set([...runs].map((run) => alongRun(run, run.recovery)))];
    }
    visible() {
      return this.chart.series.filter((series) =>
        !state.hidden.has(series.label) && (series.run < 0 || !state.filter || data.runs[series.run].filter === state.filter));
    }
    prepared() {
      return this.visible().map((series) => {
        const y = state.smooth && this.isSteps ? smoothed(series.y) : series.y;
        const usable = series.x.map((_, at) => at).filter((at) => !this.log || (y[at] > 0 && series.y[at] > 0));
        const pick = (list) => (list.length ? usable.map((at) => list[at]) : []);
        const x = pick(series.x).map((step) => (series.run < 0 ? step : alongRun(data.runs[series.run], step)));
        const tips = series.tips.length > 1 ? pick(series.tips) : series.tips;
        return { series, x, y: pick(y), raw: pick(series.y), low: pick(series.low), high: pick(series.high), tips, looks: pick(series.looks) };
      }).filter((drawn) => drawn.x.length);
    }
    scales(drawn, width) {  // where values lie, and what the axes say
      const { x, y, marks, height } = this.chart, spread = drawn.flatMap((part) => [...part.low, ...part.high]);
      const xs = drawn.flatMap((part) => part.x).concat(x.reach, this.rows ? spread : []);
      const ys = drawn.flatMap((part) => [...part.y, ...(state.smooth ? part.raw : [])]).concat(this.rows ? [] : spread, marks.map((mark) => mark.y), y.reach)
        .filter((value) => !this.log || value > 0);
      const [low, high] = padded(Math.min(...ys), Math.max(...ys), this.log);
      const yScale = this.rows ? inPlaces(y.words) : this.log ? logarithmic(low, high) : linear(low, high, Math.max(2, Math.round(height / 43)));
      const yLabels = this.rows ? y.words.map((word) => fitted(word, 0.4 * width)) : this.chart.labels.length ? [] : tickLabels(yScale.ticks, y);
      const left = 12 + Math.max(0, ...yLabels.map(widthOf)), bottom = x.label ? 36 : x.words.length ? 34 : 22;
      const inner = width - left - RIGHT, points = drawn.some((part) => part.series.style === "points" || part.series.style === "errors");
      const edge = points && !x.words.length && !this.rows ? 14 : 0;
      const [unit, unitName] = state.x === "time" && this.isSteps ? timeUnit(Math.max(...xs)) : [1, ""];
      let from = this.isSteps ? 0 : Math.min(...xs), to = Math.max(...xs);
      if (this.rows) [from, to] = padded(from, to, false);
      const curved = x.scale === "log" || x.scale === "doubling";
      const xScale = x.words.length ? inPlaces(x.words) : curved ? logarithmic(from, to) : linear(from / unit, to / unit, Math.max(3, Math.floor(inner / 85)));
      if (x.scale === "doubling") xScale.ticks = [...new Set(xs)].sort((a, b) => a - b);
      const room = height - TOP - bottom;
      return {
        drawn, xScale, yScale, yLabels, left, bottom, width, unit, unitName, room,
        atX: (value) => left + edge + (inner - 2 * edge) * xScale.place(value / unit),
        atY: (value) => TOP + room * (this.rows ? yScale.place(value) : 1 - yScale.place(value)),
      };
    }
    draw() {
      const width = Math.max(Math.round(this.place.clientWidth), this.chart.width), { height } = this.chart;
      if (this.place.clientWidth < 60) return;
      const drawn = this.prepared();
      const canvas = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": this.chart.words || this.words(drawn) });
      this.place.replaceChildren(canvas, this.tip);
      if (!drawn.length) {
        const why = this.log && this.visible().length ? "no positive value to show on a log axis" : "nothing to show";
        canvas.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "empty" }, why));
        this.shown = null; return;
      }
      this.shown = this.scales(drawn, width);
      this.drawAxes(canvas);
      const { atX, atY, left } = this.shown;
      for (const mark of this.chart.marks) {
        if (this.log && !(mark.y > 0)) continue;
        const y = atY(mark.y);
        canvas.append(svg("line", { class: "mark cb d1", x1: left, x2: width - RIGHT, y1: y, y2: y }));
        canvas.append(svg("text", { x: width - RIGHT, y: y - 4, "text-anchor": "end" }, `${mark.label} ${formatted(mark.y, this.chart.y)}`));
      }
      for (const part of drawn) this.drawSeries(canvas, part, drawn.length <= MOST_BANDS);
      for (const label of this.chart.labels) canvas.append(svg("text", { class: "over", x: atX(label.x) + 5, y: atY(label.y) + 4 }, label.text));
      this.overlay = svg("g"); canvas.append(this.overlay);
    }
    drawAxes(canvas) {
      const { x, y, height, labels } = this.chart, { xScale, yScale, yLabels, atX, atY, left, bottom, width, room, unit, unitName } = this.shown;
      const line = (name, x1, y1, x2, y2) => canvas.append(svg("line", { class: name, x1, x2, y1, y2 })), floor = height - bottom;
      const text = (at, baseline, anchor, said, whole = said, name = "") => {
        const made = svg("text", { x: at, y: baseline, "text-anchor": anchor, class: name }, said);
        if (whole !== said) made.prepend(svg("title", {}, whole));
        canvas.append(made);
      };
      for (const end of this.shades()) {
        const right = Math.min(atX(end), width - RIGHT);
        canvas.append(svg("rect", { class: "frozen", x: left, y: TOP, width: Math.max(right - left, 0), height: room }));
        if (right - left > 58) text(left, TOP - 2, "start", "recovery");
      }
      yScale.ticks.forEach((tick, at) => {
        const place = atY(tick);
        if (place < TOP - 1 || place > floor + 1 || labels.length) return;
        if (!this.rows) line("grid", left, place, width - RIGHT, place);
        else if (at) line("grid between", left, place - room / y.words.length / 2, width - RIGHT, place - room / y.words.length / 2);
        text(left - 7, place + 3.5, "end", yLabels[at], this.rows ? y.words[at] : yLabels[at], this.rows ? "name" : "");
      });
      if (!labels.length) line("axis", left, floor, width - RIGHT, floor);
      const space = (width - left - RIGHT) / Math.max(x.words.length, 1);
      const low = x.words.some((word) => widthOf(word) > space - 6);  // then every other word stands lower
      const xLabels = x.words.length ? x.words.map((word) => fitted(word, (low ? 2 : 1) * space - 8)) : tickLabels(xScale.ticks, x);
      let free = -Infinity;
      xScale.ticks.forEach((tick, at) => {
        const place = atX(tick * unit), half = widthOf(xLabels[at]) / 2;
        if (place < left - 1 || place > width - RIGHT + 4) return;
        if (labels.length) line("axis", place, TOP, place, floor);
        const inside = Math.min(Math.max(place, half), width - half - 1);
        if (!x.words.length && inside - half < free) return;
        free = inside + half + 8;
        if (this.rows) line("grid", place, TOP, place, floor);
        text(inside, floor + 15 + (low && at % 2 ? 13 : 0), "middle", xLabels[at], x.words[at]);
      });
      const name = this.isSteps ? { step: "step", samples: "pairs seen", time: `time (${unitName})` }[state.x] : x.label;
      if (name) text(width - RIGHT, height - 5, "end", fitted(name, width - left - RIGHT), name);
    }
    drawSeries(canvas, part, banded) {
      const { atX, atY } = this.shown, { series, x, y, low, high } = part, { style } = series, color = colorOf(series);
      const path = (values) => x.map((value, at) => `${at ? "L" : "M"}${atX(value).toFixed(1)} ${atY(values[at]).toFixed(1)}`).join("");
      const floor = (value, at) => (this.log && !(value > 0) ? y[at] : value);
      if (style === "ticks" || style === "bars") return this.drawRows(canvas, part);
      if (low.length && (style === "area" || (style === "line" && banded))) {
        const back = x.map((value, at) => `L${atX(value).toFixed(1)} ${atY(floor(low[at], at)).toFixed(1)}`).reverse().join("");
        canvas.append(svg("path", { class: `band ${color}`, d: `${path(high)}${back}Z` }));
      }
      if (style === "errors")
        low.forEach((value, at) => {
          if (high[at] === value) return;
          const place = atX(x[at]), a = atY(floor(value, at)), b = atY(high[at]);
          canvas.append(svg("path", { class: `error ${color}`, d: `M${place} ${a}V${b}M${place - 4} ${a}h8M${place - 4} ${b}h8` }));
        });
      if (state.smooth && this.isSteps) canvas.append(svg("path", { class: `line raw ${color}`, d: path(part.raw) }));
      if (style !== "points") canvas.append(svg("path", { class: `line ${series.look}`, d: path(y) }));
      if (style === "points" || style === "errors" || (style === "line" && (x.length < 2 || (x.length < 16 && color !== "cb"))))
        x.forEach((value, at) => {
          const look = part.looks[at] || "full", size = style === "line" ? 3 : this.chart.height < 200 ? 3 : 4;
          canvas.append(marker(atX(value), atY(y[at]), series, look === "ringed" ? "full" : look, size));
          if (look === "ringed") canvas.append(svg("circle", { class: "ring", cx: atX(value), cy: atY(y[at]), r: 6.5 }));
        });
    }
    drawRows(canvas, { series, x, y, low, high }) {
      const { atX, atY, room } = this.shown, color = colorOf(series), half = room / this.chart.y.words.length / 2;
      const box = (name, from, to, middle, tall) =>
        canvas.append(svg("rect", { class: `${name} ${color}`, x: from, y: middle - tall / 2, width: Math.max(to - from, 1), height: tall }));
      x.forEach((value, at) => {
        const place = atX(value), middle = atY(y[at]);
        if (series.style === "bars") {
          box("share", atX(0), place, middle, 11);
          canvas.append(svg("text", { x: place + 5, y: middle + 4 }, formatted(value, this.chart.x, 3)));
        } else {
          if (low.length) box("spread", atX(low[at]), atX(high[at]), middle, 12);
          canvas.append(svg("line", { class: `mean ${color}`, x1: place, x2: place, y1: middle - half + 4, y2: middle + half - 4 }));
        }
      });
    }
    words(drawn) {
      const said = drawn.slice(0, 6).map(({ series, y }) =>
        `${series.label} from ${formatted(y[0], this.chart.y)} to ${formatted(y[y.length - 1], this.chart.y)}`);
      return `${this.chart.title}: ${said.join("; ")}`;
    }

    // -- under the pointer: the values of all series there, or the tip of the nearest point
    hover(event) {
      if (!this.shown) return;
      const box = this.place.querySelector("svg").getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
      let nearest = null;
      for (const part of this.shown.drawn)
        part.x.forEach((value, at) => {
          if (this.hasTips && !part.tips.length) return;
          const across = this.shown.atX(value) - x, away = this.hasTips ? Math.hypot(across, this.shown.atY(part.y[at]) - y) : Math.abs(across);
          if (nearest === null || away < nearest.away) nearest = { away, value, part, at };
        });
      if (this.hasTips) this.showTip(nearest && nearest.away < NEAR ? nearest : null);
      else if (nearest) setHover(nearest.value, this);
    }
    showTip(nearest) {
      this.overlay.replaceChildren(); this.tip.hidden = true;
      if (!nearest) return;
      const { part, at } = nearest, x = this.shown.atX(part.x[at]), y = this.shown.atY(part.y[at]);
      this.overlay.append(svg("circle", { class: "ring", cx: x, cy: y, r: 8 }));
      this.tip.replaceChildren(element("div", { class: "text" }, part.tips[at] ?? part.tips[0]));
      this.placeTip(x, y + 14);
    }
    placeTip(x, y) {
      this.tip.hidden = false;
      const wide = this.tip.offsetWidth, beyond = x + 14 + wide > this.shown.width;
      this.tip.style.left = `${Math.max(0, beyond ? x - 14 - wide : x + 14)}px`;
      this.tip.style.top = `${y}px`;
    }
    showHover(value, leader) {
      if (!this.shown || !this.overlay) return;
      this.overlay.replaceChildren(); this.tip.hidden = true;
      if (value === null || (leader !== this && !(this.isSteps && leader.isSteps))) return;
      const { drawn, atX, atY, left, width, room, unit, unitName } = this.shown, x = atX(value);
      if (x < left - 1 || x > width - RIGHT + 1) return;
      this.overlay.append(svg("line", { class: "cross", x1: x, x2: x, y1: TOP, y2: TOP + room }));
      const met = [];
      for (const part of drawn) {
        let at = 0;
        part.x.forEach((other, place) => { if (Math.abs(other - value) < Math.abs(part.x[at] - value)) at = place; });
        if (Math.abs(atX(part.x[at]) - x) > 24) continue;
        this.overlay.append(marker(atX(part.x[at]), atY(part.y[at]), part.series, "full", 4));
        met.push({ series: part.series, y: part.y[at] });
      }
      if (leader !== this) return;
      const name = this.isSteps ? { step: "step", samples: "pairs", time: unitName }[state.x] : this.chart.x.label;
      const head = element("div", {}, state.x === "time" && this.isSteps ? `${plainNumber(value / unit)} ${name}` : `${name} ${value.toLocaleString("en")}`);
      const rows = met.sort((a, b) => b.y - a.y).slice(0, MOST_IN_TIP).map(({ series, y }) => {
        const row = element("div");
        row.append(swatch(series), element("span", { class: "name" }, series.label), element("b", {}, formatted(y, this.chart.y)));
        return row;
      });
      this.tip.replaceChildren(head, ...rows);
      if (met.length > MOST_IN_TIP) this.tip.append(element("div", {}, `and ${met.length - MOST_IN_TIP} more`));
      this.placeTip(x, 6);
    }
  }
  const setHover = (value, leader) => { for (const plot of plots) plot.showHover(value, leader); };
  const drawAll = () => { for (const plot of plots) plot.draw(); };

  // -- legends and controls -------------------------------------------------------------------------------------------
  const swatch = (series) => {
    const made = svg("svg", { class: `swatch ${colorOf(series)}`, viewBox: "0 0 20 8", "aria-hidden": "true" });
    made.append(series.style === "points" ? marker(10, 4, series, "full", 4) : svg("line", { x1: 0, x2: 20, y1: 4, y2: 4, class: dashOf(series) }));
    return made;
  };
  const fillLegend = (place, all) => {
    const labels = new Map(all.map((series) => [series.label, series]));
    if (labels.size < 2) return;
    for (const [label, series] of labels) {
      const button = element("button", { type: "button", "aria-pressed": "true", "data-label": label });
      button.append(swatch(series), element("span", {}, label));
      button.addEventListener("click", () => {
        state.hidden.has(label) ? state.hidden.delete(label) : state.hidden.add(label);
        for (const other of document.querySelectorAll(".legend button"))
          if (other.dataset.label === label) other.setAttribute("aria-pressed", !state.hidden.has(label));
        drawAll();
      });
      place.append(button);
    }
  };
  const byKey = new Map(data.charts.map((chart) => [chart.key, chart]));
  const shared = new Map([...document.querySelectorAll(".legend.shared")].map((place) => [place.closest("section"), { place, all: [] }]));
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = byKey.get(figure.dataset.chart);
    if (!chart) continue;
    plots.push(new Plot(figure, chart));
    const together = data.shared && shared.get(figure.closest("section"));
    if (together) together.all.push(...chart.series);
    else if (chart.legend) fillLegend(figure.querySelector(".legend"), chart.series);
  }
  for (const { place, all } of shared.values()) fillLegend(place, all);
  for (const choice of document.querySelectorAll("[data-choice]")) {
    const buttons = [...choice.querySelectorAll("button")];
    for (const button of buttons)
      button.addEventListener("click", () => {
        state[choice.dataset.choice] = button.dataset.value;
        for (const other of buttons) other.setAttribute("aria-pressed", other === button);
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
