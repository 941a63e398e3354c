// The buttons above the charts, and where they stand.

// Which buttons are pressed, and what is seen or under the cursor.
function tellBar() {
  const press = (id, on) => document.getElementById(id)?.setAttribute("aria-pressed", String(on));
  press("log-all", state.charts.length > 0 && state.charts.every((chart) => chart.isLog));
  press("side", state.side);
  press("by-time", state.byTime);
  sayWhere();
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
    button("Log scale", "Logarithmic scale in all charts", () => {
      const on = !state.charts.every((chart) => chart.isLog);
      for (const panel of PANELS) state.log.set(panel, on);
      redraw();
    }, { id: "log-all" }),
  );
  if (state.runs.length > 1) {
    bar.append(
      button("Side by side", "Runs side by side", () => {
        state.side = !state.side;
        build();
      }, { id: "side" }),
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
      }, { id: "by-time" }),
    );
  }
  bar.append(make("output", { id: "where" }));
  return bar;
}
