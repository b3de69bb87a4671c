// Rounds in words, for the tooltip and for the table.

import { make } from "./dom.js";
import { clock, seconds } from "./format.js";

const ROWS = 40;
const WHY = { all: "nobody was missing", grace: "the grace window was over", lease: "the missing had lost their leases" };

export function roundInWords(round) {
  const parts = [`${round.shard}, fragment ${round.fragment}, round ${round.round}: opened ${clock(round.opened)}`];
  if (round.quorum !== null) parts.push(`quorum after ${seconds(round.quorum)}`);
  if (round.closed === null && round.cut === null) parts.push(`open, ${round.asked} asked`);
  if (round.closed !== null) parts.push(`closed after ${seconds(round.closed)} with ${round.participants} of ${round.asked} as ${WHY[round.why] ?? round.why}`);
  if (round.announced === null && round.cut !== null) parts.push("then its shard fell silent");
  if (round.announced !== null) parts.push(`version announced after ${seconds(round.announced)}`);
  parts.push(...faults(round));
  return `${parts.join("; ")}.`;
}

function faults(round) {
  const refused = Object.entries(round.refused).map(([code, n]) => `${n} refused (${code})`);
  return round.absent ? [`${round.absent} absent: they carry on`, ...refused] : refused;
}

export function roundsTable(table, state) {
  const rounds = [...state.rounds.values()].sort((a, b) => b.opened - a.opened).slice(0, ROWS);
  const head = ["opened", "shard", "fragment", "round", "contributed", "closed after", "version after", "faults"];
  table.replaceChildren(
    make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col", text })))),
    make("tbody", {}, ...rounds.map((round) => make("tr", {}, ...cells(round).map((text) => make("td", { text }))))),
  );
}

function cells(round) {
  return [
    clock(round.opened), round.shard, String(round.fragment), String(round.round),
    round.closed === null && round.cut !== null ? "not known" : round.closed === null ? `open, ${round.asked} asked` : `${round.participants} of ${round.asked}`,
    seconds(round.closed), seconds(round.announced), faults(round).join(", "),
  ];
}
