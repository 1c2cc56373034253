// Layers by heads: what the treatment changes in each head, or how far a side moves it.

import { layerColour, signed } from "./colours.js";
import { announce, fill, lacking, make, select, widthOf } from "./dom.js";
import { difference, number, ratio } from "./format.js";
import { grid, legend, node } from "./grid.js";
import { BETTER, TIED, together } from "./seen.js";
import { hide, show } from "./tooltip.js";
import { words } from "./words.js";

/** @typedef {import("./seen.js").Seen} Seen */
/** @typedef {import("./choice.js").Chosen} Chosen */

const HIGHEST = 340;
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
    const { layers, heads } = seen.told;
    const drawn = grid(seen.trace, {
      width: widthOf(pane), most: HIGHEST, colour: scale.colour, hatched: scale.hatched, chosen: seen.head,
      label: `${scale.title}. Map of ${layers.length} layers by ${heads} heads; arrow keys choose a head.`,
    });
    drawn.svg.attr("tabindex", 0);
    follow(drawn, seen, scale, chosen);
    fill(pane, make("p", { class: "caption" }, scale.title), node(drawn.svg),
      legend(scale.ends[0], scale.ends[1], scale.paint, change ? "tied" : ""),
      change && seen.silent() && make("p", { class: "legend" }, "empty: σ ≤ 0.5 on either side, where the bound is no evidence"));
    if (had) node(drawn.svg).focus({ preventScroll: true });
  },
};

/** @typedef {{title: string, colour: (head: number) => string, hatched: (head: number) => boolean, ends: [string, string], paint: (share: number) => string, text: (head: number) => string}} Scale */

/**
 * @param {Seen} seen
 * @param {Seen[]} all that share the scale
 * @returns {Scale}
 */
function changeScale(seen, all) {
  const changes = seen.changes();
  const verdicts = seen.verdicts();
  const ratios = seen.measure.compare === "ratio";
  const sizes = all.filter((one) => one.paired).map((one) => Array.from(one.changes(), Math.abs));
  const widest = Math.max(...sizes.map((each) => quantile(each, 0.97)), ratios ? 0.14 : 0.01);
  const [less, more] = sizes.some((each) => each.some((one) => one > widest)) ? ["≤ ", "≥ "] : ["", ""];
  const paint = signed();
  const silent = seen.silent();
  const side = seen.measure.less ? 1 : -1;
  const end = (/** @type {number} */ sign) =>
    (sign < 0 ? less : more) + (ratios ? `× ${ratio(2 ** (sign * widest))}` : difference(sign * widest));
  const [first, second] = [seen.values(seen.baseline), seen.values(seen.treatment)];
  return {
    title: `${seen.choice.treatment} ${ratios ? "over" : "minus"} ${seen.choice.baseline}: ${words(seen.measure)}, ${seen.of}`,
    colour: (head) => (Number.isNaN(changes[head]) || silent?.[head] ? "none" : paint((-side * changes[head]) / widest)),
    hatched: (head) => verdicts[head] === TIED,
    ends: [`worse ${end(side)}`, `${end(-side)} better`],
    paint: (share) => paint(2 * share - 1),
    text: (head) =>
      `${number(first[head])} → ${number(second[head])} ${seen.measure.unit}` +
      ` (${ratios ? `× ${ratio(second[head] / first[head])}` : difference(second[head] - first[head])}), ` +
      (silent?.[head] ? "σ ≤ 0.5: no evidence" : verdicts[head] === TIED ? "tied" : verdicts[head] === BETTER ? "better" : "worse"),
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
  const finite = all.flatMap((one) => [one.baseline, one.treatment].map((config) =>
    Array.from(one.values(config)).filter((value) => !log || value > 0)));
  const low = Math.min(...finite.map((each) => quantile(each, 0.01)));
  const high = Math.max(...finite.map((each) => quantile(each, 0.99)));
  const at = log
    ? (/** @type {number} */ value) => Math.log(value / low) / (Math.log(high / low) || 1)
    : (/** @type {number} */ value) => (value - low) / (high - low || 1);
  const paint = layerColour();
  return {
    title: `${seen.choice[name]}: ${words(seen.measure)}, ${seen.of}`,
    colour: (head) => (Number.isNaN(values[head]) ? "none" : paint(Math.max(0, Math.min(1, at(values[head]) || 0)))),
    hatched: () => false,
    ends: [`≤ ${number(low)}`, `≥ ${number(high)} ${seen.measure.unit}${log ? ", logarithmic" : ""}`],
    paint,
    text: (head) => `${number(values[head])} ${seen.measure.unit}`,
  };
}

/**
 * Pointer and keys: hovering tells, a click or an arrow chooses.
 * @param {import("./grid.js").Grid} drawn
 * @param {Seen} seen
 * @param {Scale} scale
 * @param {Chosen} chosen
 */
function follow({ svg, at }, seen, scale, chosen) {
  const { layers, heads } = seen.told;
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
