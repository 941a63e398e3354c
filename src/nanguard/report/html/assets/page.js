// The page: what is seen of the runs, and where everything is put.
// The other scripts are joined with this one, in a function of their own: see page.py.

const PANELS = ["Loss", "Loss terms", "Gradient norm", "Learning rate", "Loss scale", "Accuracy"];
const KINDS = {
  incident: ["●", "incidents"],
  "non-finite": ["∅", "non-finite"],
  spike: ["▲", "spikes"],
  skip: ["✕", "skips"],
  "lr-cut": ["▼", "LR cuts"],
  "lr-restored": ["△", "LR restored"],
  rollback: ["↶", "rollbacks"],
  restart: ["↻", "restarts"],
  stop: ["■", "stops"],
  overflow: ["○", "overflows"],
  note: ["◆", "notes"],
};
const LEFT = 62;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 22;
const NARROW = 16;
const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3]];

const state = {
  runs: [],
  full: [0, 1],
  view: null,
  cursor: null,
  log: new Map(),
  hidden: new Set(),
  side: false,
  byTime: false,
  charts: [],
  strips: [],
};

function look(low, high) {
  const [first, last] = state.full;
  const least = Math.max((last - first) * 1e-7, leastView());
  let wide = Math.min(Math.max(high - low, least), last - first);
  if (!Number.isFinite(wide)) wide = last - first;
  let start = Math.min(Math.max((low + high - wide) / 2, first), last - wide);
  if (!Number.isFinite(start)) start = first;
  state.view = [start, start + wide];
  redraw();
}

// No less of the axis is ever shown: two steps, or a thousandth of an epoch or a second.
const leastView = () => (axisName() === "step" || axisName() === "entry" ? 2 : 1e-3);

function zoom(factor, around) {
  const [low, high] = state.view;
  look(around - (around - low) * factor, around + (high - around) * factor);
}

function pan(share) {
  const by = (state.view[1] - state.view[0]) * share;
  const [low, high] = state.view;
  const [first, last] = state.full;
  const move = Math.min(Math.max(by, first - low), last - high);
  look(low + move, high + move);
}

function point(x) {
  state.cursor = x;
  redraw();
}

let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const chart of state.charts) chart.draw();
    for (const strip of state.strips) strip.draw();
    sayWhere();
  });
}

function sayWhere() {
  const where = document.getElementById("where");
  if (!where) return;
  const [low, high] = state.view;
  if (state.cursor === null) {
    where.textContent = `${capital(axisName())} ${placeWords(low)} to ${placeWords(high)}`;
    return;
  }
  const fine = state.byTime || axisName() === "epoch";
  const at = fine ? state.cursor : Math.round(state.cursor);
  const time = state.runs.length === 1 ? timeAt(state.runs[0], at) : "";
  where.textContent = `${capital(axisName())} ${placeWords(at)}${time ? ` · ${time} UTC` : ""}`;
}

function toolbar() {
  const middle = () => state.cursor ?? (state.view[0] + state.view[1]) / 2;
  const bar = make("div", { class: "toolbar", role: "toolbar", "aria-label": "Zoom" });
  bar.append(
    button("+", "Zoom in", () => zoom(0.5, middle())),
    button("−", "Zoom out", () => zoom(2, middle())),
    button("←", "To the left", () => pan(-0.3)),
    button("→", "To the right", () => pan(0.3)),
    button("All", "Show all steps", () => look(...state.full)),
    button("Log scale", "Logarithmic scale in all charts", (event) => {
      const on = event.currentTarget.getAttribute("aria-pressed") !== "true";
      event.currentTarget.setAttribute("aria-pressed", String(on));
      for (const panel of PANELS) state.log.set(panel, on);
      redraw();
    }, { "aria-pressed": "false", id: "log-all" }),
  );
  if (state.runs.length > 1) {
    bar.append(
      button("Side by side", "Runs side by side", () => {
        state.side = !state.side;
        build();
      }, { "aria-pressed": String(state.side), id: "side" }),
    );
  }
  if (timed()) {
    bar.append(
      button("Time", "Time since the run began instead of steps", () => {
        state.byTime = !state.byTime;
        state.cursor = null;
        spread();
        state.view = [...state.full];
        build();
      }, { "aria-pressed": String(state.byTime), id: "by-time" }),
    );
  }
  bar.append(make("output", { id: "where" }));
  return bar;
}

function build() {
  const place = document.getElementById("charts");
  if (!place) return;
  const groups = state.side ? state.runs.map((run) => [run]) : [state.runs];
  state.charts = [];
  state.strips = [];
  const columns = make("div", { class: state.side ? "columns side" : "columns" });
  for (const group of groups) {
    const box = make("div", { class: "column" });
    if (state.side) box.append(make("p", { class: "of-run" }, group[0].name));
    const strip = new Strip(group);
    if (strip.lanes.length) {
      box.append(strip.box);
      state.strips.push(strip);
    }
    for (const panel of PANELS) {
      const curves = group.flatMap((run) => run.curves.filter((curve) => curve.panel === panel));
      if (!curves.length) continue;
      const chart = new Chart(panel, curves, group);
      state.charts.push(chart);
      box.append(chart.figure);
    }
    const left = group.reduce((sum, run) => sum + run.leftOut, 0);
    if (left) box.append(make("p", { class: "none" }, `${left} more curves are not shown.`));
    columns.append(box);
  }
  const hint = make(
    "p",
    { class: "hint" },
    "Drag to zoom, shift-drag to move, double-click for all. With a chart chosen: wheel, + and − zoom, ← and → move the cursor, L changes the scale.",
  );
  place.replaceChildren(toolbar(), hint, columns);
  const watcher = new ResizeObserver(redraw);
  watcher.observe(columns);
  redraw();
}

// Whether the time of every step is known.
const timed = () => state.runs.every((run) => run.timed);

function spread() {
  place(state.runs, state.byTime);
  state.full = extent(state.runs);
}

async function show(data) {
  const zoomed = state.view && (state.view[0] !== state.full[0] || state.view[1] !== state.full[1]);
  state.runs = await decode(data);
  const byTime = state.byTime;
  state.byTime &&= timed();
  spread();
  if (!zoomed || byTime !== state.byTime) state.view = [...state.full];
  build();
  const drawn = state.runs.reduce((sum, run) => sum + run.curves.reduce((s, c) => s + c.lows.length, 0), 0);
  const points = state.runs.reduce((sum, run) => sum + run.curves.reduce((s, c) => s + c.points, 0), 0);
  const exact = state.runs.every((run) => run.curves.every((curve) => curve.largest <= 1));
  const behind = document.getElementById("behind");
  if (behind && points) {
    behind.textContent =
      `${whole(points)} numbers stand behind the curves` +
      (exact ? ", all of them in this file." : `, kept as ${whole(drawn)} ranges.`);
  }
  document.documentElement.dataset.ready = "true";
}

function themes() {
  const choice = document.getElementById("theme");
  const root = document.documentElement;
  const dark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
  const tell = () => {
    if (choice) choice.setAttribute("aria-pressed", String(dark()));
    redraw();
  };
  if (choice) {
    choice.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      tell();
    });
  }
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
  window.addEventListener("beforeprint", () => {
    root.dataset.printing = "true";
    for (const chart of state.charts) chart.draw();
  });
  window.addEventListener("afterprint", () => {
    delete root.dataset.printing;
    redraw();
  });
  tell();
}

window.nanguard = { show };
themes();
const embedded = document.getElementById("data");
if (embedded && document.getElementById("charts")) {
  show(JSON.parse(embedded.textContent)).catch((error) => {
    document.getElementById("charts").textContent = error.message;
    document.documentElement.dataset.ready = "failed";
  });
} else {
  document.documentElement.dataset.ready = "true";
}
