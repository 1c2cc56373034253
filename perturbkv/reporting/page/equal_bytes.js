// Loss over bytes: which caches another one of no more bytes beats (METHOD, caches that are no subset).

import { colours } from "./colours.js";
import { fill, inColumns, lacking, make, table } from "./dom.js";
import { estimate, number, ratio, ratioTicks, tick } from "./format.js";

/** @typedef {import("./view.js").View} View */
/** @typedef {import("./page_data.js").EqualBytes} EqualBytes */
/** @typedef {import("./page_data.js").CachePoint} CachePoint */

const CURVES = /** @type {const} */ (["packed", "resident"]);
/** @type {Record<string, "circle" | "square" | "diamond" | "triangle" | "star">} */
const SYMBOLS = { evicted: "circle", rounded: "square", both: "diamond", "own entries": "triangle", whole: "star" };

export const equalBytes = {
  id: "equal-bytes",
  needs: [],
  /**
   * @param {HTMLElement} pane
   * @param {View} view
   */
  draw(pane, view) {
    const found = view.data.equal_bytes;
    if (!found) return fill(pane, lacking("This trace holds no caches of different bytes, none in few bits and none with entries of its own."));
    const rows = found.points.map((point) => [point.name, point.kind, ...CURVES.flatMap((curve) => [told(point[curve].share), point[curve].verdict]),
      estimate([point.loss[0], point.loss[1], point.loss[2]], number, point.loss[3])]);
    fill(pane, make("p", { class: "said" }, found.conclusion),
      inColumns(pane, 2, (width) => CURVES.map((curve) => panel(found, curve, width))), key(found),
      make("div", { class: "scrolls" }, table(found.title, ["", "cache", "#packed / full", "packed curve", "#resident / full", "resident curve", "#loss"], rows)),
      ...found.notes.map((note) => make("p", { class: "legend" }, note)));
  },
};

/** @param {number | null} share */
function told(share) {
  return share === null ? "not told" : ratio(share);
}

/**
 * @param {EqualBytes} found
 * @param {"packed" | "resident"} curve
 * @param {number} width
 */
function panel(found, curve, width) {
  const marks = found.points.flatMap((point) => {
    const { share, verdict, on_line } = point[curve];
    const [value, low, high] = point.loss.map((end) => (typeof end === "number" ? end : NaN));
    if (share === null || !(value > 0)) return [];
    const colour = verdict === "dominated" ? colours().grey : colourOf(found, point);
    return [{ point, share, value, low, high, colour, on_line, opacity: verdict === "dominated" ? 0.5 : 1 }];
  });
  if (!marks.length) return null;
  const title = `loss over ${curve} bytes, share of the full cache’s`;
  const figure = /** @type {Node} */ (Plot.plot({
    width, height: 280, marginLeft: 50, marginBottom: 38, style: { background: "none", fontSize: "11px" }, ariaLabel: title,
    x: { type: "log", grid: true, ticks: ratioTicks(marks.map((mark) => mark.share)), tickFormat: tick, label: `${curve} bytes / full`, labelAnchor: "center", labelArrow: "none", inset: 10 },
    y: { type: "log", grid: true, ticks: lossTicks(marks.flatMap((mark) => [mark.value, mark.low, mark.high].filter((end) => end > 0))), tickFormat: tick, label: null },
    marks: [
      Plot.line(marks.filter((mark) => mark.on_line).sort((one, other) => one.share - other.share), { x: "share", y: "value", stroke: "currentColor", strokeOpacity: 0.5 }),
      Plot.ruleX(marks.filter((mark) => mark.low > 0), { x: "share", y1: "low", y2: "high", stroke: "colour", strokeOpacity: "opacity" }),
      Plot.dot(marks, { x: "share", y: "value", fill: "colour", fillOpacity: "opacity", symbol: (mark) => SYMBOLS[mark.point.kind], r: 4,
        title: (mark) => `${mark.point.name}, ${mark.point.kind}\n${told(mark.share)} of the bytes, loss ${number(mark.value)}` }),
    ],
    color: { type: "identity" }, symbol: { type: "identity" }, opacity: { type: "identity" },
  }));
  return make("div", null, make("p", { class: "caption" }, title), figure);
}

/**
 * Return ticks of a logarithmic axis of losses: fewer of many powers of ten.
 * @param {number[]} values that the axis holds
 */
function lossTicks(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const steps = high > 100 * low ? [1] : [1, 2, 5];
  return d3.range(-9, 4).flatMap((power) => steps.map((step) => step * 10 ** power)).filter((one) => one >= low && one <= high);
}

/**
 * @param {EqualBytes} found
 * @param {CachePoint} point
 */
function colourOf(found, point) {
  const policies = [...new Set(found.points.map((one) => one.policy))];
  const { others } = colours();
  return others[Math.min(policies.indexOf(point.policy), others.length - 1)];
}

/** @param {EqualBytes} found */
function key(found) {
  const firsts = found.points.filter((point, index) => found.points.findIndex((one) => one.policy === point.policy) === index);
  const policies = firsts.map((point) => {
    const mark = make("b", { "aria-hidden": "true" }, "●");
    mark.style.color = colourOf(found, point);
    return make("span", { class: "key other" }, mark, ` ${point.policy}`);
  });
  return make("p", { class: "legend" }, ...policies, " ● evicted ■ rounded ◆ both ▲ own entries ★ whole; grey: dominated; the line joins the least losses");
}
