// How a token looks: by who keeps it, by how many heads do, by the attention it gets.

import { number, percent, percentOf } from "./format.js";
import { attentionOf, headOf, sharesOf } from "./kept.js";

/** @typedef {import("./seen.js").Seen} Seen */
/** @typedef {import("./kept.js").Text} Text */
/** @typedef {import("./kept.js").Loss} Loss */
/** @typedef {{look: import("./tokens.js").Look, says: (place: number) => string[], strip: (place: number) => number, keys: [string, string][],
 *   losses: {baseline: Loss[], treatment: Loss[]} | null, note: string}} Looks */

const FATES = ["none", "baseline", "treatment", "both"];
const WORDS = { none: "neither keeps it", baseline: "only the baseline keeps it", treatment: "only the treatment keeps it", both: "both keep it" };

/**
 * How the tokens of a prompt look under the present choice.
 * @param {Seen} seen
 * @param {number} sample
 * @param {Text} text
 * @returns {Promise<Looks>}
 */
export async function looks(seen, sample, text) {
  const { colour } = seen.choice;
  if (colour === "shares") return byShares(seen, sample, text);
  if (colour === "attention") return byAttention(seen, await attentionOf(seen.trace, sample), "mean over heads");
  const own = seen.head < 0 ? null : await headOf(seen.trace, sample, seen.head, text.compressed);
  if (!own) return plain(left(seen));
  if (colour === "head-attention") return byAttention(seen, own.attention, `head ${seen.choice.head}`);
  const kept = [seen.baseline, seen.treatment].map((config) => own.kept(config));
  const losses = { baseline: own.losses(seen.baseline), treatment: own.losses(seen.treatment) };
  return byFate(seen, text, kept, losses);
}

/** @param {Seen} seen */
function left(seen) {
  if (seen.told.lacks.kept) return seen.told.lacks.kept;
  return `What head ${seen.choice.head} keeps of this prompt is not in the page. ${seen.told.held_heads.why} ` +
    "Choose a head from the list beside, or colour by the share of heads.";
}

/**
 * @param {Seen} seen
 * @param {Text} text
 * @param {Uint8Array[]} kept of both sides
 * @param {{baseline: Loss[], treatment: Loss[]}} losses
 * @returns {Looks}
 */
function byFate(seen, text, [first, second], losses) {
  const lost = new Set([...losses.baseline, ...losses.treatment].map((loss) => loss.position));
  const fate = (/** @type {number} */ place) => FATES[first[place] + 2 * second[place]];
  const inside = (/** @type {number} */ place) => place < text.compressed;
  const counts = d3.rollup(d3.range(text.compressed), (group) => group.length, fate);
  const key = (/** @type {"none"|"baseline"|"treatment"|"both"} */ name) => `${WORDS[name]} (${(counts.get(name) || 0).toLocaleString("en")})`;
  return {
    look: (place) => ({ mark: inside(place) ? `${fate(place)}${lost.has(place) ? " lost" : ""}` : "question", level: 0 }),
    says: (place) => [
      inside(place) ? WORDS[/** @type {keyof typeof WORDS} */ (fate(place))] : "question: not compressed",
      ...["baseline", "treatment"].flatMap((side) => told(losses[/** @type {"baseline"|"treatment"} */ (side)], side, place)),
    ],
    strip: (place) => (inside(place) ? FATES.indexOf(fate(place)) : 0),
    keys: [["both", key("both")], ["baseline", key("baseline")], ["treatment", key("treatment")], ["none", key("none")],
      ...(lost.size ? /** @type {[string, string][]} */ ([["lost", "evicted, among the ten that add most to the output"]]) : [])],
    losses,
    note: `layer-head ${seen.choice.head}`,
  };
}

/**
 * @param {Loss[]} losses
 * @param {string} side
 * @param {number} place
 */
function told(losses, side, place) {
  const at = losses.findIndex((loss) => loss.position === place);
  return at < 0 ? [] : [`no. ${at + 1} of what the ${side} evicts: ${percentOf(losses[at].share)} of Σ A ν`];
}

/**
 * @param {Seen} seen
 * @param {number} sample
 * @param {Text} text
 * @returns {Promise<Looks>}
 */
async function byShares(seen, sample, text) {
  const [first, second] = await Promise.all([seen.baseline, seen.treatment].map((config) => sharesOf(seen.trace, sample, config)));
  if (!first || !second) return plain(seen.told.lacks.kept || "The page was made without the kept entries of this prompt; --full keeps all.");
  const change = (/** @type {number} */ place) => second[place] - first[place];
  return {
    look: (place) => (place < text.compressed
      ? { mark: Math.abs(change(place)) < 0.02 ? "none" : change(place) > 0 ? "more" : "less", level: Math.min(1, 2.5 * Math.abs(change(place))) }
      : { mark: "question", level: 0 }),
    says: (place) => (place < text.compressed
      ? [`heads that keep it: ${percent(first[place])} % → ${percent(second[place])} %`] : ["question: not compressed"]),
    strip: (place) => (place < text.compressed && Math.abs(change(place)) >= 0.05 ? (change(place) > 0 ? 2 : 1) : 0),
    keys: [["less", `more of the ${seen.trace.size} heads keep it under the baseline`], ["more", "under the treatment"],
      ["none", "as many, within 2 points; darkest: 40 points or more"]],
    losses: null,
    note: `share of all heads: ${seen.choice.treatment} − ${seen.choice.baseline}`,
  };
}

/**
 * @param {Seen} seen
 * @param {Float32Array | null} attention
 * @param {string} whose
 * @returns {Looks}
 */
function byAttention(seen, attention, whose) {
  if (!attention) return plain(seen.told.lacks.attention || "The page has no attention of this head.");
  const most = Math.max(...attention) || 1;
  const level = (/** @type {number} */ place) => (attention[place] > 0 ? Math.max(0, 1 + Math.log10(attention[place] / most) / 4) : 0);
  return {
    look: (place) => (place < attention.length ? { mark: "attended", level: level(place) } : { mark: "question", level: 0 }),
    says: (place) => [place < attention.length ? `attention ${number(attention[place])}, ${whose}` : "question"],
    strip: (place) => (place < attention.length && level(place) > 0.5 ? 2 : 0),
    keys: [["attended", "the darker, the more attention (logarithmic, four decades)"]],
    losses: null,
    note: `attention of the first decode step, ${whose}`,
  };
}

/**
 * @param {string} note
 * @returns {Looks}
 */
function plain(note) {
  return { look: () => ({ mark: "", level: 0 }), says: () => [], strip: () => 0, keys: [], losses: null, note };
}
