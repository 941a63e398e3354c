// What happened, as marks on the same axis as the curves.

class Strip {
  constructor(group, column) {
    this.column = column;
    this.box = make("div", { class: "strip", role: "group", "aria-label": "What happened" });
    this.lanes = [];
    // The lanes of all runs, so that charts side by side stand at the same height.
    for (const kind of kindsOf(state.runs)) {
      const row = make("div", { class: "lane" });
      const marks = make("div", { class: "marks" });
      row.append(make("span", { class: "lane-name" }, KINDS[kind][1]), marks);
      this.box.append(row);
      this.lanes.push({ kind, marks });
    }
    this.take(group);
  }

  take(group) {
    for (const lane of this.lanes) {
      lane.events = group.flatMap((run) => run.events.filter((e) => e.kind === lane.kind && e.x !== null));
      lane.events.sort((a, b) => a.x - b.x);
      lane.known = null;
    }
  }

  draw() {
    for (const lane of this.lanes) {
      const width = lane.marks.clientWidth;
      const [low, high] = state.view;
      const groups = [];
      for (const event of lane.events) {
        if (event.until < low || event.x > high) continue;
        const x = ((Math.max(event.x, low) - low) / (high - low)) * width;
        const last = groups[groups.length - 1];
        if (last && x - last.x < NARROW) last.events.push(event);
        else groups.push({ x, events: [event] });
      }
      const known = groups.map((g) => `${Math.round(g.x)}:${g.events.length}`).join(" ");
      if (known === lane.known) continue;
      lane.known = known;
      const marks = groups.flatMap((group) => this.mark(lane, group, width));
      keepFocus(lane.marks, () => lane.marks.replaceChildren(...marks));
    }
  }

  mark(lane, group, width) {
    const first = group.events[0];
    const many = group.events.reduce((sum, event) => sum + event.count, 0);
    const name = state.runs.length > 1 ? `${state.runs[first.run].name}, ` : "";
    const label =
      many === 1
        ? `${name}step ${whole(first.step)}: ${first.text}`
        : `${name}${whole(many)} ${KINDS[lane.kind][1]} from step ${whole(first.step)} on: ${first.text}`;
    const element = button(KINDS[lane.kind][0], label, () => this.choose(lane, group), {
      class: `marker ${lane.kind}`,
    });
    if (many > 1) element.append(make("small", { "aria-hidden": "true" }, many > 999 ? `${Math.floor(many / 1000)}k` : String(many)));
    if (state.runs.length > 1) element.style.color = `var(--c${first.run % 8})`;
    element.style.left = `${group.x}px`;
    const [low, high] = state.view;
    const until = ((Math.min(Math.max(...group.events.map((e) => e.until)), high) - low) / (high - low)) * width;
    if (until - group.x < NARROW) return [element];
    const bar = make("span", { class: `reach ${lane.kind}`, "aria-hidden": "true" });
    bar.style.left = `${group.x + NARROW}px`;
    bar.style.width = `${Math.max(0, until - group.x - NARROW)}px`;
    return [bar, element];
  }

  choose(lane, group) {
    const first = group.events[0];
    if (first.incident !== null) {
      open(`incident-${first.run}-${first.incident}`);
      return;
    }
    const last = group.events[group.events.length - 1];
    point(first.x);
    if (last.until > first.x) {
      const some = Math.max(leastView(), (last.until - first.x) * 0.5);
      look(first.x - some, last.until + some);
    }
  }
}

// The kinds of what has happened somewhere on the axis, in their order.
function kindsOf(runs) {
  const kinds = new Set(runs.flatMap((run) => run.events.map((e) => (e.x === null ? null : e.kind))));
  return Object.keys(KINDS).filter((kind) => kinds.has(kind));
}

function open(id) {
  const target = document.getElementById(id);
  if (!target) return;
  history.replaceState(null, "", `#${id}`);
  target.focus({ preventScroll: true });
  const calm = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
  target.scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "start" });
}
