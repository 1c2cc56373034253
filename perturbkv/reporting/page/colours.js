// Colours that every kind of colour vision tells apart, on light and on dark paper.

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const printing = window.matchMedia("print");

const LIGHT = {
  signed: ["#8f4600", "#e08214", "#fdd7a4", "#f4f4f4", "#cfcbe6", "#8073ac", "#3d1778"],
  grey: "#767676",
  others: ["#0173b2", "#029e73", "#cc78bc", "#8c6d1f", "#56b4e9", "#767676"],
  baseline: "#b35806",
  treatment: "#4a2d8f",
  paper: "#ffffff",
  warning: "#b3261e",
};
const DARK = {
  ...LIGHT,
  signed: ["#ffb75e", "#c47316", "#6d4517", "#2b2b30", "#443c6e", "#8173c9", "#c3b8ff"],
  grey: "#9a9aa2",
  others: ["#4aa8e0", "#2fc79a", "#e3a0d6", "#c9a94a", "#8fd0f5", "#9a9aa2"],
  baseline: "#ffa245",
  treatment: "#b3a4ff",
  paper: "#17171b",
  warning: "#ff8a80",
};

/** Return the colours for the page's background, light or dark. */
export function colours() {
  return dark.matches && !printing.matches ? DARK : LIGHT;
}

/**
 * Call a listener when the page's background changes between light and dark.
 * @param {() => void} listener
 */
export function onPaperChange(listener) {
  dark.addEventListener("change", listener);
  printing.addEventListener("change", listener);
}

/**
 * Return a colour scale from −1 to 1: orange below 0, purple above it.
 * @returns {(value: number) => string}
 */
export function signed() {
  const between = d3.interpolateRgbBasis(colours().signed);
  return (value) => between((Math.max(-1, Math.min(1, value)) + 1) / 2);
}

/**
 * Return the colour scale of layers, from the first, dark, to the last; never black on a dark background.
 * @returns {(share: number) => string}
 */
export function layerColour() {
  const low = dark.matches && !printing.matches ? 0.25 : 0;
  return (share) => d3.interpolateCividis(low + (0.94 - low) * share);
}
