// The loss over tokens and over time, drawn by uPlot.

import { $ } from "./dom.js";
import { clock, count, loss } from "./format.js";

/* global uPlot */
let chart = null;
let drawnFor = "";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function over() {
  return document.querySelector("input[name=over]:checked").value;
}

// Columns for uPlot. Over tokens, points without progress become one, the newest; points undone by a restore are dropped.
export function columns(points, kind) {
  const kept = [];
  for (const point of points) {
    while (kind === "tokens" && kept.length && kept.at(-1)[1] >= point[1]) kept.pop();
    kept.push(point);
  }
  const x = kept.map((point) => (kind === "tokens" ? point[1] : point[0]));
  return [x, ...[2, 3, 4].map((column) => kept.map((point) => point[column]))];
}

function options(kind, unit, width, height) {
  const line = css("--data");
  const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false } };
  return {
    width,
    height,
    legend: { show: false },
    cursor: { y: false, points: { size: 7, fill: line, stroke: line } },
    scales: { x: { time: false } },
    series: [
      {},
      { stroke: line, width: 2, points: { show: false } },
      { stroke: "transparent", points: { show: false } },
      { stroke: "transparent", points: { show: false } },
    ],
    bands: [{ series: [3, 2], fill: css("--band") }],
    axes: [
      { ...axis, space: 80, values: (_, values) => values.map((v) => (kind === "tokens" ? count(v) : clock(v))) },
      { ...axis, size: 48, values: (_, values) => values.map((v) => v.toFixed(values.at(-1) - values[0] < 0.5 ? 2 : 1)) },
    ],
    hooks: { setCursor: [(plot) => readout(plot, kind, unit)] },
  };
}

function readout(plot, kind, unit) {
  const i = plot.cursor.idx;
  const note = $("course-since");
  if (i === null || i === undefined) {
    note.textContent = note.dataset.said ?? "";
    return;
  }
  const [x, y] = [plot.data[0][i], plot.data[1][i]];
  note.textContent = kind === "tokens" ? `At ${count(x)} ${unit}: ${loss(y)}.` : `At ${clock(x)}: ${loss(y)}.`;
}

export function showCourse(state, anew = false) {
  const box = $("chart");
  const kind = over();
  const { unit } = state.last.run;
  const data = columns(state.points, kind);
  const size = `${kind} ${unit} ${box.clientWidth}`;
  if (chart === null || anew || drawnFor !== size) {
    chart?.destroy();
    box.replaceChildren();
    chart = new uPlot(options(kind, unit, box.clientWidth, box.clientHeight), data, box);
    drawnFor = size;
  } else {
    chart.setData(data);
  }
  const known = state.points.filter((point) => point[2] !== null);
  const words = known.length
    ? `Loss over ${kind === "tokens" ? unit : kind}: ${loss(known[0][2])} at first, ${loss(known.at(-1)[2])} now.`
    : "No loss has been reported yet.";
  box.setAttribute("aria-label", words);
  const note = $("course-since");
  note.dataset.said = `This page began to look at ${clock(state.last.began)}.`;
  if (!chart.cursor || chart.cursor.idx === null || chart.cursor.idx === undefined) note.textContent = note.dataset.said;
}
