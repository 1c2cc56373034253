// One trace under the current choice: the chosen configurations, measure, sample and head, and their numbers.

import { at, part, verdictAt } from "./numbers.js";

/** @typedef {import("./choice.js").Choice} Choice */
/** @typedef {import("./trace.js").Trace} Trace */
/** @typedef {import("./page_data.js").Measure} Measure */

/** @type {{now: Choice | null, view: View[]}} */
const last = { now: null, view: [] };

/**
 * Return a view of every trace of the page under the current choice.
 * @param {import("./choice.js").Chosen} chosen
 * @returns {View[]}
 */
export function currentViews(chosen) {
  if (last.now !== chosen.now) {
    last.now = chosen.now;
    last.view = chosen.traces.map((trace) => new View(trace, chosen.now));
  }
  return last.view;
}

/**
 * Return the views that can show the current choice; panels side by side share one scale over them.
 * @param {import("./choice.js").Chosen} chosen
 * @returns {View[]}
 */
export function comparableViews(chosen) {
  return currentViews(chosen).filter((one) => !one.lacking && (one.sample < 0 || one.trace.array("sample")));
}

/** Theorem 3 holds for heads whose σ exceeds this. */
export const EVIDENCE = 0.5;
/** Verdict: equal but for rounding. */
export const TIED = 0;
/** Verdict: the treatment is better than the baseline. */
export const BETTER = 1;
/** Verdict: the treatment is worse than the baseline. */
export const WORSE = 2;

export class View {
  /**
   * @param {Trace} trace
   * @param {Choice} choice
   */
  constructor(trace, choice) {
    const data = trace.data;
    this.trace = trace;
    this.data = data;
    this.choice = choice;
    this.baseline = trace.config(choice.baseline, choice.budget);
    this.treatment = trace.config(choice.treatment, choice.budget);
    this.sample = data.samples.findIndex((one) => one.id === choice.sample);
    this.measureIndex = trace.measure(choice.measure);
    this.head = trace.headIndex(choice.head);
    const [low, high] = [this.baseline, this.treatment].sort((one, other) => one - other);
    this.pair = trace.pairs.get(`${low}-${high}`) ?? -1;
    this.reversed = this.baseline > this.treatment ? 1 : 0;
    /** @type {Map<string, Float32Array | Uint8Array>} numbers that were looked up already */
    this.known = new Map();
  }

  /** @returns {Measure} */
  get measure() {
    return this.data.measures[this.measureIndex];
  }

  /** The reason why this trace cannot show the choice; empty where it can. */
  get lacking() {
    const { budget, baseline, treatment, measure, sample } = this.choice;
    const side = this.baseline < 0 ? baseline : this.treatment < 0 ? treatment : "";
    const each = this.data.arrays.sample?.measures;
    if (this.measureIndex < 0) return `This trace does not hold the measure that is chosen (${measure}).`;
    if (side) return `This trace holds no ${side} at the budget ${budget}.`;
    if (sample && this.sample < 0) return `This trace has no sample ${sample}.`;
    if (sample && each && !each.includes(this.measureIndex)) return this.data.lacks.samples;
    return this.hasNoEffects() ? `The text of ${sample} is one token: no head’s loss changes its log p.` : "";
  }

  /** Return whether effects are chosen of a sample without any. */
  hasNoEffects() {
    const known = this.sample >= 0 && this.measure.kind === "effect" && this.trace.array("sample");
    return known && this.values(this.baseline).every(Number.isNaN);
  }

  /** Whether baseline and treatment are two configurations whose verdicts are known. */
  get paired() {
    return this.pair >= 0 && this.baseline !== this.treatment;
  }

  /** The source of the numbers: 'mean of 8 samples', or the sample. */
  get of() {
    const count = this.data.samples.length;
    return this.sample >= 0 ? `sample ${this.choice.sample}` : count === 1 ? "1 sample" : `mean of ${count} samples`;
  }

  /**
   * Return (head,) numbers of a configuration, means over decode steps, of the chosen sample or the mean.
   * @param {number} config
   * @param {number} [measure] the one that is chosen, or another
   * @returns {Float32Array}
   */
  values(config, measure = this.measureIndex) {
    if (this.sample < 0) return part(this.requireArray("mean"), measure, config);
    const stored = this.sampleMeasureIndex(measure);
    return this.cached(`${measure}/${config}`, () =>
      stored < 0 ? new Float32Array(this.trace.size).fill(NaN) : part(this.requireArray("sample"), stored, this.sample, config));
  }

  /**
   * Return a measure's index among those stored by sample; −1 where only its mean is in the page.
   * @param {number} measure
   */
  sampleMeasureIndex(measure) {
    return this.data.arrays.sample?.measures?.indexOf(measure) ?? measure;
  }

  /**
   * Return the result of `make`, which is called once per name under this choice.
   * @template {Float32Array | Uint8Array} Made
   * @param {string} name
   * @param {() => Made} make
   * @returns {Made}
   */
  cached(name, make) {
    const found = this.known.get(name) ?? make();
    this.known.set(name, found);
    return /** @type {Made} */ (found);
  }

  /**
   * Return the sample with a prompt in which the chosen head changes most; the first where that is unknown.
   * @returns {number}
   */
  mostChangedSample() {
    const { prompts, samples } = this.data;
    if (!this.paired || this.head < 0 || this.lacking || !this.trace.array("sample")) return 0;
    const [first, second] = [this.headBySample(this.baseline, this.head), this.headBySample(this.treatment, this.head)];
    const moved = samples.map((_, index) => (prompts[index]?.text ? Math.abs(second[index] - first[index]) : -1));
    return Math.max(0, d3.maxIndex(moved));
  }

  /**
   * Return (sample,) numbers of one head.
   * @param {number} config
   * @param {number} head
   * @param {number} [measure]
   * @returns {number[]}
   */
  headBySample(config, head, measure = this.measureIndex) {
    const stored = this.sampleMeasureIndex(measure);
    const [layer, index] = [Math.floor(head / this.data.heads), head % this.data.heads];
    return this.data.samples.map((_, sample) => (stored < 0 ? NaN : at(this.requireArray("sample"), stored, sample, config, layer, index)));
  }

  /**
   * Return (head,) verdicts on the treatment: TIED, BETTER or WORSE.
   * @param {number} [measure]
   * @returns {Uint8Array}
   */
  verdicts(measure = this.measureIndex) {
    return this.cached(`verdict/${measure}`, () => this.computeVerdicts(measure));
  }

  /**
   * @param {number} measure
   * @returns {Uint8Array}
   */
  computeVerdicts(measure) {
    const { ties, less } = this.data.measures[measure];
    const found = new Uint8Array(this.trace.size);
    if (ties === null || !this.paired) return this.verdictsBySign(found, measure, less);
    const array = this.requireArray("verdict");
    const [, pairs, samples] = array.shape;
    const start = ((ties * pairs + this.pair) * samples + this.sample + 1) * this.trace.size;
    const bytes = /** @type {Uint8Array} */ (array.values);
    for (let head = 0; head < found.length; head++) {
      const verdict = verdictAt(bytes, start + head);
      found[head] = verdict && this.reversed ? 3 - verdict : verdict;
    }
    return found;
  }

  /**
   * Write verdicts of a measure without a noise floor: tied only where both sides are equal.
   * @param {Uint8Array} found
   * @param {number} measure
   * @param {boolean} less
   */
  verdictsBySign(found, measure, less) {
    const [first, second] = [this.values(this.baseline, measure), this.values(this.treatment, measure)];
    for (let head = 0; head < found.length; head++) {
      const sign = Math.sign(first[head] - second[head]) || 0;
      found[head] = sign === 0 ? TIED : sign > 0 === less ? BETTER : WORSE;
    }
    return found;
  }

  /**
   * Return (head,) 1 where a bound is no evidence, as σ of either side is at most 0.5; null for other measures.
   * @returns {Uint8Array | null}
   */
  unproven() {
    const sigma = this.trace.measure("sigma_stage1");
    if (!this.measure.key.startsWith("theta_hat") || sigma < 0) return null;
    const [first, second] = [this.values(this.baseline, sigma), this.values(this.treatment, sigma)];
    return Uint8Array.from(first, (value, head) => Number(Math.min(value, second[head]) <= EVIDENCE));
  }

  /**
   * Return (head,) the change that a map shows: the binary logarithm of a ratio, or a difference.
   * @returns {Float32Array}
   */
  changes() {
    const [first, second] = [this.values(this.baseline), this.values(this.treatment)];
    const ratios = this.measure.compare === "ratio";
    return first.map((value, head) => (ratios ? logRatio(value, second[head]) : second[head] - value));
  }

  /**
   * Return an array that is loaded; throw an Error where it is not.
   * @param {string} name
   */
  requireArray(name) {
    const found = this.trace.array(name);
    if (!found) throw new Error(`the array ${name} is not loaded`);
    return found;
  }
}

/**
 * @param {number} first
 * @param {number} second
 */
function logRatio(first, second) {
  if (first === second) return 0;
  return Math.log2(second / first);
}
