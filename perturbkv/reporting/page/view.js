// One trace under the present choice: whose numbers are looked at, and what they say.

import { at, part, verdictAt } from "./numbers.js";

/** @typedef {import("./choice.js").Choice} Choice */
/** @typedef {import("./trace.js").Trace} Trace */
/** @typedef {import("./page_data.js").Measure} Measure */

/** @type {{now: Choice | null, view: View[]}} */
const last = { now: null, view: [] };

/**
 * Every trace of the page under the present choice.
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
 * Those of them that hold what is chosen: what stands side by side has one scale.
 * @param {import("./choice.js").Chosen} chosen
 * @returns {View[]}
 */
export function comparableViews(chosen) {
  return currentViews(chosen).filter((one) => !one.lacking && (one.sample < 0 || one.trace.array("sample")));
}

/** Theorem 3 speaks of heads whose σ exceeds this. */
export const EVIDENCE = 0.5;
/** Equal but for rounding. */
export const TIED = 0;
/** The treatment is better than the baseline. */
export const BETTER = 1;
/** It is worse. */
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

  /** Why nothing can be shown of this trace; empty where it can. */
  get lacking() {
    const { budget, baseline, treatment, measure, sample } = this.choice;
    const side = this.baseline < 0 ? baseline : this.treatment < 0 ? treatment : "";
    const each = this.data.arrays.sample?.measures;
    if (this.measureIndex < 0) return `This trace does not hold the measure that is chosen (${measure}).`;
    if (side) return `This trace holds no ${side} at the budget ${budget}.`;
    if (sample && this.sample < 0) return `This trace has no sample ${sample}.`;
    return sample && each && !each.includes(this.measureIndex) ? this.data.lacks.samples : "";
  }

  /** Whether baseline and treatment are two configurations whose verdicts are known. */
  get paired() {
    return this.pair >= 0 && this.baseline !== this.treatment;
  }

  /** What the numbers are of: 'mean of 8 samples', or the sample. */
  get of() {
    const count = this.data.samples.length;
    return this.sample >= 0 ? `sample ${this.choice.sample}` : count === 1 ? "1 sample" : `mean of ${count} samples`;
  }

  /**
   * (head,) numbers of a configuration, of the mean or of the sample that is chosen, at the first decode step.
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
   * Where single samples hold a measure; −1 for one that the page holds the mean of alone.
   * @param {number} measure
   */
  sampleMeasureIndex(measure) {
    return this.data.arrays.sample?.measures?.indexOf(measure) ?? measure;
  }

  /**
   * What is made once under this choice.
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
   * The sample with a prompt in which the chosen head changes most; the first where nothing is known of it.
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
   * (sample,) numbers of one head.
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
   * (head,) what the treatment changes: verdicts, ties among them.
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
   * What has no noise floor is tied where it is equal.
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
   * (head,) 1 where a bound says nothing of a head, as σ of either side is at most 0.5; null of what holds in any.
   * @returns {Uint8Array | null}
   */
  unproven() {
    const sigma = this.trace.measure("sigma_stage1");
    if (!this.measure.key.startsWith("theta_hat") || sigma < 0) return null;
    const [first, second] = [this.values(this.baseline, sigma), this.values(this.treatment, sigma)];
    return Uint8Array.from(first, (value, head) => Number(Math.min(value, second[head]) <= EVIDENCE));
  }

  /**
   * (head,) by what a map shows the change: the binary logarithm of a ratio, or a difference.
   * @returns {Float32Array}
   */
  changes() {
    const [first, second] = [this.values(this.baseline), this.values(this.treatment)];
    const ratios = this.measure.compare === "ratio";
    return first.map((value, head) => (ratios ? logRatio(value, second[head]) : second[head] - value));
  }

  /**
   * An array that is there by now.
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
