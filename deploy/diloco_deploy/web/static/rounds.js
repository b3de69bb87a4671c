// Fragments over time: every round as a bar, with its problems. `rounds_text.js` has the same in words.

import { $ } from "./dom.js";
import { clock } from "./format.js";
import { roundInWords, roundsTable } from "./rounds_text.js";

const LEFT = 74; // pixels, for names
const TOP = 18; // pixels, for marks of learners
const AXIS = 22;
let chosen = null;
let layout = null; // of the last drawing, to find the round under the pointer

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const span = () => Number(document.querySelector("input[name=span]:checked").value);
let chosenSpan = false; // whether the user chose it; until then it follows the pace of the rounds

function suitSpan(state, numRows) {
  if (chosenSpan || !numRows) return;
  const now = state.last.now;
  const opened = [...state.rounds.values()].map((round) => round.opened);
  const age = Math.min(120, now - Math.min(now, ...opened));
  const perMinute = (60 * opened.filter((at) => at > now - 120).length) / numRows / Math.max(10, age);
  const best = age < 60 || perMinute > 12 ? "30" : age < 120 || perMinute > 1 ? "120" : "600";
  document.querySelector(`input[name=span][value="${best}"]`).checked = true;
}

// One row per fragment, grouped by shard, with a height at which all fit.
export function rowsOf(state) {
  const fragments = new Map();
  for (const shard of state.last.shards) fragments.set(shard.name, new Set(shard.fragments));
  for (const round of state.rounds.values()) fragments.get(round.shard)?.add(round.fragment);
  const numRows = [...fragments.values()].reduce((sum, set) => sum + set.size, 0);
  const height = Math.max(5, Math.min(18, Math.floor(420 / Math.max(1, numRows))));
  const groups = [];
  let y = TOP;
  for (const [shard, set] of fragments) {
    const rows = [...set].sort((a, b) => a - b).map((fragment, i) => ({ fragment, y: y + i * height }));
    const full = Math.max(rows.length * height, 18);
    groups.push({ shard, rows, y, height: full });
    y += full + 14;
  }
  return { groups, height, numRows, total: y + AXIS - 8 };
}

export function showRounds(state) {
  const canvas = $("canvas");
  const { groups, height, numRows, total } = rowsOf(state);
  suitSpan(state, numRows);
  const width = $("picture").clientWidth;
  const scale = devicePixelRatio || 1;
  canvas.style.height = `${total}px`;
  canvas.width = width * scale;
  canvas.height = total * scale;
  const to = state.last.now;
  const from = to - span();
  const x = (at) => LEFT + ((at - from) / (to - from)) * (width - LEFT - 6);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "12px system-ui, sans-serif";
  layout = { x, groups, height, from, rounds: [] };
  drawAxis(pen, from, to, x, total, width);
  for (const group of groups) {
    drawGroup(pen, group, height, width);
    drawOutages(pen, state.last.outages, group, from, to, x);
  }
  for (const round of state.rounds.values()) drawRound(pen, round, to, x);
  drawMarks(pen, state, from, x, total);
  if (chosen) drawChosen(pen);
  const open = layout.rounds.filter(({ round }) => round.closed === null && round.cut === null).length;
  canvas.setAttribute("aria-label", `${layout.rounds.length} rounds in the last ${span()} seconds, ${open} of them open`);
  if ($("rounds-details").open) roundsTable($("rounds-table"), state);
}

function drawAxis(pen, from, to, x, total, width) {
  const steps = [5, 10, 15, 30, 60, 120, 300];
  const every = steps.find((step) => ((width - LEFT) * step) / (to - from) > 84) ?? 600;
  pen.fillStyle = css("--quiet");
  pen.strokeStyle = css("--line");
  pen.lineWidth = 1;
  pen.textAlign = "center";
  for (let at = Math.ceil(from / every) * every; at <= to; at += every) {
    pen.beginPath();
    pen.moveTo(x(at), TOP);
    pen.lineTo(x(at), total - AXIS + 4);
    pen.stroke();
    if (x(at) > LEFT + 20 && x(at) < width - 28) pen.fillText(clock(at), x(at), total - 4);
  }
  pen.textAlign = "left";
}

function drawGroup(pen, group, height, width) {
  pen.fillStyle = css("--well");
  pen.fillRect(LEFT, group.y, width - LEFT - 6, group.height);
  pen.fillStyle = css("--ink");
  pen.fillText(group.shard, 0, group.y + 11, LEFT - 26);
  pen.fillStyle = css("--quiet");
  pen.textAlign = "right";
  if (height >= 11) for (const row of group.rows) pen.fillText(String(row.fragment), LEFT - 6, row.y + height / 2 + 4);
  pen.textAlign = "left";
}

function drawOutages(pen, outages, group, from, to, x) {
  for (const outage of outages) {
    if (outage.shard !== group.shard || (outage.ended ?? to) < from) continue;
    const left = Math.max(x(from), x(outage.began));
    const right = x(outage.ended ?? to);
    pen.save();
    pen.beginPath();
    pen.rect(left, group.y, Math.max(2, right - left), group.height);
    pen.clip();
    pen.fillStyle = css("--bad-back");
    pen.fill();
    pen.strokeStyle = css("--bad");
    pen.lineWidth = 1;
    pen.globalAlpha = 0.55;
    for (let at = left - group.height; at < right; at += 7) {
      pen.beginPath();
      pen.moveTo(at, group.y + group.height);
      pen.lineTo(at + group.height, group.y);
      pen.stroke();
    }
    pen.restore();
  }
}

// A round: collecting until its quorum, grace until it closes, merging until its version is announced.
function drawRound(pen, round, to, x) {
  const group = layout.groups.find((one) => one.shard === round.shard);
  const row = group?.rows.find((one) => one.fragment === round.fragment);
  const reached = round.cut ?? to - round.opened; // as far as known
  const until = round.opened + (round.announced ?? round.closed ?? reached);
  if (!row || until < layout.from) return;
  const pad = layout.height > 8 ? 2 : 1;
  const y = row.y + pad;
  const h = layout.height - 2 * pad;
  const part = (begin, end, color) => {
    const left = Math.max(LEFT, x(round.opened + begin));
    const right = x(round.opened + end);
    if (right <= LEFT) return;
    pen.fillStyle = color;
    pen.fillRect(left, y, Math.max(1, right - left), h);
  };
  const end = round.closed ?? reached;
  part(0, round.quorum ?? end, css("--collect"));
  if (round.quorum !== null) part(round.quorum, end, css("--grace"));
  if (round.closed !== null) part(round.closed, round.announced ?? reached, css("--merge"));
  const at = Math.max(LEFT, x(until));
  if (round.announced !== null) {
    pen.fillStyle = css("--version");
    pen.fillRect(at - 1, row.y + 1, 1.5, layout.height - 2);
  }
  drawFaults(pen, round, at, y + h / 2);
  layout.rounds.push({ round, left: Math.max(LEFT, x(round.opened)), right: Math.max(at, x(round.opened) + 3), y: row.y });
}

function drawFaults(pen, round, x, y) {
  const r = Math.min(4, layout.height / 2);
  if (round.numRefused) {
    pen.fillStyle = css("--bad");
    pen.beginPath();
    pen.moveTo(x - r - 1, y);
    pen.lineTo(x, y - r - 1);
    pen.lineTo(x + r + 1, y);
    pen.lineTo(x, y + r + 1);
    pen.fill();
  } else if (round.absent) {
    pen.strokeStyle = css("--absent");
    pen.lineWidth = 1.4;
    pen.beginPath();
    pen.arc(x - 0.5, y, r - 1, 0, 7);
    pen.stroke();
  }
}

// Learners that left or joined: a line through the rows of the shards that reported it.
function drawMarks(pen, state, from, x, total) {
  for (const event of state.events.values()) {
    const goes = event.kind === "evicted" || event.kind === "left out";
    const comes = event.kind === "returned" || event.kind === "released";
    if (event.at < from || !(goes || comes)) continue;
    pen.fillStyle = pen.strokeStyle = css(goes ? "--bad" : "--good");
    pen.lineWidth = 1.5;
    pen.setLineDash([4, 3]);
    for (const group of layout.groups) {
      if (!event.shards.includes(group.shard)) continue;
      pen.beginPath();
      pen.moveTo(x(event.at), group.y);
      pen.lineTo(x(event.at), group.y + group.height);
      pen.stroke();
    }
    pen.setLineDash([]);
    const [tip, base] = goes ? [TOP - 2, TOP - 11] : [TOP - 11, TOP - 2];
    pen.beginPath();
    pen.moveTo(x(event.at), tip);
    pen.lineTo(x(event.at) - 5, base);
    pen.lineTo(x(event.at) + 5, base);
    pen.fill();
  }
}

function drawChosen(pen) {
  const drawn = layout.rounds.find(({ round }) => round === chosen || same(round, chosen));
  if (!drawn) return;
  pen.strokeStyle = css("--ink");
  pen.lineWidth = 2;
  pen.strokeRect(drawn.left - 1, drawn.y, drawn.right - drawn.left + 2, layout.height);
}

const same = (a, b) => a.shard === b.shard && a.fragment === b.fragment && a.opened === b.opened;

// ---------------------------------------------------------------- pointer and keyboard

export function listenToPicture(state) {
  const picture = $("picture");
  for (const input of document.querySelectorAll("input[name=span]")) input.addEventListener("input", () => (chosenSpan = true));
  const choose = (round) => {
    chosen = round ?? null;
    $("round").textContent = round ? roundInWords(round) : "Point at a round, or go through them with the arrow keys.";
    if (state.last) showRounds(state);
  };
  picture.addEventListener("pointermove", (event) => {
    const box = $("canvas").getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    const hit = layout?.rounds.findLast(
      (one) => px >= one.left - 2 && px <= one.right + 2 && py >= one.y && py < one.y + layout.height,
    );
    if (hit && hit.round !== chosen) choose(hit.round);
  });
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") choose(null);
    if (!step || !layout?.rounds.length) return;
    event.preventDefault();
    choose(neighbour(...step));
  });
}

// The round beside the chosen one: in its row, or in the next row at about the same time.
function neighbour(dx, dy) {
  const now = chosen && layout.rounds.find(({ round }) => same(round, chosen));
  if (!now) return layout.rounds.reduce((a, b) => (b.right > a.right ? b : a)).round;
  if (dx) {
    const lane = layout.rounds.filter((one) => one.y === now.y).sort((a, b) => a.left - b.left);
    return (lane[lane.indexOf(now) + dx] ?? now).round;
  }
  const lanes = [...new Set(layout.rounds.map((one) => one.y))].sort((a, b) => a - b);
  const y = lanes[lanes.indexOf(now.y) + dy];
  const lane = layout.rounds.filter((one) => one.y === y);
  if (!lane.length) return now.round;
  return lane.reduce((a, b) => (Math.abs(b.left - now.left) < Math.abs(a.left - now.left) ? b : a)).round;
}
