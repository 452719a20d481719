"use strict";
(() => {
  const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));
  const sites = all(".site");
  const chosen = new Set();
  const target = document.getElementById("target");
  const text = document.getElementById("text");
  const shown = document.getElementById("shown");
  const nothing = document.getElementById("nothing");
  document.documentElement.classList.add("js");

  const filter = () => {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let number = 0;
    for (const site of sites) {
      const data = site.dataset;
      const fits = (!chosen.size || chosen.has(data.outcome)) && (!target.value || data.target === target.value) &&
        words.every((word) => data.text.includes(word));
      site.hidden = !fits;
      number += fits ? 1 : 0;
    }
    shown.textContent = `${number} of ${sites.length} shown`;
    nothing.hidden = number > 0 || !sites.length;
  };

  for (const button of all("[data-choose]")) {
    button.addEventListener("click", () => {
      const kind = button.dataset.choose;
      chosen.has(kind) ? chosen.delete(kind) : chosen.add(kind);
      button.setAttribute("aria-pressed", String(chosen.has(kind)));
      filter();
    });
  }
  const every = document.getElementById("every");
  if (every) {
    every.addEventListener("click", () => {
      const open = sites.some((site) => !site.hidden && !site.open);
      for (const site of sites) if (!site.hidden) site.open = open;
    });
    for (const site of sites) {
      site.addEventListener("toggle", () => {
        every.textContent = sites.some((s) => !s.hidden && !s.open) ? "Expand all" : "Collapse all";
      });
    }
    target.addEventListener("change", filter);
    text.addEventListener("input", filter);
    filter();
  }

  // A link to a site opens it, and shows it if a filter had hidden it.
  const follow = () => {
    const found = location.hash && document.getElementById(location.hash.slice(1));
    if (!found) return;
    if (found.classList.contains("site")) {
      found.hidden = false;
      found.open = true;
    }
    found.scrollIntoView({ block: "start" });
  };
  window.addEventListener("hashchange", follow);
  follow();
})();
