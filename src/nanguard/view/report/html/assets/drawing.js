// Curves on a canvas: axes, gaps, events and lines.

// What is drawn of a panel; whoever extends it provides panel, curves, group, plot and canvas.
class Drawing {
  get isLog() {
    return state.log.get(this.panel) ?? this.wantsLog();
  }

  shown() {
    return this.curves.filter((curve) => !state.hidden.has(curve.key));
  }

  // Numbers that span many sizes are unreadable on a plain scale; charts side by side have the same.
  wantsLog() {
    if (this.panel === "Learning rate") return false;
    if (state.wide.has(this.panel)) return state.wide.get(this.panel);
    let low = Infinity;
    let high = -Infinity;
    for (const curve of curvesOf(state.runs, this.panel)) {
      for (let i = 0; i < curve.lows.length; i++) {
        if (curve.lows[i] < low) low = curve.lows[i];
        if (curve.highs[i] > high) high = curve.highs[i];
      }
    }
    state.wide.set(this.panel, low > 0 && high / low > 1000);
    return state.wide.get(this.panel);
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
            const h = curve.highs[i];
            // Of a range that reaches down to 0, a logarithmic scale shows the upper end.
            const l = log && !(curve.lows[i] > 0) ? h : curve.lows[i];
            if (l < low && (!log || l > 0)) low = l;
            if (h > high) high = h;
          }
        }
      }
    }
    if (log) {
      if (!(high > 0)) return [-1, 1];
      low = Math.log10(low);
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
    const ratio = "printing" in document.documentElement.dataset ? 2 : window.devicePixelRatio || 1;
    this.width = this.plot.clientWidth;
    this.height = this.plot.clientHeight;
    if (!this.width) return;
    // This clears it as well; clearRect would paint white over the frame on paper.
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const ctx = this.canvas.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
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
    const wanted = Math.max(2, Math.floor(this.height / 36));
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
    const most = Math.max(2, Math.floor((this.width - LEFT - RIGHT) / 90));
    const [places, apart] = axisTicks(state.view[0], state.view[1], most);
    for (const place of places) {
      const x = this.x(place);
      if (x > this.width - RIGHT + 1) continue;
      ctx.fillRect(Math.round(x), this.height - BOTTOM, 1, 4);
      const words = placeWords(place, apart);
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
        if (event.x === null || event.kind === "note" || event.kind === "overflow") continue;
        const x = Math.round(this.x(event.x)) + 0.5;
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

  // A range that reaches from 0 or below to above it begins, on a logarithmic scale, at the foot of
  // the plot; one without anything above 0 has no place there.
  drawSegment(ctx, curve, a, b, log) {
    const { xs, lows, highs, broken } = curve;
    const bottom = this.height - BOTTOM;
    const y = (value) => (log && !(value > 0) ? bottom : this.y(value));
    const middle = (i) => (y(lows[i]) + y(highs[i])) / 2;
    const wide = b - a > 1 && this.x(xs[b - 1]) - this.x(xs[a]) > 9 * (b - a);
    let pixel = null;
    let low = 0;
    let high = 0;
    let last = 0;
    let joined = 0;
    const flush = (ends) => {
      if (pixel === null) return;
      if (high !== low) {
        ctx.lineTo(pixel, y(low));
        ctx.lineTo(pixel, y(high));
      }
      ctx.lineTo(pixel, last);
      // A point that nothing is joined to would not be seen.
      if (ends && joined === 1 && high === low) ctx.rect(pixel - 1.2, last - 1.2, 2.4, 2.4);
      pixel = null;
    };
    ctx.beginPath();
    for (let i = a; i < b; i++) {
      if (broken[i]) {
        flush(true);
        joined = 0;
      }
      if (log && !(highs[i] > 0)) {
        flush(true);
        joined = 0;
        continue;
      }
      const x = wide ? this.x(xs[i]) : Math.round(this.x(xs[i]));
      if (x !== pixel) {
        flush(false);
        pixel = x;
        low = lows[i];
        high = highs[i];
        if (joined) ctx.lineTo(x, middle(i));
        else ctx.moveTo(x, middle(i));
        joined++;
      } else {
        if (lows[i] < low) low = lows[i];
        if (highs[i] > high) high = highs[i];
      }
      last = middle(i);
    }
    flush(true);
    ctx.stroke();
    if (wide) this.drawPoints(ctx, curve, a, b, y);
  }

  // Where there is room, points are dots, and ranges are as wide as what they stand for.
  drawPoints(ctx, { xs, lows, highs, counts, broken }, a, b, y) {
    for (let i = a; i < b; i++) {
      const x = this.x(xs[i]);
      if (counts && counts[i] > 1) {
        const end = i + 1 < b && !broken[i + 1] ? this.x(xs[i + 1]) : x + 4;
        ctx.globalAlpha = 0.25;
        ctx.fillRect(x, y(highs[i]), end - x, y(lows[i]) - y(highs[i]));
        ctx.globalAlpha = 1;
      } else if (!this.isLog || lows[i] > 0) {
        ctx.beginPath();
        ctx.arc(x, this.y(lows[i]), 2.2, 0, 7);
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
