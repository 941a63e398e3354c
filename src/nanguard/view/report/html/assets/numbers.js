// Numbers: from the bytes of the page to curves, and looking things up in them.

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

// The key stays the same while curves come and go: nth tells apart those of the same name.
function curveOf(told, bytes, run, nth) {
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
    key: JSON.stringify([run, told.panel, told.name, nth]),
    steps: xs,
    badSteps: told.gaps,
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
    timed: run.timed,
    curves: run.curves.map((curve, at, all) => {
      const alike = (other) => other.panel === curve.panel && other.name === curve.name;
      return curveOf(curve, bytes, place, all.slice(0, at).filter(alike).length);
    }),
    events: run.events.map(([kind, step, last, count, text, incident]) => ({
      kind, step, last, count, text, incident, run: place,
    })),
  }));
}

// Puts everything at its step, or at the seconds since its run began.
function place(runs, byTime) {
  for (const run of runs) {
    const at = byTime ? (step) => secondsAt(run, step) : (step) => step;
    for (const curve of run.curves) {
      curve.xs = byTime ? Float64Array.from(curve.steps, at) : curve.steps;
      curve.gaps = curve.badSteps.map(([first, last, ...counts]) => [at(first), at(last), ...counts]);
    }
    for (const event of run.events) {
      event.x = event.step === null ? null : at(event.step);
      event.until = event.last === null ? null : at(event.last);
    }
  }
}

// Between two entries of the clock, steps are taken to be equally long; beyond it, too.
function secondsAt(run, step) {
  const clock = run.clock;
  let a = 0;
  let b = clock.length - 1;
  while (b - a > 1) {
    const middle = (a + b) >> 1;
    if (clock[middle][0] <= step) a = middle;
    else b = middle;
  }
  const [[from, began], [to, ended]] = [clock[a], clock[b]];
  return began + ((step - from) / (to - from)) * (ended - began) - clock[0][1];
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
      take(event.x);
      take(event.until);
    }
  }
  if (low > high) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

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
    const many = gap[1] > gap[0] ? ` (${placeWords(gap[0])} to ${placeWords(gap[1])})` : "";
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
