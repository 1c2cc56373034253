// A trace's arrays: what their bytes mean.

import { block, unshuffled } from "./bytes.js";

/** @typedef {{kind: "log" | "linear", low: number, step: number}} Scale */
/** @typedef {{block: string, dtype: "u1" | "u2" | "f4", shape: number[], shuffled: boolean, scale: Scale | Scale[] | null, measures?: number[]}} Stored */
/** @typedef {{shape: number[], values: Float32Array | Uint16Array | Uint8Array, scale: Scale | Scale[] | null}} Held */

const WIDTH = { u1: 1, u2: 2, f4: 4 };
const NOTHING = 65534;
const ENDLESS = 65535;

/**
 * An array as it is stored: codes where it is quantised.
 * @param {Stored} told
 * @returns {Promise<Held>}
 */
export async function held(told) {
  const raw = await block(told.block);
  const width = WIDTH[told.dtype];
  const bytes = told.shuffled ? unshuffled(raw, width) : raw.slice();
  const values =
    told.dtype === "u1" ? bytes : told.dtype === "u2" ? new Uint16Array(bytes.buffer) : new Float32Array(bytes.buffer);
  return { shape: told.shape, values, scale: told.scale };
}

/**
 * The part of an array behind the first of its axes, as numbers.
 * @param {Held} array
 * @param {number[]} places along the first axes
 * @returns {Float32Array}
 */
export function part(array, ...places) {
  let size = 1;
  for (const length of array.shape.slice(places.length)) size *= length;
  let start = 0;
  places.forEach((place, axis) => {
    start = start * array.shape[axis] + place;
  });
  const codes = array.values.subarray(start * size, (start + 1) * size);
  const scale = Array.isArray(array.scale) ? array.scale[places[0]] : array.scale;
  if (!scale) return codes instanceof Float32Array ? codes : Float32Array.from(codes);
  return Float32Array.from(codes, (code) => valueOf(code, scale));
}

/**
 * One number of an array.
 * @param {Held} array
 * @param {number[]} places along all of its axes
 * @returns {number}
 */
export function at(array, ...places) {
  let start = 0;
  places.forEach((place, axis) => {
    start = start * array.shape[axis] + place;
  });
  const scale = Array.isArray(array.scale) ? array.scale[places[0]] : array.scale;
  return scale ? valueOf(array.values[start], scale) : array.values[start];
}

/**
 * What a code of two bytes stands for.
 * @param {number} code
 * @param {Scale} scale
 * @returns {number}
 */
export function valueOf(code, scale) {
  if (code === ENDLESS) return Infinity;
  if (code === NOTHING) return NaN;
  if (scale.kind === "linear") return scale.low + code * scale.step;
  return code === 0 ? 0 : Math.exp(scale.low + (code - 1) * scale.step);
}

/**
 * One of verdicts that lie four in a byte: 0 tied, 1 better, 2 worse.
 * @param {Uint8Array} bytes
 * @param {number} place
 * @returns {number}
 */
export function verdictAt(bytes, place) {
  return (bytes[place >> 2] >> (2 * (place & 3))) & 3;
}
