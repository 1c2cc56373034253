// What heads keep of one prompt: its text, the share of heads that keep each token, and single heads as far as held.

import { inflatedBlock, inflate, blockBytes, jsonBlock } from "./bytes.js";

/** @typedef {import("./trace.js").Trace} Trace */
/** @typedef {{pieces: string[], compressed: number, cut: number | null, cut_tokens: number}} Text */
/** @typedef {{position: number, share: number}} Loss */
/** @typedef {{kept: (config: number) => Uint8Array, losses: (config: number) => Loss[], attention: Float32Array | null}} HeadKept */

const ATTENTION_STEP = 0.08;
const SHARE_STEP = 0.0005;

/**
 * Return a prompt's tokens as text; null where the page has none of the sample.
 * @param {Trace} trace
 * @param {number} sample
 * @returns {Promise<Text | null>}
 */
export async function promptText(trace, sample) {
  const blocks = trace.data.prompts[sample];
  return blocks?.text ? jsonBlock(blocks.text) : null;
}

/**
 * Return (token,) the share of heads that keep each token under a configuration; null where the page lacks it.
 * @param {Trace} trace
 * @param {number} sample
 * @param {number} config
 * @returns {Promise<Float32Array | null>}
 */
export async function keptShares(trace, sample, config) {
  const id = trace.data.prompts[sample]?.share;
  if (!id) return null;
  const bytes = await inflatedBlock(id);
  const tokens = bytes.length / trace.data.configs.length;
  return Float32Array.from(bytes.subarray(config * tokens, (config + 1) * tokens), (code) => code / 255);
}

/**
 * Return (token,) attention at the first decode step, mean over heads; null where the page lacks it.
 * @param {Trace} trace
 * @param {number} sample
 * @returns {Promise<Float32Array | null>}
 */
export async function meanAttention(trace, sample) {
  const id = trace.data.prompts[sample]?.attention;
  return id ? decodeAttention(await inflatedBlock(id)) : null;
}

/**
 * Return one head's kept tokens, losses and attention; null where the page left them out.
 * @param {Trace} trace
 * @param {number} sample
 * @param {number} head
 * @param {number} tokens that are compressed
 * @returns {Promise<HeadKept | null>}
 */
export async function keptOfHead(trace, sample, head, tokens) {
  const blocks = trace.data.prompts[sample];
  const index = blocks?.held ? blocks.held.indexOf(head) : -1;
  if (!blocks?.heads || index < 0) return null;
  const bytes = blockBytes(blocks.heads).subarray(index ? blocks.ends[index - 1] : 0, blocks.ends[index]);
  return read(await inflate(bytes), trace.data.configs.length, tokens, trace.data.losses);
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
  for (let index = width; index < masks.length; index++) masks[index] ^= masks[index - width];
  const behind = configs * width;
  const bytesView = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const shares = behind + configs * most * 4;
  const rest = shares + configs * most * 2;
  return {
    kept: (config) => unpackBits(masks.subarray(config * width, (config + 1) * width), tokens),
    losses: (config) => Array.from({ length: most }, (_, index) => ({
      position: bytesView.getInt32(behind + 4 * (config * most + index), true),
      share: decodeShare(bytesView.getUint16(shares + 2 * (config * most + index), true)),
    })).filter((loss) => loss.position >= 0),
    attention: rest + tokens <= bytes.length ? decodeAttention(bytes.subarray(rest, rest + tokens)) : null,
  };
}

/** @param {number} code */
function decodeShare(code) {
  return code === 0 ? 0 : Math.exp((code - 65535) * SHARE_STEP);
}

/** @param {Uint8Array} codes */
function decodeAttention(codes) {
  return Float32Array.from(codes, (code) => (code === 0 ? 0 : Math.exp((code - 255) * ATTENTION_STEP)));
}

/**
 * @param {Uint8Array} bytes lowest bits first
 * @param {number} count
 */
function unpackBits(bytes, count) {
  const bits = new Uint8Array(count);
  for (let index = 0; index < count; index++) bits[index] = (bytes[index >> 3] >> (index & 7)) & 1;
  return bits;
}
