// What the theme adds to a page for the mouse, for keyboards and screen readers, too.
function complete() {
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((bar) => {
    bar.setAttribute("aria-label", `Code block ${bar.closest("pre").id.replace("__code_", "")}`);
  });
  document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])").forEach((table) => {
    table.tabIndex = 0;
  });
}

new MutationObserver(complete).observe(document.body, { childList: true, subtree: true });
complete();
