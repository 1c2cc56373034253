// How much attention the first stage holds in each head (paper, Assumption 1 and figure 4).

import { signed } from "./colours.js";
import { beside, fill, lacking, make, select } from "./dom.js";
import { counted, number } from "./format.js";
import { hide, show } from "./tooltip.js";

/** @typedef {import("./seen.js").Seen} Seen */
/** @typedef {import("./choice.js").Chosen} Chosen */

const HALF = 0.5;
const LEFT = 30;
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
    fill(pane, beside(pane, 2, (width) => sides.map((side) => ofSide(seen, side, measure, width))), legend());
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
  const across = (width - LEFT - 2) / layers.length;
  const down = Math.max(5, Math.min(across, 18, 420 / heads));
  const height = down * heads + 22;
  const paint = signed();
  const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("width", width).attr("height", height)
    .attr("class", "map").attr("role", "img").attr("aria-label", caption);
  svg.append("g").selectAll("rect").data(values).join("rect")
    .attr("x", (_, place) => LEFT + Math.floor(place / heads) * across).attr("y", (_, place) => (place % heads) * down)
    .attr("width", across - 0.5).attr("height", down - 0.5).attr("fill", (value) => paint(2 * value - 1));
  const every = Math.max(1, Math.ceil(layers.length / (width / 46)));
  const axis = svg.append("g").attr("class", "axis");
  axis.selectAll("text.layer").data(d3.range(0, layers.length, every)).join("text").attr("class", "layer")
    .attr("x", (place) => LEFT + (place + 0.5) * across).attr("y", height - 6).attr("text-anchor", "middle")
    .text((place) => layers[place]);
  axis.append("text").attr("x", 2).attr("y", height - 6).text("layer");
  axis.append("text").attr("x", 2).attr("y", 11).text("head");
  svg.on("pointermove", (event) => {
    const [x, y] = d3.pointer(event);
    const [layer, head] = [Math.floor((x - LEFT) / across), Math.floor(y / down)];
    if (layer < 0 || layer >= layers.length || head < 0 || head >= heads) return hide();
    show(event, [`layer ${layers[layer]}, head ${head}`, number(values[layer * heads + head])]);
  });
  svg.on("pointerleave", hide);
  return /** @type {SVGSVGElement} */ (svg.node());
}

function legend() {
  const paint = signed();
  const bar = d3.create("svg").attr("width", 190).attr("height", 12).attr("aria-hidden", "true");
  bar.selectAll("rect").data(d3.range(38)).join("rect").attr("x", (step) => step * 5).attr("width", 5.2)
    .attr("height", 12).attr("fill", (step) => paint((2 * step) / 37 - 1));
  return make("div", { class: "legend" }, make("span", null, "0: fails"), /** @type {SVGSVGElement} */ (bar.node()),
    make("span", null, "1: holds · palest at 0.5"));
}
