// What to conclude of the pair that is chosen: the sentence, and the numbers behind it.

import { fill, lacking, make } from "./dom.js";
import { changeFormat, plural, estimate, number, percent } from "./format.js";
import { part } from "./numbers.js";
import { BETTER, TIED, WORSE } from "./view.js";
import { measureName } from "./words.js";

/** @typedef {import("./view.js").View} View */

export const verdict = {
  id: "verdict",
  needs: ["baseline", "treatment", "budget", "measure", "sample"],
  /**
   * @param {HTMLElement} pane
   * @param {View} view
   */
  draw(pane, view) {
    if (view.lacking) return fill(pane, lacking(view.lacking));
    if (!view.paired) return fill(pane, lacking(unpairedReason(view)));
    const conclusion = view.data.conclusions[`${view.baseline}-${view.treatment}`];
    const tiles = [totalTile(view), shareTile(view), countsTile(view), ...(known(view) ? [cachesTile(view)] : [])];
    fill(
      pane,
      make("p", { class: "said" }, conclusion && view.measure.key === "propagated" && view.sample < 0 ? conclusion : changeSentence(view)),
      make("dl", { class: "tiles" }, ...tiles.map(([name, value, note]) =>
        make("div", null, make("dt", null, name), make("dd", { class: "big" }, value), make("dd", null, note)))),
    );
  },
};

/** @param {View} view */
function unpairedReason(view) {
  if (view.baseline === view.treatment) {
    return view.data.lacks.pairs || "Baseline and treatment are the same: choose another to see what changes.";
  }
  return "This pair is not in the page, which holds the pairs of the first configurations.";
}

/**
 * Return a sentence with the change of the sum, and whether it is decided.
 * @param {View} view
 */
function changeSentence(view) {
  const { baseline, treatment, budget } = view.choice;
  const who = `${treatment} against ${baseline} at budget ${budget}`;
  if (isUnchanged(view)) return `${who}: the ${measureName(view.measure)} is the same in all ${plural(view.trace.size, "head")} (${view.of}).`;
  const [, value] = totalTile(view);
  const how = view.measure.compare === "ratio" ? "its sum over heads is" : "its mean over heads changes by";
  return `${who}: the ${measureName(view.measure)} ${directionText(view)}; ${how} ${value} (${view.of}).`;
}

/**
 * Return whether all heads are tied.
 * @param {View} view
 */
function isUnchanged(view) {
  return view.verdicts().every((one) => one === TIED);
}

/**
 * Return whether the sum rises or falls, as words, as far as its interval decides it.
 * @param {View} view
 */
function directionText(view) {
  const [value, low, high] = sumOverHeads(view);
  const same = view.measure.compare === "ratio" ? 1 : 0;
  if (Number.isNaN(value)) return "has no sum: it is endless in some head";
  if (view.sample >= 0) return `is ${value < same ? "lower" : "higher"} in this sample`;
  if (view.data.interval !== "interval") return `of ${plural(view.data.samples.length, "sample")} cannot be decided`;
  if (low > same || high < same) return value < same ? "is lower" : "is higher";
  return "is not decidedly lower or higher";
}

/**
 * Return the change over all heads, with the ends of its interval.
 * @param {View} view
 * @returns {number[]}
 */
function sumOverHeads(view) {
  if (view.sample >= 0) return [sampleChange(view), NaN, NaN];
  const found = Array.from(part(view.requireArray("pair_sum"), view.measureIndex, view.pair, view.reversed));
  return isUnchanged(view) ? [found[0], NaN, NaN] : found;
}

/**
 * @param {View} view
 * @returns {[string, string, string]}
 */
function totalTile(view) {
  const { measure, data } = view;
  const ratios = measure.compare === "ratio";
  const name = ratios ? "Σ over the baseline’s" : "mean difference";
  const shown = estimate(sumOverHeads(view), changeFormat(measure), data.interval);
  return [name, ratios ? `× ${shown}` : shown, `${measureName(measure)}, all heads, ${view.of}`];
}

/**
 * Return one sample's ratio of sums over heads, or its difference of means.
 * @param {View} view
 */
function sampleChange(view) {
  const [first, second] = [view.baseline, view.treatment].map((config) => d3.sum(view.values(config)));
  return view.measure.compare === "ratio" ? second / first : (second - first) / view.trace.size;
}

/**
 * Return the verdicts of the heads for which the measure is evidence.
 * @param {View} view
 */
function evidencedVerdicts(view) {
  const unproven = view.unproven();
  return unproven ? view.verdicts().filter((_, head) => !unproven[head]) : view.verdicts();
}

/**
 * @param {View} view
 * @returns {[string, string, string]}
 */
function shareTile(view) {
  const { measure, data } = view;
  const verdicts = evidencedVerdicts(view);
  const known = view.sample < 0 && measure.ties !== null && view.trace.array("pair_better");
  const found = known
    ? part(known, /** @type {number} */ (measure.ties), view.pair, view.reversed)
    : [d3.mean(verdicts, (one) => Number(one === BETTER)) ?? NaN, null, null];
  const each = known ? `mean over ${plural(data.samples.length, "sample")} of each one’s share` : `${verdicts.length === view.trace.size ? "" : `of ${verdicts.length} with σ > 0.5, `}by the ${view.of}, no interval`;
  return ["heads better", estimate(found, percent, data.interval, " %"), each];
}

/**
 * @param {View} view
 * @returns {[string, string, string]}
 */
function countsTile(view) {
  const verdicts = evidencedVerdicts(view);
  const [better, tied, worse] = [BETTER, TIED, WORSE].map((word) => d3.sum(verdicts, (one) => Number(one === word)));
  const note = view.measure.ties === null ? "better / equal / worse" : "better / tied / worse";
  return ["heads + / = / −", `${better} / ${tied} / ${worse}`, `${note}, each head by its ${view.sample < 0 ? "mean" : "value"}`];
}

/**
 * Return whether the cache shares of both sides are known.
 * @param {View} view
 */
function known(view) {
  return [view.baseline, view.treatment].every((config) => view.data.configs[config].held !== null);
}

/**
 * @param {View} view
 * @returns {[string, string, string]}
 */
function cachesTile(view) {
  const held = [view.baseline, view.treatment].map((config) => view.data.configs[config].held);
  const stored = [view.baseline, view.treatment].map((config) => view.data.configs[config].bytes);
  const few = stored.some((share, index) => share !== null && Math.abs(share - (held[index] ?? share)) > 0.005);
  const note = few ? `bytes: ${stored.map(number).join(" → ")} of the full cache’s` : "entries of each cache over the full one’s";
  return ["cache share", held.map(number).join(" → "), note];
}
