// The prompt as text: which of its tokens are kept, by whom, and what the evicted ones would have added.

import { colours } from "./colours.js";
import { announce, fill, lacking, make, select, table, widthOf } from "./dom.js";
import { counted, percentOf } from "./format.js";
import { textOf } from "./kept.js";
import { looks } from "./looks.js";
import { Tokens } from "./tokens.js";
import { hide as hideTip, show as showTip } from "./tooltip.js";

/** @typedef {import("./seen.js").Seen} Seen */
/** @typedef {import("./choice.js").Chosen} Chosen */
/** @typedef {import("./kept.js").Text} Text */
/** @typedef {import("./looks.js").Looks} Looks */
/** @typedef {{sample: number, tokens: Tokens, places: Record<string, HTMLElement>, looks: Looks | null, drawn: number}} View */

const COLOURS = [
  { value: "fate", text: "who keeps it, in the chosen head" },
  { value: "shares", text: "share of heads that keep it: treatment − baseline" },
  { value: "attention", text: "attention, mean over heads" },
  { value: "head-attention", text: "attention of the chosen head" },
];
const PARTS = ["tools", "note", "key", "strip", "text", "lost"];

/** @type {WeakMap<HTMLElement, View>} */
const views = new WeakMap();
let draws = 0;

export const prompt = {
  id: "prompt",
  needs: ["baseline", "treatment", "budget", "sample", "head", "colour"],
  /**
   * @param {HTMLElement} controls
   * @param {Chosen} chosen
   */
  controls(controls, chosen) {
    const attention = chosen.traces.some((one) => !one.told.lacks.attention);
    const options = COLOURS.map((one) => one.value.includes("attention") && !attention
      ? { ...one, text: `${one.text} (not recorded)`, disabled: true } : one);
    fill(controls, select("Colour by", "colour", options, chosen.now.colour, (colour) => chosen.choose({ colour })));
  },
  /**
   * @param {HTMLElement} pane
   * @param {Seen} seen
   * @param {Chosen} chosen
   */
  async draw(pane, seen, chosen) {
    const ticket = ++draws;
    pane.dataset.draw = String(ticket);
    if (seen.baseline < 0 || seen.treatment < 0) return fill(pane, lacking(seen.lacking));
    const sample = seen.sample >= 0 ? seen.sample : seen.mostChanged();
    const text = await textOf(seen.trace, sample);
    if (pane.dataset.draw !== String(ticket)) return;
    if (!text) return fill(pane, lacking(seen.told.lacks.prompt || "This trace holds no text of this prompt."));
    const found = await looks(seen, sample, text);
    if (pane.dataset.draw !== String(ticket)) return;
    show(view(pane, seen, sample, text), seen, text, found, chosen);
  },
};

/**
 * The pane's parts, made anew for another prompt alone.
 * @param {HTMLElement} pane
 * @param {Seen} seen
 * @param {number} sample
 * @param {Text} text
 * @returns {View}
 */
function view(pane, seen, sample, text) {
  const known = views.get(pane);
  if (known && known.sample === sample) return known;
  known?.tokens.close();
  const places = Object.fromEntries(PARTS.map((name) => [name, make("div", { class: name })]));
  const { id } = seen.told.samples[sample];
  const several = seen.sample < 0 && seen.told.samples.length > 1;
  const caption = `the prompt of sample ${id}${several ? ", in which this head changes most; choose another above" : ""}`;
  fill(pane, make("p", { class: "caption" }, `${caption} · ${counted(text.pieces.length, "token")}`), places.tools, places.note, places.key,
    places.strip, make("div", { class: "reading" }, places.text, places.lost));
  for (const [name, value] of Object.entries({ tabindex: "0", role: "region", "aria-label": `Text of ${id}`, dir: "auto" })) {
    places.text.setAttribute(name, value);
  }
  /** @type {View} */
  const made = { sample, places, looks: null, drawn: 0, tokens: new Tokens(places.text, text, (place, event) => hover(made, text, place, event)) };
  views.set(pane, made);
  tools(made, seen);
  return made;
}

/**
 * @param {View} own
 * @param {Seen} seen
 * @param {Text} text
 * @param {Looks} found
 * @param {Chosen} chosen
 */
function show(own, seen, text, found, chosen) {
  own.looks = found;
  own.tokens.paint(found.look);
  fill(own.places.note, found.keys.length ? make("p", { class: "caption" }, found.note) : lacking(found.note));
  fill(own.places.key, make("p", { class: "legend" }, ...found.keys.map(([mark, words]) =>
    make("span", { class: "key" }, make("span", { class: `swatch ${mark}`, "aria-hidden": "true" }, "abc"), ` ${words}`))));
  strip(own, text, found);
  fill(own.places.lost, ...lost(own, seen, text, found), ...heads(seen, own.sample, chosen));
}

/**
 * Search, and jumps to what was asked for.
 * @param {View} own
 * @param {Seen} seen
 */
function tools(own, seen) {
  const said = make("span", { class: "found-count", role: "status" });
  let at = -1;
  const go = (/** @type {string} */ wanted, /** @type {number} */ by) => {
    const found = own.tokens.search(wanted);
    at = found.length ? (at + by + found.length) % found.length : -1;
    said.textContent = wanted ? (found.length ? `${at + 1} of ${found.length}` : "not found") : "";
    if (at >= 0) own.tokens.jump(...found[at]);
  };
  const box = make("input", { type: "search", name: "search", placeholder: "Search the prompt", "aria-label": "Search the prompt",
    oninput: () => { at = -1; go(box.value, 1); },
    onkeydown: (event) => { if (event.key === "Enter") { event.preventDefault(); go(box.value, event.shiftKey ? -1 : 1); } } });
  const expected = seen.told.answers?.expected?.[own.sample] || [];
  const jump = expected.length > 0 && make("button", { type: "button", onclick: () => {
    const place = expected.map((answer) => own.tokens.search(answer)[0]).find((one) => one !== undefined);
    if (place === undefined) announce(said.textContent = "the expected answer does not stand in the prompt");
    else own.tokens.jump(...place);
  } }, `Jump to the answer: ${short(expected[0])}`);
  const end = make("button", { type: "button", onclick: () => own.tokens.jump(own.tokens.text.pieces.length - 1) }, "Jump to the end");
  fill(own.places.tools, box, make("button", { type: "button", "aria-label": "previous find", onclick: () => go(box.value, -1) }, "↑"),
    make("button", { type: "button", "aria-label": "next find", onclick: () => go(box.value, 1) }, "↓"), said, jump, end);
}

/** @param {string} text */
function short(text) {
  return text.length > 40 ? `${text.slice(0, 40)}…` : text;
}

/**
 * The whole prompt as a strip: a click scrolls there.
 * @param {View} own
 * @param {Text} text
 * @param {Looks} found
 */
function strip(own, text, found) {
  const width = widthOf(own.places.text);
  const count = text.pieces.length;
  const canvas = make("canvas", { width, height: 22, role: "img", "aria-label": "Where in the prompt the coloured tokens lie" });
  canvas.onclick = (event) => own.tokens.jump(Math.floor((event.offsetX / canvas.clientWidth) * count));
  const drawing = canvas.getContext("2d");
  const { baseline, treatment, grey } = colours();
  const tones = ["", baseline, treatment, grey];
  if (drawing) {
    const totals = new Float32Array(width * 4);
    for (let place = 0; place < count; place++) {
      const last = Math.max(Math.floor(((place + 1) * width) / count) - 1, Math.floor((place * width) / count));
      for (let x = Math.floor((place * width) / count); x <= last; x++) totals[4 * x + found.strip(place)] += 1;
    }
    for (let x = 0; x < width; x++) column(drawing, x, totals.subarray(4 * x, 4 * x + 4), tones);
    drawing.fillStyle = colours().warning;
    for (const loss of found.losses ? [...found.losses.baseline, ...found.losses.treatment] : []) {
      drawing.fillRect(Math.floor((loss.position * width) / count) - 1, 0, 2, 5);
    }
  }
  fill(own.places.strip, canvas);
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
 * The evicted entries that add most, of each side.
 * @param {View} own
 * @param {Seen} seen
 * @param {Text} text
 * @param {Looks} found
 */
function lost(own, seen, text, found) {
  if (!found.losses) return [];
  if (seen.told.lacks.losses) return [lacking(seen.told.lacks.losses)];
  const sides = /** @type {["baseline", "treatment"]} */ (["baseline", "treatment"]);
  return sides.filter((_, place) => !place || seen.baseline !== seen.treatment).map((side) => {
    const rows = /** @type {import("./looks.js").Looks["losses"]} */ (found.losses)?.[side].map((loss, place) => [
      String(place + 1),
      make("button", { type: "button", class: "token", onclick: () => own.tokens.jump(loss.position) }, short(text.pieces[loss.position] ?? "") || " "),
      `${loss.position.toLocaleString("en")}`,
      percentOf(loss.share),
    ]);
    return table(`Evicted by ${seen.choice[side]}: what would add most to the head’s output`, ["", "token", "#position", "#of Σ A ν"], rows || []);
  });
}

/**
 * Heads whose kept tokens the page holds, where it does not hold all.
 * @param {Seen} seen
 * @param {number} sample
 * @param {Chosen} chosen
 */
function heads(seen, sample, chosen) {
  const held = seen.told.prompts[sample]?.held || [];
  if (!held.length || held.length === seen.trace.size || !["fate", "head-attention"].includes(seen.choice.colour)) return [];
  const options = held.map((place) => ({ value: seen.trace.headName(place), text: `head ${seen.trace.headName(place)}` }));
  const known = options.some((one) => one.value === seen.choice.head);
  const list = known ? options : [{ value: seen.choice.head, text: `head ${seen.choice.head}: not held` }, ...options];
  return [select(`${held.length} of ${seen.trace.size} heads are held, most changed first`, "held", list, seen.choice.head,
    (head) => chosen.choose({ head }))];
}

/**
 * @param {View} own
 * @param {Text} text
 * @param {number} place
 * @param {PointerEvent} event
 */
function hover(own, text, place, event) {
  if (place < 0 || !own.looks) return hideTip();
  showTip(event, [`“${short(text.pieces[place])}”`, `token ${place.toLocaleString("en")}`, ...own.looks.says(place)]);
}
