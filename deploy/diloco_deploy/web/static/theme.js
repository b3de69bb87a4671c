// Light, dark, or the system's choice. Runs before the first paint, so nothing flashes.

const THEMES = ["system", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = "system";
try {
  theme = localStorage.getItem("diloco-theme") || "system";
} catch {
  // no storage: use the system's choice
}

function apply() {
  document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  document.dispatchEvent(new Event("theme"));
}
apply();
dark.addEventListener("change", apply);

document.addEventListener("DOMContentLoaded", () => {
  const button = document.getElementById("theme");
  if (button === null) return; // the page that asks for the key has no button
  const show = () => {
    button.textContent = `◐ ${theme}`;
    button.setAttribute("aria-label", `Theme: ${theme}`);
  };
  show();
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try {
      localStorage.setItem("diloco-theme", theme);
    } catch {
      // applies to this visit only
    }
    show();
    apply();
  });
});
