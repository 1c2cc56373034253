// What to conclude of the pair that is chosen: the sentence, and the numbers behind it.

import { fill, lacking, make } from "./dom.js";
import { counted, difference, estimate, number, percent, ratio } from "./format.js";
import { part } from "./numbers.js";
import { BETTER, TIED, WORSE } from "./seen.js";
import { words } from "./words.js";

/** @typedef {import("./seen.js").Seen} Seen */

export const verdict = {
  id: "verdict",
  needs: ["baseline", "treatment", "budget", "measure", "sample"],
  /**
   * @param {HTMLElement} pane
   * @param {Seen} seen
   */
  draw(pane, seen) {
    if (seen.lacking) return fill(pane, lacking(seen.lacking));
    if (!seen.paired) return fill(pane, lacking(alone(seen)));
    const said = seen.told.conclusions[`${seen.baseline}-${seen.treatment}`];
    const tiles = [total(seen), share(seen), counts(seen), ...(known(seen) ? [caches(seen)] : [])];
    fill(
      pane,
      make("p", { class: "said" }, said && seen.measure.key === "propagated" && seen.sample < 0 ? said : plainly(seen)),
      make("dl", { class: "tiles" }, ...tiles.map(([name, value, note]) =>
        make("div", null, make("dt", null, name), make("dd", { class: "big" }, value), make("dd", null, note)))),
    );
  },
};

/** @param {Seen} seen */
function alone(seen) {
  if (seen.baseline === seen.treatment) {
    return seen.told.lacks.pairs || "Baseline and treatment are the same: choose another to see what changes.";
  }
  return "This pair is not in the page, which holds the pairs of the first configurations.";
}

/**
 * The change of the sum, and whether it is decided.
 * @param {Seen} seen
 */
function plainly(seen) {
  const { baseline, treatment, budget } = seen.choice;
  const who = `${treatment} against ${baseline} at budget ${budget}`;
  if (alike(seen)) return `${who}: the ${words(seen.measure)} is the same in all ${counted(seen.trace.size, "head")} (${seen.of}).`;
  const [, value] = total(seen);
  const how = seen.measure.compare === "ratio" ? "its sum over heads is" : "its mean over heads changes by";
  return `${who}: the ${words(seen.measure)} ${decided(seen)}; ${how} ${value} (${seen.of}).`;
}

/**
 * Whether nothing differs in any head.
 * @param {Seen} seen
 */
function alike(seen) {
  return seen.verdicts().every((one) => one === TIED);
}

/**
 * Whether the sum rises or falls, as far as its interval says.
 * @param {Seen} seen
 */
function decided(seen) {
  const [value, low, high] = sum(seen);
  const same = seen.measure.compare === "ratio" ? 1 : 0;
  if (Number.isNaN(value)) return "has no sum: it is endless in some head";
  if (seen.sample >= 0) return `is ${value < same ? "lower" : "higher"} in this sample`;
  if (seen.told.interval !== "interval") return `of ${counted(seen.told.samples.length, "sample")} cannot be decided`;
  if (low > same || high < same) return value < same ? "is lower" : "is higher";
  return "is not decidedly lower or higher";
}

/**
 * The change of all heads together, with its ends.
 * @param {Seen} seen
 * @returns {number[]}
 */
function sum(seen) {
  if (seen.sample >= 0) return [ofSample(seen), NaN, NaN];
  const found = Array.from(part(seen.need("pair_sum"), seen.place, seen.pair, seen.turned));
  return alike(seen) ? [found[0], NaN, NaN] : found;
}

/**
 * @param {Seen} seen
 * @returns {[string, string, string]}
 */
function total(seen) {
  const { measure, told } = seen;
  const ratios = measure.compare === "ratio";
  const name = ratios ? "Σ over the baseline’s" : "mean difference";
  const shown = estimate(sum(seen), ratios ? ratio : difference, told.interval);
  return [name, ratios ? `× ${shown}` : shown, `${words(measure)}, all heads, ${seen.of}`];
}

/**
 * Of one sample: the ratio of both sums over heads, or the difference of both means.
 * @param {Seen} seen
 */
function ofSample(seen) {
  const [first, second] = [seen.baseline, seen.treatment].map((config) => d3.sum(seen.values(config)));
  return seen.measure.compare === "ratio" ? second / first : (second - first) / seen.trace.size;
}

/**
 * Verdicts of the heads that the measure says something of.
 * @param {Seen} seen
 */
function spoken(seen) {
  const silent = seen.silent();
  return silent ? seen.verdicts().filter((_, head) => !silent[head]) : seen.verdicts();
}

/**
 * @param {Seen} seen
 * @returns {[string, string, string]}
 */
function share(seen) {
  const { measure, told } = seen;
  const verdicts = spoken(seen);
  const known = seen.sample < 0 && measure.ties !== null && seen.trace.array("pair_better");
  const found = known
    ? part(known, /** @type {number} */ (measure.ties), seen.pair, seen.turned)
    : [d3.mean(verdicts, (one) => Number(one === BETTER)) ?? NaN, null, null];
  const each = known ? `mean over ${counted(told.samples.length, "sample")} of each one’s share` : `${verdicts.length === seen.trace.size ? "" : `of ${verdicts.length} with σ > 0.5, `}by the ${seen.of}, no interval`;
  return ["heads better", estimate(found, percent, told.interval, " %"), each];
}

/**
 * @param {Seen} seen
 * @returns {[string, string, string]}
 */
function counts(seen) {
  const verdicts = spoken(seen);
  const [better, tied, worse] = [BETTER, TIED, WORSE].map((word) => d3.sum(verdicts, (one) => Number(one === word)));
  const note = seen.measure.ties === null ? "better / equal / worse" : "better / tied / worse";
  return ["heads + / = / −", `${better} / ${tied} / ${worse}`, `${note}, each head by its ${seen.sample < 0 ? "mean" : "value"}`];
}

/**
 * Whether the trace tells what its caches hold.
 * @param {Seen} seen
 */
function known(seen) {
  return [seen.baseline, seen.treatment].every((config) => seen.told.configs[config].held !== null);
}

/**
 * @param {Seen} seen
 * @returns {[string, string, string]}
 */
function caches(seen) {
  const held = [seen.baseline, seen.treatment].map((config) => seen.told.configs[config].held);
  const stored = [seen.baseline, seen.treatment].map((config) => seen.told.configs[config].bytes);
  const few = stored.some((share, place) => share !== null && Math.abs(share - (held[place] ?? share)) > 0.005);
  const note = few ? `bytes: ${stored.map(number).join(" → ")} of the full cache’s` : "entries of each cache over the full one’s";
  return ["held / full", held.map(number).join(" → "), note];
}
