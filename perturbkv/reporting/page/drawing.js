// Draws the parts of the page when a choice changes: at once what is on the screen, the others as soon as there is time.

import { lacking, make } from "./dom.js";
import { currentViews } from "./view.js";

/** @typedef {import("./choice.js").Chosen} Chosen */
/** @typedef {import("./view.js").View} View */
/**
 * @typedef {{id: string, needs: string[], controls?: (pane: HTMLElement, chosen: Chosen) => void,
 *   draw: (pane: HTMLElement, view: View, chosen: Chosen) => void | Promise<void>}} Part
 */
/** @typedef {{part: Part, section: HTMLElement, panes: HTMLElement[], controls: HTMLElement | null}} Placed */

/** Most milliseconds that a part off the screen waits for the browser to be idle. */
const PATIENCE = 300;

export class Drawing {
  /**
   * @param {Part[]} parts
   * @param {Chosen} chosen
   */
  constructor(parts, chosen) {
    this.chosen = chosen;
    this.placed = parts.map((part) => placed(part, chosen));
    this.stale = new Set(this.placed);
    this.waiting = false;
    this.pending = 0;
    this.watch = new IntersectionObserver((entries) => this.onIntersection(entries), { rootMargin: "200px 0px" });
    for (const one of this.placed) this.watch.observe(one.section);
    chosen.listen((changed) => this.change(changed));
    let width = window.innerWidth;
    window.addEventListener("resize", () => {
      if (width === window.innerWidth) return;
      width = window.innerWidth;
      this.redraw();
    });
    window.addEventListener("beforeprint", () => this.drawAll());
  }

  /** Draw all parts again, as the width changed or arrays were loaded. */
  redraw() {
    for (const one of this.placed) this.stale.add(one);
    this.drawVisible();
    this.drawRest();
  }

  /** Draw all parts at once, also those off the screen, for printing. */
  drawAll() {
    for (const one of this.placed) this.draw(one);
  }

  /** @param {Set<string>} changed */
  change(changed) {
    const start = performance.now();
    for (const one of this.placed) if (one.part.needs.some((key) => changed.has(key))) this.stale.add(one);
    this.showPending();
    this.drawVisible();
    afterPaint(() => performance.measure("change", { start, end: performance.now() }));
    this.drawRest();
  }

  /** Draw the stale parts that are on the screen. */
  drawVisible() {
    for (const one of [...this.stale]) if (this.onScreen(one.section)) this.draw(one);
  }

  /** @param {HTMLElement} section */
  onScreen(section) {
    const { top, bottom } = section.getBoundingClientRect();
    return bottom > 0 && top < window.innerHeight;
  }

  /** @param {IntersectionObserverEntry[]} entries */
  onIntersection(entries) {
    for (const entry of entries) {
      const own = this.placed.find((one) => one.section === entry.target);
      if (own && entry.isIntersecting && this.stale.has(own)) this.draw(own);
    }
  }

  /** Draw the stale parts off the screen, one at a time, when the browser is idle. */
  drawRest() {
    if (this.waiting || !this.stale.size) return;
    this.waiting = true;
    const next = () => {
      this.waiting = false;
      const [one] = this.stale;
      if (one) this.draw(one);
      this.drawRest();
    };
    if (window.requestIdleCallback) window.requestIdleCallback(next, { timeout: PATIENCE });
    else window.setTimeout(next, 30);
  }

  /** @param {Placed} one */
  draw(one) {
    this.stale.delete(one);
    if (one.controls) follow(one.controls, this.chosen);
    one.panes.forEach((pane, index) => {
      const view = currentViews(this.chosen)[index];
      if (view.sample >= 0 && !view.trace.array("sample")) {
        pane.replaceChildren(lacking("Single samples are still being read."));
        return;
      }
      this.pending++;
      Promise.resolve(one.part.draw(pane, view, this.chosen)).finally(() => {
        this.pending--;
        this.showPending();
      });
    });
    this.showPending();
  }

  /** Write the number of parts still to be drawn into the page, for tests. */
  showPending() {
    document.body.dataset.stale = String(this.stale.size + this.pending);
  }
}

/**
 * Return a part with its section, and a pane per trace.
 * @param {Part} part
 * @param {Chosen} chosen
 * @returns {Placed}
 */
function placed(part, chosen) {
  const section = document.getElementById(part.id);
  const room = section?.querySelector(".panes");
  if (!section || !room) throw new Error(`the page has no section ${part.id}`);
  const controls = part.controls ? make("div", { class: "controls" }) : null;
  if (controls) {
    section.insertBefore(controls, room);
    part.controls?.(controls, chosen);
  }
  const panes = chosen.traces.map((trace) => {
    const pane = make("div", { class: "pane" });
    const name = chosen.traces.length > 1 && make("h3", null, trace.data.name);
    room.append(make("div", { class: "of-trace" }, ...(name ? [name] : []), pane));
    return pane;
  });
  return { part, section, panes, controls };
}

/**
 * Update a part's selects after choices that were made elsewhere.
 * @param {HTMLElement} controls
 * @param {Chosen} chosen
 */
function follow(controls, chosen) {
  const [layer, head] = chosen.now.head.split("-");
  /** @type {Record<string, string>} */
  const now = { ...chosen.now, layer, head };
  for (const list of controls.querySelectorAll("select")) if (list.name in now) list.value = now[list.name];
}

/** @param {() => void} call */
function afterPaint(call) {
  requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = call;
    channel.port2.postMessage(null);
  });
}
