"""Three small ES modules that import each other in every form that is supported, and how they are joined."""

from __future__ import annotations

from collections.abc import Mapping

from perturbkv.reporting.html import bundle

SOURCES = {
    "main.js": (
        'import { twice, Counter as C } from "./a.js";\n'
        'import {\n  base,\n  async_one as later,\n} from "./deep-er.js";\n'
        "const c = new C();\nlater().then((one) => console.log(JSON.stringify([twice(base), c.next(), one])));\n"
    ),
    "a.js": (
        'import { base } from "./deep-er.js";\n/** @param {import("./types.js").N} x */\n'
        "export function twice(x) {\n  return 2 * x;\n}\n"
        "export class Counter {\n  #at = base;\n  next() {\n    return ++this.#at;\n  }\n}\n"
        "const own = 1;\n"
    ),
    "deep-er.js": "// import nothing\nexport const base = 20;\nconst own = 2;\n"
    "export async function async_one() {\n  return own;\n}\n",
}


def of(sources: Mapping[str, str]) -> str:
    def read(name: str) -> str:
        if name not in sources:
            raise FileNotFoundError(name)
        return sources[name]

    return bundle(read)
