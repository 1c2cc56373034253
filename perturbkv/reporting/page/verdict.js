// What to conclude of the pair that is chosen: the sentence, and the numbers behind it.

import { fill, lacking, make } from "./dom.js";
import { counted, difference, estimate, number, percent, ratio } from "./format.js";
import { part } from "./numbers.js";
import { BETTER, TIED, WORSE } from "./seen.js";

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
    const l1 = ["isolated", "propagated"].includes(seen.measure.key);
    const tiles = [total(seen), share(seen), counts(seen), ...(known(seen) ? [caches(seen)] : [])];
    fill(
      pane,
      make("p", { class: "said" }, said && l1 && seen.sample < 0 ? said : plainly(seen)),
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
 * The change of the sum, without a conclusion's words.
 * @param {Seen} seen
 */
function plainly(seen) {
  const { baseline, treatment, budget } = seen.choice;
  const [, value] = total(seen);
  const what = seen.measure.compare === "ratio" ? "is at" : "changes by";
  return `${treatment} against ${baseline} at budget ${budget}: the ${seen.measure.name} ${what} ${value} (${seen.of}).`;
}

/**
 * @param {Seen} seen
 * @returns {[string, string, string]}
 */
function total(seen) {
  const { measure, told } = seen;
  const ratios = measure.compare === "ratio";
  const name = ratios ? "Σ over the baseline’s" : "mean difference";
  const found = seen.sample < 0 ? part(seen.need("pair_sum"), seen.place, seen.pair, seen.turned) : [ofSample(seen), null, null];
  const shown = estimate(found, ratios ? ratio : difference, told.interval);
  return [name, ratios ? `× ${shown}` : shown, `${measure.name}, all heads, ${seen.of}`];
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
 * @param {Seen} seen
 * @returns {[string, string, string]}
 */
function share(seen) {
  const { measure, told } = seen;
  const verdicts = seen.verdicts();
  const known = seen.sample < 0 && measure.ties !== null && seen.trace.array("pair_better");
  const found = known
    ? part(known, /** @type {number} */ (measure.ties), seen.pair, seen.turned)
    : [d3.mean(verdicts, (one) => Number(one === BETTER)) ?? NaN, null, null];
  const each = known ? `mean of ${counted(told.samples.length, "sample")}’ shares` : seen.of;
  return ["heads better", estimate(found, percent, told.interval, " %"), each];
}

/**
 * @param {Seen} seen
 * @returns {[string, string, string]}
 */
function counts(seen) {
  const verdicts = seen.verdicts();
  const [better, tied, worse] = [BETTER, TIED, WORSE].map((word) => d3.sum(verdicts, (one) => Number(one === word)));
  const note = seen.measure.ties === null ? "better / equal / worse, of the values" : "better / tied / worse, of the values";
  return ["heads + / = / −", `${better} / ${tied} / ${worse}`, `${note} (${seen.of})`];
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
  const note = few ? `bytes: ${stored.map(number).join(" → ")} of the full cache’s` : "entries that both caches hold";
  return ["held / full", held.map(number).join(" → "), note];
}
