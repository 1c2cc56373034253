// What later steps needed of the text and did not have (METHOD, decode-time eviction), token by token.

import { jsonBlock } from "./bytes.js";
import { fill, inColumns, lacking, make, table } from "./dom.js";
import { number, percentOf, plural, short } from "./format.js";
import { Tokens } from "./tokens.js";
import { hide as hideTip, show as showTip } from "./tooltip.js";

/** @typedef {import("./view.js").View} View */
/**
 * @typedef {{has_text: boolean, pieces: string[], missed: (number | null)[][], held: number[][], compressions: number[][],
 *   gone: (number | null)[][]}} Read numbers by configuration, then by step or place; null where others compress the cache
 */

const LISTED = 5;
/** @type {WeakMap<HTMLElement, View>} pane -> the view that it was last asked to draw */
const asked = new WeakMap();
/** @type {WeakMap<HTMLElement, Tokens[]>} */
const texts = new WeakMap();

export const missed = {
  id: "missed",
  needs: ["baseline", "treatment", "budget", "sample"],
  /**
   * @param {HTMLElement} pane
   * @param {View} view
   */
  async draw(pane, view) {
    asked.set(pane, view);
    const found = view.data.missed;
    if (!found) return fill(pane, lacking("The caches of this trace were not compressed again while the text was read: perturbkv trace --compress-every."));
    if (view.baseline < 0 || view.treatment < 0) return fill(pane, lacking(view.lacking));
    const sample = Math.max(0, view.sample);
    const block = found.blocks[sample];
    if (!block) return fill(pane, lacking("The text of this sample is left out to keep the page small; --full keeps all."));
    const read = /** @type {Read} */ (await jsonBlock(block));
    if (asked.get(pane) !== view) return;
    texts.get(pane)?.forEach((one) => one.close());
    const configs = [...new Set([view.baseline, view.treatment])];
    const most = Math.max(...configs.flatMap((config) => read.missed[config].map(Number)));
    const made = configs.map((config) => new Tokens(textBox(view, sample, config, read), shownText(read), (step, event) => hover(read, config, step, event)));
    texts.set(pane, made);
    made.forEach((one, index) => one.paint(look(read, configs[index], most)));
    const several = view.sample < 0 && view.data.samples.length > 1;
    const caption = `the text that the steps of sample ${view.data.samples[sample].id} read${several ? ", the first; choose another above" : ""}`;
    fill(pane, make("p", { class: "caption" }, `${caption} · ${plural(read.pieces.length, "token")}`), legend(most),
      inColumns(pane, 2, () => configs.map((config, index) => make("div", null, heading(view, config), words(found.places, read, config),
        made[index].box, listed(read, config)))));
  },
};

/**
 * Return the text as `Tokens` shows it: of a trace without text, steps with the ids of their tokens.
 * @param {Read} read
 */
function shownText(read) {
  const pieces = read.has_text ? read.pieces : read.pieces.map((id, step) => `${step}: ${id}`);
  return { pieces, compressed: 0, cut: null, cut_tokens: 0 };
}

/**
 * @param {Read} read
 * @param {number} step
 */
function tokenName(read, step) {
  return read.has_text ? `“${short(read.pieces[step])}”` : `token ${read.pieces[step]}`;
}

/**
 * Return how many entries the queries of a step attend to, mean over layers and heads.
 * @param {Read} read
 * @param {number} config
 * @param {number} step
 */
function heldEntries(read, config, step) {
  return read.held[config][step].toLocaleString("en", { maximumFractionDigits: 1 });
}

/**
 * @param {View} view
 * @param {number} sample
 * @param {number} config
 * @param {Read} read
 */
function textBox(view, sample, config, read) {
  return make("div", { class: read.has_text ? "text steps" : "text steps ids", tabindex: "0", role: "region", dir: "auto",
    "aria-label": `Text of ${view.data.samples[sample].id} under ${view.data.configs[config].label}` });
}

/**
 * @param {Read} read
 * @param {number} config
 * @param {number} most
 * @returns {import("./tokens.js").Look}
 */
function look(read, config, most) {
  const steps = new Set(read.compressions[config]);
  return (step) => ({ mark: steps.has(step) ? "missed compression" : "missed", level: most ? Number(read.missed[config][step]) / most : 0 });
}

/** @param {number} most */
function legend(most) {
  return make("p", { class: "legend" }, "0", make("span", { class: "swatch missed", "aria-hidden": "true" }, "a scale"),
    `${number(most)}: attention of later steps on the token while it was gone, sum over the steps, mean over layers and heads`,
    make("span", { class: "key" }, make("span", { class: "swatch compression", "aria-hidden": "true" }, "abc"), " the cache was compressed right before"));
}

/**
 * @param {View} view
 * @param {number} config
 */
function heading(view, config) {
  const side = config === view.treatment ? "treatment" : "baseline";
  return make("h3", { class: `key ${side}` }, make("b", null, `${view.choice[side]} · ${view.choice.budget}`));
}

/**
 * Return the line on the attention that fell on what was gone, and on the compressions.
 * @param {string[]} places
 * @param {Read} read
 * @param {number} config
 */
function words(places, read, config) {
  const gone = read.gone[config].map((share) => share ?? NaN);
  if (gone.some(Number.isNaN)) return lacking("Others compress this cache: nothing is known of what is gone from it.");
  const parts = places.map((place, index) => `${place} ${percentOf(gone[index])}`).join(", ");
  return make("p", { class: "said" }, `Of the attention of all steps, ${percentOf(d3.sum(gone))} fell on what was gone: ${parts}. `
    + `The cache was compressed before ${read.compressions[config].length} of ${plural(read.pieces.length, "step")}.`);
}

/**
 * Return a table of the tokens that were missed most.
 * @param {Read} read
 * @param {number} config
 */
function listed(read, config) {
  const numbers = read.missed[config].map(Number);
  const steps = d3.sort(d3.range(numbers.length).filter((step) => numbers[step] > 0), (step) => -numbers[step]).slice(0, LISTED);
  if (read.missed[config].includes(null)) return null;
  if (!steps.length) return make("p", { class: "legend" }, "No later step attended to a token of the text that was gone.");
  const rows = steps.map((step) => [make("span", { class: "answer" }, tokenName(read, step)), String(step), number(numbers[step]), heldEntries(read, config, step)]);
  return table("missed most", ["token", "#step", "#missed", "#entries held"], rows);
}

/**
 * @param {Read} read
 * @param {number} config
 * @param {number} step
 * @param {PointerEvent} event
 */
function hover(read, config, step, event) {
  if (step < 0) return hideTip();
  const missed = read.missed[config][step];
  const numbers = missed === null ? [] : [`missed ${number(missed)}`, `${heldEntries(read, config, step)} entries held`];
  showTip(event, [tokenName(read, step), `step ${step}`, ...numbers,
    ...(read.compressions[config].includes(step) ? ["the cache was compressed right before"] : [])]);
}
