// What a measure is called in a sentence.

/** @typedef {import("./page_data.js").Measure} Measure */

/** @type {Record<string, string>} */
const NAMES = {
  theta: "bound θ",
  theta_hat: "bound θ̂",
  theta_hat_relax: "bound θ̂ relaxed",
  retained_mass: "attention kept, S",
  sigma_stage1: "attention of stage 1, σ",
  sigma_topk: "attention of the top ⌊αb⌋, σ",
  gone_distance: "distance of what went, ‖μ_gone − μ_kept‖",
  effect_isolated: "change of log p (isolated, first order)",
  effect_propagated: "change of log p (propagated, first order)",
};

/**
 * Return a measure's name in a sentence: 'propagated perturbation', 'isolated perturbation in L2', 'bound θ̂'.
 * @param {Measure} measure
 * @returns {string}
 */
export function measureName(measure) {
  if (measure.kind !== "perturbation") return NAMES[measure.key] || measure.name;
  const [kind] = measure.key.split("_");
  return `${kind} perturbation${measure.distance === "l1" ? "" : ` in ${measure.unit}`}`;
}

/**
 * Return a measure's name with its unit, for a list of measures.
 * @param {Measure} measure
 * @returns {string}
 */
export function measureOption(measure) {
  if (measure.kind === "effect") return measureName(measure).replace(")", `, ${measure.unit})`);
  const withUnit = measure.distance === "l1" || measure.kind === "distance";
  return withUnit && measure.unit !== "share" ? `${measureName(measure)} (${measure.unit})` : measureName(measure);
}
