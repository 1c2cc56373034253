// What every side gives up, over its budgets (paper, figure 3c).

import { colours } from "./colours.js";
import { beside, fill, lacking, make } from "./dom.js";
import { estimate, number, percent, tick } from "./format.js";
import { part } from "./numbers.js";
import { words } from "./words.js";

/** @typedef {import("./seen.js").Seen} Seen */
/** @typedef {{side: string, role: string, held: number, budget: string, value: number, low: number, high: number}} Point */

export const budgets = {
  id: "budgets",
  needs: ["baseline", "treatment", "budget", "measure"],
  /**
   * @param {HTMLElement} pane
   * @param {Seen} seen
   */
  draw(pane, seen) {
    if (seen.place < 0) return fill(pane, lacking(seen.lacking));
    const { measure, told } = seen;
    const ratios = measure.compare === "ratio" && measure.distance !== "cosine" && measure.kind !== "distance";
    const floor = told.kl_floor ? `; noise floor ${number(told.kl_floor)}` : "";
    const exact = told.samples.length > 1 ? "interval" : "none";
    const panels = (/** @type {number} */ width) => [
      panel(seen, width, ratios ? `Σ ${words(measure)} over Σ ‖o_h‖, ${told.samples.length} samples` : `${words(measure)}, mean of heads and ${told.samples.length} samples`,
        (config) => part(seen.need("total"), seen.place, config), number, true),
      panel(seen, width, `KL of the next token, median of ${told.samples.length} samples (nat${floor})`, (config) => part(seen.need("kl"), config), number, true),
      panel(seen, width, `same next token, share of ${told.samples.length} samples (%)`, (config) => part(seen.need("top1"), config), percent, false, exact),
    ];
    fill(pane, beside(pane, 3, panels), key(seen));
  },
};

/**
 * @param {Seen} seen
 * @param {number} width
 * @param {string} title
 * @param {(config: number) => Float32Array} read value, low, high
 * @param {(value: number | null) => string} shown
 * @param {boolean} log
 * @param {import("./format.js").Kind} [kind] of ends
 */
function panel(seen, width, title, read, shown, log, kind = seen.told.interval) {
  const found = points(seen, read);
  const logs = log && found.every((point) => point.value > 0) && found.length > 0;
  const { baseline, treatment, grey } = colours();
  const bars = found.filter((point) => (logs ? point.low > 0 : Number.isFinite(point.low)) && point.role !== "other");
  const told = seen.told.configs.every((config) => config.held !== null);
  const x = told
    ? { label: "entries held / full cache", ticks: 5, tickFormat: tick, inset: 10 }
    : { label: "budget", ticks: d3.range(seen.told.budgets.length), tickFormat: (/** @type {number} */ place) => seen.told.budgets[place], inset: 10 };
  const figure = /** @type {Node} */ (Plot.plot({
    width, height: 240, marginLeft: 50, marginBottom: 38, style: { background: "none", fontSize: "11px" }, ariaLabel: title,
    x: { ...x, labelAnchor: "center", labelArrow: "none" },
    y: { type: logs ? "log" : "linear", grid: true, ticks: 5, tickFormat: (/** @type {number} */ value) => (shown === percent ? percent(value) : tick(value)), label: null },
    color: { domain: ["other", "baseline", "treatment"], range: [grey, baseline, treatment] },
    symbol: { domain: ["other", "baseline", "treatment"], range: ["diamond", "circle", "square"] },
    marks: [
      Plot.line(found.filter((point) => point.role === "other"), { x: "held", y: "value", z: "side", stroke: "role", strokeOpacity: 0.45 }),
      Plot.line(found.filter((point) => point.role !== "other"), { x: "held", y: "value", z: "side", stroke: "role", strokeWidth: 2 }),
      ...["baseline", "treatment"].map((role) => Plot.ruleX(bars.filter((bar) => bar.role === role), {
        x: "held", y1: "low", y2: "high", stroke: "role", dx: role === "baseline" ? -2 : 2,
      })),
      Plot.text(found.filter((point) => point.role === "treatment"), { x: "held", frameAnchor: "bottom", dy: -2, text: (point) => `b=${point.budget}`, fill: "currentColor", fillOpacity: 0.7 }),
      Plot.dot(found, { x: "held", y: "value", fill: "role", symbol: "role", r: 3.2, fillOpacity: (point) => (point.role === "other" ? 0.5 : 1),
        title: (point) => `${point.side}, budget ${point.budget}\n${estimate([point.value, point.low, point.high], shown, kind)}` }),
    ],
  }));
  return make("div", null, make("p", { class: "caption" }, title), figure);
}

/**
 * @param {Seen} seen
 * @param {(config: number) => Float32Array} read
 * @returns {Point[]}
 */
function points(seen, read) {
  const { configs, sides, budgets: names } = seen.told;
  const told = configs.every((config) => config.held !== null);
  return configs.map((config, place) => {
    const side = sides[config.side];
    const role = side === seen.choice.treatment ? "treatment" : side === seen.choice.baseline ? "baseline" : "other";
    const [value, low, high] = read(place);
    return { side, role, held: told ? /** @type {number} */ (config.held) : config.budget, budget: names[config.budget], value, low, high };
  }).filter((point) => Number.isFinite(point.value)).sort((one, other) => d3.ascending(one.held, other.held));
}

/** @param {Seen} seen */
function key(seen) {
  const { baseline, treatment } = seen.choice;
  const swatch = (/** @type {string} */ role, /** @type {string} */ mark, /** @type {string} */ text) =>
    make("span", { class: `key ${role}` }, make("b", { "aria-hidden": "true" }, mark), ` ${text}`);
  const words = { interval: "bars: 95 % intervals over samples", range: "bars: ranges of single samples, of shares exact 95 % intervals", none: "" };
  const others = seen.told.sides.filter((side) => side !== baseline && side !== treatment);
  return make("p", { class: "legend" }, baseline !== treatment && swatch("baseline", "●", baseline), swatch("treatment", "■", treatment),
    others.length > 0 && swatch("other", "◆", `others: ${others.join(", ")}`), ` ${words[seen.told.interval]}`);
}
