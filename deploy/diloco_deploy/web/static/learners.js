// Learners: an overview of all, and a table with one page of rows at a time, so that thousands cost no more than fifty.

import { $, make, say } from "./dom.js";
import { clock, count, loss, seconds } from "./format.js";
import { pill } from "./shards.js";

const EVERY_MS = 2000;
const WHY = {
  ABSENT: "absent", FENCED: "fenced off", LEFT: "left before", LEASE_EXPIRED: "away",
  STALLED: "stalled", NOT_FINITE: "not finite",
};
// Draws a cell by the kind of its column. The columns come from the server (web/feed.py).
const CELLS = {
  text: (value) => value,
  count: (value) => count(value),
  rate: (value, row) => (isGone(row) ? "–" : count(value || null)),
  number: (value) => (value === null ? "–" : String(value)),
  loss: (value) => loss(value),
  state: (value, row, now) => stateOf(row, now),
  fate: (value, row) => fateOf(row),
};
const ON_THE_LEFT = ["text", "state", "fate"];
let columns = null;
const asked = { sort: "attention", descending: false, page: 0, find: "" };
let lastAt = -EVERY_MS;
let glance = null;
let version = 0;

export function listenForLearners() {
  $("find").addEventListener("input", () => {
    asked.find = $("find").value;
    asked.page = 0;
    askAnew();
  });
  $("before").addEventListener("click", () => turn(-1));
  $("next").addEventListener("click", () => turn(1));
}

function turn(pages) {
  asked.page += pages;
  askAnew();
}

export function showLearners(state) {
  showGlance(state.last);
  if (performance.now() - lastAt >= EVERY_MS) askAnew();
}

async function askAnew() {
  lastAt = performance.now();
  version += 1;
  const mine = version;
  const query = new URLSearchParams({ ...asked, descending: asked.descending ? "1" : "0" });
  let found;
  try {
    const answer = await fetch(`/learners?${query}`);
    if (!answer.ok) return;
    found = await answer.json();
  } catch {
    return; // the server is away; the top of the page says so
  }
  if (mine !== version) return;
  asked.page = found.page;
  if (columns === null) {
    columns = found.columns;
    $("learners").querySelector("tr").replaceChildren(...columns.map(headOf));
  }
  $("learners").querySelector("tbody").replaceChildren(...found.rows.map((row) => rowOf(row, found.now)));
  const from = found.page * 50;
  const forgotten = found.forgotten ? `, ${found.forgotten} more were away too long and are forgotten` : "";
  say($("pages"), found.total ? `${from + 1} to ${from + found.rows.length} of ${found.total}${forgotten}` : "nobody");
  $("before").disabled = found.page === 0;
  $("next").disabled = found.page >= found.pages - 1;
  for (const head of document.querySelectorAll("#learners th[data-sort]")) {
    const sorted = head.dataset.sort === asked.sort;
    if (sorted) head.setAttribute("aria-sort", asked.descending ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
}

function headOf(column) {
  const { title, key, word, unit } = column;
  const button = make("button", { type: "button", "data-word": word || null, "data-unit": unit || null, text: title });
  button.addEventListener("click", () => {
    asked.descending = asked.sort === key ? !asked.descending : false;
    asked.sort = key;
    asked.page = 0;
    askAnew();
  });
  return make("th", { scope: "col", class: classOf(column), "data-sort": key }, button);
}

const classOf = ({ kind, wide }) => `${ON_THE_LEFT.includes(kind) ? "" : "number"} ${wide ? "wide" : ""}`.trim() || null;
const isGone = (row) => ["away", "left", "unknown"].includes(row.state);

function rowOf(row, now) {
  const cells = columns.map((column, i) => {
    const attributes = { scope: i === 0 ? "row" : null, class: classOf(column) };
    return make(i === 0 ? "th" : "td", attributes, ...[CELLS[column.kind](row[column.key], row, now)].flat());
  });
  return make("tr", { "data-state": isGone(row) ? "away" : "here" }, ...cells);
}

function stateOf(row, now) {
  const heard = `${clock(row.heard_at)}, ${seconds(now - row.heard_at)} ago`;
  const since = { partly: `away at ${row.away_at.join(", ")}`, away: `since ${heard}`, left: `heard ${heard}`, unknown: `heard ${heard}` };
  return [pill(row.level, row.word), make("span", { class: "quiet", text: since[row.state] ?? "" })];
}

function fateOf(row) {
  if (!row.asked) return [make("span", { class: "quiet", text: "not asked yet" })];
  const missed = Object.entries(row.missed);
  const numMissed = missed.reduce((sum, [, n]) => sum + n, 0);
  const bar = make("span", { class: "fates", "aria-hidden": "true" });
  for (const [kind, n] of [["merged", row.merged], ["missed", numMissed]]) {
    const part = make("i", { class: kind });
    part.style.width = `${(100 * Math.min(n, row.asked)) / row.asked}%`;
    bar.append(part);
  }
  const why = missed.map(([code, n]) => `${n} ${WHY[code] ?? code.toLowerCase().replaceAll("_", " ")}`).join(", ");
  return [bar, make("span", { text: `${count(row.merged)} of ${count(row.asked)} merged` }),
    make("span", { class: "quiet", text: why })];
}

function showGlance({ glance: letters, titles, totals }) {
  if (letters === glance) return;
  glance = letters;
  const box = $("glance");
  const words = Object.entries(totals.learners).map(([state, n]) => `${n} ${state}`);
  box.setAttribute("aria-label", words.length ? `Learners: ${words.join(", ")}` : "No learner yet");
  box.dataset.many = letters.length > 400 ? "yes" : "no";
  const dots = [...letters].map((letter) => make("i", { "data-state": letter, title: titles[letter] }));
  box.replaceChildren(...dots);
}
