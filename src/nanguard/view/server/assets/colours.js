// Remembers light or dark from one page to the next; the page's own script does the rest.
(() => {
  "use strict";

  const root = document.documentElement;
  const name = "nanguard-colours";
  try {
    const kept = localStorage.getItem(name);
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch {
    // A browser that keeps nothing follows the system's colours.
  }
  document.addEventListener("click", (event) => {
    if (event.target.id !== "theme") return;
    try {
      localStorage.setItem(name, root.dataset.theme);
    } catch {
      // As above.
    }
  });
})();
