// Light, dark, or as the system says. Runs before the first paint, so nothing flashes.

const THEMES = ["system", "light", "dark"];
let theme = "system";
try {
  theme = localStorage.getItem("diloco-theme") || "system";
} catch {
  // storage is forbidden: the system decides
}
if (theme !== "system") document.documentElement.dataset.theme = theme;

document.addEventListener("DOMContentLoaded", () => {
  const button = document.getElementById("theme");
  const show = () => {
    button.textContent = `◐ ${theme}`;
    button.setAttribute("aria-label", `Theme: ${theme}`);
  };
  show();
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("diloco-theme", theme);
    } catch {
      // it holds for this visit
    }
    show();
    document.dispatchEvent(new Event("theme"));
  });
});
