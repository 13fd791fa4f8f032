"use strict";
// Values beside the pointer, lists that sort and search, and (served) news without losing the place. Everything from data
// goes into the page as text, never as markup.
(() => {
  document.documentElement.classList.add("scripted");
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);

  const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
  const number = (v) => (Math.abs(v) >= 1000 ? grouped.format(v) : String(+v.toPrecision(4)));
  const show = (event) => {
    tip.hidden = false;
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    const left = event.clientX + 16 + wide > innerWidth ? event.clientX - wide - 16 : event.clientX + 16;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, Math.min(innerHeight - high - 4, event.clientY - high / 2)) + "px";
  };
  const row = (color, name, value) => {
    const line = document.createElement("div"), label = document.createElement("span"), text = document.createElement("b");
    if (color) {
      const swatch = document.createElement("i");
      swatch.style.background = color;
      label.append(swatch);
    }
    label.append(name);
    text.textContent = value;
    line.append(label, text);
    return line;
  };
  const nearest = (xs, at) => {
    let best = -1;
    xs.forEach((x, i) => {
      if (x !== null && (best < 0 || Math.abs(x - at) < Math.abs(xs[best] - at))) best = i;
    });
    return best;
  };
  const hover = (event) => {
    const svg = event.currentTarget, data = svg.hoverData, box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width, [left, right, top, bottom] = data.box;
    const px = (event.clientX - box.left) * scale;
    if (px < left - 8 || px > right + 8) return leave(event);
    const [low, high] = data.x, at = low + ((px - left) / (right - left)) * (high - low);
    const own = data.at.length ? data.at : (data.lines[0] || [])[3] || [];
    const i = nearest(own, at);
    if (i < 0) return leave(event);
    const x = own[i], rows = [];
    for (const [name, color, values, xs] of data.lines) {
      const places = xs || data.at, j = xs ? nearest(places, x) : i, value = values[j];
      if (value === null || value === undefined) continue;
      if (xs && Math.abs(places[j] - x) > (high - low) / 20) continue;
      rows.push(row(color, name, data.percent ? (100 * value).toFixed(1) + "%" : number(value)));
    }
    if (!rows.length) return leave(event);
    tip.replaceChildren(row("", data.of, number(x)), ...rows);
    const cross = svg.cross;
    const where = left + ((x - low) / (high - low || 1)) * (right - left);
    cross.setAttribute("x1", where);
    cross.setAttribute("x2", where);
    cross.setAttribute("y1", top);
    cross.setAttribute("y2", bottom);
    cross.removeAttribute("visibility");
    show(event);
  };
  const leave = (event) => {
    tip.hidden = true;
    if (event.currentTarget.cross) event.currentTarget.cross.setAttribute("visibility", "hidden");
  };

  const value = (cell) => {
    const given = cell.dataset.value ?? cell.textContent.trim();
    const plain = Number(given.replaceAll(",", ""));
    return given === "" || given === "-" ? null : Number.isNaN(plain) ? given.toLowerCase() : plain;
  };
  const sortBy = (head, down) => {
    const table = head.closest("table"), at = head.cellIndex, body = table.tBodies[0];
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const keyed = [...body.rows].map((line, i) => [value(line.cells[at]), i, line]);
    const order = (a, b) => (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1);
    keyed.sort(([a, i], [b, j]) =>
      a === null || b === null ? (a === null) - (b === null) || i - j : (down ? order(b, a) : order(a, b)) || i - j);
    body.append(...keyed.map(([, , line]) => line));
  };
  const search = (input) => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean), lines = [...document.getElementById(input.dataset.table).tBodies[0].rows];
    let hits = 0;
    for (const line of lines) {
      const text = line.textContent.toLowerCase(), fits = words.every((word) => text.includes(word));
      line.hidden = !fits;
      hits += fits;
    }
    input.nextElementSibling.textContent = words.length ? `${hits} of ${lines.length}` : "";
  };

  const dress = () => {
    for (const svg of document.querySelectorAll("svg[data-hover]")) {
      svg.hoverData = JSON.parse(svg.dataset.hover);
      svg.cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
      svg.cross.setAttribute("class", "cross");
      svg.cross.setAttribute("visibility", "hidden");
      svg.append(svg.cross);
      for (const title of svg.querySelectorAll("title")) title.remove();
      svg.addEventListener("pointermove", hover);
      svg.addEventListener("pointerleave", leave);
    }
    for (const title of document.querySelectorAll(".chart svg title")) {
      const mark = title.parentNode, text = title.textContent;
      title.remove();
      mark.setAttribute("aria-label", text);
      mark.addEventListener("pointermove", (event) => {
        tip.textContent = text;
        show(event);
      });
      mark.addEventListener("pointerleave", leave);
    }
    for (const head of document.querySelectorAll("th[data-sort]")) {
      head.tabIndex = 0;
      const turn = () => sortBy(head, head.hasAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : head.dataset.sort === "number");
      head.addEventListener("click", turn);
      head.addEventListener("keydown", (event) => event.key === "Enter" && turn());
    }
    const link = document.getElementById("compare");
    const ticked = () => {
      const ids = [...document.querySelectorAll(".tick:checked")].map((box) => box.value);
      link.hidden = ids.length < 2;
      link.href = "/compare?" + ids.map((id) => "run=" + encodeURIComponent(id)).join("&");
    };
    for (const box of document.querySelectorAll(".tick")) box.addEventListener("change", ticked);
    for (const button of document.querySelectorAll(".csv")) button.addEventListener("click", () => {
      // As `export`: what a spreadsheet would run gets an apostrophe in front.
      const said = (cell) => (cell.querySelector("code[title]") || {}).title ?? cell.dataset.value ?? cell.textContent.trim();
      const quoted = (text) => '"' + (/^[\p{Z}\p{C}]*[=+\-@＝＋－＠]|^[\t\r\n]/u.test(text) && Number.isNaN(Number(text)) ? "'" + text : text).replaceAll('"', '""') + '"';
      const lines = [...document.getElementById(button.dataset.table).rows].filter((line) => !line.hidden);
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob(lines.map((line) => [...line.cells].map((c) => quoted(said(c))).join(",") + "\n"), { type: "text/csv" }));
      link.download = button.dataset.table + ".csv";
      link.click();
      URL.revokeObjectURL(link.href);
    });
    for (const input of document.querySelectorAll(".find")) input.addEventListener("input", () => search(input));
  };
  dress();

  // Served: ask now and then whether there is news; what was picked, searched, sorted and opened stays as it is.
  const watch = document.documentElement.dataset.watch;
  if (!watch) return;
  let version = document.documentElement.dataset.version;
  const state = (text) => {
    const place = document.querySelector("nav .state");
    if (place) place.textContent = text;
  };
  const refresh = async () => {
    if (document.hidden) return;
    let fresh;
    try {
      fresh = (await (await fetch(watch, { cache: "no-store" })).text()).trim();
      if (fresh === version) return state("live");
      const page = await fetch(location.href, { cache: "no-store" });
      if (!page.ok) throw new Error(page.status);
      const next = new DOMParser().parseFromString(await page.text(), "text/html");
      const picked = [...document.querySelectorAll(".pick:checked, .tick:checked")].map((x) => x.id);
      const found = [...document.querySelectorAll(".find")].map((x) => [x.id, x.value]);
      const sorted = [...document.querySelectorAll("th[aria-sort]")].map((x) => [x.closest("table").id, x.cellIndex, x.getAttribute("aria-sort")]);
      const opened = [...document.querySelectorAll("details[open]")].map((x) => x.id);
      const scrolled = [...document.querySelectorAll(".tall")].map((x) => [x.id, x.scrollTop, x.scrollLeft]);
      const active = document.activeElement && document.activeElement.id, x = scrollX, y = scrollY;
      document.querySelector("main").replaceWith(document.adoptNode(next.querySelector("main")));
      tip.hidden = true;
      dress();
      const by = (id) => document.getElementById(id);
      for (const id of picked) if (by(id)) by(id).checked = true;
      for (const box of document.querySelectorAll(".tick:checked")) box.dispatchEvent(new Event("change"));
      for (const [table, at, way] of sorted) if (by(table)) sortBy(by(table).tHead.rows[0].cells[at], way === "descending");
      for (const [id, text] of found) if (by(id) && text) { by(id).value = text; search(by(id)); }
      for (const id of opened) if (id && by(id)) by(id).open = true;
      for (const [id, top, left] of scrolled) if (by(id)) { by(id).scrollTop = top; by(id).scrollLeft = left; }
      if (active && by(active)) by(active).focus({ preventScroll: true });
      scrollTo(x, y);
      version = fresh;
      state("live");
    } catch (error) {
      state("server gone");
    }
  };
  setInterval(refresh, 1000 * Number(document.documentElement.dataset.every));
  document.addEventListener("visibilitychange", refresh);
})();
