// The page: what is seen of the runs, and where everything is put.
// The other scripts are joined with this one, in a function of their own: see page.py.

const PANELS = ["Loss", "Loss terms", "Gradient norm", "Learning rate", "Loss scale", "Accuracy"];
const KINDS = {
  incident: ["●", "incidents"],
  "non-finite": ["∅", "non-finite"],
  spike: ["▲", "spikes"],
  skip: ["✕", "skips"],
  "lr-cut": ["▼", "LR cuts"],
  "lr-restored": ["△", "LR back"],
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
  wide: new Map(),
  hidden: new Set(),
  tables: new Set(),
  side: false,
  byTime: false,
  layout: "",
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
    draw();
  });
}

function draw() {
  for (const one of [...state.charts, ...state.strips]) one.draw();
  tellBar();
}

const curvesOf = (runs, panel) => runs.flatMap((run) => run.curves.filter((curve) => curve.panel === panel));

// Everything that decides which elements there are; numbers alone change what they show.
function layoutOf() {
  const told = (run) => [run.name, run.leftOut, run.curves.map((curve) => [curve.key, curve.evaluation])];
  return JSON.stringify([state.side, timed(), kindsOf(state.runs), state.runs.map(told)]);
}

function build() {
  const place = document.getElementById("charts");
  if (!place) return;
  const groups = state.side ? state.runs.map((run) => [run]) : [state.runs];
  const layout = layoutOf();
  if (layout === state.layout && place.hasChildNodes()) {
    for (const one of [...state.charts, ...state.strips]) one.take(groups[one.column]);
    redraw();
    return;
  }
  state.layout = layout;
  state.charts = [];
  state.strips = [];
  const columns = make("div", { class: state.side ? "columns side" : "columns" });
  groups.forEach((group, column) => columns.append(columnOf(group, column)));
  const hint = make(
    "p",
    { class: "hint" },
    "Drag to zoom, shift-drag to move, double-click for all. With a chart chosen: wheel, + and − zoom, ← and → move the cursor, L changes the scale.",
  );
  keepFocus(place, () => {
    place.replaceChildren(toolbar(), hint, columns);
    draw();
  });
  watcher.disconnect();
  watcher.observe(columns);
}

// The charts of one run, or of all.
function columnOf(group, column) {
  const box = make("div", { class: "column" });
  if (state.side) box.append(make("p", { class: "of-run" }, group[0].name));
  const strip = new Strip(group, column);
  if (strip.lanes.length) {
    box.append(strip.box);
    state.strips.push(strip);
  }
  for (const panel of PANELS) {
    if (curvesOf(group, panel).length) {
      const chart = new Chart(panel, group, column);
      state.charts.push(chart);
      box.append(chart.figure);
    } else if (curvesOf(state.runs, panel).length) {
      // The same charts of other runs stay beside each other.
      box.append(make("p", { class: "chart none" }, `${panel}: no numbers`));
    }
  }
  const left = group.reduce((sum, run) => sum + run.leftOut, 0);
  if (left) box.append(make("p", { class: "none" }, `${left} more curves are not shown.`));
  else if (state.runs.some((run) => run.leftOut)) box.append(make("span"));
  box.style.setProperty("--rows", String(box.childElementCount));
  return box;
}

const watcher = new ResizeObserver(redraw);

// Whether the time of every step is known.
const timed = () => state.runs.every((run) => run.timed);

function spread() {
  place(state.runs, state.byTime);
  state.full = extent(state.runs);
}

// What is drawn must not change under a pointer that is down in a chart.
let letGo = null;
let free = Promise.resolve();
function hold() {
  if (!letGo) free = new Promise((done) => (letGo = done));
}
for (const end of ["pointerup", "pointercancel", "blur"]) {
  window.addEventListener(end, () => {
    letGo?.();
    letGo = null;
  });
}

let asked = 0;
async function show(data) {
  const own = ++asked;
  const runs = await decode(data);
  await free;
  // Newer numbers came meanwhile.
  if (own !== asked) return;
  const zoomed = state.view && (state.view[0] !== state.full[0] || state.view[1] !== state.full[1]);
  state.runs = runs;
  state.wide.clear();
  const byTime = state.byTime;
  state.byTime &&= timed();
  spread();
  // A file that was written anew may end before what was zoomed to.
  const away = zoomed && (state.view[0] >= state.full[1] || state.view[1] <= state.full[0]);
  if (!zoomed || away || byTime !== state.byTime) state.view = [...state.full];
  build();
  const drawn = state.runs.reduce((sum, run) => sum + run.curves.reduce((s, c) => s + c.lows.length, 0), 0);
  const points = state.runs.reduce((sum, run) => sum + run.curves.reduce((s, c) => s + c.points, 0), 0);
  const exact = state.runs.every((run) => run.curves.every((curve) => curve.largest <= 1));
  const behind = document.getElementById("behind");
  if (behind && points) {
    behind.textContent =
      `${whole(points)} numbers stand behind the curves` +
      (exact ? ", all of them in this page." : `, kept as ${whole(drawn)} ranges.`);
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
  // Paper has the light colours and its own width, and nothing to click on.
  const brief = (one) => one.querySelectorAll("tr").length <= 200;
  let opened = [];
  window.addEventListener("beforeprint", () => {
    root.dataset.printing = "true";
    opened = [...document.querySelectorAll("main details:not([open], .data)")].filter(brief);
    for (const one of opened) one.open = true;
    draw();
  });
  window.addEventListener("afterprint", () => {
    delete root.dataset.printing;
    for (const one of opened) one.open = false;
    redraw();
  });
  tell();
}

window.nanguard = { show, free: () => free };
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
