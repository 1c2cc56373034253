"""Files that are right but for one thing in them, for each reader that has a layout of its own."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
import zlib
from typing import Any

import numpy as np

from tests.attack.odd_words import WORDS
from tests.attack.readers import EVICTION, KEPT, PLUGIN, READERS, SCORES, npz

Documents = dict[str, bytes]
_ODD_VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "a text": "3",
    "an object": {},
    "an empty list": [],
    "lists in lists": [[[1]]],
    "a negative": -1,
    "a fraction": 1.5,
    "400 digits": 10**400,
}
_FEW = ("a closing tag", "a title", "LF", "bidi", "long")
_RAW = {"NaN": "NaN", "Infinity": "Infinity", "1e999": "1e999", "5,000 digits": "9" * 5_000}


def _json(document: Any) -> bytes:
    return json.dumps(document).encode()


def _raw(document: Any, place: str, raw: str) -> bytes:
    """The document with other text where it says "HERE"."""
    return json.dumps(document).replace('"HERE"', raw, 1).encode()


def _head_scores() -> tuple[Documents, Documents]:
    odd = {name: value for name, value in _ODD_VALUES.items() if name not in ("a fraction",)}
    wrong = {f"a score is {what}": _json({**SCORES, "0-0": value}) for what, value in odd.items()}
    wrong |= {f"a score is {what}": _raw({**SCORES, "0-0": "HERE"}, "HERE", raw) for what, raw in _RAW.items()}
    wrong |= {f"a list with {what}": _raw({**SCORES, "0-0": [1, "HERE"]}, "HERE", raw) for what, raw in _RAW.items()}
    wrong |= {f"a head is called {what}": _json({**SCORES, WORDS[what]: 1.0}) for what in _FEW}
    wrong |= {
        "one head is missing": _json({name: 1.0 for name in SCORES if name != "1-3"}),
        "no score above 0": _json(dict.fromkeys(SCORES, 0)),
        "a huge sum": _json({**SCORES, "0-0": [1e308, 1e308, 1e308]}),
        "a list with true": _json({**SCORES, "0-0": [True]}),
        "a head that is half a pair": _json({**SCORES, "\ud800": 1.0}),
    }
    return wrong, {"lists of scores": _json({name: [1.0, 2] for name in SCORES})}


def _positions() -> tuple[Documents, Documents]:
    def with_head(kept: Any) -> bytes:
        return _json({"kept": [[kept, KEPT[0][1]], KEPT[1]]})

    logits = [[0.5] * 260] * 2
    wrong = {f"a head keeps {what}": with_head(value) for what, value in _ODD_VALUES.items() if what != "an empty list"}
    wrong |= {f"a head keeps [{what}]": with_head([value]) for what, value in _ODD_VALUES.items()}
    wrong |= {
        f"a head keeps [{what}]": _raw({"kept": [[["HERE"], [1]], KEPT[1]]}, "", raw) for what, raw in _RAW.items()
    }
    for field in ("token_ids", "tokens"):
        more = {"logits": logits} if field == "tokens" else {}
        odd = {name: [value, *[5] * 11] for name, value in _ODD_VALUES.items()} | {
            "a text itself": "35",
            "a number itself": 3,
        }
        odd |= {
            "beyond the vocabulary": [260, *[3] * 11],
            "far beyond it": [2**40, *[3] * 11],
            "beyond int64": [2**70, *[3] * 11],
        }
        wrong |= {f"{field} are {what}": _json({"kept": KEPT, field: value, **more}) for what, value in odd.items()}
        wrong |= {
            f"{field} hold {what}": _raw({"kept": KEPT, field: ["HERE"], **more}, "", raw) for what, raw in _RAW.items()
        }
    odd_logits: dict[str, Any] = {
        "a number": 3, "a text": "x", "an object": {"a": 1}, "ragged": [[1.0], [1.0, 2.0]], "of no tokens": [[], []],
        "of 3 tokens": [[1.0] * 3], "texts": [["x"] * 260], "nulls": [[None] * 260], "flat": [0.5] * 260,
        "more than tokens": None,
    }  # fmt: skip
    for what, value in odd_logits.items():
        made = {"kept": KEPT, "logits": value} if value is not None else {"kept": KEPT, "logits": logits, "tokens": [3]}
        wrong[f"logits are {what}"] = _json(made)
    for what, raw in _RAW.items():
        wrong[f"logits hold {what}"] = _raw({"kept": KEPT, "logits": [["HERE", *[0.5] * 259]]}, "", raw)
    wrong |= {
        "kept is missing": _json({"tokens": [1]}),
        "kept is an object": _json({"kept": {"0": KEPT[0]}}),
        "one layer too many": _json({"kept": [*KEPT, KEPT[0]]}),
        "no layer": _json({"kept": []}),
        "three heads": _json({"kept": [[*layer, [1]] for layer in KEPT]}),
        "other heads in one layer": _json({"kept": [KEPT[0], KEPT[1] * 2]}),
        "a position twice": with_head([3, 3]),
        "a position behind the prompt": with_head([5_000]),
        "deep in a head": b'{"kept": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    }
    right = {"nothing kept by one head": with_head([]), "in another order": with_head([9, 1, 0])}
    return wrong, right


def _npz() -> tuple[Documents, Documents]:
    arrays = {f"layer_{layer}_head_{head}": np.array(KEPT[layer][head]) for layer in range(2) for head in range(2)}

    def with_head(kept: Any) -> bytes:
        return npz(**{**arrays, "layer_0_head_0": kept})

    plain = io.BytesIO()
    np.save(plain, np.arange(4))
    wrong = {
        "a pickle": pickle.dumps({"kept": KEPT}),
        "objects": with_head(np.array([{}, 1], dtype=object)),
        "an .npy file": plain.getvalue(),
        "fractions": with_head(np.array([0.5, 1.0])),
        "texts": with_head(np.array(["a"])),
        "two axes": with_head(np.array([[1, 2]])),
        "a scalar": with_head(np.array(3)),
        "dates": with_head(np.array(["2020-01-01"], dtype="datetime64[D]")),
        "negative": with_head(np.array([-1])),
        "beyond int64": with_head(np.array([2**63 + 1], dtype=np.uint64)),
        "true": with_head(np.array([True])),
        "a layer is missing": npz(layer_1_head_0=[1], layer_1_head_1=[1]),
        "a head is missing": npz(**{name: held for name, held in arrays.items() if name != "layer_0_head_0"}),
        "nothing": npz(),
        "layer of 4,000 digits": npz(**arrays, **{f"layer_{'9' * 4000}_head_0": [1]}),
        "layer 10^9": npz(**arrays, **{"layer_1000000000_head_0": [1]}),
        "NaN logits": npz(**arrays, logits=np.full((1, 260), np.nan)),
        "objects as logits": npz(**arrays, logits=np.array([[None] * 260], dtype=object)),
        "complex logits": npz(**arrays, logits=np.ones((1, 260), dtype=complex)),
        "fractions as tokens": npz(**arrays, tokens=[1.7], logits=np.ones((1, 260))),
        "tokens of two axes": npz(**arrays, tokens=[[1, 2]], logits=np.ones((1, 260))),
        "a bomb": _bomb(),
        "a huge shape": _npz_of(_header((2**50,))),
        "a shape of minus one": _npz_of(_header((-1,))),
        "another layout's header": _npz_of(b"\x93NUMPY\x07\x00" + struct.pack("<H", 4) + b"{}\n "),
        "code in the header": _npz_of(_raw_header("__import__('os').system('touch out')")),
        "an empty member": _npz_of(b""),
        "text in a member": _npz_of(b"no array"),
        "a compression of another kind": _of_other_compression(),
        "an encrypted member": _encrypted(),
        "cut": npz(**arrays)[:-40],
        "its middle overwritten": _overwritten(npz(**arrays)),
    }
    return wrong, {
        "unsigned": with_head(np.array([1, 2], dtype=np.uint8)),
        "token ids": npz(**arrays, token_ids=[1] * 12),
    }


def _raw_header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n"


def _header(shape: tuple[int, ...]) -> bytes:
    return _raw_header(str({"descr": "<i8", "fortran_order": False, "shape": shape})) + bytes(64)


def _npz_of(member: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", compression) as made:
        made.writestr("layer_0_head_0.npy", member)
    return held.getvalue()


def _bomb() -> bytes:
    """3.75 GiB of zeros in 4 MB: one compressed block as often as its size goes into that."""
    packer = zlib.compressobj(1, wbits=-15)
    packer.compress(b"") + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(2**24)) + packer.flush(zlib.Z_FULL_FLUSH)
    first = packer.compress(_header((240 * 2**21,))[:-64]) + packer.flush(zlib.Z_FULL_FLUSH)
    whole = bytearray(_npz_of(first + block * 240 + packer.flush()))
    central = whole.index(b"PK\x01\x02")
    for method, size in ((8, 22), (central + 10, central + 24)):
        struct.pack_into("<H", whole, method, zipfile.ZIP_DEFLATED)
        struct.pack_into("<I", whole, size, 240 * 2**24)
    return bytes(whole)


def _of_other_compression() -> bytes:
    return _npz_of(_header((8,))).replace(b"\x14\x00\x00\x00\x00\x00", b"\x14\x00\x00\x00\x63\x00")


def _encrypted() -> bytes:
    whole = bytearray(_npz_of(_header((8,))))
    whole[6] |= 1
    whole[whole.index(b"PK\x01\x02") + 8] |= 1
    return bytes(whole)


def _overwritten(whole: bytes) -> bytes:
    middle = len(whole) // 2
    return whole[: middle - 20] + b"\xff" * 40 + whole[middle + 20 :]


def _sweep() -> tuple[Documents, Documents]:
    aliases = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    wrong = {
        "billions of laughs": aliases,
        "aliases as a budget": "x: &a [24, 40]\nbudget: *b\n",
        "an object's tag": "budget: !!python/object/apply:os.system ['touch out']\n",
        "a key twice": "budget: 24\nbudget: 40\n",
        "two documents": "budget: 24\n---\nbudget: 40\n",
        "a tab": "budget:\n\t- 24\n",
        "a list as key": "? [budget]\n: 24\n",
        "itself": "&a budget: *a\n",
        "a budget of 5,000 digits": f"budget: {'9' * 5_000}\n",
        "samples of 5,000 digits": f"samples: {'9' * 5_000}\n",
        "a fraction of samples": "samples: 1.5\n",
        "an escape code as key": '"\\x1b[2J": 1\n',
        "an escape code as policy": 'policy: "\\x1b]0;x\\x07"\n',
        "half a pair as policy": 'policy: "\\ud800"\n',
        "markup as policy": "policy: '[/INST]'\n",
        "NaN": "alpha: .nan\n",
        "a deep list": f"policy: {'[' * 20_000}\n",
        "a deep mapping": "budget: " + "{a: " * 20_000 + "\n",
        "a key of 100 kB": f"{'k' * 100_000}: 1\n",
        "a date": "budget: 2020-01-01\n",
        "bytes": "policy: !!binary aGVsbG8=\n",
    }
    right = {
        "one budget": "budget: 24\nwindow: 8\n",
        "quoted": 'budget: "24"\n"window": 8\n',
        "in braces": "{budget: [24], window: 8}\n",
        "an alias": "budget: [&b 24]\nwindow: 8\n",
        "a comment in other letters": "# é 漢字 🙂\nbudget: 24\nwindow: 8\n",
    }
    return {name: text.encode() for name, text in wrong.items()}, {name: text.encode() for name, text in right.items()}


def _benchmark() -> tuple[Documents, Documents]:
    whole = json.loads(READERS["benchmark"].right)

    def changed(where: tuple[Any, ...], value: Any) -> Any:
        made = json.loads(READERS["benchmark"].right)
        inside = made
        for step in where[:-1]:
            inside = inside[step]
        inside[where[-1]] = value
        return made

    odd = {name: value for name, value in _ODD_VALUES.items() if name not in ("an empty list", "an object")}
    wrong = {}
    for where in (("rows",), ("rows", 0), ("machine",), ("settings",), ("rows", 0, "name"), ("rows", 0, "details")):
        for what, value in odd.items():
            if not (where[-1] == "name" and what == "a text"):
                wrong[f"{where[-1]} is {what}"] = _json(changed(where, value))
    for name in ("value", "bound", "at_least"):
        taken = {
            "value": ("null", "a negative", "a fraction"),
            "bound": ("a negative", "a fraction"),
            "at_least": ("true",),
        }
        for what, value in _ODD_VALUES.items():
            if what not in taken[name]:
                wrong[f"{name} is {what}"] = _json(changed(("rows", 0, name), value))
        for what, raw in _RAW.items():
            wrong[f"{name} is {what}"] = _raw(changed(("rows", 0, name), "HERE"), "", raw)
    for name in ("name", "value", "reason", "details"):
        wrong[f"a row lacks {name}"] = _json(
            {**whole, "rows": [{k: v for k, v in whole["rows"][0].items() if k != name}]}
        )
    wrong["a row twice"] = _json({**whole, "rows": [*whole["rows"], whole["rows"][0]]})
    wrong["a format of the future"] = _json({**whole, "format": 99})
    right = {"no rows": _json({**whole, "rows": []}), "1e-320": _json(changed(("rows", 0, "value"), 1e-320))}
    right |= {f"machine {what}": _json(changed(("machine", "device"), WORDS[what])) for what in _FEW}
    right |= {f"row {what}": _json(changed(("rows", 0, "name"), WORDS[what])) for what in _FEW}
    return wrong, right


def _python(right: bytes, what: str) -> tuple[Documents, Documents]:
    said = "\\x1b[2J [/INST]\\n\\x07" * 40
    before = {
        "a syntax error": "def f(:\n",
        "an exit": "raise SystemExit(0)\n",
        "an exit with words": "import sys\nsys.exit('good bye')\n",
        "a quick exit": "exit()\n",
        "an odd message": f"raise ValueError('{said}')\n",
        "an error without words": "raise RuntimeError\n",
        "an error that cannot be said": "class E(Exception):\n    def __str__(self): raise ValueError\nraise E\n",
        "a package that is not there": "import no_such_package_of_anybody\n",
        "endless recursion": "def f(): f()\nf()\n",
        "memory": "x = bytearray(2**62)\n",
        "an assertion": "assert False\n",
        "half a pair": "raise ValueError('\\ud800')\n",
        "a stop": "raise StopIteration\n",
        "the exit of a generator": "raise GeneratorExit\n",
        "an exception of no kind": "class E(BaseException): pass\nraise E('x')\n",
    }
    wrong = {f"{name} first": text.encode() + right for name, text in before.items()}
    wrong["a number of that name"] = f"{what} = 3\n".encode()
    wrong["a module of that name"] = f"import sys as {what}\n".encode()
    return wrong, {"prints": b"print('said')\n" + right, "other letters": "# é 漢字\n".encode() + right}


DOCUMENTS: dict[str, tuple[Documents, Documents]] = {
    "head scores": _head_scores(),
    "positions in JSON": _positions(),
    "positions in npz": _npz(),
    "sweep": _sweep(),
    "benchmark": _benchmark(),
    "policy": _python(PLUGIN, "Peak"),
    "eviction": _python(EVICTION, "evict"),
}
"""Reader -> documents that are refused, and documents that are read."""
