// Searches, and shows what comes back: only the tiles in view exist.  Text only ever enters by textContent.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const embedded = byId("data"), still = embedded ? JSON.parse(embedded.textContent) : null;  // a page without a server
  const MOST = 20000, MAX_UPLOAD = 32 * 2 ** 20, WIDE = 190, CAPTION = 34, BEYOND = 2;
  const SILENT = "The server does not answer; has it been stopped?";
  const grid = byId("grid"), words = byId("words"), large = byId("large");
  const asked = { q: "", like: [], folder: "", least: null };
  let hits = [], shown = [], tiles = new Map(), current = 0, waiting = null;

  const element = (name, attributes = {}, text) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const count = (number) => number.toLocaleString("en");
  const scoreOf = (score) => (score === null ? "" : score.toFixed(3).replace("-", "−"));
  const tell = (text, wrong = false) => { byId("told").textContent = text; byId("told").classList.toggle("wrong", wrong); };
  const thumbnail = (hit) => (still ? `data:image/jpeg;base64,${still.pictures[still.hits.indexOf(hit)]}` : `thumbnail/${hit[0]}`);

  // -- the query lives in the address, so that back and forward work --------------------------------------------------
  const address = () => {
    const values = new URLSearchParams();
    if (asked.q) values.set("q", asked.q);
    if (asked.like.length) values.set("like", asked.like.join(","));
    if (asked.folder) values.set("folder", asked.folder);
    if (asked.least !== null) values.set("least", asked.least);
    return `?${values}`;
  };
  const readAddress = () => {
    const values = new URLSearchParams(location.search);
    asked.q = values.get("q") || "";
    asked.like = (values.get("like") || "").split(",").filter(Boolean);
    asked.folder = values.get("folder") || "";
    asked.least = values.has("least") && isFinite(values.get("least")) ? +values.get("least") : null;
  };
  const ask = (change) => {
    Object.assign(asked, { least: null }, change);
    history.pushState({ y: 0 }, "", address());
    search(0);
  };

  const search = async (y) => {
    words.value = asked.q;
    byId("folder").value = asked.folder;
    showLikes();
    if (waiting) waiting.abort();
    grid.setAttribute("aria-busy", "true");
    const own = (waiting = new AbortController());
    const values = new URLSearchParams(address());
    values.delete("least");
    values.set("top", MOST);
    try {
      const response = await fetch(`search?${values}`, { signal: own.signal });
      const answer = await response.json();
      if (own !== waiting) return;
      if (!response.ok) { tell(answer.error, true); return; }
      hits = answer.hits;
      const nothing = !asked.q && !asked.like.length;
      show(nothing ? "; ask for something" : ` · ${Math.max(1, Math.round(1000 * answer.seconds))} ms`, y);
      document.title = `${asked.q || (asked.like.length ? "by a picture" : "all pictures")} · fullbatch find`;
    } catch (error) {
      if (own === waiting && error.name !== "AbortError") tell(SILENT, true);
    } finally {
      if (own === waiting) grid.setAttribute("aria-busy", "false");
    }
  };

  // -- filters --------------------------------------------------------------------------------------------------------
  let rest = "";
  const show = (said, y) => {
    rest = said;
    const scores = hits.map((hit) => hit[1]).filter((score) => score !== null), least = byId("least");
    byId("scores").hidden = scores.length < 2;
    if (scores.length) {
      least.min = scores.reduce((one, other) => Math.min(one, other));
      least.max = scores[0];
      least.value = asked.least === null ? least.min : asked.least;
    }
    current = 0;
    filter(y);
  };
  const filter = (y) => {
    const folder = still && asked.folder !== "" ? `${still.about.folders[+asked.folder][0]}/` : "";
    shown = hits.filter((hit) => (asked.least === null || hit[1] === null || hit[1] >= asked.least) && hit[2].startsWith(folder));
    byId("bound").textContent = asked.least === null ? "any" : scoreOf(asked.least);
    tell(`${count(shown.length)} ${shown.length === 1 ? "picture" : "pictures"}${hits.length < MOST ? "" : ", the nearest"}${rest}`);
    for (const tile of tiles.values()) tile.remove();
    tiles = new Map();
    layOut();
    scrollTo(0, y);
    draw();
  };

  // -- the grid -------------------------------------------------------------------------------------------------------
  let columns = 1, width = WIDE, height = WIDE;
  const layOut = () => {
    columns = Math.max(2, Math.floor(grid.clientWidth / WIDE));
    width = grid.clientWidth / columns;
    height = width + CAPTION;
    grid.style.height = `${Math.ceil(shown.length / columns) * height}px`;
  };
  const placed = (tile, at) => {
    tile.style.width = `${width}px`;
    tile.style.height = `${height}px`;
    tile.style.transform = `translate(${(at % columns) * width}px, ${Math.floor(at / columns) * height}px)`;
  };
  const blank = () => {
    const tile = element("figure", { class: "tile" }), caption = element("figcaption");
    const like = element("button", { class: "like", type: "button" });
    like.append(element("img", { decoding: "async" }));
    caption.append(element("span", { class: "score" }), element("bdi"));
    const buttons = [["large", "⤢", "show it large"], ["plus", "+", "more like this"], ["minus", "−", "less like this"]];
    const tools = element("div", { class: "tools" });
    for (const [key, sign, title] of still ? buttons.slice(0, 1) : buttons)
      tools.append(element("button", { class: key, type: "button", tabindex: -1, title }, sign));
    tile.append(like, caption, tools);
    return tile;
  };
  const filled = (tile, at) => {
    const hit = shown[at], [like, caption] = tile.children, name = hit[2].split("/").pop();
    tile.dataset.at = at;
    like.tabIndex = at === current ? 0 : -1;
    like.title = hit[2];
    like.firstChild.src = thumbnail(hit);
    like.firstChild.alt = name;
    caption.children[0].textContent = scoreOf(hit[1]);
    caption.children[1].textContent = name;
    placed(tile, at);
    return tile;
  };
  const draw = () => {  // tiles that have left the view are filled anew: most of the work of a new one is saved
    const top = scrollY - grid.offsetTop, first = Math.max(0, (Math.floor(top / height) - BEYOND) * columns);
    const last = Math.min(shown.length, (Math.ceil((top + innerHeight) / height) + BEYOND) * columns), free = [];
    for (const [at, tile] of tiles)
      if (at < first || at >= last) { free.push(tile); tiles.delete(at); }
    for (let at = first; at < last; at++)
      if (!tiles.has(at)) {
        const tile = free.pop();
        tiles.set(at, tile ? filled(tile, at) : grid.appendChild(filled(blank(), at)));
      }
    for (const tile of free) tile.remove();
  };
  let drawing = 0, settled = 0;
  addEventListener("scroll", () => {
    if (!drawing) drawing = requestAnimationFrame(() => { drawing = 0; draw(); });
    clearTimeout(settled);
    settled = setTimeout(() => { if (!still) history.replaceState({ y: scrollY }, "", address()); }, 150);
  }, { passive: true });
  addEventListener("resize", () => { layOut(); for (const [at, tile] of tiles) placed(tile, at); draw(); });

  const go = (at) => {
    at = Math.max(0, Math.min(shown.length - 1, at));
    const before = tiles.get(current);
    if (before) before.querySelector(".like").tabIndex = -1;
    current = at;
    const y = grid.offsetTop + Math.floor(at / columns) * height, head = document.querySelector("header").offsetHeight;
    if (y < scrollY + head) scrollTo(0, y - head - 8);
    if (y + height > scrollY + innerHeight) scrollTo(0, y + height - innerHeight + 8);
    draw();
    const like = tiles.get(at) && tiles.get(at).querySelector(".like");
    if (like) { like.tabIndex = 0; like.focus({ preventScroll: true }); }
  };

  // -- pictures in the query ------------------------------------------------------------------------------------------
  const showLikes = () => {
    byId("likes").replaceChildren(...asked.like.map((like) => {
      const name = like.replace("-", ""), minus = like.startsWith("-");
      const source = name.startsWith("d") ? `dropped/${name.slice(1)}` : `thumbnail/${name}`;
      const button = element("button", { type: "button", "data-like": like, title: "take it out of the query" });
      button.append(element("span", {}, minus ? "−" : "+"), element("img", { src: source, alt: "a picture" }), element("span", {}, "×"));
      const item = element("li");
      item.append(button);
      return item;
    }));
  };
  byId("likes").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) ask({ like: asked.like.filter((like) => like !== button.dataset.like) });
  });
  const enlarge = (at) => {
    const hit = shown[at];
    byId("shown").src = still ? thumbnail(hit) : `picture/${hit[0]}`;
    byId("shown").alt = hit[2];
    byId("path").textContent = hit[2];
    byId("score").textContent = scoreOf(hit[1]);
    current = at;
    if (!large.open) large.showModal();
  };
  grid.addEventListener("click", (event) => {
    const tile = event.target.closest(".tile"), button = event.target.closest("button");
    if (!tile || !button) return;
    const at = +tile.dataset.at, number = String(shown[at][0]);
    current = at;
    if (still || button.className === "large") enlarge(at);
    else if (button.className === "like") ask({ q: "", like: [number] });
    else ask({ like: [...asked.like.filter((like) => like.replace("-", "") !== number), button.className === "minus" ? `-${number}` : number] });
  });

  const drop = async (file) => {
    if (file.size > MAX_UPLOAD) { tell(`That picture is larger than ${MAX_UPLOAD / 2 ** 20} MB.`, true); return; }
    tell("looking at the picture…");
    try {
      const response = await fetch("drop", { method: "POST", body: await file.arrayBuffer(), headers: { "Content-Type": "application/octet-stream" } });
      const answer = await response.json();
      if (response.ok) ask({ q: "", like: [answer.name] });
      else tell(answer.error, true);
    } catch { tell(SILENT, true); }
  };

  // -- keyboard, large view, light and dark ---------------------------------------------------------------------------
  const steps = { ArrowLeft: () => -1, ArrowRight: () => 1, ArrowUp: () => -columns, ArrowDown: () => columns };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input, select"), step = steps[event.key];
    if (event.key === "/" && !typing && !large.open) { event.preventDefault(); words.focus(); words.select(); }
    if (!shown.length) return;
    if (large.open) {
      if (step) { event.preventDefault(); enlarge(Math.max(0, Math.min(shown.length - 1, current + step()))); }
      return;
    }
    if (event.key === "ArrowDown" && event.target === words) { event.preventDefault(); go(current); }
    else if (event.target.matches(".like") && step) { event.preventDefault(); go(current + step()); }
    else if (event.target.matches(".like") && event.key === " ") { event.preventDefault(); enlarge(current); }
  });
  byId("close").addEventListener("click", () => large.close());
  large.addEventListener("close", () => { byId("shown").removeAttribute("src"); go(current); });
  const themed = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  if (themed()) document.documentElement.dataset.theme = themed();
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* not kept */ }
  });
  byId("folder").addEventListener("change", (event) => {
    if (still) { asked.folder = event.target.value; filter(0); } else ask({ folder: event.target.value });
  });
  byId("least").addEventListener("input", (event) => {
    asked.least = +event.target.value > +event.target.min ? +event.target.value : null;
    if (!still) history.replaceState({ y: 0 }, "", address());
    filter(0);
  });

  const describe = (about) => {
    byId("name").textContent = ` · ${about.name} · ${count(about.pictures)} pictures${about.bad ? `, ${count(about.bad)} that cannot be read` : ""}`;
    for (const [at, [name, pictures]] of about.folders.entries())
      byId("folder").append(element("option", { value: at }, `${name} (${count(pictures)})`));
    byId("folders").hidden = !about.folders.length;
    for (const part of document.querySelectorAll(".by-words")) part.hidden = !about.words;
  };
  if (still) {
    byId("search").hidden = byId("keys").hidden = true;
    byId("asked").hidden = !still.asked;
    byId("asked").textContent = still.asked;
    describe(still.about);
    hits = still.hits;
    show(` of ${count(still.about.pictures)}`, 0);
    return;
  }
  byId("search").addEventListener("submit", (event) => { event.preventDefault(); ask({ q: words.value.trim() }); });
  byId("choose").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", (event) => { if (event.target.files[0]) drop(event.target.files[0]); event.target.value = ""; });
  addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("over"); });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("over"); });
  addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("over");
    if (event.dataTransfer.files[0]) drop(event.dataTransfer.files[0]);
  });
  addEventListener("paste", (event) => { if (event.clipboardData.files[0]) drop(event.clipboardData.files[0]); });
  addEventListener("popstate", (event) => { readAddress(); search((event.state && event.state.y) || 0); });
  history.scrollRestoration = "manual";
  readAddress();
  fetch("about").then((response) => response.json()).then((about) => {
    describe(about);
    search((history.state && history.state.y) || 0);
  }).catch(() => tell(SILENT, true));
})();
