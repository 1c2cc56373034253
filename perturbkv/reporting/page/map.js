// Layers by heads: what the treatment changes in each head, or how far a side moves it.

import { colours, layerColour, signed } from "./colours.js";
import { announce, fill, lacking, make, select, widthOf } from "./dom.js";
import { difference, number, ratio } from "./format.js";
import { BETTER, TIED, together } from "./seen.js";
import { hide, show } from "./tooltip.js";

/** @typedef {import("./seen.js").Seen} Seen */
/** @typedef {import("./choice.js").Chosen} Chosen */

const LEFT = 38;
const TOP = 4;
const BOTTOM = 34;
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
   * @param {Seen} seen
   * @param {Chosen} chosen
   */
  draw(pane, seen, chosen) {
    if (seen.lacking) return fill(pane, lacking(seen.lacking));
    const change = seen.choice.show === "change" && seen.paired;
    const all = together(chosen);
    const scale = change ? changeScale(seen, all) : valueScale(seen, all);
    const had = pane.contains(document.activeElement) && document.activeElement instanceof SVGElement;
    const drawn = cells(pane, seen, scale, chosen);
    fill(pane, make("p", { class: "caption" }, scale.title), drawn, legend(scale, change));
    if (had) drawn.focus({ preventScroll: true });
  },
};

/** @typedef {{title: string, colour: (head: number) => string, hatched: (head: number) => boolean, ends: [string, string, string], paint: (share: number) => string, text: (head: number) => string}} Scale */

/**
 * @param {Seen} seen
 * @param {Seen[]} all that share the scale
 * @returns {Scale}
 */
function changeScale(seen, all) {
  const changes = seen.changes();
  const verdicts = seen.verdicts();
  const ratios = seen.measure.compare === "ratio";
  const ends = all.filter((one) => one.paired).map((one) => quantile(Array.from(one.changes(), Math.abs), 0.97));
  const widest = Math.max(...ends, ratios ? 0.14 : 1e-4);
  const paint = signed();
  const side = seen.measure.less ? 1 : -1;
  const end = (/** @type {number} */ sign) => (ratios ? `× ${ratio(2 ** (sign * widest))}` : difference(sign * widest));
  const [first, second] = [seen.values(seen.baseline), seen.values(seen.treatment)];
  return {
    title: `${seen.choice.treatment} ${ratios ? "over" : "minus"} ${seen.choice.baseline}: ${seen.measure.name}, ${seen.of}`,
    colour: (head) => (Number.isNaN(changes[head]) ? "none" : paint((-side * changes[head]) / widest)),
    hatched: (head) => verdicts[head] === TIED,
    ends: [end(side), ratios ? "× 1" : "0", end(-side)],
    paint: (share) => paint(2 * share - 1),
    text: (head) =>
      `${number(first[head])} → ${number(second[head])} ${seen.measure.unit}` +
      ` (${ratios ? `× ${ratio(second[head] / first[head])}` : difference(second[head] - first[head])}), ` +
      (verdicts[head] === TIED ? "tied" : verdicts[head] === BETTER ? "better" : "worse"),
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
 * @param {Seen} seen
 * @param {Seen[]} all that share the scale
 * @returns {Scale}
 */
function valueScale(seen, all) {
  const name = seen.choice.show === "baseline" ? "baseline" : "treatment";
  const values = seen.values(seen[name]);
  const log = seen.measure.compare === "ratio";
  const finite = all.map((one) => Array.from(one.values(one[name])).filter((value) => !log || value > 0));
  const low = Math.min(...finite.map((each) => quantile(each, 0.01)));
  const high = Math.max(...finite.map((each) => quantile(each, 0.99)));
  const at = log
    ? (/** @type {number} */ value) => Math.log(value / low) / (Math.log(high / low) || 1)
    : (/** @type {number} */ value) => (value - low) / (high - low || 1);
  const paint = layerColour();
  const middle = log ? Math.sqrt(low * high) : (low + high) / 2;
  return {
    title: `${seen.choice[name]}: ${seen.measure.name}, ${seen.of}`,
    colour: (head) => (Number.isNaN(values[head]) ? "none" : paint(Math.max(0, Math.min(1, at(values[head]) || 0)))),
    hatched: () => false,
    ends: [number(low), number(middle), number(high)],
    paint,
    text: (head) => `${number(values[head])} ${seen.measure.unit}`,
  };
}

/**
 * @param {HTMLElement} pane
 * @param {Seen} seen
 * @param {Scale} scale
 * @param {Chosen} chosen
 */
function cells(pane, seen, scale, chosen) {
  const { layers, heads } = seen.told;
  const width = widthOf(pane);
  const across = (width - LEFT - 2) / layers.length;
  const down = Math.max(6, Math.min(1.7 * across, 340 / heads));
  const height = TOP + down * heads + BOTTOM;
  const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("width", width).attr("height", height);
  svg.attr("class", "map").attr("tabindex", 0).attr("role", "img")
    .attr("aria-label", `${scale.title}. Map of ${layers.length} layers by ${heads} heads; arrow keys choose a head.`);
  hatch(svg);
  const places = d3.range(seen.trace.size);
  const x = (/** @type {number} */ head) => LEFT + Math.floor(head / heads) * across;
  const y = (/** @type {number} */ head) => TOP + (head % heads) * down;
  const gap = across > 8 && down > 8 ? 1 : 0.25;
  const rect = (/** @type {any} */ parts) => parts.attr("x", x).attr("y", y)
    .attr("width", across - gap).attr("height", down - gap);
  svg.append("g").selectAll("rect").data(places).join("rect").call(rect).attr("fill", scale.colour);
  svg.append("g").attr("class", "ties").selectAll("rect").data(places.filter(scale.hatched)).join("rect").call(rect)
    .attr("fill", `url(#${hatchId(svg)})`);
  if (seen.head >= 0) svg.append("rect").datum(seen.head).call(rect).attr("class", "chosen");
  axes(svg, seen, { across, down, height, width });
  follow(svg, seen, scale, chosen, { across, down });
  return /** @type {SVGSVGElement} */ (svg.node());
}

let hatches = 0;

/** @param {any} svg */
function hatch(svg) {
  const id = `hatch-${++hatches}`;
  const pattern = svg.append("defs").append("pattern").attr("id", id).attr("patternUnits", "userSpaceOnUse")
    .attr("width", 4).attr("height", 4).attr("patternTransform", "rotate(45)");
  pattern.append("rect").attr("width", 4).attr("height", 4).attr("fill", colours().paper);
  pattern.append("rect").attr("width", 1.4).attr("height", 4).attr("fill", colours().grey);
}

/** @param {any} svg */
function hatchId(svg) {
  return svg.select("pattern").attr("id");
}

/**
 * @param {any} svg
 * @param {Seen} seen
 * @param {{across: number, down: number, height: number, width: number}} size
 */
function axes(svg, seen, { across, down, height, width }) {
  const { layers, heads } = seen.told;
  const every = Math.max(1, Math.ceil(layers.length / (width / 46)));
  const middle = (/** @type {number} */ place) => LEFT + (place + 0.5) * across;
  const named = d3.range(layers.length).filter((place) => place % every === 0);
  const group = svg.append("g").attr("class", "axis");
  group.selectAll("text.layer").data(named).join("text").attr("class", "layer").attr("x", middle).attr("y", height - 20)
    .attr("text-anchor", "middle").text((/** @type {number} */ place) => layers[place]);
  const rows = Math.max(1, Math.ceil(heads / Math.max(1, (down * heads) / 16)));
  group.selectAll("text.head").data(d3.range(0, heads, rows)).join("text").attr("class", "head").attr("x", LEFT - 5)
    .attr("y", (/** @type {number} */ head) => TOP + (head + 0.5) * down + 3.5).attr("text-anchor", "end").text((/** @type {number} */ head) => head);
  group.append("text").attr("x", LEFT + (width - LEFT) / 2).attr("y", height - 5).attr("text-anchor", "middle").text("layer");
  group.append("text").attr("transform", `translate(10 ${TOP + (down * heads) / 2}) rotate(-90)`).attr("text-anchor", "middle").text("head");
}

/**
 * Pointer and keys: hovering tells, a click or an arrow chooses.
 * @param {any} svg
 * @param {Seen} seen
 * @param {Scale} scale
 * @param {Chosen} chosen
 * @param {{across: number, down: number}} size
 */
function follow(svg, seen, scale, chosen, { across, down }) {
  const { layers, heads } = seen.told;
  const at = (/** @type {MouseEvent} */ event) => {
    const [x, y] = d3.pointer(event);
    const [layer, head] = [Math.floor((x - LEFT) / across), Math.floor((y - TOP) / down)];
    return layer >= 0 && layer < layers.length && head >= 0 && head < heads ? layer * heads + head : -1;
  };
  svg.on("pointermove", (/** @type {PointerEvent} */ event) => {
    const place = at(event);
    if (place < 0) return hide();
    show(event, lines(seen, scale, place));
  });
  svg.on("pointerleave", hide);
  svg.on("click", (/** @type {MouseEvent} */ event) => {
    const place = at(event);
    if (place >= 0) chosen.choose({ head: seen.trace.headName(place) });
  });
  svg.on("keydown", (/** @type {KeyboardEvent} */ event) => {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    const from = Math.max(0, seen.head);
    const layer = Math.max(0, Math.min(layers.length - 1, Math.floor(from / heads) + step[0]));
    const head = Math.max(0, Math.min(heads - 1, (from % heads) + step[1]));
    const place = layer * heads + head;
    announce(lines(seen, scale, place).join(", "));
    chosen.choose({ head: seen.trace.headName(place) });
  });
}

/**
 * What hovering says of a head.
 * @param {Seen} seen
 * @param {Scale} scale
 * @param {number} place
 */
function lines(seen, scale, place) {
  const { layers, heads } = seen.told;
  const found = [`layer ${layers[Math.floor(place / heads)]}, head ${place % heads}`, scale.text(place)];
  for (const [key, name] of [["retained_mass", "S"], ["sigma_stage1", "σ"]]) {
    const measure = seen.trace.measure(key);
    if (measure < 0) continue;
    const sides = [...new Set([seen.baseline, seen.treatment])];
    found.push(`${name} ${sides.map((config) => number(seen.values(config, measure)[place])).join(" → ")}`);
  }
  return found;
}

/**
 * @param {Scale} scale
 * @param {boolean} change
 */
function legend(scale, change) {
  const bar = d3.create("svg").attr("width", 190).attr("height", 12).attr("aria-hidden", "true");
  bar.selectAll("rect").data(d3.range(38)).join("rect").attr("x", (step) => step * 5).attr("width", 5.2).attr("height", 12)
    .attr("fill", (step) => scale.paint(step / 37));
  const svg = d3.create("svg").attr("width", 16).attr("height", 12).attr("aria-hidden", "true");
  hatch(svg);
  svg.append("rect").attr("width", 16).attr("height", 12).attr("fill", `url(#${hatchId(svg)})`);
  const words = change ? [`worse ${scale.ends[0]}`, scale.ends[1], `${scale.ends[2]} better`] : scale.ends;
  return make("div", { class: "legend" }, make("span", null, words[0]),
    /** @type {SVGSVGElement} */ (bar.node()), make("span", null, words[2]),
    change && make("span", { class: "key" }, /** @type {SVGSVGElement} */ (svg.node()), " tied"));
}
