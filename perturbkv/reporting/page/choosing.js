// The bar of choices at the top, which everything below follows.

import { MEAN } from "./choice.js";
import { fill, make, select } from "./dom.js";
import { plural } from "./format.js";
import { measureOption } from "./words.js";

/** @typedef {import("./choice.js").Chosen} Chosen */
/** @typedef {import("./choice.js").Choice} Choice */
/** @typedef {{value: string, text: string}} Option */

/**
 * Draw the bar, and draw it again when a choice comes from elsewhere.
 * @param {HTMLElement} pane
 * @param {Chosen} chosen
 */
export function drawChoices(pane, chosen) {
  const lists = /** @type {const} */ (["baseline", "treatment", "budget", "measure", "sample"]);
  const names = { baseline: "Baseline", treatment: "Treatment", budget: "Budget", measure: "Measure", sample: "Sample" };
  const labels = lists.map((key) =>
    select(names[key], key, options(chosen, key), chosen.now[key], (value) => chosen.choose({ [key]: value })));
  const swap = make("button", { type: "button", class: "swap", title: "Swap baseline and treatment", "aria-label": "Swap baseline and treatment",
    onclick: () => chosen.choose({ baseline: chosen.now.treatment, treatment: chosen.now.baseline }) }, "⇄");
  fill(pane, labels[0], swap, ...labels.slice(1));
  chosen.listen(() => labels.forEach((label, index) => {
    const list = label.querySelector("select");
    if (list) list.value = chosen.now[lists[index]];
  }));
}

/**
 * Return the distinct options of a choice over all traces of the page.
 * @param {Chosen} chosen
 * @param {"baseline" | "treatment" | "budget" | "measure" | "sample"} key
 * @returns {Option[]}
 */
function options(chosen, key) {
  const traces = chosen.traces.map((one) => one.data);
  const same = (/** @type {string} */ text) => ({ value: text, text });
  if (key === "budget") return distinct(traces.flatMap((one) => one.budgets.map(same)));
  if (key === "measure") return distinct(traces.flatMap((one) => one.measures.map((measure) => ({ value: measure.key, text: measureOption(measure) }))));
  if (key !== "sample") return distinct(traces.flatMap((one) => one.sides.map(same)));
  const samples = distinct(traces.flatMap((one) => one.samples.map((sample) => ({ value: sample.id, text: shorten(sample.id) }))));
  const counts = [...new Set(traces.map((one) => one.samples.length))];
  return [{ value: MEAN, text: counts.length === 1 ? `mean of ${plural(counts[0], "sample")}` : "mean of all samples" }, ...samples];
}

/** @param {string} id */
function shorten(id) {
  return id.length > 60 ? `${id.slice(0, 57)}…` : id;
}

/**
 * @param {Option[]} all
 * @returns {Option[]}
 */
function distinct(all) {
  return [...new Map(all.map((one) => [one.value, one])).values()];
}
