// The top of the page: three answers, progress, and findings.

import { $, make, say } from "./dom.js";
import { clock, count, loss, seconds } from "./format.js";

const SIGNS = { good: "✓", info: "·", bad: "!" };

export function showCards(state) {
  const { headlines, run, totals } = state.last;
  for (const id of ["learning", "here", "lost"]) {
    const { level, title, words } = headlines[id];
    const card = $(id);
    card.dataset.level = level;
    say(card.querySelector(".title"), `${SIGNS[level]} ${title}`);
    say(card.querySelector(".words"), words);
  }
  say($("run"), run.id ?? "");
  for (const word of document.querySelectorAll("[data-unit]")) say(word, word.dataset.unit.replace("*", run.unit));
  document.title = `${headlines.learning.title} · ${run.id ?? "diloco"}`;
  showProgress(state, run, totals);
  showBanner(state.last);
  showFindings(state.last);
}

let told = "";

function showFindings({ findings, findings_more: more }) {
  const list = $("findings");
  const now = JSON.stringify(findings) + more;
  if (now === told) return;
  told = now;
  list.hidden = !findings.length;
  const rows = findings.map((one) =>
    make("li", {}, make("span", { text: `${one.words}; ` }), make("b", { text: `${one.do} ` }), make("code", { text: one.code })),
  );
  if (more) rows.push(make("li", { text: `and ${more} more` }));
  list.replaceChildren(...rows);
}

function showProgress(state, run, totals) {
  const bar = $("bar");
  bar.hidden = !run.tokens_budget || run.tokens_merged === null;
  if (!bar.hidden) {
    const share = Math.min(1, run.tokens_merged / run.tokens_budget);
    $("bar-done").style.width = `${100 * share}%`;
    bar.setAttribute("aria-valuenow", Math.round(100 * share));
  }
  const last = state.points.at(-1);
  const budget = run.tokens_budget ? ` of ${count(run.tokens_budget)}` : "";
  const figures = [
    ["loss", loss(last ? last[2] : null)],
    [`${run.unit} merged`, `${count(run.tokens_merged)}${budget}`],
    ["left", run.done ? "done" : run.tokens_budget ? seconds(run.left_s) : "no end set"],
    [`${run.unit}/s`, count(totals.tokens_per_s)],
    ["versions made", count(totals.rounds)],
    ["contributions merged", totals.asked ? `${count(totals.merged)} of ${count(totals.asked)} asked` : "–"],
  ];
  $("figures").replaceChildren(
    ...figures.map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value }))),
  );
}

function showBanner({ run, shards }) {
  const banner = $("banner");
  const since = run.silent_since;
  banner.hidden = since === null;
  if (since === null) return;
  const whys = shards.map((shard) => shard.why_not).filter(Boolean);
  const heard = shards.some((shard) => shard.heard_at);
  const what = heard ? `No shard answers since ${clock(since)}. What you see is from before.` : "No shard has answered yet.";
  say(banner, `${what} ${whys.slice(0, 3).join("; ")}`);
}

export function showLive(state, connected) {
  const live = $("live");
  const silent = (performance.now() - state.heardAt) / 1000;
  const lost = state.last !== null && silent > 6;
  live.dataset.live = state.last === null || lost ? "no" : "yes";
  if (lost) say(live, `page server silent since ${clock(state.last.now)}`);
  else if (state.last !== null) say(live, `live ${clock(state.last.now)}`);
  else say(live, connected ? "connected" : "connecting");
}
