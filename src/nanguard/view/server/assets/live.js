// Keeps the page of a run up to date while its files grow.
(() => {
  "use strict";

  const key = document.querySelector("meta[name=run]").content;
  const live = document.getElementById("live");
  const main = document.querySelector("main");
  const nav = document.querySelector("nav");
  const held = new Map();
  let version = document.querySelector("meta[name=version]").content;
  let newest = version;
  let busy = false;
  let state = null;

  for (const section of main.children) {
    const title = section.querySelector("h2");
    held.set(title.id, null);
  }

  function say() {
    let word = "lost";
    let said = "The connection is lost; trying again";
    if (state && state.gone) said = "The files are gone; this is what was read last";
    else if (state) {
      word = state.state;
      const seconds = Math.max(0, Math.round(Date.now() / 1000 - state.changed));
      const ago = seconds < 5 ? "" : seconds < 100 ? `${seconds} s ago` : `${Math.round(seconds / 60)} min ago`;
      const names = { running: "Running", ended: "Ended", bad: state.running ? "Running, and bad" : "Bad", reading: "Being read" };
      said = `${names[word]} · ${seconds < 86400 && ago ? `last line ${ago}` : ago ? "no new line for days" : "last line now"}`;
    }
    live.dataset.state = word;
    if (live.textContent !== said) live.textContent = said;
  }

  // Where the focus is, in words that fit the same place after it was drawn anew.
  function placeOfFocus() {
    const now = document.activeElement;
    if (!now || now === document.body || !main.contains(now)) return null;
    const kind = now.className ? `${now.tagName}.${now.className.split(" ")[0]}` : now.tagName;
    const place = [...main.querySelectorAll(kind)].indexOf(now);
    return () => {
      if (document.activeElement !== now) main.querySelectorAll(kind)[place]?.focus({ preventScroll: true });
    };
  }

  function put(id, [title, html]) {
    let head = document.getElementById(id);
    if (head && held.get(id) === html) return;
    const first = head && held.get(id) === null;
    held.set(id, html);
    if (!head) {
      const section = document.createElement("section");
      section.setAttribute("aria-labelledby", id);
      head = document.createElement("h2");
      head.id = id;
      head.textContent = title;
      section.append(head);
      main.append(section);
    } else if (first && id === "curves" && document.getElementById("charts")) {
      // Drawn already, by the page itself.
      return;
    }
    const section = head.parentElement;
    const open = [...section.querySelectorAll("details")].map((one) => one.open);
    const made = document.createElement("template");
    made.innerHTML = html;
    section.replaceChildren(head, made.content);
    section.querySelectorAll("details").forEach((one, at) => {
      if (at < open.length) one.open = open[at];
    });
  }

  function arrange(sections) {
    const keys = Object.keys(sections);
    for (const id of [...held.keys()]) {
      if (!sections[id]) {
        held.delete(id);
        document.getElementById(id)?.parentElement.remove();
      }
    }
    for (const id of keys) put(id, sections[id]);
    const there = [...main.children].map((section) => section.firstElementChild.id);
    if (there.join() !== keys.join()) main.append(...keys.map((id) => document.getElementById(id).parentElement));
    const links = keys.map((id) => {
      const link = document.createElement("a");
      link.href = `#${id}`;
      link.textContent = sections[id][0];
      return link;
    });
    if (nav.textContent !== links.map((link) => link.textContent).join("")) nav.replaceChildren(...links);
  }

  async function refresh() {
    if (busy || newest === version) return;
    busy = true;
    const asked = newest;
    let shown = false;
    try {
      const answer = await fetch(`/run/${key}/data`);
      const told = await answer.json();
      if (told.gone) {
        state = told;
      } else {
        // Nothing moves while somebody drags in a chart.
        await window.nanguard.free();
        const back = placeOfFocus();
        arrange(told.sections);
        if (back) back();
        await window.nanguard.show(told.page);
        const under = document.querySelector(".top .under");
        if (under) under.textContent = `${String(told.points).replace(/\B(?=(\d{3})+$)/g, "\u202f")} numbers`;
        version = told.version;
        // What was announced meanwhile is still to be asked for.
        if (newest === asked) {
          newest = version;
          state = told;
        }
        shown = true;
        document.documentElement.dataset.version = version;
      }
    } catch {
      state = null;
    } finally {
      busy = false;
      say();
      if (shown) refresh();
    }
  }

  let source = null;
  function listen() {
    if (document.hidden || source) return;
    source = new EventSource(`/run/${key}/events?after=${version}`);
    source.addEventListener("change", (event) => {
      const told = JSON.parse(event.data);
      state = told;
      if (told.version) newest = told.version;
      say();
      refresh();
    });
    source.onerror = () => {
      state = null;
      say();
      source.close();
      source = null;
      setTimeout(listen, 2000);
    };
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden && source) {
      source.close();
      source = null;
    } else listen();
  });
  setInterval(() => {
    if (document.hidden) return;
    if (state) say();
    refresh();
  }, 1000);
  live.textContent = "Connecting";
  listen();
})();
