// What every side gives up, over its budgets (paper, figure 3c).

import { colours } from "./colours.js";
import { inColumns, fill, lacking, make } from "./dom.js";
import { estimate, number, percent, tick } from "./format.js";
import { part } from "./numbers.js";
import { measureName } from "./words.js";

/** @typedef {import("./view.js").View} View */
/** @typedef {{side: string, role: string, held: number, budget: string, value: number, low: number, high: number}} Point */

export const budgets = {
  id: "budgets",
  needs: ["baseline", "treatment", "budget", "measure"],
  /**
   * @param {HTMLElement} pane
   * @param {View} view
   */
  draw(pane, view) {
    if (view.measureIndex < 0) return fill(pane, lacking(view.lacking));
    const { measure, data } = view;
    const ratios = measure.compare === "ratio" && measure.distance !== "cosine" && measure.kind !== "distance";
    const floor = data.kl_floor ? `; noise floor ${number(data.kl_floor)}` : "";
    const exact = data.samples.length > 1 ? "interval" : "none";
    const panels = (/** @type {number} */ width) => [
      panel(view, width, ratios ? `Σ ${measureName(measure)} over Σ ‖o_h‖, ${data.samples.length} samples` : `${measureName(measure)}, mean of heads and ${data.samples.length} samples`,
        (config) => part(view.requireArray("total"), view.measureIndex, config), number, true),
      panel(view, width, `KL of the next token, median of ${data.samples.length} samples (nat${floor})`, (config) => part(view.requireArray("kl"), config), number, true),
      panel(view, width, `same next token, share of ${data.samples.length} samples (%)`, (config) => part(view.requireArray("top1"), config), percent, false, exact),
    ];
    fill(pane, inColumns(pane, 3, panels), key(view));
  },
};

/**
 * @param {View} view
 * @param {number} width
 * @param {string} title
 * @param {(config: number) => Float32Array} read value, low, high
 * @param {(value: number | null) => string} shown
 * @param {boolean} log
 * @param {import("./format.js").Kind} [kind] of ends
 */
function panel(view, width, title, read, shown, log, kind = view.data.interval) {
  const found = points(view, read);
  const logs = log && found.every((point) => point.value > 0) && found.length > 0;
  const sides = view.data.sides;
  const colour = { domain: sides, range: sides.map((side) => sideColour(view, side)) };
  const bars = found.filter((point) => (logs ? point.low > 0 : Number.isFinite(point.low)) && point.role !== "other");
  const known = view.data.configs.every((config) => config.held !== null);
  const x = known
    ? { label: "cache share", ticks: 5, tickFormat: tick, inset: 10 }
    : { label: "budget", ticks: d3.range(view.data.budgets.length), tickFormat: (/** @type {number} */ index) => view.data.budgets[index], inset: 10 };
  const figure = /** @type {Node} */ (Plot.plot({
    width, height: 240, marginLeft: 50, marginBottom: 38, style: { background: "none", fontSize: "11px" }, ariaLabel: title,
    x: { ...x, labelAnchor: "center", labelArrow: "none" },
    y: { type: logs ? "log" : "linear", grid: true, ticks: 5, tickFormat: (/** @type {number} */ value) => (shown === percent ? percent(value) : tick(value)), label: null },
    color: colour,
    symbol: { domain: ["other", "baseline", "treatment"], range: ["diamond", "circle", "square"] },
    marks: [
      Plot.line(found.filter((point) => point.role === "other"), { x: "held", y: "value", z: "side", stroke: "side", strokeWidth: 1.4 }),
      Plot.line(found.filter((point) => point.role !== "other"), { x: "held", y: "value", z: "side", stroke: "side", strokeWidth: 2.4 }),
      ...["baseline", "treatment"].map((role) => Plot.ruleX(bars.filter((bar) => bar.role === role), {
        x: "held", y1: "low", y2: "high", stroke: "side", dx: role === "baseline" ? -2 : 2,
      })),
      Plot.text(found.filter((point) => point.role === "treatment"), { x: "held", frameAnchor: "bottom", dy: -2, text: (point) => `b=${point.budget}`, fill: "currentColor", fillOpacity: 0.7 }),
      Plot.dot(found, { x: "held", y: "value", fill: "side", symbol: "role", r: 3.2,
        title: (point) => `${point.side}, budget ${point.budget}\n${estimate([point.value, point.low, point.high], shown, kind)}` }),
    ],
  }));
  return make("div", null, make("p", { class: "caption" }, title), figure);
}

/**
 * Return a side's colour: that of its role, or of its number among the others, the last one grey.
 * @param {View} view
 * @param {string} side
 */
function sideColour(view, side) {
  const { baseline, treatment, others } = colours();
  if (side === view.choice.treatment) return treatment;
  if (side === view.choice.baseline) return baseline;
  return others[Math.min(view.data.sides.indexOf(side), others.length - 1)];
}

/**
 * @param {View} view
 * @param {(config: number) => Float32Array} read
 * @returns {Point[]}
 */
function points(view, read) {
  const { configs, sides, budgets: names } = view.data;
  const known = configs.every((config) => config.held !== null);
  return configs.map((config, index) => {
    const side = sides[config.side];
    const role = side === view.choice.treatment ? "treatment" : side === view.choice.baseline ? "baseline" : "other";
    const [value, low, high] = read(index);
    return { side, role, held: known ? /** @type {number} */ (config.held) : config.budget, budget: names[config.budget], value, low, high };
  }).filter((point) => Number.isFinite(point.value)).sort((one, other) => d3.ascending(one.held, other.held));
}

/** @param {View} view */
function key(view) {
  const { baseline, treatment } = view.choice;
  const swatch = (/** @type {string} */ role, /** @type {string} */ mark, /** @type {string} */ text) =>
    make("span", { class: `key ${role}` }, make("b", { "aria-hidden": "true" }, mark), ` ${text}`);
  const intervalTexts = { interval: "bars: 95 % intervals over samples", range: "bars: ranges of single samples, of shares exact 95 % intervals", none: "" };
  const others = view.data.sides.filter((side) => side !== baseline && side !== treatment).map((side) => {
    const mark = swatch("other", "◆", side);
    /** @type {HTMLElement} */ (mark.querySelector("b")).style.color = sideColour(view, side);
    return mark;
  });
  return make("p", { class: "legend" }, baseline !== treatment && swatch("baseline", "●", baseline), swatch("treatment", "■", treatment),
    ...others, ` ${intervalTexts[view.data.interval]}`);
}
