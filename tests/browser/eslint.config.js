// Text is data, never markup, and the page's policy refuses style attributes: both are held here before a browser does.
import js from "@eslint/js";
import globals from "globals";

const asMarkup = ["innerHTML", "outerHTML", "insertAdjacentHTML", "setHTMLUnsafe", "parseFromString", "srcdoc"];
const setsStyle = "CallExpression[callee.property.name=/^(setAttribute|attr)$/][arguments.0.value='style']";

export default [
  js.configs.recommended,
  {
    files: ["**/*.js"],
    languageOptions: {
      ecmaVersion: 2023,
      sourceType: "module",
      globals: { ...globals.browser, d3: "readonly", Plot: "readonly" },
    },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      eqeqeq: "error",
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-new-func": "error",
      "no-var": "error",
      "prefer-const": "error",
      "no-restricted-properties": ["error", ...asMarkup.map((property) => ({ property, message: "use textContent" }))],
      "no-restricted-syntax": [
        "error",
        { selector: setsStyle, message: "the policy refuses style attributes; set element.style, or .style()" },
        { selector: "CallExpression[callee.property.name='html']", message: "use .text()" },
        { selector: "CallExpression[callee.object.name='document'][callee.property.name=/^write/]", message: "no" },
      ],
    },
  },
];
