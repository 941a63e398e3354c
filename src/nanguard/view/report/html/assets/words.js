// Numbers in words, ticks of axes, and small elements. Every string becomes text, never markup.

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

// Ticks of the axis that all charts share.
function axisTicks(low, high, wanted) {
  if (!state.byTime) return ticks(low, high, wanted, axisName() !== "epoch");
  const raw = (high - low) / Math.max(1, wanted);
  const day = 86400;
  const usual = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, day];
  const step = raw < 1 ? niceStep(high - low, wanted)
    : usual.find((s) => raw <= s) ?? day * niceStep((high - low) / day, wanted);
  const out = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9 && out.length <= 100; at += step) out.push(at);
  return [out, step];
}

// A place on that axis, as precise as what is in view.
function placeWords(x, apart = 0) {
  if (!state.byTime) return whole(x);
  const unit = state.view[1] - state.view[0] < 60 ? 0.001 : 1;
  let left = Math.round(Math.abs(x) / unit) * unit;
  const sign = x < 0 && left ? "−" : "";
  const padded = (count) => (out.length && count < 10 ? `0${whole(count)}` : whole(count));
  const out = [];
  for (const [size, name] of [[86400, "d"], [3600, "h"], [60, "m"]]) {
    const count = Math.floor(left / size);
    left -= count * size;
    if (count || out.length) out.push(`${padded(count)}${name}`);
  }
  // Between ticks that are minutes apart, there are no seconds to tell.
  if (!out.length || apart < 60) out.push(`${padded(left)}s`);
  return sign + out.join(" ");
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
  if (state.byTime) found = run.clock[0][1] + x;
  else for (const [step, time] of run.clock) if (step <= x) found = time;
  if (found === null) return "";
  return new Date(found * 1000).toISOString().slice(0, 19).replace("T", " ");
}

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

// Changes a part of the page; what stands for the element with the focus afterwards has it again.
function keepFocus(place, change) {
  const now = document.activeElement;
  const name = (one) => `${one.tagName} ${one.getAttribute("aria-label") || one.title || one.textContent}`;
  const alike = (of) => [...place.querySelectorAll(now.tagName)].filter((one) => name(one) === of);
  const own = place.contains(now) ? name(now) : null;
  const nth = own === null ? 0 : alike(own).indexOf(now);
  change();
  if (own !== null && !place.contains(now)) alike(own)[nth]?.focus({ preventScroll: true });
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

const axisName = () => (state.byTime ? "time" : state.runs[0] ? state.runs[0].axis : "step");
const capital = (word) => word[0].toUpperCase() + word.slice(1);
