// Light or dark: the system's setting, until the switch is used; then what was chosen, remembered.

import { byId } from "./dom.js";

const system = matchMedia("(prefers-color-scheme: dark)");

export function setUpTheme() {
  const root = document.documentElement;
  const toggle = byId("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const tell = () => {
    toggle.setAttribute("aria-checked", String(isDark()));
    document.dispatchEvent(new Event("colours"));
  };
  toggle.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("minbert-theme", root.dataset.theme);
    } catch {
      // Then it holds for this visit.
    }
    tell();
  });
  system.addEventListener("change", tell);
  tell();
}
