// Numbers as people read them, with what they need to be read.

/** @typedef {"interval" | "range" | "none"} Kind */

/**
 * Return a measured number with three significant digits.
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return signed(value.toExponential(1).replace("e-", "e−"));
  if (size >= 1000) return signed(Math.round(value).toLocaleString("en"));
  return signed(value.toPrecision(3));
}

/**
 * Return the label of an axis tick, with no more digits than it needs.
 * @param {number} value
 * @returns {string}
 */
export function tick(value) {
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e6)) return signed(value.toExponential(0).replace("e+", "e").replace("e-", "e−"));
  return signed(Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 }));
}

const NAMED = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100];
const CLOSE = [0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2];

/**
 * Return ticks of a logarithmic axis of ratios, more than three also on a short axis.
 * @param {number[]} values that the axis holds
 * @returns {number[]}
 */
export function ratioTicks(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const within = (/** @type {number[]} */ ticks) => ticks.filter((one) => one >= low && one <= high);
  return within(NAMED).length > 3 ? within(NAMED) : within(CLOSE);
}

/**
 * Return a ratio with two decimals, one from 10 on, none from 100.
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function ratio(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return "∞";
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(value >= 10 ? 1 : 2);
}

/**
 * Return a share in per cent, without its sign.
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function percent(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return (100 * value).toFixed(0);
}

/**
 * Return a share in per cent, with three digits where it is small.
 * @param {number} share
 * @returns {string}
 */
export function percentOf(share) {
  return share >= 0.1 ? `${percent(share)} %` : `${number(100 * share)} %`;
}

/**
 * Return a difference with its sign.
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function difference(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return `${value > 0 ? "+" : ""}${signed(value.toFixed(3))}`;
}

/**
 * Return a difference with its sign and three significant digits.
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function signedNumber(value) {
  return (value ?? NaN) > 0 ? `+${number(value)}` : number(value);
}

/**
 * Return the function that writes a change of a measure: a ratio, a difference of shares, or one of log p.
 * @param {{compare: "ratio" | "difference", kind: string}} measure
 * @returns {(value: number | null) => string}
 */
export function changeFormat(measure) {
  return measure.compare === "ratio" ? ratio : measure.kind === "effect" ? signedNumber : difference;
}

/**
 * Return a number with its interval in brackets, or with the range of few samples in parentheses.
 * @param {ArrayLike<number | null>} values value, low, high
 * @param {(value: number | null) => string} shown
 * @param {Kind} kind
 * @param {string} [unit] behind the value
 * @returns {string}
 */
export function estimate(values, shown, kind, unit = "") {
  const value = `${shown(values[0])}${unit}`;
  const known = [values[1], values[2]].every((end) => end !== null && end !== undefined && !Number.isNaN(end));
  if (!known || kind === "none") return value;
  const [low, high] = [shown(values[1]), shown(values[2])];
  return kind === "range" ? `${value} (${low} … ${high})` : `${value} [${low}, ${high}]`;
}

/**
 * Return a count with its noun: '1 sample', '8 samples'.
 * @param {number} count
 * @param {string} word
 * @returns {string}
 */
export function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

/**
 * Return the beginning of a text that is longer than a line of a table.
 * @param {string} text
 * @returns {string}
 */
export function short(text) {
  return text.length > 40 ? `${text.slice(0, 40)}…` : text;
}

/** @param {string} text */
function signed(text) {
  return text.replace(/^-/, "−");
}
