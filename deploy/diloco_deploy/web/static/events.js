// Events, newest first.

import { $, make } from "./dom.js";
import { clock } from "./format.js";

const SIGNS = { good: "▲", info: "·", bad: "▼" };
let drawn = "";

export function showEvents(state) {
  const events = [...state.events.values()].sort((a, b) => b.at - a.at);
  const now = JSON.stringify(events.slice(0, 20)) + events.length;
  if (now === drawn) return;
  drawn = now;
  const rows = events.map((event) =>
    make(
      "li",
      { "data-level": event.level },
      make("time", { text: clock(event.at), datetime: new Date(event.at * 1000).toISOString() }),
      make("span", { class: "sign", text: SIGNS[event.level], "aria-hidden": "true" }),
      make("span", { text: event.words }),
      make("span", { class: "where", text: event.kind.startsWith("shard") ? "" : event.shards.join(", ") }),
    ),
  );
  $("events").replaceChildren(...(rows.length ? rows : [make("li", { text: "Nothing has happened yet." })]));
}
