// A trace's arrays: what their bytes mean.

import { inflatedBlock, joinPlanes } from "./bytes.js";

/** @typedef {{kind: "log" | "linear", low: number, step: number}} Scale */
/** @typedef {{block: string, dtype: "u1" | "u2" | "f4", shape: number[], shuffled: boolean, scale: Scale | Scale[] | null, measures?: number[]}} Stored */
/** @typedef {{shape: number[], values: Float32Array | Uint16Array | Uint8Array, scale: Scale | Scale[] | null}} LoadedArray */

const WIDTH = { u1: 1, u2: 2, f4: 4 };
const NOTHING = 65534;
const ENDLESS = 65535;

/**
 * Return an array as it is stored, with codes where it is quantised.
 * @param {Stored} stored
 * @returns {Promise<LoadedArray>}
 */
export async function loadArray(stored) {
  const raw = await inflatedBlock(stored.block);
  const width = WIDTH[stored.dtype];
  const bytes = stored.shuffled ? joinPlanes(raw, width) : raw.slice();
  const values =
    stored.dtype === "u1" ? bytes : stored.dtype === "u2" ? new Uint16Array(bytes.buffer) : new Float32Array(bytes.buffer);
  return { shape: stored.shape, values, scale: stored.scale };
}

/**
 * Return the numbers of an array at indices along its first axes.
 * @param {LoadedArray} array
 * @param {number[]} indices along the first axes
 * @returns {Float32Array}
 */
export function part(array, ...indices) {
  let size = 1;
  for (const length of array.shape.slice(indices.length)) size *= length;
  let start = 0;
  indices.forEach((index, axis) => {
    start = start * array.shape[axis] + index;
  });
  const codes = array.values.subarray(start * size, (start + 1) * size);
  const scale = Array.isArray(array.scale) ? array.scale[indices[0]] : array.scale;
  if (!scale) return codes instanceof Float32Array ? codes : Float32Array.from(codes);
  return Float32Array.from(codes, (code) => decodeValue(code, scale));
}

/**
 * Return one number of an array.
 * @param {LoadedArray} array
 * @param {number[]} indices along all of its axes
 * @returns {number}
 */
export function at(array, ...indices) {
  let start = 0;
  indices.forEach((index, axis) => {
    start = start * array.shape[axis] + index;
  });
  const scale = Array.isArray(array.scale) ? array.scale[indices[0]] : array.scale;
  return scale ? decodeValue(array.values[start], scale) : array.values[start];
}

/**
 * Return the number of a two-byte code.
 * @param {number} code
 * @param {Scale} scale
 * @returns {number}
 */
export function decodeValue(code, scale) {
  if (code === ENDLESS) return Infinity;
  if (code === NOTHING) return NaN;
  if (scale.kind === "linear") return scale.low + code * scale.step;
  return code === 0 ? 0 : Math.exp(scale.low + (code - 1) * scale.step);
}

/**
 * Return one of the verdicts that are packed four to a byte: 0 tied, 1 better, 2 worse.
 * @param {Uint8Array} bytes
 * @param {number} index
 * @returns {number}
 */
export function verdictAt(bytes, index) {
  return (bytes[index >> 2] >> (2 * (index & 3))) & 3;
}
