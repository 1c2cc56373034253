// Drift of the residual stream, layer by layer (paper, figures 3a and 5).

import { colours } from "./colours.js";
import { beside, fill, lacking, make } from "./dom.js";
import { estimate, number, ratio, tick } from "./format.js";
import { sidesKey } from "./head.js";
import { part } from "./numbers.js";
import { together } from "./seen.js";

/** @typedef {import("./seen.js").Seen} Seen */
/** @typedef {{layer: number, side: string, value: number, low: number, high: number}} Drift */

const UNITS = { l1: "L1", l2: "L2", cosine: "cosine distance" };

export const layers = {
  id: "layers",
  needs: ["baseline", "treatment", "budget", "measure", "sample"],
  /**
   * @param {HTMLElement} pane
   * @param {Seen} seen
   * @param {import("./choice.js").Chosen} chosen
   */
  draw(pane, seen, chosen) {
    if (seen.lacking) return fill(pane, lacking(seen.lacking));
    if (!seen.told.distances.includes(distance(seen))) return fill(pane, lacking(seen.told.lacks.distances));
    const all = together(chosen).filter((one) => one.told.distances.includes(distance(one)));
    fill(pane, beside(pane, 2, (width) => [make("div", null, ...drifts(seen, all, width)),
      make("div", null, ...ratios(seen, all, width))]));
  },
};

/**
 * Layers that an axis names: all, or every other, third, ….
 * @param {Seen} seen
 */
function ticks(seen) {
  const names = seen.told.layers;
  return names.filter((_, place) => place % Math.ceil(names.length / 10) === 0);
}

/** @param {Seen} seen */
function distance(seen) {
  return /** @type {keyof typeof UNITS} */ (seen.measure.distance || "l1");
}

/**
 * @param {Seen} seen
 * @param {string} side
 * @returns {Drift[]}
 */
function ofSide(seen, side) {
  const config = side === "baseline" ? seen.baseline : seen.treatment;
  const place = seen.told.distances.indexOf(distance(seen));
  const names = seen.told.layers;
  if (seen.sample >= 0) {
    const each = part(seen.need("drift_sample"), place, seen.sample, config);
    return names.map((layer, at) => ({ layer, side, value: each[at], low: NaN, high: NaN }));
  }
  return names.map((layer, at) => {
    const [value, low, high] = part(seen.need("drift"), place, config, at);
    return { layer, side, value, low, high };
  });
}

/**
 * Both sides' drift.
 * @param {Seen} seen
 * @returns {Drift[]}
 */
function ofBoth(seen) {
  const sides = seen.baseline === seen.treatment ? ["treatment"] : ["baseline", "treatment"];
  return sides.flatMap((side) => ofSide(seen, side)).filter((one) => one.value > 0);
}

/**
 * The ends of a logarithmic axis: what stands side by side has one.
 * @param {Drift[]} found
 */
function domain(found) {
  return d3.extent(found.flatMap((one) => [one.value, one.low, one.high]).filter((value) => value > 0));
}

/**
 * @param {Seen} seen
 * @param {Seen[]} all that share the scale
 * @param {number} width
 */
function drifts(seen, all, width) {
  const found = ofBoth(seen);
  const unit = UNITS[distance(seen)];
  const { baseline, treatment } = colours();
  const figure = /** @type {Node} */ (Plot.plot({
    width, height: 260, marginLeft: 54, marginBottom: 38, style: { background: "none", fontSize: "11px" },
    ariaLabel: `Drift of the residual stream after each layer, ${unit}`,
    x: { label: "layer", labelAnchor: "center", labelArrow: "none", ticks: ticks(seen), tickFormat: "d" },
    y: { type: "log", domain: domain(all.flatMap(ofBoth)), grid: true, ticks: 5, tickFormat: tick, label: `↑ drift (${unit})`, labelArrow: "none" },
    color: { domain: ["baseline", "treatment"], range: [baseline, treatment] },
    marks: [
      Plot.areaY(found.filter((one) => one.low > 0), { x: "layer", y1: "low", y2: "high", z: "side", fill: "side", fillOpacity: 0.16 }),
      Plot.line(found, { x: "layer", y: "value", z: "side", stroke: "side", strokeWidth: 1.8 }),
      Plot.dot(found, { x: "layer", y: "value", fill: "side", r: 2.2, symbol: (one) => (one.side === "baseline" ? "circle" : "square"), title: (one) => said(one, number) }),
    ],
    symbol: { type: "identity" },
  }));
  return [make("p", { class: "caption" }, `drift after each layer, ${seen.of}${bands(seen)}`), figure, sidesKey(seen)];
}

/**
 * @param {Seen} seen
 * @param {Seen[]} all that share the scale
 * @param {number} width
 */
function ratios(seen, all, width) {
  if (!seen.paired) return [];
  const found = ratiosOf(seen);
  const [low, high] = domain(all.filter((one) => one.paired).flatMap(ratiosOf));
  const { treatment, grey } = colours();
  const figure = /** @type {Node} */ (Plot.plot({
    width, height: 260, marginLeft: 54, marginBottom: 38, style: { background: "none", fontSize: "11px" },
    ariaLabel: "The treatment's drift over the baseline's after each layer",
    x: { label: "layer", labelAnchor: "center", labelArrow: "none", ticks: ticks(seen), tickFormat: "d" },
    y: { type: "log", domain: [Math.min(low ?? 1, 1), Math.max(high ?? 1, 1)], grid: true, ticks: 5, tickFormat: tick, label: "↑ over the baseline’s", labelArrow: "none" },
    marks: [
      Plot.ruleY([1], { stroke: grey, strokeWidth: 1.5 }),
      Plot.areaY(found.filter((one) => one.low > 0), { x: "layer", y1: "low", y2: "high", z: null, fill: treatment, fillOpacity: 0.16 }),
      Plot.line(found, { x: "layer", y: "value", z: null, stroke: treatment, strokeWidth: 1.8 }),
      Plot.dot(found, { x: "layer", y: "value", fill: treatment, symbol: "square", r: 2.2, title: (one) => said(one, ratio) }),
    ],
  }));
  const last = found[found.length - 1];
  const told = last && estimate([last.value, last.low, last.high], ratio, seen.told.interval);
  const end = last ? `: × ${told} after layer ${last.layer}` : "";
  return [make("p", { class: "caption" }, `treatment over baseline${end}`), figure];
}

/**
 * @param {Seen} seen
 * @returns {Drift[]}
 */
function ratiosOf(seen) {
  const place = seen.told.distances.indexOf(distance(seen));
  if (seen.sample >= 0) {
    const [first, second] = ["baseline", "treatment"].map((side) => ofSide(seen, side));
    return second.map((one, at) => ({ ...one, value: one.value / first[at].value })).filter(positive);
  }
  return seen.told.layers.map((layer, at) => {
    const [value, low, high] = part(seen.need("drift_ratio"), place, seen.pair, seen.turned, at);
    return { layer, side: "treatment", value, low, high };
  }).filter(positive);
}

/** @param {Drift} one */
function positive(one) {
  return Number.isFinite(one.value) && one.value > 0;
}

/**
 * @param {Drift} one
 * @param {(value: number | null) => string} shown
 */
function said(one, shown) {
  return `layer ${one.layer}\n${estimate([one.value, one.low, one.high], shown, "interval")}`;
}

/** @param {Seen} seen */
function bands(seen) {
  const word = { interval: "95 % intervals over samples", range: "ranges of single samples", none: "" }[seen.told.interval];
  return seen.sample < 0 && word ? `; bands: ${word}` : "";
}
