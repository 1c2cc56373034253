// A point per head: baseline against treatment (paper, figure 2).

import { colours, layerColour } from "./colours.js";
import { fill, lacking, make, widthOf } from "./dom.js";
import { number, ratio, tick } from "./format.js";
import { EVIDENCE, TIED, comparableViews } from "./view.js";
import { hide, show } from "./tooltip.js";
import { measureName } from "./words.js";

/** @typedef {import("./view.js").View} View */
/** @typedef {import("./choice.js").Chosen} Chosen */
/** @typedef {{head: number, layer: number, x: number, y: number, tied: boolean, flagged: boolean, clipped: boolean}} Point */

const DECADES = 1000;
const NEAR = 24;

export const scatter = {
  id: "scatter",
  needs: ["baseline", "treatment", "budget", "measure", "sample", "head"],
  /**
   * @param {HTMLElement} pane
   * @param {View} view
   * @param {Chosen} chosen
   */
  draw(pane, view, chosen) {
    if (view.lacking || !view.paired) return fill(pane, lacking(view.lacking || "A scatter needs two sides."));
    const log = view.measure.compare === "ratio";
    const found = points(view, log);
    const size = Math.min(widthOf(pane), 460);
    const all = comparableViews(chosen).filter((one) => one.paired).flatMap((one) => points(one, log));
    const figure = scatterPlot(view, found, all, log, size);
    follow(figure, view, found, chosen);
    const below = view.measure.less ? "Below the diagonal" : "Above the diagonal";
    fill(pane, make("p", { class: "caption" }, `${measureName(view.measure)}, ${view.of}. ${below} the treatment is better.`),
      figure, key(found));
  },
};

/**
 * @param {View} view
 * @param {boolean} log
 * @returns {Point[]}
 */
function points(view, log) {
  const [first, second] = [view.values(view.baseline), view.values(view.treatment)];
  const verdicts = view.verdicts();
  const sigma = view.trace.measure("sigma_stage1");
  const flags = sigma < 0 ? null : view.values(view.treatment, sigma);
  const least = log ? axisFloor([...first, ...second]) : -Infinity;
  const found = Array.from(first, (x, head) => ({
    head,
    layer: Math.floor(head / view.data.heads),
    x: Math.max(x, least),
    y: Math.max(second[head], least),
    tied: verdicts[head] === TIED,
    flagged: flags !== null && flags[head] <= EVIDENCE,
    clipped: Math.min(x, second[head]) < least,
  }));
  return found.filter((point) => Number.isFinite(point.x) && Number.isFinite(point.y));
}

/**
 * Return the lower end of log axes; heads far below it are drawn on the edge.
 * @param {number[]} values
 */
function axisFloor(values) {
  const positive = values.filter((value) => value > 0 && Number.isFinite(value)).sort(d3.ascending);
  const middle = d3.quantileSorted(positive, 0.5) || 1;
  return positive.find((value) => value >= middle / DECADES) || middle;
}

/**
 * @param {View} view
 * @param {Point[]} found
 * @param {Point[]} all that share the axes
 * @param {boolean} log
 * @param {number} size
 */
function scatterPlot(view, found, all, log, size) {
  const paint = layerColour();
  const last = Math.max(1, view.data.layers.length - 1);
  const [low, high] = d3.extent(all.flatMap((point) => [point.x, point.y]));
  const domain = log ? [(low || 1) / 1.15, (high || 1) * 1.15] : [low ?? 0, high ?? 1];
  const axis = { type: log ? "log" : "linear", domain, grid: true, nice: false, tickFormat: tick };
  const radius = found.length > 600 ? 2 : 3;
  return /** @type {SVGSVGElement} */ (Plot.plot({
    width: size, height: size, marginLeft: 54, marginBottom: 44, marginTop: 24, marginRight: 10,
    ariaLabel: `Scatter of ${found.length} heads: ${view.choice.baseline} across, ${view.choice.treatment} upwards`,
    style: { background: "none", fontSize: "11px" },
    x: /** @type {any} */ ({ ...axis, ticks: 5, label: `${view.choice.baseline} (${view.measure.unit}) →`, labelAnchor: "center", labelArrow: "none" }),
    y: /** @type {any} */ ({ ...axis, ticks: 5, label: `↑ ${view.choice.treatment} (${view.measure.unit})`, labelArrow: "none" }),
    marks: [
      Plot.line([[domain[0], domain[0]], [domain[1], domain[1]]], { stroke: colours().grey }),
      Plot.dot(found.filter((point) => point.tied), { x: "x", y: "y", symbol: "times", r: radius, stroke: colours().grey }),
      Plot.dot(found.filter((point) => !point.tied), {
        x: "x", y: "y", r: radius, fill: (/** @type {Point} */ point) => paint(point.layer / last),
        symbol: (/** @type {Point} */ point) => (point.clipped ? "triangle" : "circle"),
      }),
      Plot.dot(found.filter((point) => point.flagged), { x: "x", y: "y", r: radius + 2, stroke: colours().warning, strokeWidth: 1 }),
      Plot.dot(found.filter((point) => point.head === view.head), { x: "x", y: "y", r: 8, stroke: "currentColor", strokeWidth: 2 }),
      Plot.text(found.filter((point) => point.head === view.head), {
        x: "x", y: "y", text: (/** @type {Point} */ point) => view.trace.headName(point.head), dy: -15, fontWeight: "bold",
        stroke: colours().paper, strokeWidth: 4, fill: "currentColor",
      }),
    ],
    symbol: { legend: false, type: "identity" },
    color: { type: "identity" },
  }));
}

/**
 * @param {SVGSVGElement} figure
 * @param {View} view
 * @param {Point[]} found
 * @param {Chosen} chosen
 */
function follow(figure, view, found, chosen) {
  const scales = /** @type {any} */ (figure);
  const [x, y] = [scales.scale("x"), scales.scale("y")];
  const tree = d3.quadtree(found, (point) => x.apply(point.x), (point) => y.apply(point.y));
  const near = (/** @type {MouseEvent} */ event) => tree.find(...d3.pointer(event, figure), NEAR);
  figure.addEventListener("pointermove", (event) => {
    const point = near(event);
    if (!point) return hide();
    const [first, second] = [view.values(view.baseline)[point.head], view.values(view.treatment)[point.head]];
    show(event, [
      `layer ${view.data.layers[point.layer]}, head ${point.head % view.data.heads}`,
      `${view.choice.baseline}: ${number(first)} ${view.measure.unit}`,
      `${view.choice.treatment}: ${number(second)} ${view.measure.unit}${first ? ` (× ${ratio(second / first)})` : ""}`,
      point.flagged ? "σ ≤ 0.5: no evidence for Theorem 3" : "",
    ].filter(Boolean));
  });
  figure.addEventListener("pointerleave", hide);
  figure.addEventListener("click", (event) => {
    const point = near(event);
    if (point) chosen.choose({ head: view.trace.headName(point.head) });
  });
}

/** @param {Point[]} found */
function key(found) {
  const texts = ["● a head, dark to light from the first layer to the last"];
  if (found.some((point) => point.tied)) texts.push("× tied");
  if (found.some((point) => point.flagged)) texts.push("red ring: σ ≤ 0.5");
  if (found.some((point) => point.clipped)) texts.push("▲ smaller than the axes show");
  return make("p", { class: "legend" }, texts.join(" · "));
}
