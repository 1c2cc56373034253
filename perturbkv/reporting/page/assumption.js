// How much attention the first stage holds in each head (paper, Assumption 1 and figure 4).

import { signed } from "./colours.js";
import { inColumns, fill, lacking, make, select } from "./dom.js";
import { plural, number } from "./format.js";
import { grid, legend, node } from "./grid.js";
import { hide, show } from "./tooltip.js";

/** @typedef {import("./view.js").View} View */
/** @typedef {import("./choice.js").Chosen} Chosen */

const HALF = 0.5;
const HIGHEST = 240;
const READINGS = [
  { value: "sigma_stage1", text: "σ of stage 1, as it holds" },
  { value: "sigma_topk", text: "σ of the top ⌊αb⌋, as stated" },
  { value: "retained_mass", text: "S of the whole kept set" },
];

export const assumption = {
  id: "assumption",
  needs: ["baseline", "treatment", "budget", "sample", "sigma"],
  /**
   * @param {HTMLElement} controls
   * @param {Chosen} chosen
   */
  controls(controls, chosen) {
    fill(controls, select("Reading", "sigma", READINGS, chosen.now.sigma, (sigma) => chosen.choose({ sigma })));
  },
  /**
   * @param {HTMLElement} pane
   * @param {View} view
   */
  draw(pane, view) {
    const measure = view.trace.measure(view.choice.sigma);
    if (view.baseline < 0 || view.treatment < 0) return fill(pane, lacking(view.lacking));
    if (measure < 0) return fill(pane, lacking("This trace does not hold this reading."));
    const sides = view.baseline === view.treatment ? ["treatment"] : ["baseline", "treatment"];
    fill(pane, inColumns(pane, 2, (width) => sides.map((side) => sidePanel(view, side, measure, width))),
      legend("0: fails", "1: holds · palest at 0.5", (share) => signed()(2 * share - 1)));
  },
};

/**
 * @param {View} view
 * @param {string} side
 * @param {number} measure
 * @param {number} width
 */
function sidePanel(view, side, measure, width) {
  const config = side === "baseline" ? view.baseline : view.treatment;
  const name = side === "baseline" ? view.choice.baseline : view.choice.treatment;
  const values = view.values(config, measure);
  const below = d3.sum(values, (value) => Number(value <= HALF));
  const caption = `${name}: at most 0.5 in ${plural(below, "head")} of ${values.length} (${view.of})`;
  return make("div", null, make("p", { class: "caption" }, caption), sigmaMap(view, values, width, caption));
}

/**
 * @param {View} view
 * @param {Float32Array} values
 * @param {number} width
 * @param {string} caption
 */
function sigmaMap(view, values, width, caption) {
  const { layers, heads } = view.data;
  const paint = signed();
  const { svg, at } = grid(view.trace, { width, most: HIGHEST, label: caption, colour: (head) => paint(2 * values[head] - 1) });
  svg.on("pointermove", (/** @type {PointerEvent} */ event) => {
    const head = at(event);
    if (head < 0) return hide();
    show(event, [`layer ${layers[Math.floor(head / heads)]}, head ${head % heads}`, number(values[head])]);
  });
  svg.on("pointerleave", hide);
  return node(svg);
}
