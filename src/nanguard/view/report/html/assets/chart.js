// One chart: its elements, what it tells, and how it answers to pointer and keys.

class Chart extends Drawing {
  constructor(panel, group, column) {
    super();
    this.panel = panel;
    this.column = column;
    this.id = state.side ? `${panel} ${column}` : panel;
    this.take(group);
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.plot = make(
      "div",
      {
        class: "plot",
        tabindex: "0",
        role: "slider",
        "aria-label": `${panel}: position of the cursor`,
        "aria-orientation": "horizontal",
      },
      this.canvas,
      (this.brush = make("div", { class: "brush", hidden: "" })),
    );
    this.logButton = button("log", `${panel}: logarithmic scale`, () => this.toggleLog(), {
      class: "log",
    });
    this.legend = make("ul", { class: "legend" });
    this.note = make("p", { class: "behind" });
    this.table = make("details", { class: "data", ontoggle: () => this.toggleTable() });
    const words = `${panel} as a table`;
    this.rows = make("div", { class: "wide", tabindex: "0", role: "region", "aria-label": words });
    this.table.append(make("summary", {}, words), this.rows);
    this.table.open = state.tables.has(this.id);
    this.figure = make(
      "figure",
      { class: "chart" },
      make("figcaption", {}, make("h3", {}, panel), this.legend, this.logButton),
      this.plot,
      this.note,
      this.table,
    );
    this.fillLegend();
    this.listen();
  }

  take(group) {
    this.group = group;
    this.curves = curvesOf(group, this.panel);
    this.told = null;
  }

  toggleTable() {
    if (this.table.open) state.tables.add(this.id);
    else state.tables.delete(this.id);
    this.fillTable();
  }

  toggleLog() {
    state.log.set(this.panel, !this.isLog);
    redraw();
  }

  fillLegend() {
    this.values = this.curves.map((curve) => {
      const value = make("output", {});
      const name = state.runs.length > 1 && !state.side
        ? `${state.runs[curve.run].name} · ${curve.name}`
        : curve.name;
      const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.setProperty("--own", `var(--${colourOf(curve, this.curves)})`);
      const dash = dashOf(curve, this.curves);
      if (dash.length) swatch.classList.add("dashed");
      const toggle = make(
        "button",
        { type: "button", "aria-pressed": "true", title: `Show or hide ${name}` },
        swatch,
        make("span", { class: "name" }, name),
      );
      toggle.addEventListener("click", () => {
        const off = state.hidden.has(curve.key);
        if (off) state.hidden.delete(curve.key);
        else state.hidden.add(curve.key);
        toggle.setAttribute("aria-pressed", String(off));
        redraw();
      });
      if (state.hidden.has(curve.key)) toggle.setAttribute("aria-pressed", "false");
      this.legend.append(make("li", {}, toggle, value));
      return value;
    });
  }

  // What stands behind the picture, and what is under the cursor.
  tell() {
    const told = [];
    this.curves.forEach((curve, place) => {
      const found = state.cursor === null ? null : valueAt(curve, state.cursor, this.perPixel);
      this.values[place].textContent = found ? found.words : "";
      this.values[place].classList.toggle("bad", Boolean(found && found.bad));
      if (found && found.words) told.push(`${curve.name} ${found.words}`);
    });
    let points = 0;
    let most = 0;
    for (const curve of this.shown()) {
      for (const [a, b] of visible(curve, state.view)) {
        if (!curve.counts) {
          points += b - a;
          most = Math.max(most, 1);
          continue;
        }
        for (let i = a; i < b; i++) {
          points += curve.counts[i];
          if (curve.counts[i] > most) most = curve.counts[i];
        }
      }
    }
    let bad = 0;
    for (const curve of this.shown()) {
      for (const gap of curve.gaps) {
        if (gap[1] >= state.view[0] && gap[0] <= state.view[1]) bad += gap[2] + gap[3] + gap[4];
      }
    }
    const below = this.isLog && this.shown().some((c) => c.lows.some((v) => !(v > 0)));
    const one = points === 1 ? "1 finite number" : `${whole(points)} finite numbers`;
    this.note.textContent =
      `${one} in view` +
      (most > 1
        ? `, kept as ranges of up to ${whole(most)}; every lowest and highest value is kept`
        : "") +
      (bad ? `; ${whole(bad)} not finite` : "") +
      (below ? "; values of 0 and below have no place on this scale" : "");
    const at = state.cursor === null ? state.view[0] : state.cursor;
    this.plot.setAttribute("aria-valuemin", String(state.view[0]));
    this.plot.setAttribute("aria-valuemax", String(state.view[1]));
    this.plot.setAttribute("aria-valuenow", String(at));
    this.plot.setAttribute("aria-valuetext", `${axisName()} ${placeWords(at)}: ${told.join(", ") || "no cursor"}`);
    if (this.table.open) this.fillTable();
  }

  fillTable() {
    const told = JSON.stringify([state.view, state.byTime, this.shown().map((curve) => curve.key)]);
    if (!this.table.open || this.told === told) return;
    this.told = told;
    const rows = [];
    const [low, high] = state.view;
    const parts = 16;
    const edge = (part) => (part === parts ? high : low + ((high - low) * part) / parts);
    for (const curve of this.shown()) {
      for (let part = 0; part < parts; part++) {
        const row = summary(curve, edge(part), edge(part + 1));
        if (row) rows.push([curve.name, ...row]);
      }
    }
    const head = make("tr", {});
    for (const name of ["Curve", capital(axisName()), "Smallest", "Largest", "Points", "Not finite"]) {
      head.append(make("th", { scope: "col" }, name));
    }
    const body = make("tbody", {});
    for (const row of rows) {
      const tr = make("tr", {});
      row.forEach((cell, i) => tr.append(make("td", { class: i ? "number" : "" }, cell)));
      body.append(tr);
    }
    this.rows.replaceChildren(make("table", {}, make("thead", {}, head), body));
  }

  listen() {
    let from = null;
    let moved = null;
    const plot = this.plot;
    plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      hold();
      from = event.offsetX;
      moved = event.shiftKey ? [...state.view] : null;
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointermove", (event) => {
      const x = event.offsetX;
      if (from !== null && moved) {
        const by = (from - x) * this.perPixel;
        look(moved[0] + by, moved[1] + by);
        return;
      }
      if (from !== null && Math.abs(x - from) > 4) {
        this.brush.hidden = false;
        this.brush.style.left = `${Math.max(LEFT, Math.min(from, x))}px`;
        this.brush.style.width = `${Math.min(this.width - RIGHT, Math.max(from, x)) - Math.max(LEFT, Math.min(from, x))}px`;
      }
      point(Math.min(Math.max(this.at(x), state.view[0]), state.view[1]));
    });
    plot.addEventListener("pointerup", (event) => {
      const start = from;
      from = null;
      this.brush.hidden = true;
      if (start === null || moved || Math.abs(event.offsetX - start) <= 6) return;
      look(this.at(Math.min(start, event.offsetX)), this.at(Math.max(start, event.offsetX)));
    });
    plot.addEventListener("pointercancel", () => {
      from = null;
      this.brush.hidden = true;
    });
    plot.addEventListener("pointerleave", () => {
      if (from === null && document.activeElement !== plot) point(null);
    });
    plot.addEventListener("dblclick", () => look(...state.full));
    // A plain wheel scrolls the page until the chart was chosen with a click or with Tab.
    plot.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && !event.metaKey && document.activeElement !== plot) return;
        event.preventDefault();
        zoom(event.deltaY < 0 ? 0.8 : 1.25, this.at(event.offsetX));
      },
      { passive: false },
    );
    plot.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const wide = state.view[1] - state.view[0];
    const at = state.cursor ?? state.view[0] + wide / 2;
    const acts = {
      ArrowLeft: () => (event.shiftKey ? pan(-0.2) : this.move(at, -1)),
      ArrowRight: () => (event.shiftKey ? pan(0.2) : this.move(at, 1)),
      Home: () => point(state.view[0]),
      End: () => point(state.view[1]),
      "+": () => zoom(0.5, at),
      "=": () => zoom(0.5, at),
      "-": () => zoom(2, at),
      0: () => look(...state.full),
      l: () => this.toggleLog(),
      Escape: () => point(null),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  // To the next point that can be told apart from this one.
  move(at, direction) {
    const least = this.perPixel * 3;
    let next = at + direction * least;
    const curve = this.shown()[0];
    if (curve) {
      for (const [a, b] of visible(curve, state.view)) {
        let i = after(curve.xs, at + (direction > 0 ? 0 : -1e-9), a, b);
        if (direction < 0) i--;
        if (i >= a && i < b && Math.abs(curve.xs[i] - at) >= least) next = curve.xs[i];
      }
    }
    point(Math.min(Math.max(next, state.view[0]), state.view[1]));
  }
}

// What lies between two places of the view; the end of the view belongs to its last part.
function summary(curve, from, to) {
  const [first, last] = state.view;
  const within = (x) => x >= from && (x < to || (x === last && to === last));
  let low = Infinity;
  let high = -Infinity;
  let count = 0;
  for (const [a, b] of curve.segments) {
    for (let i = Math.max(a, after(curve.xs, from, a, b) - 1); i < b && curve.xs[i] <= to; i++) {
      if (!within(curve.xs[i])) continue;
      low = Math.min(low, curve.lows[i]);
      high = Math.max(high, curve.highs[i]);
      count += curve.counts ? curve.counts[i] : 1;
    }
  }
  let bad = 0;
  for (const gap of curve.gaps) {
    // A gap counts where it begins, or where the view does.
    const seen = gap[1] >= first && gap[0] <= last;
    if (seen && within(Math.max(gap[0], first))) bad += gap[2] + gap[3] + gap[4];
  }
  if (!count && !bad) return null;
  return [
    `${placeWords(from)} to ${placeWords(to)}`,
    count ? short(low) : "",
    count ? short(high) : "",
    whole(count),
    whole(bad),
  ];
}
