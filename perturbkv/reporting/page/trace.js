// One trace of the page: its document, and its arrays as far as they are loaded.

import { held } from "./numbers.js";

/** @typedef {import("./told.js").Told} Told */
/** @typedef {import("./numbers.js").Held} Held */

const LATER = new Set(["sample", "drift_sample", "step_mean"]);

export class Trace {
  /** @param {Told} told */
  constructor(told) {
    this.told = told;
    /** @type {Map<string, Held>} */
    this.arrays = new Map();
    /** @type {Map<string, number>} */
    this.pairs = new Map(told.pairs.map(([first, second], place) => [`${first}-${second}`, place]));
    this.size = told.layers.length * told.heads;
  }

  /** Load what the first look needs. */
  async open() {
    await this.load(Object.keys(this.told.arrays).filter((name) => !LATER.has(name)));
  }

  /** Load what single samples and steps need. */
  async rest() {
    await this.load(Object.keys(this.told.arrays).filter((name) => LATER.has(name)));
  }

  /** @param {string[]} names */
  async load(names) {
    const wanted = names.filter((name) => !this.arrays.has(name));
    const found = await Promise.all(wanted.map((name) => held(this.told.arrays[name])));
    wanted.forEach((name, place) => this.arrays.set(name, found[place]));
  }

  /**
   * An array that is loaded; null where the trace has none, or not yet.
   * @param {string} name
   * @returns {Held | null}
   */
  array(name) {
    return this.arrays.get(name) || null;
  }

  /**
   * The place of a measure; −1 where the trace lacks it.
   * @param {string} key
   */
  measure(key) {
    return this.told.measures.findIndex((one) => one.key === key);
  }

  /**
   * The place of a configuration; −1 where there is none.
   * @param {string} side
   * @param {string} budget
   */
  config(side, budget) {
    const { sides, budgets, configs } = this.told;
    const wanted = [sides.indexOf(side), budgets.indexOf(budget)];
    return configs.findIndex((one) => one.side === wanted[0] && one.budget === wanted[1]);
  }

  /**
   * A head's name, as analyses write it: layer-head.
   * @param {number} place in the flat order of heads
   */
  headName(place) {
    const { layers, heads } = this.told;
    return `${layers[Math.floor(place / heads)]}-${place % heads}`;
  }

  /**
   * The flat place of a head's name; −1 for one that the trace lacks.
   * @param {string} name
   */
  headPlace(name) {
    const [layer, head] = name.split("-").map(Number);
    const { layers, heads } = this.told;
    const place = layers.indexOf(layer);
    return place >= 0 && Number.isInteger(head) && head >= 0 && head < heads ? place * heads + head : -1;
  }
}
