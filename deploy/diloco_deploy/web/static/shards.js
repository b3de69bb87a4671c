// The table of shards.

import { $, make } from "./dom.js";
import { bytes, clock, count, seconds } from "./format.js";

export function showShards(state) {
  const { shards, now, run } = state.last;
  const rows = shards.map((shard) => row(shard, now));
  const unasked = (run.shards_of_run ?? 0) - shards.length;
  if (unasked > 0) {
    const words = `${unasked} more of this run: this page was not given the address`;
    rows.push(make("tr", {}, make("td", { colspan: 9, class: "quiet", text: words })));
  }
  $("shards").querySelector("tbody").replaceChildren(...rows);
}

function row(shard, now) {
  const known = shard.heard_at !== null;
  const versions = shard.version_min === null ? "–" : shard.version_min === shard.version_max
    ? String(shard.version_max) : `${shard.version_min}–${shard.version_max}`;
  const disk = shard.in_memory_only ? "memory only" : shard.disk_free_bytes === null || shard.disk_free_bytes === undefined
    ? "–" : `${bytes(shard.disk_free_bytes)} free`;
  return make(
    "tr",
    { "data-state": shard.answers ? "here" : "away" },
    make("th", { scope: "row", text: shard.name }),
    make("td", {}, ...stateOf(shard, now, known)),
    number(versions),
    number(shard.answers ? count(shard.open_rounds) : "–", "wide"),
    number(shard.answers ? count(shard.learners) : "–", "wide"),
    number(known ? bytes(shard.bytes_pushed) : "–"),
    number(known ? bytes(shard.bytes_pulled) : "–"),
    number(shard.answers ? bytes(shard.memory_bytes) : "–", "wide"),
    number(disk, "wide"),
  );
}

function stateOf(shard, now, known) {
  if (!shard.answers && !known) return [pill("bad", "never answered"), note(shard.why_not)];
  if (!shard.answers) return [pill("bad", "away"), note(`since ${clock(shard.heard_at)}: ${shard.why_not}`)];
  const restarts = shard.starts > 1 ? `, started again ${shard.starts - 1}×` : "";
  const blind = shard.tells_rounds ? "" : ", tells no rounds";
  const every = shard.sync_every ? `, H = ${shard.sync_every}` : "";
  const readers = Object.entries(shard.readers).map(([what, times]) => `, ${times} ${what}`).join("");
  const since = `up ${seconds(shard.uptime_s)}${every}${restarts}${blind}${readers}`;
  return shard.ready ? [pill("good", "serving"), note(since)] : [pill("bad", "not ready"), note(shard.reason)];
}

const number = (text, more = "") => make("td", { class: `number ${more}`, text });
export const pill = (level, text) => make("span", { class: "pill", "data-level": level, text });
const note = (text) => make("span", { class: "quiet", text });
