// What is chosen: kept in the address bar, told to whoever draws.

/**
 * @typedef {{baseline: string, treatment: string, budget: string, measure: string, sample: string, show: string,
 *   head: string, sigma: string, colour: string}} Choice
 */

/** The sample id that means the mean over all samples; no sample's id is empty. */
export const MEAN = "";
const SHOWS = ["change", "baseline", "treatment"];
const SIGMAS = ["sigma_stage1", "sigma_topk", "retained_mass"];
const COLOURS = ["fate", "shares", "attention", "head-attention"];

/** @typedef {import("./trace.js").Trace} Trace */

export class Chosen {
  /** @param {Trace[]} traces */
  constructor(traces) {
    this.traces = traces;
    /** @type {Choice} */
    this.now = { ...initialChoice(traces[0]), ...validChoices(traces, fromAddress()) };
    if (location.hash) writeAddress(this.address());
    /** @type {((changed: Set<string>) => void)[]} */
    this.listeners = [];
    window.addEventListener("hashchange", () => this.choose(validChoices(this.traces, fromAddress())));
  }

  /** @param {(changed: Set<string>) => void} listener */
  listen(listener) {
    this.listeners.push(listener);
  }

  /** Return the choice as the fragment of the page's address. */
  address() {
    return `#${new URLSearchParams(this.now)}`;
  }

  /**
   * Change some of the choices, and call the listeners with the names of those that changed.
   * @param {Partial<Choice>} more
   */
  choose(more) {
    const before = this.now;
    this.now = { ...before, ...more };
    const keys = /** @type {(keyof Choice)[]} */ (Object.keys(this.now));
    const changed = new Set(keys.filter((key) => before[key] !== this.now[key]));
    if (!changed.size) return;
    writeAddress(this.address());
    for (const listener of this.listeners) listener(/** @type {Set<string>} */ (changed));
  }
}

/**
 * Write the choice into the page's address; a frame of a notebook has no history to replace.
 * @param {string} address
 */
function writeAddress(address) {
  try {
    history.replaceState(null, "", address);
  } catch {
    location.hash = address;
  }
}

/**
 * Return the choices with which the page opens.
 * @param {Trace} trace
 * @returns {Choice}
 */
function initialChoice(trace) {
  const { start, sides, budgets, heads, measures } = trace.data;
  const propagated = measures.find((one) => one.key === "propagated");
  return {
    baseline: sides[start.baseline],
    treatment: sides[start.treatment],
    budget: budgets[start.budget],
    measure: propagated ? "propagated" : measures[0].key,
    sample: MEAN,
    show: sides.length > 1 ? "change" : "treatment",
    head: trace.headName(start.head[0] * heads + start.head[1]),
    sigma: "sigma_stage1",
    colour: "fate",
  };
}

/** @returns {Record<string, string>} */
function fromAddress() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

/**
 * Return the requested choices that some trace of the page can show; an address may hold anything.
 * @param {Trace[]} traces
 * @param {Record<string, string>} wanted
 * @returns {Partial<Choice>}
 */
function validChoices(traces, wanted) {
  /** @type {Record<string, (value: string) => boolean>} */
  const known = {
    baseline: (value) => traces.some((one) => one.data.sides.includes(value)),
    treatment: (value) => traces.some((one) => one.data.sides.includes(value)),
    budget: (value) => traces.some((one) => one.data.budgets.includes(value)),
    measure: (value) => traces.some((one) => one.measure(value) >= 0),
    sample: (value) => value === MEAN || traces.some((one) => one.data.samples.some((sample) => sample.id === value)),
    show: (value) => SHOWS.includes(value),
    head: (value) => traces.some((one) => one.headIndex(value) >= 0),
    sigma: (value) => SIGMAS.includes(value),
    colour: (value) => COLOURS.includes(value),
  };
  return Object.fromEntries(Object.entries(wanted).filter(([key, value]) => Object.hasOwn(known, key) && known[key](value)));
}
