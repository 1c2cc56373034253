// Layers across, heads downwards: a cell each, in whatever colour.

import { colours } from "./colours.js";
import { make } from "./dom.js";

/** @typedef {import("./trace.js").Trace} Trace */
/**
 * @typedef {{width: number, most: number, label: string, colour: (head: number) => string,
 *   hatched?: (head: number) => boolean, chosen?: number}} Look how wide it is, how high its rows may be, what it shows
 */
/** @typedef {{svg: any, at: (event: MouseEvent) => number}} Grid the drawing, and which head lies below the pointer */

const [LEFT, TOP, BOTTOM] = [38, 4, 34];
const [LABEL, LINE] = [46, 16];
const STEPS = 38;
let hatches = 0;

/**
 * @param {Trace} trace
 * @param {Look} look
 * @returns {Grid}
 */
export function grid(trace, look) {
  const { layers, heads } = trace.data;
  const across = (look.width - LEFT - 2) / layers.length;
  const down = Math.max(6, Math.min(1.7 * across, look.most / heads));
  const [width, height] = [look.width, TOP + down * heads + BOTTOM];
  const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("width", width).attr("height", height)
    .attr("class", "map").attr("role", "img").attr("aria-label", look.label);
  const cells = d3.range(trace.size);
  const gap = across > 8 && down > 8 ? 1 : 0.25;
  const cell = (/** @type {any} */ parts) => parts
    .attr("x", (/** @type {number} */ head) => LEFT + Math.floor(head / heads) * across)
    .attr("y", (/** @type {number} */ head) => TOP + (head % heads) * down)
    .attr("width", across - gap).attr("height", down - gap);
  svg.append("g").selectAll("rect").data(cells).join("rect").call(cell).attr("fill", look.colour);
  if (look.hatched) {
    const id = hatch(svg);
    svg.append("g").attr("class", "ties").selectAll("rect").data(cells.filter(look.hatched)).join("rect").call(cell)
      .attr("fill", `url(#${id})`);
  }
  if (look.chosen !== undefined && look.chosen >= 0) svg.append("rect").datum(look.chosen).call(cell).attr("class", "chosen");
  axes(svg, trace, { across, down, width, height });
  return { svg, at: (event) => headAt(event, trace, across, down) };
}

/**
 * @param {any} svg
 * @param {Trace} trace
 * @param {{across: number, down: number, width: number, height: number}} size
 */
function axes(svg, trace, { across, down, width, height }) {
  const { layers, heads } = trace.data;
  const [columns, rows] = [Math.ceil((LABEL * layers.length) / width), Math.ceil(LINE / down)];
  const axis = svg.append("g").attr("class", "axis");
  axis.selectAll("text.layer").data(d3.range(0, layers.length, columns)).join("text").attr("class", "layer")
    .attr("x", (/** @type {number} */ index) => LEFT + (index + 0.5) * across).attr("y", height - 20)
    .attr("text-anchor", "middle").text((/** @type {number} */ index) => layers[index]);
  axis.selectAll("text.head").data(d3.range(0, heads, rows)).join("text").attr("class", "head").attr("x", LEFT - 5)
    .attr("y", (/** @type {number} */ head) => TOP + (head + 0.5) * down + 3.5).attr("text-anchor", "end")
    .text((/** @type {number} */ head) => head);
  axis.append("text").attr("x", LEFT + (width - LEFT) / 2).attr("y", height - 5).attr("text-anchor", "middle").text("layer");
  axis.append("text").attr("transform", `translate(10 ${TOP + (down * heads) / 2}) rotate(-90)`)
    .attr("text-anchor", "middle").text("head");
}

/**
 * @param {MouseEvent} event
 * @param {Trace} trace
 * @param {number} across
 * @param {number} down
 */
function headAt(event, trace, across, down) {
  const { layers, heads } = trace.data;
  const [x, y] = d3.pointer(event);
  const [layer, head] = [Math.floor((x - LEFT) / across), Math.floor((y - TOP) / down)];
  return layer >= 0 && layer < layers.length && head >= 0 && head < heads ? layer * heads + head : -1;
}

/**
 * Add a hatching pattern to a drawing and return its id.
 * @param {any} svg
 * @returns {string}
 */
function hatch(svg) {
  const id = `hatch-${++hatches}`;
  const pattern = svg.append("defs").append("pattern").attr("id", id).attr("patternUnits", "userSpaceOnUse")
    .attr("width", 4).attr("height", 4).attr("patternTransform", "rotate(45)");
  pattern.append("rect").attr("width", 4).attr("height", 4).attr("fill", colours().paper);
  pattern.append("rect").attr("width", 1.4).attr("height", 4).attr("fill", colours().grey);
  return id;
}

/**
 * Return a legend: a colour scale between two labels, and the meaning of hatching where there is some.
 * @param {string} low
 * @param {string} high
 * @param {(share: number) => string} paint
 * @param {string} [hatched]
 */
export function legend(low, high, paint, hatched) {
  const bar = d3.create("svg").attr("width", 5 * STEPS).attr("height", 12).attr("aria-hidden", "true");
  bar.selectAll("rect").data(d3.range(STEPS)).join("rect").attr("x", (step) => step * 5).attr("width", 5.2)
    .attr("height", 12).attr("fill", (step) => paint(step / (STEPS - 1)));
  return make("div", { class: "legend" }, make("span", null, low), node(bar), make("span", null, high),
    hatched ? make("span", { class: "key" }, swatch(), ` ${hatched}`) : null);
}

function swatch() {
  const svg = d3.create("svg").attr("width", 16).attr("height", 12).attr("aria-hidden", "true");
  const id = hatch(svg);
  svg.append("rect").attr("width", 16).attr("height", 12).attr("fill", `url(#${id})`);
  return node(svg);
}

/**
 * @param {any} drawn
 * @returns {SVGSVGElement}
 */
export function node(drawn) {
  return drawn.node();
}
