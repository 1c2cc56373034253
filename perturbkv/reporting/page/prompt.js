// The prompt as text: which of its tokens are kept, by whom, and what the evicted ones would have added.

import { colours } from "./colours.js";
import { announce, fill, lacking, make, select, table, widthOf } from "./dom.js";
import { plural, percentOf, short } from "./format.js";
import { promptText } from "./kept.js";
import { looks } from "./looks.js";
import { Tokens } from "./tokens.js";
import { hide as hideTip, show as showTip } from "./tooltip.js";

/** @typedef {import("./view.js").View} View */
/** @typedef {import("./choice.js").Chosen} Chosen */
/** @typedef {import("./kept.js").Text} Text */
/** @typedef {import("./looks.js").Looks} Looks */
/** @typedef {{sample: number, tokens: Tokens, elements: Record<string, HTMLElement>, looks: Looks | null, drawn: number}} Pane */

const COLOURS = [
  { value: "fate", text: "who keeps it, in the chosen head" },
  { value: "shares", text: "share of heads that keep it: treatment − baseline" },
  { value: "attention", text: "attention, mean over heads" },
  { value: "head-attention", text: "attention of the chosen head" },
];
const PARTS = ["tools", "note", "key", "strip", "text", "lost"];

/** @type {WeakMap<HTMLElement, Pane>} */
const panes = new WeakMap();
let draws = 0;

export const prompt = {
  id: "prompt",
  needs: ["baseline", "treatment", "budget", "sample", "head", "colour"],
  /**
   * @param {HTMLElement} controls
   * @param {Chosen} chosen
   */
  controls(controls, chosen) {
    const attention = chosen.traces.some((one) => !one.data.lacks.attention);
    const options = COLOURS.map((one) => one.value.includes("attention") && !attention
      ? { ...one, text: `${one.text} (not recorded)`, disabled: true } : one);
    fill(controls, select("Colour by", "colour", options, chosen.now.colour, (colour) => chosen.choose({ colour })));
  },
  /**
   * @param {HTMLElement} pane
   * @param {View} view
   * @param {Chosen} chosen
   */
  async draw(pane, view, chosen) {
    const ticket = ++draws;
    pane.dataset.draw = String(ticket);
    if (view.baseline < 0 || view.treatment < 0) return fill(pane, lacking(view.lacking));
    const sample = view.sample >= 0 ? view.sample : view.mostChangedSample();
    const text = await promptText(view.trace, sample);
    if (pane.dataset.draw !== String(ticket)) return;
    if (!text) return fill(pane, lacking(view.data.lacks.prompt || "This trace holds no text of this prompt."));
    const found = await looks(view, sample, text);
    if (pane.dataset.draw !== String(ticket)) return;
    show(promptPane(pane, view, sample, text), view, text, found, chosen);
  },
};

/**
 * Return the pane's parts, which are made again only for another prompt.
 * @param {HTMLElement} pane
 * @param {View} view
 * @param {number} sample
 * @param {Text} text
 * @returns {Pane}
 */
function promptPane(pane, view, sample, text) {
  const known = panes.get(pane);
  if (known && known.sample === sample) return known;
  known?.tokens.close();
  const elements = Object.fromEntries(PARTS.map((name) => [name, make("div", { class: name })]));
  const { id } = view.data.samples[sample];
  const several = view.sample < 0 && view.data.samples.length > 1;
  const caption = `the prompt of sample ${id}${several ? ", in which this head changes most; choose another above" : ""}`;
  fill(pane, make("p", { class: "caption" }, `${caption} · ${plural(text.pieces.length, "token")}`), elements.tools, elements.note, elements.key,
    elements.strip, make("div", { class: "reading" }, elements.text, elements.lost));
  for (const [name, value] of Object.entries({ tabindex: "0", role: "region", "aria-label": `Text of ${id}`, dir: "auto" })) {
    elements.text.setAttribute(name, value);
  }
  /** @type {Pane} */
  const made = { sample, elements, looks: null, drawn: 0, tokens: new Tokens(elements.text, text, (index, event) => hover(made, text, index, event)) };
  panes.set(pane, made);
  tools(made, view);
  return made;
}

/**
 * @param {Pane} own
 * @param {View} view
 * @param {Text} text
 * @param {Looks} found
 * @param {Chosen} chosen
 */
function show(own, view, text, found, chosen) {
  own.looks = found;
  own.tokens.paint(found.look);
  fill(own.elements.note, found.keys.length ? make("p", { class: "caption" }, found.note) : lacking(found.note));
  fill(own.elements.key, make("p", { class: "legend" }, ...found.keys.map(([mark, text]) =>
    make("span", { class: "key" }, make("span", { class: `swatch ${mark}`, "aria-hidden": "true" }, "abc"), ` ${text}`))));
  strip(own, text, found);
  fill(own.elements.lost, ...lost(own, view, text, found), ...heads(view, own.sample, chosen));
}

/**
 * Add the search box, and buttons that jump to the answer and to the end.
 * @param {Pane} own
 * @param {View} view
 */
function tools(own, view) {
  const status = make("span", { class: "found-count", role: "status" });
  let at = -1;
  const go = (/** @type {string} */ wanted, /** @type {number} */ by) => {
    const found = own.tokens.search(wanted);
    at = found.length ? (at + by + found.length) % found.length : -1;
    status.textContent = wanted ? (found.length ? `${at + 1} of ${found.length}` : "not found") : "";
    if (at >= 0) own.tokens.jump(...found[at]);
  };
  const box = make("input", { type: "search", name: "search", placeholder: "Search the prompt", "aria-label": "Search the prompt",
    oninput: () => { at = -1; go(box.value, 1); },
    onkeydown: (event) => { if (event.key === "Enter") { event.preventDefault(); go(box.value, event.shiftKey ? -1 : 1); } } });
  const expected = view.data.answers?.expected?.[own.sample] || [];
  const jump = expected.length > 0 && make("button", { type: "button", onclick: () => {
    const index = expected.map((answer) => own.tokens.search(answer)[0]).find((one) => one !== undefined);
    if (index === undefined) announce(status.textContent = "the expected answer does not stand in the prompt");
    else own.tokens.jump(...index);
  } }, `Jump to the answer: ${short(expected[0])}`);
  const end = make("button", { type: "button", onclick: () => own.tokens.jump(own.tokens.text.pieces.length - 1) }, "Jump to the end");
  fill(own.elements.tools, box, make("button", { type: "button", "aria-label": "previous find", onclick: () => go(box.value, -1) }, "↑"),
    make("button", { type: "button", "aria-label": "next find", onclick: () => go(box.value, 1) }, "↓"), status, jump, end);
}

/**
 * Draw the whole prompt as a strip; a click scrolls to its position.
 * @param {Pane} own
 * @param {Text} text
 * @param {Looks} found
 */
function strip(own, text, found) {
  const width = widthOf(own.elements.text);
  const count = text.pieces.length;
  const canvas = make("canvas", { width, height: 22, role: "img", "aria-label": "Where in the prompt the coloured tokens lie" });
  canvas.onclick = (event) => own.tokens.jump(Math.floor((event.offsetX / canvas.clientWidth) * count));
  const drawing = canvas.getContext("2d");
  const { baseline, treatment, grey } = colours();
  const tones = ["", baseline, treatment, grey];
  if (drawing) {
    const totals = new Float32Array(width * 4);
    for (let index = 0; index < count; index++) {
      const last = Math.max(Math.floor(((index + 1) * width) / count) - 1, Math.floor((index * width) / count));
      for (let x = Math.floor((index * width) / count); x <= last; x++) totals[4 * x + found.strip(index)] += 1;
    }
    for (let x = 0; x < width; x++) column(drawing, x, totals.subarray(4 * x, 4 * x + 4), tones);
    drawing.fillStyle = colours().warning;
    for (const loss of found.losses ? [...found.losses.baseline, ...found.losses.treatment] : []) {
      drawing.fillRect(Math.floor((loss.position * width) / count) - 1, 0, 2, 5);
    }
  }
  fill(own.elements.strip, canvas);
}

/**
 * @param {CanvasRenderingContext2D} drawing
 * @param {number} x
 * @param {Float32Array} totals of none, baseline, treatment, both
 * @param {string[]} tones
 */
function column(drawing, x, totals, tones) {
  const whole = d3.sum(totals) || 1;
  let top = 22;
  for (const kind of [3, 1, 2]) {
    const height = (16 * totals[kind]) / whole;
    drawing.fillStyle = tones[kind];
    drawing.fillRect(x, top - height, 1, height);
    top -= height;
  }
}

/**
 * Return tables of the evicted entries that would add most to the output, per side.
 * @param {Pane} own
 * @param {View} view
 * @param {Text} text
 * @param {Looks} found
 */
function lost(own, view, text, found) {
  if (!found.losses) return [];
  if (view.data.lacks.losses) return [lacking(view.data.lacks.losses)];
  const sides = /** @type {["baseline", "treatment"]} */ (["baseline", "treatment"]);
  return sides.filter((_, index) => !index || view.baseline !== view.treatment).map((side) => {
    const rows = /** @type {import("./looks.js").Looks["losses"]} */ (found.losses)?.[side].map((loss, index) => [
      String(index + 1),
      make("button", { type: "button", class: "token", onclick: () => own.tokens.jump(loss.position) }, short(text.pieces[loss.position] ?? "") || " "),
      `${loss.position.toLocaleString("en")}`,
      percentOf(loss.share),
    ]);
    return table(`Evicted by ${view.choice[side]}: what would add most to the head’s output`, ["", "token", "#position", "#of Σ A ν"], rows || []);
  });
}

/**
 * Return a list of the heads whose kept tokens are in the page, where not all are.
 * @param {View} view
 * @param {number} sample
 * @param {Chosen} chosen
 */
function heads(view, sample, chosen) {
  const stored = view.data.prompts[sample]?.held || [];
  if (!stored.length || stored.length === view.trace.size || !["fate", "head-attention"].includes(view.choice.colour)) return [];
  const options = stored.map((index) => ({ value: view.trace.headName(index), text: `head ${view.trace.headName(index)}` }));
  const known = options.some((one) => one.value === view.choice.head);
  const list = known ? options : [{ value: view.choice.head, text: `head ${view.choice.head}: not held` }, ...options];
  return [select(`${stored.length} of ${view.trace.size} heads are held, most changed first`, "held", list, view.choice.head,
    (head) => chosen.choose({ head }))];
}

/**
 * @param {Pane} own
 * @param {Text} text
 * @param {number} index
 * @param {PointerEvent} event
 */
function hover(own, text, index, event) {
  if (index < 0 || !own.looks) return hideTip();
  showTip(event, [`“${short(text.pieces[index])}”`, `token ${index.toLocaleString("en")}`, ...own.looks.says(index)]);
}
