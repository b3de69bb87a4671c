// Formats numbers, sizes and times. Unknown values are a dash.

const UNKNOWN = "–";

export function count(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 1000) return String(Math.round(value));
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= size) return `${trimmed(value / size)}${letter}`;
  }
  return String(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return UNKNOWN;
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= size) return `${trimmed(value / size)} ${unit}`;
  }
  return `${value} B`;
}

export function loss(value) {
  return value === null || value === undefined ? UNKNOWN : value.toFixed(3);
}

export function seconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 48 * 3600) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} days`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString(undefined, { hour12: false });
}

function trimmed(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}
