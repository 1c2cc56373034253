// How much attention the first stage holds in each head (paper, Assumption 1 and figure 4).

import { signed } from "./colours.js";
import { beside, fill, lacking, make, select } from "./dom.js";
import { counted, number } from "./format.js";
import { grid, legend, node } from "./grid.js";
import { hide, show } from "./tooltip.js";

/** @typedef {import("./seen.js").Seen} Seen */
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
   * @param {Seen} seen
   */
  draw(pane, seen) {
    const measure = seen.trace.measure(seen.choice.sigma);
    if (seen.baseline < 0 || seen.treatment < 0) return fill(pane, lacking(seen.lacking));
    if (measure < 0) return fill(pane, lacking("This trace does not hold this reading."));
    const sides = seen.baseline === seen.treatment ? ["treatment"] : ["baseline", "treatment"];
    fill(pane, beside(pane, 2, (width) => sides.map((side) => ofSide(seen, side, measure, width))),
      legend("0: fails", "1: holds · palest at 0.5", (share) => signed()(2 * share - 1)));
  },
};

/**
 * @param {Seen} seen
 * @param {string} side
 * @param {number} measure
 * @param {number} width
 */
function ofSide(seen, side, measure, width) {
  const config = side === "baseline" ? seen.baseline : seen.treatment;
  const name = side === "baseline" ? seen.choice.baseline : seen.choice.treatment;
  const values = seen.values(config, measure);
  const below = d3.sum(values, (value) => Number(value <= HALF));
  const caption = `${name}: at most 0.5 in ${counted(below, "head")} of ${values.length} (${seen.of})`;
  return make("div", null, make("p", { class: "caption" }, caption), drawn(seen, values, width, caption));
}

/**
 * @param {Seen} seen
 * @param {Float32Array} values
 * @param {number} width
 * @param {string} caption
 */
function drawn(seen, values, width, caption) {
  const { layers, heads } = seen.told;
  const paint = signed();
  const { svg, at } = grid(seen.trace, { width, most: HIGHEST, label: caption, colour: (head) => paint(2 * values[head] - 1) });
  svg.on("pointermove", (/** @type {PointerEvent} */ event) => {
    const head = at(event);
    if (head < 0) return hide();
    show(event, [`layer ${layers[Math.floor(head / heads)]}, head ${head % heads}`, number(values[head])]);
  });
  svg.on("pointerleave", hide);
  return node(svg);
}
