// How a token looks: by who keeps it, by how many heads do, by the attention it gets.

import { number, percent, percentOf } from "./format.js";
import { meanAttention, keptOfHead, keptShares } from "./kept.js";

/** @typedef {import("./view.js").View} View */
/** @typedef {import("./kept.js").Text} Text */
/** @typedef {import("./kept.js").Loss} Loss */
/** @typedef {{look: import("./tokens.js").Look, says: (index: number) => string[], strip: (index: number) => number, keys: [string, string][],
 *   losses: {baseline: Loss[], treatment: Loss[]} | null, note: string}} Looks */

const FATES = ["none", "baseline", "treatment", "both"];
const WORDS = { none: "neither keeps it", baseline: "only the baseline keeps it", treatment: "only the treatment keeps it", both: "both keep it" };

/**
 * Return how the tokens of a prompt look under the current choice.
 * @param {View} view
 * @param {number} sample
 * @param {Text} text
 * @returns {Promise<Looks>}
 */
export async function looks(view, sample, text) {
  const { colour } = view.choice;
  if (colour === "shares") return byShares(view, sample, text);
  if (colour === "attention") return byAttention(view, await meanAttention(view.trace, sample), "mean over heads");
  const own = view.head < 0 ? null : await keptOfHead(view.trace, sample, view.head, text.compressed);
  if (!own) return withoutColours(leftOutNote(view));
  if (colour === "head-attention") return byAttention(view, own.attention, `head ${view.choice.head}`);
  const kept = [view.baseline, view.treatment].map((config) => own.kept(config));
  const losses = { baseline: own.losses(view.baseline), treatment: own.losses(view.treatment) };
  return byFate(view, text, kept, losses);
}

/** @param {View} view */
function leftOutNote(view) {
  if (view.data.lacks.kept) return view.data.lacks.kept;
  return `What head ${view.choice.head} keeps of this prompt is not in the page. ${view.data.held_heads.why} ` +
    "Choose a head from the list beside, or colour by the share of heads.";
}

/**
 * @param {View} view
 * @param {Text} text
 * @param {Uint8Array[]} kept of both sides
 * @param {{baseline: Loss[], treatment: Loss[]}} losses
 * @returns {Looks}
 */
function byFate(view, text, [first, second], losses) {
  const lost = new Set([...losses.baseline, ...losses.treatment].map((loss) => loss.position));
  const fate = (/** @type {number} */ index) => FATES[first[index] + 2 * second[index]];
  const inside = (/** @type {number} */ index) => index < text.compressed;
  const counts = d3.rollup(d3.range(text.compressed), (group) => group.length, fate);
  const key = (/** @type {"none"|"baseline"|"treatment"|"both"} */ name) => `${WORDS[name]} (${(counts.get(name) || 0).toLocaleString("en")})`;
  return {
    look: (index) => ({ mark: inside(index) ? `${fate(index)}${lost.has(index) ? " lost" : ""}` : "question", level: 0 }),
    says: (index) => [
      inside(index) ? WORDS[/** @type {keyof typeof WORDS} */ (fate(index))] : "question: not compressed",
      ...["baseline", "treatment"].flatMap((side) => lossText(losses[/** @type {"baseline"|"treatment"} */ (side)], side, index)),
    ],
    strip: (index) => (inside(index) ? FATES.indexOf(fate(index)) : 0),
    keys: [["both", key("both")], ["baseline", key("baseline")], ["treatment", key("treatment")], ["none", key("none")],
      ...(lost.size ? /** @type {[string, string][]} */ ([["lost", "evicted, among the ten that add most to the output"]]) : [])],
    losses,
    note: `layer-head ${view.choice.head}`,
  };
}

/**
 * @param {Loss[]} losses
 * @param {string} side
 * @param {number} index
 */
function lossText(losses, side, index) {
  const at = losses.findIndex((loss) => loss.position === index);
  return at < 0 ? [] : [`no. ${at + 1} of what the ${side} evicts: ${percentOf(losses[at].share)} of Σ A ν`];
}

/**
 * @param {View} view
 * @param {number} sample
 * @param {Text} text
 * @returns {Promise<Looks>}
 */
async function byShares(view, sample, text) {
  const [first, second] = await Promise.all([view.baseline, view.treatment].map((config) => keptShares(view.trace, sample, config)));
  if (!first || !second) return withoutColours(view.data.lacks.kept || "The page was made without the kept entries of this prompt; --full keeps all.");
  const change = (/** @type {number} */ index) => second[index] - first[index];
  return {
    look: (index) => (index < text.compressed
      ? { mark: Math.abs(change(index)) < 0.02 ? "none" : change(index) > 0 ? "more" : "less", level: Math.min(1, 2.5 * Math.abs(change(index))) }
      : { mark: "question", level: 0 }),
    says: (index) => (index < text.compressed
      ? [`heads that keep it: ${percent(first[index])} % → ${percent(second[index])} %`] : ["question: not compressed"]),
    strip: (index) => (index < text.compressed && Math.abs(change(index)) >= 0.05 ? (change(index) > 0 ? 2 : 1) : 0),
    keys: [["less", `more of the ${view.trace.size} heads keep it under the baseline`], ["more", "under the treatment"],
      ["none", "as many, within 2 points; darkest: 40 points or more"]],
    losses: null,
    note: `share of all heads: ${view.choice.treatment} − ${view.choice.baseline}`,
  };
}

/**
 * @param {View} view
 * @param {Float32Array | null} attention
 * @param {string} whose
 * @returns {Looks}
 */
function byAttention(view, attention, whose) {
  if (!attention) return withoutColours(view.data.lacks.attention || "The page has no attention of this head.");
  const most = Math.max(...attention) || 1;
  const level = (/** @type {number} */ index) => (attention[index] > 0 ? Math.max(0, 1 + Math.log10(attention[index] / most) / 4) : 0);
  return {
    look: (index) => (index < attention.length ? { mark: "attended", level: level(index) } : { mark: "question", level: 0 }),
    says: (index) => [index < attention.length ? `attention ${number(attention[index])}, ${whose}` : "question"],
    strip: (index) => (index < attention.length && level(index) > 0.5 ? 2 : 0),
    keys: [["attended", "the darker, the more attention (logarithmic, four decades)"]],
    losses: null,
    note: `attention of the first decode step, ${whose}`,
  };
}

/**
 * @param {string} note
 * @returns {Looks}
 */
function withoutColours(note) {
  return { look: () => ({ mark: "", level: 0 }), says: () => [], strip: () => 0, keys: [], losses: null, note };
}
