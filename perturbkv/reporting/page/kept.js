// What heads keep of one prompt: its text, the share of heads that keep each token, and single heads as far as held.

import { block, inflated, stored } from "./bytes.js";

/** @typedef {import("./trace.js").Trace} Trace */
/** @typedef {{pieces: string[], compressed: number, cut: number | null, cut_tokens: number}} Text */
/** @typedef {{position: number, share: number}} Loss */
/** @typedef {{kept: (config: number) => Uint8Array, losses: (config: number) => Loss[], attention: Float32Array | null}} HeadKept */

const ATTENTION_STEP = 0.08;
const SHARE_STEP = 0.0005;

/**
 * A prompt's tokens as text; null where the page has none of the sample.
 * @param {Trace} trace
 * @param {number} sample
 * @returns {Promise<Text | null>}
 */
export async function textOf(trace, sample) {
  const told = trace.told.prompts[sample];
  return told?.text ? JSON.parse(new TextDecoder().decode(await block(told.text))) : null;
}

/**
 * (token,) share of heads that keep it under a configuration; null where the page does not say.
 * @param {Trace} trace
 * @param {number} sample
 * @param {number} config
 * @returns {Promise<Float32Array | null>}
 */
export async function sharesOf(trace, sample, config) {
  const id = trace.told.prompts[sample]?.share;
  if (!id) return null;
  const bytes = await block(id);
  const tokens = bytes.length / trace.told.configs.length;
  return Float32Array.from(bytes.subarray(config * tokens, (config + 1) * tokens), (code) => code / 255);
}

/**
 * (token,) attention at the first decode step, mean over heads; null where the page does not say.
 * @param {Trace} trace
 * @param {number} sample
 * @returns {Promise<Float32Array | null>}
 */
export async function attentionOf(trace, sample) {
  const id = trace.told.prompts[sample]?.attention;
  return id ? attention(await block(id)) : null;
}

/**
 * What one head keeps; null where the page left it out.
 * @param {Trace} trace
 * @param {number} sample
 * @param {number} head
 * @param {number} tokens that are compressed
 * @returns {Promise<HeadKept | null>}
 */
export async function headOf(trace, sample, head, tokens) {
  const told = trace.told.prompts[sample];
  const place = told?.held ? told.held.indexOf(head) : -1;
  if (!told?.heads || place < 0) return null;
  const bytes = stored(told.heads).subarray(place ? told.ends[place - 1] : 0, told.ends[place]);
  return read(await inflated(bytes), trace.told.configs.length, tokens, trace.told.losses);
}

/**
 * @param {Uint8Array} bytes
 * @param {number} configs
 * @param {number} tokens
 * @param {number} most lost entries of each
 * @returns {HeadKept}
 */
function read(bytes, configs, tokens, most) {
  const width = Math.ceil(tokens / 8);
  const masks = bytes.slice(0, configs * width);
  for (let place = width; place < masks.length; place++) masks[place] ^= masks[place - width];
  const behind = configs * width;
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const shares = behind + configs * most * 4;
  const rest = shares + configs * most * 2;
  return {
    kept: (config) => unpacked(masks.subarray(config * width, (config + 1) * width), tokens),
    losses: (config) => Array.from({ length: most }, (_, place) => ({
      position: view.getInt32(behind + 4 * (config * most + place), true),
      share: shareOf(view.getUint16(shares + 2 * (config * most + place), true)),
    })).filter((loss) => loss.position >= 0),
    attention: rest + tokens <= bytes.length ? attention(bytes.subarray(rest, rest + tokens)) : null,
  };
}

/** @param {number} code */
function shareOf(code) {
  return code === 0 ? 0 : Math.exp((code - 65535) * SHARE_STEP);
}

/** @param {Uint8Array} codes */
function attention(codes) {
  return Float32Array.from(codes, (code) => (code === 0 ? 0 : Math.exp((code - 255) * ATTENTION_STEP)));
}

/**
 * @param {Uint8Array} bytes lowest bits first
 * @param {number} count
 */
function unpacked(bytes, count) {
  const bits = new Uint8Array(count);
  for (let place = 0; place < count; place++) bits[place] = (bytes[place >> 3] >> (place & 7)) & 1;
  return bits;
}
