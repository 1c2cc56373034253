// Layers by heads: what the treatment changes in each head, or how far a side moves it.

import { layerColour, signed } from "./colours.js";
import { announce, fill, lacking, make, select, widthOf } from "./dom.js";
import { changeFormat, number, signedNumber } from "./format.js";
import { grid, legend, node } from "./grid.js";
import { BETTER, TIED, comparableViews } from "./view.js";
import { hide, show } from "./tooltip.js";
import { measureName } from "./words.js";

/** @typedef {import("./view.js").View} View */
/** @typedef {import("./choice.js").Chosen} Chosen */

const HIGHEST = 340;
/** Least change of log p, in nat, at the end of a colour scale. */
const LEAST_EFFECT = 1e-9;
/** @type {Record<string, number[]>} */
const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const SHOWN = [
  { value: "change", text: "what the treatment changes" },
  { value: "baseline", text: "the baseline" },
  { value: "treatment", text: "the treatment" },
];

export const map = {
  id: "map",
  needs: ["baseline", "treatment", "budget", "measure", "sample", "show", "head"],
  /**
   * @param {HTMLElement} controls
   * @param {Chosen} chosen
   */
  controls(controls, chosen) {
    fill(controls, select("Show", "show", SHOWN, chosen.now.show, (show) => chosen.choose({ show })));
  },
  /**
   * @param {HTMLElement} pane
   * @param {View} view
   * @param {Chosen} chosen
   */
  draw(pane, view, chosen) {
    if (view.lacking) return fill(pane, lacking(view.lacking));
    const change = view.choice.show === "change" && view.paired;
    const all = comparableViews(chosen);
    const scale = change ? changeScale(view, all) : view.measure.kind === "effect" ? effectScale(view, all) : valueScale(view, all);
    const had = pane.contains(document.activeElement) && document.activeElement instanceof SVGElement;
    const { layers, heads } = view.data;
    const drawn = grid(view.trace, {
      width: widthOf(pane), most: HIGHEST, colour: scale.colour, hatched: scale.hatched, chosen: view.head,
      label: `${scale.title}. Map of ${layers.length} layers by ${heads} heads; arrow keys choose a head.`,
    });
    drawn.svg.attr("tabindex", 0);
    follow(drawn, view, scale, chosen);
    fill(pane, make("p", { class: "caption" }, scale.title), node(drawn.svg),
      legend(scale.ends[0], scale.ends[1], scale.paint, change ? "tied" : ""),
      change && view.unproven() && make("p", { class: "legend" }, "empty: σ ≤ 0.5 on either side, where the bound is no evidence"));
    if (had) node(drawn.svg).focus({ preventScroll: true });
  },
};

/** @typedef {{title: string, colour: (head: number) => string, hatched: (head: number) => boolean, ends: [string, string], paint: (share: number) => string, text: (head: number) => string}} Scale */

/**
 * @param {View} view
 * @param {View[]} all that share the scale
 * @returns {Scale}
 */
function changeScale(view, all) {
  const changes = view.changes();
  const verdicts = view.verdicts();
  const ratios = view.measure.compare === "ratio";
  const sizes = all.filter((one) => one.paired).map((one) => Array.from(one.changes(), Math.abs));
  const least = ratios ? 0.14 : view.measure.kind === "effect" ? LEAST_EFFECT : 0.01;
  const widest = Math.max(...sizes.map((each) => quantile(each, 0.97)), least);
  const [less, more] = sizes.some((each) => each.some((one) => one > widest)) ? ["≤ ", "≥ "] : ["", ""];
  const paint = signed();
  const unproven = view.unproven();
  const side = view.measure.less ? 1 : -1;
  const written = changeFormat(view.measure);
  const end = (/** @type {number} */ sign) =>
    (sign < 0 ? less : more) + (ratios ? `× ${written(2 ** (sign * widest))}` : written(sign * widest));
  const [first, second] = [view.values(view.baseline), view.values(view.treatment)];
  return {
    title: `${view.choice.treatment} ${ratios ? "over" : "minus"} ${view.choice.baseline}: ${measureName(view.measure)}, ${view.of}`,
    colour: (head) => (Number.isNaN(changes[head]) || unproven?.[head] ? "none" : paint((-side * changes[head]) / widest)),
    hatched: (head) => verdicts[head] === TIED,
    ends: [`worse ${end(side)}`, `${end(-side)} better`],
    paint: (share) => paint(2 * share - 1),
    text: (head) =>
      `${number(first[head])} → ${number(second[head])} ${view.measure.unit}` +
      ` (${ratios ? `× ${written(second[head] / first[head])}` : written(second[head] - first[head])}), ` +
      (unproven?.[head] ? "σ ≤ 0.5: no evidence" : verdicts[head] === TIED ? "tied" : verdicts[head] === BETTER ? "better" : "worse"),
  };
}

/**
 * @param {number[]} values
 * @param {number} share
 */
function quantile(values, share) {
  return d3.quantile(values.filter(Number.isFinite), share) ?? 0;
}

/**
 * @param {View} view
 * @param {View[]} all that share the scale
 * @returns {Scale}
 */
function valueScale(view, all) {
  const name = view.choice.show === "baseline" ? "baseline" : "treatment";
  const values = view.values(view[name]);
  const log = view.measure.compare === "ratio";
  const finite = all.flatMap((one) => [one.baseline, one.treatment].map((config) =>
    Array.from(one.values(config)).filter((value) => !log || value > 0)));
  const low = Math.min(...finite.map((each) => quantile(each, 0.01)));
  const high = Math.max(...finite.map((each) => quantile(each, 0.99)));
  const at = log
    ? (/** @type {number} */ value) => Math.log(value / low) / (Math.log(high / low) || 1)
    : (/** @type {number} */ value) => (value - low) / (high - low || 1);
  const paint = layerColour();
  return {
    title: `${view.choice[name]}: ${measureName(view.measure)}, ${view.of}`,
    colour: (head) => (Number.isNaN(values[head]) ? "none" : paint(Math.max(0, Math.min(1, at(values[head]) || 0)))),
    hatched: () => false,
    ends: [`≤ ${number(low)}`, `≥ ${number(high)} ${view.measure.unit}${log ? ", logarithmic" : ""}`],
    paint,
    text: (head) => `${number(values[head])} ${view.measure.unit}`,
  };
}

/**
 * Return the scale of one side's changes of log p, 0 in its middle.
 * @param {View} view
 * @param {View[]} all that share the scale
 * @returns {Scale}
 */
function effectScale(view, all) {
  const name = view.choice.show === "baseline" ? "baseline" : "treatment";
  const values = view.values(view[name]);
  const sizes = all.flatMap((one) => [one.baseline, one.treatment].map((config) => Array.from(one.values(config), Math.abs)));
  const widest = Math.max(...sizes.map((each) => quantile(each, 0.99)), LEAST_EFFECT);
  const paint = signed();
  return {
    title: `${view.choice[name]}: ${measureName(view.measure)}, ${view.of}`,
    colour: (head) => (Number.isNaN(values[head]) ? "none" : paint(values[head] / widest)),
    hatched: () => false,
    ends: [`costs the text ≤ ${signedNumber(-widest)}`, `≥ ${signedNumber(widest)} ${view.measure.unit}`],
    paint: (share) => paint(2 * share - 1),
    text: (head) => `${signedNumber(values[head])} ${view.measure.unit}`,
  };
}

/**
 * Handle pointer and keys: hovering shows a tooltip, a click or an arrow key chooses a head.
 * @param {import("./grid.js").Grid} drawn
 * @param {View} view
 * @param {Scale} scale
 * @param {Chosen} chosen
 */
function follow({ svg, at }, view, scale, chosen) {
  const { layers, heads } = view.data;
  svg.on("pointermove", (/** @type {PointerEvent} */ event) => {
    const index = at(event);
    if (index < 0) return hide();
    show(event, lines(view, scale, index));
  });
  svg.on("pointerleave", hide);
  svg.on("click", (/** @type {MouseEvent} */ event) => {
    const index = at(event);
    if (index >= 0) chosen.choose({ head: view.trace.headName(index) });
  });
  svg.on("keydown", (/** @type {KeyboardEvent} */ event) => {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    const from = Math.max(0, view.head);
    const layer = Math.max(0, Math.min(layers.length - 1, Math.floor(from / heads) + step[0]));
    const head = Math.max(0, Math.min(heads - 1, (from % heads) + step[1]));
    const index = layer * heads + head;
    announce(lines(view, scale, index).join(", "));
    chosen.choose({ head: view.trace.headName(index) });
  });
}

/**
 * Return the lines of a head's tooltip.
 * @param {View} view
 * @param {Scale} scale
 * @param {number} index
 */
function lines(view, scale, index) {
  const { layers, heads } = view.data;
  const found = [`layer ${layers[Math.floor(index / heads)]}, head ${index % heads}`, scale.text(index)];
  for (const [key, name] of [["retained_mass", "S"], ["sigma_stage1", "σ"]]) {
    const measure = view.trace.measure(key);
    if (measure < 0) continue;
    const sides = [...new Set([view.baseline, view.treatment])];
    found.push(`${name} ${sides.map((config) => number(view.values(config, measure)[index])).join(" → ")}`);
  }
  return found;
}
