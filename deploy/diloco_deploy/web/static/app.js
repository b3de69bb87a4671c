// The live page: receives the run by server-sent events, and shows it. Each part has a file; only state.js keeps data.

import { showCards, showLive } from "./cards.js";
import { showCourse } from "./course.js";
import { $, say } from "./dom.js";
import { showEvents } from "./events.js";
import { listenForLearners, showLearners } from "./learners.js";
import { listenToPicture, showRounds } from "./rounds.js";
import { showShards } from "./shards.js";
import { emptyState, merge } from "./state.js";
import { explainWords } from "./words.js";

// The cookie is enough: remove the key from the address, so that a copied link does not contain it.
if (location.hash.startsWith("#key=")) history.replaceState(null, "", location.pathname);
const state = emptyState();
let source = null;

function show(anew = false) {
  if (state.last === null || document.hidden) return;
  showCards(state);
  showShards(state);
  showEvents(state);
  showLearners(state);
  showRounds(state);
  showCourse(state, anew);
  const begun = new Date(state.last.began * 1000).toLocaleString(undefined, { hour12: false });
  say($("footer"), `Loss and events are from ${begun} on, when this page's server began to look. Times are those of your browser.`);
}

function connect() {
  source = new EventSource("/events");
  source.onmessage = (event) => {
    merge(state, JSON.parse(event.data));
    showLive(state, true);
    show();
  };
  source.onerror = async () => {
    if (source.readyState !== EventSource.CLOSED) return; // the browser reconnects
    setTimeout(async () => {
      const page = await fetch("/").catch(() => null);
      if (page?.status === 401) location.reload(); // the server restarted with another key
      else connect();
    }, 3000);
  };
}

listenForLearners();
listenToPicture(state);
explainWords();
connect();
setInterval(() => showLive(state, source.readyState === EventSource.OPEN), 1000);
for (const input of document.querySelectorAll("input[name=over]")) input.addEventListener("change", () => show(true));
for (const input of document.querySelectorAll("input[name=span]")) input.addEventListener("change", () => show());
addEventListener("resize", () => show(true));
document.addEventListener("theme", () => show(true));
document.addEventListener("visibilitychange", () => show());
