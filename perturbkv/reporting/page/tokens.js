// A prompt of any length as text: only what is on the screen is made of single tokens.

import { make } from "./dom.js";

const LEAST = 250;
const MOST = 600;
/** Most chunks that are all laid out; of more, those off the screen are not. */
const LONG = 20;
const AHEAD = "600px 0px";

/** @typedef {{pieces: string[], compressed: number, cut: number | null, cut_tokens: number}} Text */
/** @typedef {(index: number) => {mark: string, level: number}} Look */

export class Tokens {
  /**
   * @param {HTMLElement} box that scrolls
   * @param {Text} text
   * @param {(index: number, event: PointerEvent) => void} hovered
   */
  constructor(box, text, hovered) {
    this.box = box;
    this.text = text;
    /** @type {Look} */
    this.look = () => ({ mark: "", level: 0 });
    /** @type {Map<HTMLElement, number>} chunks that are made of tokens -> their first token */
    this.open = new Map();
    this.starts = chunkStarts(text.pieces);
    this.chunks = this.starts.map((start) => make("div", { class: "chunk", "data-start": start }, this.plain(start)));
    box.replaceChildren(...this.chunks);
    box.classList.toggle("long", this.chunks.length > LONG);
    this.watch = new IntersectionObserver((entries) => entries.forEach((entry) => this.turn(entry)), { root: box, rootMargin: AHEAD });
    for (const chunk of this.chunks) this.watch.observe(chunk);
    box.onpointermove = (event) => this.point(event, hovered);
    box.onpointerleave = (event) => hovered(-1, event);
    /** @type {[number, number]} first token that is marked, and the one behind the last */
    this.found = [-1, -1];
    /** @type {{text: string, starts: number[]} | null} what is searched, made when somebody does */
    this.whole = null;
  }

  /** Stop observing the chunks. */
  close() {
    this.watch.disconnect();
  }

  /**
   * Colour every token that is on the screen.
   * @param {Look} look
   */
  paint(look) {
    this.look = look;
    for (const [chunk, start] of this.open) this.colour(chunk, start);
  }

  /**
   * Scroll to a token and mark it, or all up to another.
   * @param {number} index
   * @param {number} [end]
   */
  jump(index, end = index + 1) {
    const number = d3.bisectRight(this.starts, index) - 1;
    const chunk = this.chunks[number];
    if (!chunk) return;
    this.found = [index, end];
    this.fill(chunk);
    for (const [other, start] of this.open) this.colour(other, start);
    const token = /** @type {HTMLElement | undefined} */ (chunk.children[index - this.starts[number]]);
    const box = this.box.getBoundingClientRect();
    const at = (token || chunk).getBoundingClientRect();
    this.box.scrollTop += at.top - box.top - box.height / 3;
  }

  /**
   * Return every occurrence of a text in the prompt, as its first token and the token after its last.
   * @param {string} wanted
   * @returns {[number, number][]}
   */
  search(wanted) {
    if (!wanted) return [];
    this.whole ||= searchIndex(this.text.pieces);
    /** @type {[number, number][]} */
    const found = [];
    const [{ text, starts }, sought] = [this.whole, wanted.toLowerCase()];
    for (let at = text.indexOf(sought); at >= 0; at = text.indexOf(sought, at + sought.length)) {
      found.push([d3.bisectRight(starts, at) - 1, d3.bisectLeft(starts, at + sought.length)]);
    }
    return found;
  }

  /**
   * Return the tokens' texts of the chunk that begins at a token.
   * @param {number} start
   */
  pieces(start) {
    return this.text.pieces.slice(start, this.starts[d3.bisectRight(this.starts, start)]);
  }

  /** @param {number} start */
  plain(start) {
    return this.pieces(start).join("");
  }

  /** @param {IntersectionObserverEntry} entry */
  turn(entry) {
    const chunk = /** @type {HTMLElement} */ (entry.target);
    if (entry.isIntersecting) return this.fill(chunk);
    if (!this.open.has(chunk)) return;
    this.open.delete(chunk);
    chunk.textContent = this.plain(Number(chunk.dataset.start));
  }

  /** @param {HTMLElement} chunk */
  fill(chunk) {
    if (this.open.has(chunk)) return;
    const start = Number(chunk.dataset.start);
    const { cut, cut_tokens: lost } = this.text;
    const spans = this.pieces(start).map((piece, index) => {
      const span = make("span", null, piece);
      if (cut !== null && start + index === cut) span.dataset.cut = `[${lost.toLocaleString("en")} tokens cut] `;
      return span;
    });
    chunk.replaceChildren(...spans);
    this.open.set(chunk, start);
    this.colour(chunk, start);
  }

  /**
   * @param {HTMLElement} chunk
   * @param {number} start
   */
  colour(chunk, start) {
    const spans = /** @type {HTMLCollectionOf<HTMLElement>} */ (chunk.children);
    for (let index = 0; index < spans.length; index++) {
      const { mark, level } = this.look(start + index);
      const name = start + index >= this.found[0] && start + index < this.found[1] ? `${mark} found` : mark;
      if (spans[index].className !== name) spans[index].className = name;
      if (level) spans[index].style.setProperty("--level", level.toFixed(2));
    }
  }

  /**
   * @param {PointerEvent} event
   * @param {(index: number, event: PointerEvent) => void} hovered
   */
  point(event, hovered) {
    const span = /** @type {HTMLElement} */ (event.target);
    const chunk = /** @type {HTMLElement | null} */ (span.parentElement);
    const start = chunk ? this.open.get(chunk) : undefined;
    if (!chunk || start === undefined) return hovered(-1, event);
    hovered(start + Array.prototype.indexOf.call(chunk.children, span), event);
  }
}

/**
 * Return the first token of every chunk; a chunk ends with a line where possible.
 * @param {string[]} pieces
 */
function chunkStarts(pieces) {
  const found = [0];
  for (let index = 1; index < pieces.length; index++) {
    const length = index - found[found.length - 1];
    if (length >= MOST || (length >= LEAST && pieces[index - 1].endsWith("\n"))) found.push(index);
  }
  return found;
}

/**
 * Return the text in lower case, and the position where each token begins.
 * @param {string[]} pieces
 */
function searchIndex(pieces) {
  const small = pieces.map((piece) => piece.toLowerCase());
  let at = 0;
  const starts = small.map((piece) => {
    const own = at;
    at += piece.length;
    return own;
  });
  return { text: small.join(""), starts };
}
