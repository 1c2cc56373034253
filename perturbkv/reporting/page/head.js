// One head: every quantity of it under both sides, over samples and over decode steps.

import { colours } from "./colours.js";
import { inColumns, fill, lacking, make, select, table } from "./dom.js";
import { changeFormat, number, tick } from "./format.js";
import { part } from "./numbers.js";
import { BETTER, TIED } from "./view.js";

/** @typedef {import("./view.js").View} View */
/** @typedef {import("./choice.js").Chosen} Chosen */
/** @typedef {{name: string, side: string, value: number, index: number}} Mark */

export const head = {
  id: "head",
  needs: ["baseline", "treatment", "budget", "measure", "sample", "head"],
  /**
   * @param {HTMLElement} controls
   * @param {Chosen} chosen
   */
  controls(controls, chosen) {
    const { layers, heads } = chosen.traces[0].data;
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
   * @param {View} view
   * @param {Chosen} chosen
   */
  draw(pane, view, chosen) {
    if (view.lacking) return fill(pane, lacking(view.lacking));
    if (view.head < 0) return fill(pane, lacking(`This trace has no head ${view.choice.head}.`));
    fill(pane, inColumns(pane, 2, (width) => [make("div", { class: "scrolls" }, quantities(view, chosen)),
      make("div", null, ...overSamples(view, width), ...overSteps(view, width))]));
  },
};

/**
 * Return a table of all measures of the head; a click on a name chooses the measure.
 * @param {View} view
 * @param {Chosen} chosen
 */
function quantities(view, chosen) {
  const configs = [...new Set([view.baseline, view.treatment])];
  const sides = configs.map((config) => `#${view.data.sides[view.data.configs[config].side]}`);
  const rows = view.data.measures.map((measure, index) => {
    const values = configs.map((config) => view.values(config, index)[view.head]);
    const floor = view.trace.array("floor");
    return [
      make("button", { type: "button", class: "link", title: measure.about, "aria-pressed": String(index === view.measureIndex),
        onclick: () => chosen.choose({ measure: measure.key }) }, measure.name),
      ...values.map(number), ...(view.paired ? changed(view, index, values) : []),
      measure.ties === null || !floor ? "" : number(part(floor, measure.ties)[view.head]),
    ];
  });
  const [layer, index] = view.choice.head.split("-");
  const steps = view.data.steps > 1 ? "mean over decode steps" : "first decode step";
  return table(`Layer ${layer}, head ${index} (${view.of}, ${steps})`,
    ["", ...sides, ...(view.paired ? ["#change", ""] : []), "#noise floor"], rows);
}

/**
 * Return the treatment's change of a measure, and the verdict on it.
 * @param {View} view
 * @param {number} index of the measure
 * @param {number[]} values of baseline and treatment
 */
function changed(view, index, [first, second]) {
  const measure = view.data.measures[index];
  const written = changeFormat(measure);
  const change = measure.compare === "ratio" ? `× ${written(second / first)}` : written(second - first);
  const verdict = view.verdicts(index)[view.head];
  return [change, measure.ties === null ? "" : verdict === TIED ? "tied" : verdict === BETTER ? "better" : "worse"];
}

/**
 * @param {View} view
 * @param {number} width
 * @returns {(Node | string)[]}
 */
function overSamples(view, width) {
  const { samples } = view.data;
  if (!view.trace.array("sample")) return [lacking("Single samples are still being read.")];
  if (view.data.arrays.sample.measures?.includes(view.measureIndex) === false) return [lacking(view.data.lacks.samples)];
  const marks = both(view, (config) => view.headBySample(config, view.head), 0);
  const links = samples.map((_, sample) => marks.filter((one) => one.index === sample).map((one) => one.value));
  return [
    make("p", { class: "caption" }, `${view.measure.name} in ${samples.length === 1 ? "the sample" : `each of the ${samples.length} samples`}`),
    chart(view, marks, width, {
      x: { label: null, ticks: d3.range(0, samples.length, Math.ceil(samples.length / 24)), tickRotate: -35, tickFormat: (/** @type {number} */ index) => shortId(samples[index]?.id ?? "") },
      marginBottom: 64,
      marks: [
        Plot.ruleX(view.sample < 0 ? [] : [view.sample], { stroke: colours().grey, strokeWidth: 9, strokeOpacity: 0.25 }),
        Plot.ruleX(links.filter((link) => link.length === 2), {
          x: (_, index) => index, y1: (link) => link[0], y2: (link) => link[1], stroke: colours().grey,
        }),
        Plot.dot(marks, { x: "index", y: "value", fill: "side", symbol: "side", r: 3.5,
          title: (one) => `${samples[one.index].id}\n${one.name}: ${number(one.value)} ${view.measure.unit}` }),
      ],
    }),
    sidesKey(view),
  ];
}

/**
 * @param {View} view
 * @param {number} width
 * @returns {(Node | string)[]}
 */
function overSteps(view, width) {
  const means = view.trace.array("step_mean");
  const index = (view.data.stepped || []).indexOf(view.measure.key);
  if (view.data.lacks.steps) return [lacking(view.data.lacks.steps)];
  if (!means || index < 0) return [lacking(`Over decode steps the page holds ${names(view)}; choose one of them.`)];
  const steps = d3.range(view.data.steps).filter((step) => view.data.step_samples[step] > 0);
  const marks = both(view, (config) => steps.map((step) => part(means, index, config, step)[view.head]), 0);
  const most = Math.max(...view.data.step_samples);
  const fewer = view.data.step_samples.some((count) => count && count < most) ? ", as far as their texts go" : "";
  return [
    make("p", { class: "caption" }, `${view.measure.name} over decode steps, mean of ${most === 1 ? "1 sample" : `${most} samples`}${fewer}`),
    chart(view, marks, width, {
      x: { label: "decode step", ticks: Math.min(8, steps.length), tickFormat: (/** @type {number} */ step) => Number.isInteger(step) ? String(step) : "" },
      marks: [Plot.line(marks, { x: "index", y: "value", z: "side", stroke: "side", strokeWidth: 1.6 }),
        Plot.dot(marks, { x: "index", y: "value", fill: "side", symbol: "side", r: 2.6 })],
    }),
  ];
}

/**
 * Return the names of the measures that the page has per decode step.
 * @param {View} view
 */
function names(view) {
  return view.data.stepped.map((key) => view.data.measures[view.trace.measure(key)].name).join(", ");
}

/**
 * @param {View} view
 * @param {(config: number) => number[]} read
 * @param {number} from
 * @returns {Mark[]}
 */
function both(view, read, from) {
  const sides = view.baseline === view.treatment ? ["treatment"] : ["baseline", "treatment"];
  return sides.flatMap((side) => {
    const name = side === "baseline" ? "baseline" : "treatment";
    return read(view[name]).map((value, index) => ({ name: view.choice[name], side, value, index: index + from }))
      .filter((mark) => Number.isFinite(mark.value));
  });
}

/**
 * @param {View} view
 * @param {Mark[]} marks
 * @param {number} width
 * @param {{x: object, marks: any[], marginBottom?: number}} more
 */
function chart(view, marks, width, more) {
  const log = view.measure.compare === "ratio" && marks.every((mark) => mark.value > 0);
  const { baseline, treatment } = colours();
  return /** @type {Node} */ (Plot.plot({
    width, height: 190 + (more.marginBottom ?? 36) - 36, marginLeft: 54, marginBottom: more.marginBottom ?? 36, style: { background: "none", fontSize: "11px" },
    ariaLabel: `${view.measure.name} of head ${view.choice.head}`,
    x: { ...more.x, labelAnchor: "center", labelArrow: "none", inset: 8 },
    y: { type: log ? "log" : "linear", grid: true, ticks: 5, tickFormat: tick, label: `↑ ${view.measure.unit}`, labelArrow: "none", zero: !log && view.measure.compare === "ratio" },
    color: { domain: ["baseline", "treatment"], range: [baseline, treatment] },
    symbol: { domain: ["baseline", "treatment"], range: ["circle", "square"] },
    marks: more.marks,
  }));
}

/**
 * Return a sample's id, shortened at its beginning, which ids of one data set have in common.
 * @param {string} id
 */
function shortId(id) {
  return id.length > 12 ? `…${id.slice(-11)}` : id;
}

/**
 * Return the legend of baseline and treatment.
 * @param {View} view
 */
export function sidesKey(view) {
  const swatch = (/** @type {string} */ side, /** @type {string} */ mark, /** @type {string} */ name) =>
    make("span", { class: `key ${side}` }, make("b", { "aria-hidden": "true" }, mark), ` ${name}`);
  if (view.baseline === view.treatment) return make("p", { class: "legend" }, swatch("treatment", "■", view.choice.treatment));
  return make("p", { class: "legend" }, swatch("baseline", "●", view.choice.baseline), swatch("treatment", "■", view.choice.treatment));
}
