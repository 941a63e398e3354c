// The curves of the page: decoded from the embedded numbers, drawn on canvases with linked axes.
// Nothing of a stranger becomes markup: every string goes through textContent or an attribute.
(() => {
  "use strict";

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
    charts: [],
    strips: [],
  };

  // ---- Decoding ----

  async function bytesOf(numbers) {
    const text = atob(numbers.bytes);
    const raw = new Uint8Array(text.length);
    for (let i = 0; i < raw.length; i++) raw[i] = text.charCodeAt(i);
    if (numbers.packing !== "gzip") return raw;
    if (typeof DecompressionStream === "undefined") {
      throw new Error("This browser is too old to unpack the numbers of this page.");
    }
    const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  function column(bytes, [offset, count, type]) {
    const size = Number(type.slice(1));
    const out = new Uint8Array(count * size);
    for (let plane = 0; plane < size; plane++) {
      const from = offset + plane * count;
      for (let i = 0; i < count; i++) out[i * size + plane] = bytes[from + i];
    }
    const Kind = { f4: Float32Array, d8: Float64Array, i4: Int32Array }[type];
    return new Kind(out.buffer);
  }

  function curveOf(told, bytes, run, place) {
    const lows = column(bytes, told.lows);
    const count = lows.length;
    let xs;
    if (told.xs) {
      xs = column(bytes, told.xs);
    } else {
      const steps = column(bytes, told.steps);
      xs = new Float64Array(count);
      if (count) xs[0] = told.first;
      for (let i = 1; i < count; i++) xs[i] = xs[i - 1] + steps[i - 1];
    }
    const broken = new Uint8Array(count);
    for (const at of told.breaks) broken[at] = 1;
    const segments = [];
    let start = 0;
    for (let i = 1; i <= count; i++) {
      if (i === count || xs[i] < xs[i - 1]) {
        segments.push([start, i]);
        start = i;
      }
    }
    return {
      ...told,
      run,
      key: `${run}/${told.panel}/${told.name}/${place}`,
      xs,
      lows,
      highs: told.highs ? column(bytes, told.highs) : lows,
      counts: told.counts ? column(bytes, told.counts) : null,
      broken,
      segments: count ? segments : [],
    };
  }

  async function decode(data) {
    const bytes = await bytesOf(data.numbers);
    return data.runs.map((run, place) => ({
      name: run.name,
      axis: run.axis,
      leftOut: run.left_out,
      clock: run.clock,
      curves: run.curves.map((curve, at) => curveOf(curve, bytes, place, at)),
      events: run.events.map(([kind, step, last, count, text, incident]) => ({
        kind, step, last, count, text, incident, run: place,
      })),
    }));
  }

  function extent(runs) {
    let low = Infinity;
    let high = -Infinity;
    const take = (x) => {
      if (x === null || x === undefined) return;
      if (x < low) low = x;
      if (x > high) high = x;
    };
    for (const run of runs) {
      for (const curve of run.curves) {
        for (const [a, b] of curve.segments) {
          take(curve.xs[a]);
          take(curve.xs[b - 1]);
        }
        for (const gap of curve.gaps) {
          take(gap[0]);
          take(gap[1]);
        }
      }
      for (const event of run.events) {
        take(event.step);
        take(event.last);
      }
    }
    if (low > high) return [0, 1];
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  // ---- Numbers in words ----

  function whole(x) {
    const rounded = Number.isInteger(x) ? x : Math.round(x * 100) / 100;
    return rounded.toLocaleString("en-US", { maximumFractionDigits: 2 }).replace(/,/g, "\u202f");
  }

  function short(value) {
    if (Number.isNaN(value)) return "nan";
    if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
      return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
    }
    return String(Number(value.toPrecision(5)));
  }

  function tickWords(value, step) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (step < 1e-3 || size >= 1e5) {
      return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    }
    const digits = step >= 1 ? 0 : Math.min(6, Math.ceil(-Math.log10(step)));
    return value.toFixed(digits);
  }

  function niceStep(range, wanted) {
    const raw = range / Math.max(1, wanted);
    const power = 10 ** Math.floor(Math.log10(raw));
    for (const factor of [1, 2, 5, 10]) if (raw <= factor * power) return factor * power;
    return 10 * power;
  }

  function ticks(low, high, wanted, integer) {
    let step = niceStep(high - low, wanted);
    if (integer) step = Math.max(1, step);
    const out = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) {
      out.push(Math.abs(at) < step * 1e-9 ? 0 : at);
      if (out.length > 100) break;
    }
    return [out, step];
  }

  function logTicks(low, high) {
    const out = [];
    const first = Math.floor(low);
    const every = Math.max(1, Math.ceil((high - low) / 5));
    for (let power = first; power <= high; power += every) if (power >= low) out.push(10 ** power);
    if (out.length < 2) {
      for (let power = first; power <= high; power++) {
        for (const factor of [1, 2, 5]) {
          const at = Math.log10(factor) + power;
          if (at >= low && at <= high) out.push(factor * 10 ** power);
        }
      }
    }
    if (out.length < 2) return ticks(10 ** low, 10 ** high, 4, false)[0].filter((v) => v > 0);
    return [...new Set(out)].sort((a, b) => a - b);
  }

  function timeAt(run, x) {
    let found = null;
    for (const [step, time] of run.clock) if (step <= x) found = time;
    if (found === null) return "";
    return new Date(found * 1000).toISOString().slice(0, 19).replace("T", " ");
  }

  // ---- Elements ----

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "class") element.className = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
    for (const child of children) if (child !== null && child !== undefined) element.append(child);
    return element;
  }

  function button(text, label, act, extra = {}) {
    return make("button", { type: "button", "aria-label": label, title: label, onclick: act, ...extra }, text);
  }

  const styles = () => getComputedStyle(document.documentElement);
  function colour(name) {
    return styles().getPropertyValue(`--${name}`).trim();
  }

  function colourOf(curve, among) {
    return state.runs.length > 1 ? `c${curve.run % 8}` : `c${among.indexOf(curve) % 8}`;
  }

  function dashOf(curve, among) {
    if (state.runs.length === 1) return curve.evaluation ? [5, 3] : [];
    const own = among.filter((other) => other.run === curve.run);
    return DASHES[own.indexOf(curve) % DASHES.length];
  }

  const axisName = () => (state.runs[0] ? state.runs[0].axis : "step");
  const capital = (word) => word[0].toUpperCase() + word.slice(1);

  // ---- Looking things up ----

  // The first bucket of a segment that begins after x.
  function after(xs, x, a, b) {
    while (a < b) {
      const middle = (a + b) >> 1;
      if (xs[middle] <= x) a = middle + 1;
      else b = middle;
    }
    return a;
  }

  // Visible buckets of each segment, with a neighbour on both sides so that lines reach the edge.
  function* visible(curve, [low, high]) {
    for (const [a, b] of curve.segments) {
      const first = Math.max(a, after(curve.xs, low, a, b) - 1);
      const last = Math.min(b, after(curve.xs, high, a, b) + 1);
      if (first < last) yield [first, last];
    }
  }

  function gapAt(curve, x, slack) {
    for (const gap of curve.gaps) if (gap[0] - slack <= x && x <= gap[1] + slack) return gap;
    return null;
  }

  function gapWords(gap) {
    const parts = [];
    if (gap[2]) parts.push("nan");
    if (gap[3]) parts.push("inf");
    if (gap[4]) parts.push("-inf");
    return parts.join("/");
  }

  function valueAt(curve, x, perPixel) {
    let best = -1;
    for (const [a, b] of curve.segments) {
      const at = after(curve.xs, x, a, b);
      for (const i of [at - 1, at]) {
        if (i < a || i >= b) continue;
        if (best < 0 || Math.abs(curve.xs[i] - x) <= Math.abs(curve.xs[best] - x)) best = i;
      }
    }
    const gap = gapAt(curve, x, perPixel);
    if (gap && (best < 0 || Math.abs(curve.xs[best] - x) > perPixel / 2 || gap[0] <= x)) {
      const many = gap[1] > gap[0] ? ` (${whole(gap[0])} to ${whole(gap[1])})` : "";
      return { words: `${gapWords(gap)}${many}`, bad: true };
    }
    if (best < 0) return { words: "", bad: false };
    const count = curve.counts ? curve.counts[best] : 1;
    if (count === 1) return { words: short(curve.lows[best]), bad: false, x: curve.xs[best] };
    return {
      words: `${short(curve.lows[best])} … ${short(curve.highs[best])} (${count} points)`,
      bad: false,
      x: curve.xs[best],
    };
  }

  // ---- One chart ----

  class Chart {
    constructor(panel, curves, group) {
      this.panel = panel;
      this.curves = curves;
      this.group = group;
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
      this.table = make("details", { class: "data", ontoggle: () => this.fillTable() });
      this.table.append(make("summary", {}, `${panel} as a table`));
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

    get isLog() {
      return state.log.get(this.panel) ?? this.wantsLog();
    }

    shown() {
      return this.curves.filter((curve) => !state.hidden.has(curve.key));
    }

    // Numbers that span many sizes are unreadable on a plain scale.
    wantsLog() {
      if (this.auto !== undefined) return this.auto;
      let low = Infinity;
      let high = -Infinity;
      for (const curve of this.curves) {
        for (let i = 0; i < curve.lows.length; i++) {
          if (curve.lows[i] < low) low = curve.lows[i];
          if (curve.highs[i] > high) high = curve.highs[i];
        }
      }
      this.auto = low > 0 && high / low > 1000 && this.panel !== "Learning rate";
      return this.auto;
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

    x(at) {
      const [low, high] = state.view;
      return LEFT + ((at - low) / (high - low)) * (this.width - LEFT - RIGHT);
    }

    at(x) {
      const [low, high] = state.view;
      return low + ((x - LEFT) / Math.max(1, this.width - LEFT - RIGHT)) * (high - low);
    }

    get perPixel() {
      return (state.view[1] - state.view[0]) / Math.max(1, this.width - LEFT - RIGHT);
    }

    // The range of what is in view, over all charts of this panel so that they can be compared.
    domain() {
      let low = Infinity;
      let high = -Infinity;
      const log = this.isLog;
      for (const chart of state.charts) {
        if (chart.panel !== this.panel) continue;
        for (const curve of chart.shown()) {
          for (const [a, b] of visible(curve, state.view)) {
            for (let i = a; i < b; i++) {
              const l = curve.lows[i];
              const h = curve.highs[i];
              if (log ? l > 0 && l < low : l < low) low = l;
              if (h > high) high = h;
            }
          }
        }
      }
      if (log) {
        if (!(high > 0)) return [-1, 1];
        low = Math.log10(Math.min(low, high));
        high = Math.log10(high);
      }
      if (low > high) return [0, 1];
      if (low === high) {
        const some = log ? 0.5 : Math.abs(low) * 0.1 || 1;
        return [low - some, high + some];
      }
      const pad = (high - low) * 0.06;
      return [low - pad, high + pad];
    }

    draw() {
      const ratio = window.devicePixelRatio || 1;
      this.width = this.plot.clientWidth;
      this.height = this.plot.clientHeight;
      if (!this.width) return;
      this.canvas.width = Math.round(this.width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      const ctx = this.canvas.getContext("2d");
      ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
      ctx.clearRect(0, 0, this.width, this.height);
      const [low, high] = this.domain();
      const log = this.isLog;
      const inner = this.height - TOP - BOTTOM;
      this.y = (value) => {
        const v = log ? Math.log10(value) : value;
        return TOP + inner * (1 - (v - low) / (high - low));
      };
      this.drawAxes(ctx, low, high, log);
      ctx.save();
      ctx.beginPath();
      ctx.rect(LEFT, 0, this.width - LEFT - RIGHT, this.height - BOTTOM + 1);
      ctx.clip();
      this.drawGaps(ctx);
      this.drawEvents(ctx);
      for (const curve of this.shown()) this.drawCurve(ctx, curve, log);
      this.drawCursor(ctx);
      ctx.restore();
      this.logButton.setAttribute("aria-pressed", String(log));
      this.tell();
    }

    drawAxes(ctx, low, high, log) {
      ctx.font = `11px ${colour("font")}`;
      ctx.fillStyle = colour("quiet");
      ctx.strokeStyle = colour("grid");
      ctx.lineWidth = 1;
      ctx.textAlign = "right";
      ctx.textBaseline = "middle";
      const wanted = Math.max(2, Math.floor(this.height / 42));
      const [values, step] = log ? [logTicks(low, high), 0] : ticks(low, high, wanted, false);
      ctx.beginPath();
      for (const value of values) {
        const y = Math.round(this.y(value)) + 0.5;
        if (y < TOP - 2 || y > this.height - BOTTOM + 2) continue;
        ctx.moveTo(LEFT, y);
        ctx.lineTo(this.width - RIGHT, y);
        ctx.fillText(log ? short(value) : tickWords(value, step), LEFT - 8, y);
      }
      ctx.stroke();
      ctx.textAlign = "center";
      ctx.textBaseline = "top";
      const most = Math.max(2, Math.floor((this.width - LEFT) / 110));
      const [places] = ticks(state.view[0], state.view[1], most, axisName() !== "epoch");
      for (const place of places) {
        const x = this.x(place);
        if (x > this.width - RIGHT + 1) continue;
        ctx.fillRect(Math.round(x), this.height - BOTTOM, 1, 4);
        const words = whole(place);
        const half = ctx.measureText(words).width / 2;
        ctx.fillText(words, Math.min(x, this.width - half - 1), this.height - BOTTOM + 7);
      }
      ctx.strokeStyle = colour("line");
      ctx.beginPath();
      ctx.moveTo(LEFT, this.height - BOTTOM + 0.5);
      ctx.lineTo(this.width - RIGHT, this.height - BOTTOM + 0.5);
      ctx.stroke();
    }

    // Non-finite steps: a hatched band with a mark, as wide as it is and never too thin to be seen.
    drawGaps(ctx) {
      const hatch = hatching(ctx);
      const bottom = this.height - BOTTOM;
      const [low, high] = state.view;
      for (const curve of this.shown()) {
        let reached = -Infinity;
        for (const gap of curve.gaps) {
          if (gap[1] < low || gap[0] > high) continue;
          let left = this.x(gap[0]);
          let right = this.x(gap[1]);
          if (right - left < 3) {
            const middle = (left + right) / 2;
            left = middle - 1.5;
            right = middle + 1.5;
          }
          if (right <= reached) continue;
          left = Math.max(left, reached, LEFT);
          right = Math.min(right, this.width);
          ctx.fillStyle = hatch;
          ctx.fillRect(left, TOP, right - left, bottom - TOP);
          ctx.fillStyle = colour("bad");
          ctx.fillRect(left, bottom - 4, right - left, 4);
          if (gap[3]) triangle(ctx, (left + right) / 2, TOP, 5);
          if (gap[4]) triangle(ctx, (left + right) / 2, bottom - 5, -5);
          if (right - left > 42) {
            ctx.font = `11px ${colour("font")}`;
            ctx.textAlign = "center";
            ctx.textBaseline = "top";
            const whose = this.group.length > 1 ? `${state.runs[curve.run].name}: ` : "";
            ctx.fillText(`${whose}${gapWords(gap)}`, (left + right) / 2, TOP + 8, right - left);
          }
          reached = right;
        }
      }
    }

    drawEvents(ctx) {
      ctx.lineWidth = 1;
      const drawn = new Set();
      for (const run of this.group) {
        for (const event of run.events) {
          if (event.step === null || event.kind === "note" || event.kind === "overflow") continue;
          const x = Math.round(this.x(event.step)) + 0.5;
          if (x < LEFT || x > this.width || drawn.has(`${x}`)) continue;
          drawn.add(`${x}`);
          ctx.strokeStyle = colour(`k-${event.kind}`) || colour("quiet");
          ctx.globalAlpha = 0.45;
          ctx.setLineDash([2, 3]);
          ctx.beginPath();
          ctx.moveTo(x, TOP);
          ctx.lineTo(x, this.height - BOTTOM);
          ctx.stroke();
        }
      }
      ctx.globalAlpha = 1;
      ctx.setLineDash([]);
    }

    drawCurve(ctx, curve, log) {
      const own = colour(colourOf(curve, this.curves));
      ctx.strokeStyle = own;
      ctx.fillStyle = own;
      ctx.lineWidth = 1.4;
      ctx.lineJoin = "round";
      ctx.setLineDash(dashOf(curve, this.curves));
      for (const [a, b] of visible(curve, state.view)) this.drawSegment(ctx, curve, a, b, log);
      ctx.setLineDash([]);
    }

    drawSegment(ctx, curve, a, b, log) {
      const { xs, lows, highs, counts, broken } = curve;
      const wide = b - a > 1 && this.x(xs[b - 1]) - this.x(xs[a]) > 9 * (b - a);
      const middle = (i) =>
        lows[i] === highs[i] ? lows[i] : log ? Math.sqrt(lows[i] * highs[i]) : (lows[i] + highs[i]) / 2;
      let pixel = null;
      let low = 0;
      let high = 0;
      let last = 0;
      let joined = 0;
      let begun = false;
      const flush = () => {
        if (pixel === null) return;
        if (high !== low) {
          ctx.lineTo(pixel, this.y(low));
          ctx.lineTo(pixel, this.y(high));
        }
        ctx.lineTo(pixel, this.y(last));
        if (joined === 1 && high === low) ctx.rect(pixel - 1.2, this.y(last) - 1.2, 2.4, 2.4);
        pixel = null;
      };
      ctx.beginPath();
      for (let i = a; i < b; i++) {
        if (log && !(lows[i] > 0)) {
          flush();
          begun = false;
          continue;
        }
        const x = wide ? this.x(xs[i]) : Math.round(this.x(xs[i]));
        if (broken[i] || !begun) {
          flush();
          begun = true;
          joined = 0;
          ctx.moveTo(x, this.y(middle(i)));
        }
        if (x !== pixel) {
          flush();
          pixel = x;
          low = lows[i];
          high = highs[i];
          joined++;
          ctx.lineTo(x, this.y(middle(i)));
        } else {
          if (lows[i] < low) low = lows[i];
          if (highs[i] > high) high = highs[i];
        }
        last = middle(i);
      }
      flush();
      ctx.stroke();
      if (!wide) return;
      for (let i = a; i < b; i++) {
        if (log && !(lows[i] > 0)) continue;
        if (counts && counts[i] > 1) {
          const end = i + 1 < b && !broken[i + 1] ? this.x(xs[i + 1]) : this.x(xs[i]) + 4;
          ctx.globalAlpha = 0.25;
          ctx.fillRect(this.x(xs[i]), this.y(highs[i]), end - this.x(xs[i]), this.y(lows[i]) - this.y(highs[i]));
          ctx.globalAlpha = 1;
        } else {
          ctx.beginPath();
          ctx.arc(this.x(xs[i]), this.y(lows[i]), 2.2, 0, 7);
          ctx.fill();
        }
      }
    }

    drawCursor(ctx) {
      if (state.cursor === null) return;
      const x = Math.round(this.x(state.cursor)) + 0.5;
      ctx.strokeStyle = colour("text");
      ctx.globalAlpha = 0.6;
      ctx.beginPath();
      ctx.moveTo(x, 0);
      ctx.lineTo(x, this.height - BOTTOM);
      ctx.stroke();
      ctx.globalAlpha = 1;
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
      this.plot.setAttribute("aria-valuetext", `${axisName()} ${whole(at)}: ${told.join(", ") || "no cursor"}`);
      if (this.table.open) this.fillTable();
    }

    fillTable() {
      if (!this.table.open) return;
      const rows = [];
      const [low, high] = state.view;
      const parts = 16;
      for (const curve of this.shown()) {
        for (let part = 0; part < parts; part++) {
          const from = low + ((high - low) * part) / parts;
          const to = low + ((high - low) * (part + 1)) / parts;
          const row = summary(curve, from, to, part === parts - 1);
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
      const table = make("table", {}, make("thead", {}, head), body);
      const box = make("div", { class: "wide", tabindex: "0", role: "region", "aria-label": `${this.panel} as a table` }, table);
      this.table.querySelector(".wide")?.remove();
      this.table.append(box);
    }

    listen() {
      let from = null;
      let moved = null;
      const plot = this.plot;
      plot.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
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

  function summary(curve, from, to, closed) {
    let low = Infinity;
    let high = -Infinity;
    let count = 0;
    for (const [a, b] of curve.segments) {
      for (let i = Math.max(a, after(curve.xs, from, a, b) - 1); i < b && curve.xs[i] <= to; i++) {
        if (curve.xs[i] < from || (curve.xs[i] === to && !closed)) continue;
        low = Math.min(low, curve.lows[i]);
        high = Math.max(high, curve.highs[i]);
        count += curve.counts ? curve.counts[i] : 1;
      }
    }
    let bad = 0;
    for (const gap of curve.gaps) {
      if (gap[0] >= from && (gap[0] < to || closed)) bad += gap[2] + gap[3] + gap[4];
    }
    if (!count && !bad) return null;
    return [
      `${whole(from)} to ${whole(to)}`,
      count ? short(low) : "",
      count ? short(high) : "",
      whole(count),
      whole(bad),
    ];
  }

  function triangle(ctx, x, y, size) {
    ctx.beginPath();
    ctx.moveTo(x, y);
    ctx.lineTo(x - Math.abs(size), y + size);
    ctx.lineTo(x + Math.abs(size), y + size);
    ctx.fill();
  }

  function hatching(ctx) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const own = tile.getContext("2d");
    own.fillStyle = colour("bad-ground");
    own.fillRect(0, 0, 8, 8);
    own.strokeStyle = colour("bad");
    own.globalAlpha = 0.55;
    own.beginPath();
    own.moveTo(-2, 2);
    own.lineTo(2, -2);
    own.moveTo(0, 8);
    own.lineTo(8, 0);
    own.moveTo(6, 10);
    own.lineTo(10, 6);
    own.stroke();
    return ctx.createPattern(tile, "repeat");
  }

  // ---- What happened, on the same axis ----

  class Strip {
    constructor(group) {
      this.group = group;
      this.box = make("div", { class: "strip", role: "group", "aria-label": "What happened" });
      this.lanes = [];
      for (const kind of Object.keys(KINDS)) {
        const of = (runs) => runs.flatMap((run) => run.events.filter((e) => e.kind === kind && e.step !== null));
        // The lanes of all runs, so that charts side by side stand at the same height.
        if (!of(state.runs).length) continue;
        const events = of(group);
        events.sort((a, b) => a.step - b.step);
        const row = make("div", { class: "lane" });
        const marks = make("div", { class: "marks" });
        row.append(make("span", { class: "lane-name" }, KINDS[kind][1]), marks);
        this.box.append(row);
        this.lanes.push({ kind, events, marks, known: "" });
      }
    }

    draw() {
      for (const lane of this.lanes) {
        const width = lane.marks.clientWidth;
        const [low, high] = state.view;
        const groups = [];
        for (const event of lane.events) {
          if (event.last < low || event.step > high) continue;
          const x = ((Math.max(event.step, low) - low) / (high - low)) * width;
          const last = groups[groups.length - 1];
          if (last && x - last.x < NARROW) last.events.push(event);
          else groups.push({ x, events: [event] });
        }
        const known = groups.map((g) => `${Math.round(g.x)}:${g.events.length}`).join(" ");
        if (known === lane.known) continue;
        lane.known = known;
        lane.marks.replaceChildren(...groups.flatMap((group) => this.mark(lane, group, width)));
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
      const until = ((Math.min(Math.max(...group.events.map((e) => e.last)), high) - low) / (high - low)) * width;
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
      point(first.step);
      if (last.last > first.step) {
        const some = Math.max(2, (last.last - first.step) * 0.5);
        look(first.step - some, last.last + some);
      }
    }
  }

  function open(id) {
    const target = document.getElementById(id);
    if (!target) return;
    history.replaceState(null, "", `#${id}`);
    target.focus({ preventScroll: true });
    const calm = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
    target.scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "start" });
  }

  // ---- The view ----

  function look(low, high) {
    const [first, last] = state.full;
    const least = Math.max((last - first) * 1e-7, axisName() === "epoch" ? 1e-3 : 2);
    let wide = Math.min(Math.max(high - low, least), last - first);
    if (!Number.isFinite(wide)) wide = last - first;
    let start = Math.min(Math.max((low + high - wide) / 2, first), last - wide);
    if (!Number.isFinite(start)) start = first;
    state.view = [start, start + wide];
    redraw();
  }

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
      where.textContent = `${capital(axisName())} ${whole(Math.round(low * 100) / 100)} to ${whole(Math.round(high * 100) / 100)}`;
      return;
    }
    const at = axisName() === "epoch" ? state.cursor : Math.round(state.cursor);
    const time = state.runs.length === 1 ? timeAt(state.runs[0], at) : "";
    where.textContent = `${capital(axisName())} ${whole(at)}${time ? ` · ${time} UTC` : ""}`;
  }

  // ---- Building ----

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

  async function show(data) {
    const zoomed = state.view && (state.view[0] !== state.full[0] || state.view[1] !== state.full[1]);
    state.runs = await decode(data);
    state.full = extent(state.runs);
    if (!zoomed) state.view = [...state.full];
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
})();
