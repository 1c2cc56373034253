// One head: every quantity of it under both sides, over samples and over decode steps.

import { colours } from "./colours.js";
import { beside, fill, lacking, make, select, table } from "./dom.js";
import { difference, number, ratio, tick } from "./format.js";
import { part } from "./numbers.js";
import { BETTER, TIED } from "./seen.js";

/** @typedef {import("./seen.js").Seen} Seen */
/** @typedef {import("./choice.js").Chosen} Chosen */
/** @typedef {{name: string, side: string, value: number, place: number}} Mark */

export const head = {
  id: "head",
  needs: ["baseline", "treatment", "budget", "measure", "sample", "head"],
  /**
   * @param {HTMLElement} controls
   * @param {Chosen} chosen
   */
  controls(controls, chosen) {
    const { layers, heads } = chosen.traces[0].told;
    const [layer, number_] = chosen.now.head.split("-");
    const of = (/** @type {number[]} */ list) => list.map((one) => ({ value: String(one), text: String(one) }));
    fill(
      controls,
      select("Layer", "layer", of(layers), layer, (value) => chosen.choose({ head: `${value}-${chosen.now.head.split("-")[1]}` })),
      select("Head", "head", of(d3.range(heads)), number_, (value) => chosen.choose({ head: `${chosen.now.head.split("-")[0]}-${value}` })),
    );
  },
  /**
   * @param {HTMLElement} pane
   * @param {Seen} seen
   * @param {Chosen} chosen
   */
  draw(pane, seen, chosen) {
    if (seen.lacking) return fill(pane, lacking(seen.lacking));
    if (seen.head < 0) return fill(pane, lacking(`This trace has no head ${seen.choice.head}.`));
    fill(pane, beside(pane, 2, (width) => [make("div", { class: "scrolls" }, quantities(seen, chosen)),
      make("div", null, ...overSamples(seen, width), ...overSteps(seen, width))]));
  },
};

/**
 * Every quantity; its name chooses it as the measure.
 * @param {Seen} seen
 * @param {Chosen} chosen
 */
function quantities(seen, chosen) {
  const configs = [...new Set([seen.baseline, seen.treatment])];
  const sides = configs.map((config) => `#${seen.told.sides[seen.told.configs[config].side]}`);
  const rows = seen.told.measures.map((measure, place) => {
    const values = configs.map((config) => seen.values(config, place)[seen.head]);
    const floor = seen.trace.array("floor");
    return [
      make("button", { type: "button", class: "link", title: measure.about, "aria-pressed": String(place === seen.place),
        onclick: () => chosen.choose({ measure: measure.key }) }, measure.name),
      ...values.map(number), ...(seen.paired ? changed(seen, place, values) : []),
      measure.ties === null || !floor ? "" : number(part(floor, measure.ties)[seen.head]),
    ];
  });
  const [layer, place] = seen.choice.head.split("-");
  return table(`Layer ${layer}, head ${place} (${seen.of}, first decode step)`,
    ["", ...sides, ...(seen.paired ? ["#change", ""] : []), "#noise floor"], rows);
}

/**
 * What the treatment changes of a quantity, and the verdict on it.
 * @param {Seen} seen
 * @param {number} place of the measure
 * @param {number[]} values of baseline and treatment
 */
function changed(seen, place, [first, second]) {
  const measure = seen.told.measures[place];
  const change = measure.compare === "ratio" ? `× ${ratio(second / first)}` : difference(second - first);
  const verdict = seen.verdicts(place)[seen.head];
  return [change, measure.ties === null ? "" : verdict === TIED ? "tied" : verdict === BETTER ? "better" : "worse"];
}

/**
 * @param {Seen} seen
 * @param {number} width
 * @returns {(Node | string)[]}
 */
function overSamples(seen, width) {
  const { samples } = seen.told;
  if (!seen.trace.array("sample")) return [lacking("Single samples are still being read.")];
  if (seen.told.arrays.sample.measures?.includes(seen.place) === false) return [lacking(seen.told.lacks.samples)];
  const marks = both(seen, (config) => seen.ofSamples(config, seen.head), 0);
  const links = samples.map((_, sample) => marks.filter((one) => one.place === sample).map((one) => one.value));
  return [
    make("p", { class: "caption" }, `${seen.measure.name} in ${samples.length === 1 ? "the sample" : `each of the ${samples.length} samples`}`),
    chart(seen, marks, width, {
      x: { label: "sample", ticks: d3.range(0, samples.length, Math.ceil(samples.length / 24)), tickFormat: (/** @type {number} */ place) => String(place + 1) },
      marks: [
        Plot.ruleX(seen.sample < 0 ? [] : [seen.sample], { stroke: colours().grey, strokeWidth: 9, strokeOpacity: 0.25 }),
        Plot.ruleX(links.filter((link) => link.length === 2), {
          x: (_, place) => place, y1: (link) => link[0], y2: (link) => link[1], stroke: colours().grey,
        }),
        Plot.dot(marks, { x: "place", y: "value", fill: "side", symbol: "side", r: 3.5,
          title: (one) => `${samples[one.place].id}\n${one.name}: ${number(one.value)} ${seen.measure.unit}` }),
      ],
    }),
    sidesKey(seen),
  ];
}

/**
 * @param {Seen} seen
 * @param {number} width
 * @returns {(Node | string)[]}
 */
function overSteps(seen, width) {
  const held = seen.trace.array("step_mean");
  const place = (seen.told.stepped || []).indexOf(seen.measure.key);
  if (seen.told.lacks.steps) return [lacking(seen.told.lacks.steps)];
  if (!held || place < 0) return [lacking(`Over decode steps the page holds ${names(seen)}; choose one of them.`)];
  const steps = d3.range(seen.told.steps).filter((step) => seen.told.step_samples[step] > 0);
  const marks = both(seen, (config) => steps.map((step) => part(held, place, config, step)[seen.head]), 0);
  const most = Math.max(...seen.told.step_samples);
  const fewer = seen.told.step_samples.some((count) => count && count < most) ? ", as far as their texts go" : "";
  return [
    make("p", { class: "caption" }, `${seen.measure.name} over decode steps, mean of ${most === 1 ? "1 sample" : `${most} samples`}${fewer}`),
    chart(seen, marks, width, {
      x: { label: "decode step", ticks: Math.min(8, steps.length), tickFormat: (/** @type {number} */ step) => Number.isInteger(step) ? String(step) : "" },
      marks: [Plot.line(marks, { x: "place", y: "value", z: "side", stroke: "side", strokeWidth: 1.6 }),
        Plot.dot(marks, { x: "place", y: "value", fill: "side", symbol: "side", r: 2.6 })],
    }),
  ];
}

/**
 * What is known of later decode steps.
 * @param {Seen} seen
 */
function names(seen) {
  return seen.told.stepped.map((key) => seen.told.measures[seen.trace.measure(key)].name).join(", ");
}

/**
 * @param {Seen} seen
 * @param {(config: number) => number[]} read
 * @param {number} from
 * @returns {Mark[]}
 */
function both(seen, read, from) {
  const sides = seen.baseline === seen.treatment ? ["treatment"] : ["baseline", "treatment"];
  return sides.flatMap((side) => {
    const name = side === "baseline" ? "baseline" : "treatment";
    return read(seen[name]).map((value, place) => ({ name: seen.choice[name], side, value, place: place + from }))
      .filter((mark) => Number.isFinite(mark.value));
  });
}

/**
 * @param {Seen} seen
 * @param {Mark[]} marks
 * @param {number} width
 * @param {{x: object, marks: any[]}} more
 */
function chart(seen, marks, width, more) {
  const log = seen.measure.compare === "ratio" && marks.every((mark) => mark.value > 0);
  const { baseline, treatment } = colours();
  return /** @type {Node} */ (Plot.plot({
    width, height: 190, marginLeft: 54, marginBottom: 36, style: { background: "none", fontSize: "11px" },
    ariaLabel: `${seen.measure.name} of head ${seen.choice.head}`,
    x: { ...more.x, labelAnchor: "center", labelArrow: "none", inset: 8 },
    y: { type: log ? "log" : "linear", grid: true, ticks: 5, tickFormat: tick, label: `↑ ${seen.measure.unit}`, labelArrow: "none", zero: !log && seen.measure.compare === "ratio" },
    color: { domain: ["baseline", "treatment"], range: [baseline, treatment] },
    symbol: { domain: ["baseline", "treatment"], range: ["circle", "square"] },
    marks: more.marks,
  }));
}

/**
 * What stands for which side, in every chart of two sides.
 * @param {Seen} seen
 */
export function sidesKey(seen) {
  const swatch = (/** @type {string} */ side, /** @type {string} */ mark, /** @type {string} */ name) =>
    make("span", { class: `key ${side}` }, make("b", { "aria-hidden": "true" }, mark), ` ${name}`);
  if (seen.baseline === seen.treatment) return make("p", { class: "legend" }, swatch("treatment", "■", seen.choice.treatment));
  return make("p", { class: "legend" }, swatch("baseline", "●", seen.choice.baseline), swatch("treatment", "■", seen.choice.treatment));
}
