// Before anything is drawn: the colours that were chosen here last time.
"use strict";
try {
  const chosen = localStorage.getItem("minbert-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // A browser that keeps nothing goes by its own setting.
}
