// Drift of the residual stream, layer by layer (paper, figures 3a and 5).

import { colours } from "./colours.js";
import { inColumns, fill, lacking, make } from "./dom.js";
import { estimate, number, ratio, tick } from "./format.js";
import { sidesKey } from "./head.js";
import { part } from "./numbers.js";
import { comparableViews } from "./view.js";

/** @typedef {import("./view.js").View} View */
/** @typedef {{layer: number, side: string, value: number, low: number, high: number}} Drift */

const UNITS = { l1: "L1", l2: "L2", cosine: "cosine distance" };

export const layers = {
  id: "layers",
  needs: ["baseline", "treatment", "budget", "measure", "sample"],
  /**
   * @param {HTMLElement} pane
   * @param {View} view
   * @param {import("./choice.js").Chosen} chosen
   */
  draw(pane, view, chosen) {
    if (view.lacking) return fill(pane, lacking(view.lacking));
    if (!view.data.distances.includes(distance(view))) return fill(pane, lacking(view.data.lacks.distances));
    const all = comparableViews(chosen).filter((one) => one.data.distances.includes(distance(one)));
    fill(pane, inColumns(pane, 2, (width) => [make("div", null, ...drifts(view, all, width)),
      make("div", null, ...ratios(view, all, width))]));
  },
};

/**
 * Return the layers with a tick: at most ten, evenly spaced.
 * @param {View} view
 */
function ticks(view) {
  const count = view.data.decoder_layers;
  return d3.range(0, count, Math.ceil(count / 10));
}

/** @param {View} view */
function distance(view) {
  return /** @type {keyof typeof UNITS} */ (view.measure.distance in UNITS ? view.measure.distance : "l1");
}

/**
 * @param {View} view
 * @param {string} side
 * @returns {Drift[]}
 */
function sideDrift(view, side) {
  const config = side === "baseline" ? view.baseline : view.treatment;
  const index = view.data.distances.indexOf(distance(view));
  const layers = d3.range(view.data.decoder_layers);
  if (view.sample >= 0) {
    const each = part(view.requireArray("drift_sample"), index, view.sample, config);
    return layers.map((layer) => ({ layer, side, value: each[layer], low: NaN, high: NaN }));
  }
  return layers.map((layer) => {
    const [value, low, high] = part(view.requireArray("drift"), index, config, layer);
    return { layer, side, value, low, high };
  });
}

/**
 * Return both sides' drift by layer, where positive.
 * @param {View} view
 * @returns {Drift[]}
 */
function bothDrifts(view) {
  const sides = view.baseline === view.treatment ? ["treatment"] : ["baseline", "treatment"];
  return sides.flatMap((side) => sideDrift(view, side)).filter((one) => one.value > 0);
}

/**
 * Return the ends of the logarithmic axis that panels share.
 * @param {Drift[]} found
 */
function domain(found) {
  return d3.extent(found.flatMap((one) => [one.value, one.low, one.high]).filter((value) => value > 0));
}

/**
 * @param {View} view
 * @param {View[]} all that share the scale
 * @param {number} width
 */
function drifts(view, all, width) {
  const found = bothDrifts(view);
  const unit = UNITS[distance(view)];
  const { baseline, treatment } = colours();
  const figure = /** @type {Node} */ (Plot.plot({
    width, height: 260, marginLeft: 54, marginBottom: 38, style: { background: "none", fontSize: "11px" },
    ariaLabel: `Drift of the residual stream after each layer, ${unit}`,
    x: { label: "layer", labelAnchor: "center", labelArrow: "none", ticks: ticks(view), tickFormat: "d" },
    y: { type: "log", domain: domain(all.flatMap(bothDrifts)), grid: true, ticks: 5, tickFormat: tick, label: `↑ drift (${unit})`, labelArrow: "none" },
    color: { domain: ["baseline", "treatment"], range: [baseline, treatment] },
    marks: [
      Plot.areaY(found.filter((one) => one.low > 0), { x: "layer", y1: "low", y2: "high", z: "side", fill: "side", fillOpacity: 0.16 }),
      Plot.line(found, { x: "layer", y: "value", z: "side", stroke: "side", strokeWidth: 1.8 }),
      Plot.dot(found, { x: "layer", y: "value", fill: "side", r: 2.2, symbol: (one) => (one.side === "baseline" ? "circle" : "square"), title: (one) => driftText(one, number) }),
    ],
    symbol: { type: "identity" },
  }));
  return [make("p", { class: "caption" }, `drift after each layer, ${view.of}${bandsText(view)}`), figure, sidesKey(view)];
}

/**
 * @param {View} view
 * @param {View[]} all that share the scale
 * @param {number} width
 */
function ratios(view, all, width) {
  if (!view.paired) return [];
  const found = driftRatios(view);
  const [low, high] = domain(all.filter((one) => one.paired).flatMap(driftRatios));
  const { treatment, grey } = colours();
  const figure = /** @type {Node} */ (Plot.plot({
    width, height: 260, marginLeft: 54, marginBottom: 38, style: { background: "none", fontSize: "11px" },
    ariaLabel: "The treatment's drift over the baseline's after each layer",
    x: { label: "layer", labelAnchor: "center", labelArrow: "none", ticks: ticks(view), tickFormat: "d" },
    y: { type: "log", domain: [Math.min(low ?? 1, 1), Math.max(high ?? 1, 1)], grid: true, ticks: 5, tickFormat: tick, label: "↑ over the baseline’s", labelArrow: "none" },
    marks: [
      Plot.ruleY([1], { stroke: grey, strokeWidth: 1.5 }),
      Plot.areaY(found.filter((one) => one.low > 0), { x: "layer", y1: "low", y2: "high", z: null, fill: treatment, fillOpacity: 0.16 }),
      Plot.line(found, { x: "layer", y: "value", z: null, stroke: treatment, strokeWidth: 1.8 }),
      Plot.dot(found, { x: "layer", y: "value", fill: treatment, symbol: "square", r: 2.2, title: (one) => driftText(one, ratio) }),
    ],
  }));
  const last = found[found.length - 1];
  const lastText = last && estimate([last.value, last.low, last.high], ratio, view.data.interval);
  const end = last ? `: × ${lastText} after layer ${last.layer}` : "";
  return [make("p", { class: "caption" }, `treatment over baseline${end}`), figure];
}

/**
 * @param {View} view
 * @returns {Drift[]}
 */
function driftRatios(view) {
  const index = view.data.distances.indexOf(distance(view));
  if (view.sample >= 0) {
    const [first, second] = ["baseline", "treatment"].map((side) => sideDrift(view, side));
    return second.map((one, at) => ({ ...one, value: one.value / first[at].value })).filter(positive);
  }
  return d3.range(view.data.decoder_layers).map((layer) => {
    const [value, low, high] = part(view.requireArray("drift_ratio"), index, view.pair, view.reversed, layer);
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
function driftText(one, shown) {
  return `layer ${one.layer}\n${estimate([one.value, one.low, one.high], shown, "interval")}`;
}

/** @param {View} view */
function bandsText(view) {
  const word = { interval: "95 % intervals over samples", range: "ranges of single samples", none: "" }[view.data.interval];
  return view.sample < 0 && word ? `; bands: ${word}` : "";
}
