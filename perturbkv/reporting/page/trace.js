// One trace of the page: its document, and its arrays as far as they are loaded.

import { loadArray } from "./numbers.js";

/** @typedef {import("./page_data.js").TraceData} TraceData */
/** @typedef {import("./numbers.js").LoadedArray} LoadedArray */

const LATER = new Set(["sample", "drift_sample", "step_mean"]);

export class Trace {
  /** @param {TraceData} data */
  constructor(data) {
    this.data = data;
    /** @type {Map<string, LoadedArray>} */
    this.arrays = new Map();
    /** @type {Map<string, number>} */
    this.pairs = new Map(data.pairs.map(([first, second], index) => [`${first}-${second}`, index]));
    this.size = data.layers.length * data.heads;
  }

  /** Load the arrays that the first drawing needs. */
  async loadFirst() {
    await this.load(Object.keys(this.data.arrays).filter((name) => !LATER.has(name)));
  }

  /** Load the arrays of single samples and decode steps. */
  async loadRest() {
    await this.load(Object.keys(this.data.arrays).filter((name) => LATER.has(name)));
  }

  /** @param {string[]} names */
  async load(names) {
    const wanted = names.filter((name) => !this.arrays.has(name));
    const found = await Promise.all(wanted.map((name) => loadArray(this.data.arrays[name])));
    wanted.forEach((name, index) => this.arrays.set(name, found[index]));
  }

  /**
   * Return a loaded array; null where the trace lacks it or it is not loaded yet.
   * @param {string} name
   * @returns {LoadedArray | null}
   */
  array(name) {
    return this.arrays.get(name) || null;
  }

  /**
   * Return the index of a measure; −1 where the trace lacks it.
   * @param {string} key
   */
  measure(key) {
    return this.data.measures.findIndex((one) => one.key === key);
  }

  /**
   * Return the index of a configuration; −1 where the trace lacks it.
   * @param {string} side
   * @param {string} budget
   */
  config(side, budget) {
    const { sides, budgets, configs } = this.data;
    const wanted = [sides.indexOf(side), budgets.indexOf(budget)];
    return configs.findIndex((one) => one.side === wanted[0] && one.budget === wanted[1]);
  }

  /**
   * Return a head's name as 'layer-head'.
   * @param {number} index in the flat order of heads
   */
  headName(index) {
    const { layers, heads } = this.data;
    return `${layers[Math.floor(index / heads)]}-${index % heads}`;
  }

  /**
   * Return a head's index in the flat order of heads from its name; −1 for one that the trace lacks.
   * @param {string} name
   */
  headIndex(name) {
    const [layer, head] = name.split("-").map(Number);
    const { layers, heads } = this.data;
    const index = layers.indexOf(layer);
    return index >= 0 && Number.isInteger(head) && head >= 0 && head < heads ? index * heads + head : -1;
  }
}
