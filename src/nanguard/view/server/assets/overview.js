// Keeps the page of all runs up to date, and filters it.
(() => {
  "use strict";

  const body = document.getElementById("runs");
  const table = body.closest("table");
  const filter = document.getElementById("filter");
  const chips = [...document.querySelectorAll("[data-show]")];
  const status = document.getElementById("status");
  let version = document.querySelector("meta[name=version]").content;
  let wanted = "";

  function ago(seconds) {
    if (seconds < 5) return "now";
    if (seconds < 100) return `${Math.round(seconds)} s ago`;
    if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
    if (seconds < 130000) return `${Math.round(seconds / 3600)} h ago`;
    return `${Math.round(seconds / 86400)} days ago`;
  }

  function sayTimes() {
    const now = Date.now() / 1000;
    for (const time of body.querySelectorAll("time")) {
      const changed = Number(time.dataset.time);
      const said = changed ? ago(Math.max(0, now - changed)) : "–";
      if (time.textContent !== said) time.textContent = said;
      if (changed && !time.dateTime) {
        time.dateTime = new Date(changed * 1000).toISOString();
        time.title = time.dateTime;
      }
    }
  }

  function choose() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let seen = 0;
    for (const row of body.rows) {
      const fits =
        (!wanted || row.dataset.state === wanted || (wanted === "running" && row.dataset.live)) &&
        words.every((word) => row.dataset.find.includes(word));
      row.hidden = !fits;
      seen += fits;
    }
    const nothing = document.getElementById("nothing");
    table.hidden = !seen;
    nothing.hidden = seen > 0;
    if (body.rows.length) nothing.textContent = "No run matches this filter.";
  }

  function rowOf(html) {
    const made = document.createElement("template");
    made.innerHTML = html;
    return made.content.firstElementChild;
  }

  function update(told) {
    version = told.version;
    status.textContent = told.status;
    const there = new Set(told.keys);
    for (const row of [...body.rows]) if (!there.has(row.id.slice(4))) row.remove();
    // The newest come first, so they are put on top from the last to the first.
    for (const [key, html] of told.rows.reverse()) {
      const row = rowOf(html);
      const old = document.getElementById(`run-${key}`);
      if (!old) body.prepend(row);
      else if (!old.contains(document.activeElement)) old.replaceWith(row);
      else {
        // A link that has the focus keeps it.
        const at = [...old.querySelectorAll("a")].indexOf(document.activeElement);
        old.replaceWith(row);
        row.querySelectorAll("a")[at]?.focus({ preventScroll: true });
      }
    }
    const problems = told.problems.map((said) => {
      const item = document.createElement("li");
      item.textContent = said;
      return item;
    });
    document.getElementById("problems").replaceChildren(...problems);
    choose();
    sayTimes();
  }

  let source = null;
  function listen() {
    if (document.hidden || source) return;
    source = new EventSource(`/events?after=${version}`);
    source.addEventListener("rows", (event) => update(JSON.parse(event.data)));
    source.onerror = () => {
      status.textContent = "The connection is lost; trying again.";
      source.close();
      source = null;
      setTimeout(listen, 2000);
    };
  }

  filter.addEventListener("input", choose);
  for (const chip of chips) {
    chip.addEventListener("click", () => {
      wanted = chip.dataset.show;
      for (const other of chips) other.setAttribute("aria-pressed", String(other === chip));
      choose();
    });
  }
  document.addEventListener("visibilitychange", () => {
    if (document.hidden && source) {
      source.close();
      source = null;
    } else listen();
  });
  setInterval(() => document.hidden || sayTimes(), 1000);
  sayTimes();
  listen();
})();
