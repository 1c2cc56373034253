// A point per head: baseline against treatment (paper, figure 2).

import { colours, layerColour } from "./colours.js";
import { fill, lacking, make, widthOf } from "./dom.js";
import { number, ratio, tick } from "./format.js";
import { EVIDENCE, TIED, together } from "./seen.js";
import { hide, show } from "./tooltip.js";
import { words } from "./words.js";

/** @typedef {import("./seen.js").Seen} Seen */
/** @typedef {import("./choice.js").Chosen} Chosen */
/** @typedef {{head: number, layer: number, x: number, y: number, tied: boolean, flagged: boolean, clipped: boolean}} Point */

const DECADES = 1000;
const NEAR = 24;

export const scatter = {
  id: "scatter",
  needs: ["baseline", "treatment", "budget", "measure", "sample", "head"],
  /**
   * @param {HTMLElement} pane
   * @param {Seen} seen
   * @param {Chosen} chosen
   */
  draw(pane, seen, chosen) {
    if (seen.lacking || !seen.paired) return fill(pane, lacking(seen.lacking || "A scatter needs two sides."));
    const log = seen.measure.compare === "ratio";
    const found = points(seen, log);
    const size = Math.min(widthOf(pane), 460);
    const all = together(chosen).filter((one) => one.paired).flatMap((one) => points(one, log));
    const figure = drawn(seen, found, all, log, size);
    follow(figure, seen, found, chosen);
    const below = seen.measure.less ? "Below the diagonal" : "Above the diagonal";
    fill(pane, make("p", { class: "caption" }, `${words(seen.measure)}, ${seen.of}. ${below} the treatment is better.`),
      figure, key(found));
  },
};

/**
 * @param {Seen} seen
 * @param {boolean} log
 * @returns {Point[]}
 */
function points(seen, log) {
  const [first, second] = [seen.values(seen.baseline), seen.values(seen.treatment)];
  const verdicts = seen.verdicts();
  const sigma = seen.trace.measure("sigma_stage1");
  const flags = sigma < 0 ? null : seen.values(seen.treatment, sigma);
  const least = log ? floorOf([...first, ...second]) : -Infinity;
  const found = Array.from(first, (x, head) => ({
    head,
    layer: Math.floor(head / seen.told.heads),
    x: Math.max(x, least),
    y: Math.max(second[head], least),
    tied: verdicts[head] === TIED,
    flagged: flags !== null && flags[head] <= EVIDENCE,
    clipped: Math.min(x, second[head]) < least,
  }));
  return found.filter((point) => Number.isFinite(point.x) && Number.isFinite(point.y));
}

/**
 * The least that log axes show: far smaller heads lie on their edge.
 * @param {number[]} values
 */
function floorOf(values) {
  const positive = values.filter((value) => value > 0 && Number.isFinite(value)).sort(d3.ascending);
  const middle = d3.quantileSorted(positive, 0.5) || 1;
  return positive.find((value) => value >= middle / DECADES) || middle;
}

/**
 * @param {Seen} seen
 * @param {Point[]} found
 * @param {Point[]} all that share the axes
 * @param {boolean} log
 * @param {number} size
 */
function drawn(seen, found, all, log, size) {
  const paint = layerColour();
  const last = Math.max(1, seen.told.layers.length - 1);
  const [low, high] = d3.extent(all.flatMap((point) => [point.x, point.y]));
  const domain = log ? [(low || 1) / 1.15, (high || 1) * 1.15] : [low ?? 0, high ?? 1];
  const axis = { type: log ? "log" : "linear", domain, grid: true, nice: false, tickFormat: tick };
  const radius = found.length > 600 ? 2 : 3;
  return /** @type {SVGSVGElement} */ (Plot.plot({
    width: size, height: size, marginLeft: 54, marginBottom: 44, marginTop: 24, marginRight: 10,
    ariaLabel: `Scatter of ${found.length} heads: ${seen.choice.baseline} across, ${seen.choice.treatment} upwards`,
    style: { background: "none", fontSize: "11px" },
    x: /** @type {any} */ ({ ...axis, ticks: 5, label: `${seen.choice.baseline} (${seen.measure.unit}) →`, labelAnchor: "center", labelArrow: "none" }),
    y: /** @type {any} */ ({ ...axis, ticks: 5, label: `↑ ${seen.choice.treatment} (${seen.measure.unit})`, labelArrow: "none" }),
    marks: [
      Plot.line([[domain[0], domain[0]], [domain[1], domain[1]]], { stroke: colours().grey }),
      Plot.dot(found.filter((point) => point.tied), { x: "x", y: "y", symbol: "times", r: radius, stroke: colours().grey }),
      Plot.dot(found.filter((point) => !point.tied), {
        x: "x", y: "y", r: radius, fill: (/** @type {Point} */ point) => paint(point.layer / last),
        symbol: (/** @type {Point} */ point) => (point.clipped ? "triangle" : "circle"),
      }),
      Plot.dot(found.filter((point) => point.flagged), { x: "x", y: "y", r: radius + 2, stroke: colours().warning, strokeWidth: 1 }),
      Plot.dot(found.filter((point) => point.head === seen.head), { x: "x", y: "y", r: 8, stroke: "currentColor", strokeWidth: 2 }),
      Plot.text(found.filter((point) => point.head === seen.head), {
        x: "x", y: "y", text: (/** @type {Point} */ point) => seen.trace.headName(point.head), dy: -15, fontWeight: "bold",
        stroke: colours().paper, strokeWidth: 4, fill: "currentColor",
      }),
    ],
    symbol: { legend: false, type: "identity" },
    color: { type: "identity" },
  }));
}

/**
 * @param {SVGSVGElement} figure
 * @param {Seen} seen
 * @param {Point[]} found
 * @param {Chosen} chosen
 */
function follow(figure, seen, found, chosen) {
  const scales = /** @type {any} */ (figure);
  const [x, y] = [scales.scale("x"), scales.scale("y")];
  const tree = d3.quadtree(found, (point) => x.apply(point.x), (point) => y.apply(point.y));
  const near = (/** @type {MouseEvent} */ event) => tree.find(...d3.pointer(event, figure), NEAR);
  figure.addEventListener("pointermove", (event) => {
    const point = near(event);
    if (!point) return hide();
    const [first, second] = [seen.values(seen.baseline)[point.head], seen.values(seen.treatment)[point.head]];
    show(event, [
      `layer ${seen.told.layers[point.layer]}, head ${point.head % seen.told.heads}`,
      `${seen.choice.baseline}: ${number(first)} ${seen.measure.unit}`,
      `${seen.choice.treatment}: ${number(second)} ${seen.measure.unit}${first ? ` (× ${ratio(second / first)})` : ""}`,
      point.flagged ? "σ ≤ 0.5: no evidence for Theorem 3" : "",
    ].filter(Boolean));
  });
  figure.addEventListener("pointerleave", hide);
  figure.addEventListener("click", (event) => {
    const point = near(event);
    if (point) chosen.choose({ head: seen.trace.headName(point.head) });
  });
}

/** @param {Point[]} found */
function key(found) {
  const words = ["● a head, dark to light from the first layer to the last"];
  if (found.some((point) => point.tied)) words.push("× tied");
  if (found.some((point) => point.flagged)) words.push("red ring: σ ≤ 0.5");
  if (found.some((point) => point.clipped)) words.push("▲ smaller than the axes show");
  return make("p", { class: "legend" }, words.join(" · "));
}
