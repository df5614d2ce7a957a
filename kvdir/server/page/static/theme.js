// Colours before the first paint: as the system has them, or as somebody chose here.
"use strict";
(() => {
  const KEY = "kvdir-theme";
  const CHOICES = ["auto", "dark", "light"];
  const WORDS = { auto: "as the system", dark: "dark", light: "light" };
  let kept = "auto";
  try {
    kept = localStorage.getItem(KEY) || "auto";
  } catch {
    // storage is off: the choice lasts as long as the page
  }
  let chosen = CHOICES.includes(kept) ? kept : "auto";

  function apply() {
    document.documentElement.dataset.theme = chosen;
    const button = document.getElementById("theme");
    if (button) button.setAttribute("aria-label", `Colours: ${WORDS[chosen]}`);
    if (button) button.title = `Colours: ${WORDS[chosen]}`;
    window.dispatchEvent(new Event("kvdir-theme"));
  }

  apply();
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      chosen = CHOICES[(CHOICES.indexOf(chosen) + 1) % CHOICES.length];
      try {
        localStorage.setItem(KEY, chosen);
      } catch {
        // as above
      }
      apply();
    });
  });
})();
