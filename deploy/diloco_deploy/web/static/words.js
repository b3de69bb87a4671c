// Explains words of the glossary on hover, focus or tap; Escape closes.

import { $ } from "./dom.js";

let glossary = {};
let shown = null;

export async function explainWords() {
  glossary = await (await fetch("/static/glossary.json")).json();
  const about = (event) => event.target.closest?.("[data-word]");
  document.addEventListener("mouseover", (event) => (about(event) ? show(about(event)) : hide()));
  document.addEventListener("focusin", (event) => (about(event) ? show(about(event)) : hide()));
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  addEventListener("scroll", hide, { passive: true });
}

function show(element) {
  const meaning = glossary[element.dataset.word];
  if (!meaning || shown === element) return;
  hide();
  shown = element;
  const tip = $("tip");
  tip.textContent = meaning;
  tip.hidden = false;
  element.setAttribute("aria-describedby", "tip");
  const at = element.getBoundingClientRect();
  const left = Math.max(12, Math.min(at.left, innerWidth - tip.offsetWidth - 12));
  const below = at.bottom + tip.offsetHeight + 12 < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${below ? at.bottom + 8 : at.top - tip.offsetHeight - 8}px`;
}

function hide() {
  shown?.removeAttribute("aria-describedby");
  shown = null;
  $("tip").hidden = true;
}
