"""Every text file that a command reads, as everything that it should not be."""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.attack.case import Case, Flaw, Outcome, answers, crashed, refused
from tests.attack.materials import EVICTION_CODE, MODEL, PROMPTS, RUN, SCORE_CODE, SMALL, TEXT, TRACE, WORDS
from tests.attack.outputs import bind_socket

COUNT = 1000
"""More than there are: `make attack` tries all."""
DEEP, DIGITS = 10_000, "9" * 5_000
RIGHT: dict[str, Callable[[bytes], bytes]] = {
    "as it should be": lambda right: right, "a byte order mark": lambda right: b"\xef\xbb\xbf" + right,
    "CR alone": lambda right: right.replace(b"\n", b"\r"), "CR LF": lambda right: right.replace(b"\n", b"\r\n"),
    "no last newline": lambda right: right.rstrip(b"\n"), "100,000 lines more": lambda right: right + b"\n" * 100_000,
}  # fmt: skip
"""Forms of a file that are read."""
WRONG: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda right: b"", "NUL bytes": lambda right: bytes(64), "latin-1": lambda right: b"\xe9" + right,
    "UTF-16": lambda right: right.decode("latin-1").encode("utf-16"), "gzip": partial(gzip.compress, mtime=0),
    "deep JSON": lambda right: ("[" * DEEP + "]" * DEEP).encode(), "a number": lambda right: b"3\n",
    "deep objects": lambda right: ('{"a":' * DEEP + "1" + "}" * DEEP).encode(), "a text": lambda right: b'"text"\n',
    "5,000 digits": lambda right: f'{{"prompt": {DIGITS}}}'.encode(), "null": lambda right: b"null\n",
    "a list": lambda right: b"[1, 2]\n", "NaN": lambda right: b"NaN\n",
    "half of it": lambda right: right[: len(right) // 2],
    "an object of NaN": lambda right: b'{"prompt": NaN, "rows": Infinity}\n',
    "half a surrogate pair": lambda right: b'{"\\ud800": "\\udfff"}\n', "empty lines": lambda right: b"\n" * 100_000,
    "escape codes": lambda right: b'{"\\u001b[2J": "\x1b]0;x\x07"}\n',
    "10 MB of a letter": lambda right: b"x" * 10_000_000,
}  # fmt: skip
NO_FILE: dict[str, Callable[[Path], object]] = {
    "100 GiB of nothing": lambda path: (path.touch(), os.truncate(path, 100 * 2**30)), "a FIFO": os.mkfifo,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"), "/dev/tty": lambda path: path.symlink_to("/dev/tty"),
    "a folder": Path.mkdir, "a loop of links": lambda path: path.symlink_to(path.name), "nothing": lambda path: None,
    "a link to nothing": lambda path: path.symlink_to("no"),
    "a socket": lambda path: bind_socket(path.parent, path.name),
}  # fmt: skip
"""Both are refused, whatever was to be read."""


@dataclass(frozen=True)
class Reader:
    """A file that a command reads, and what would be right in it; `fine`: kinds of wrong files that are none here."""

    file: str
    right: bytes
    argv: tuple[str, ...]
    forms: tuple[str, ...] = tuple(RIGHT)
    fine: tuple[str, ...] = ()


def npz(**arrays: object) -> bytes:
    """Return an .npz file's bytes."""
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # type: ignore[arg-type]
    return stream.getvalue()


KEPT = [[[0, 1, 5, 9], [0, 2, 5, 9]], [[0, 1, 5, 9], [3, 4, 5, 9]]]
ARRAYS = {f"layer_{layer}_head_{head}": np.array(KEPT[layer][head]) for layer in range(2) for head in range(2)}
SCORES = {f"{layer}-{head}": 1.5 for layer in range(2) for head in range(4)}
_AUDIT = ("--model", MODEL, "--dataset", PROMPTS, "--samples", "1", "--no-loss", "--format", "svg", "-o", "out")
_ABSENT = ("nothing", "a link to nothing", "a loop of links")
READERS = {
    "dataset": Reader("odd.jsonl", json.dumps({"id": "a", "prompt": TEXT}).encode() + b"\n",
                      ("list", "datasets", "odd.jsonl", "--show", "--model", MODEL)),
    "LongBench": Reader("trec.jsonl", json.dumps({"context": TEXT, "input": "Q", "answers": ["a"],
                                                  "all_classes": ["a", "b"]}).encode() + b"\n",
                        ("list", "datasets", "trec", "--show", "--data-dir", ".", "--model", MODEL)),
    "head scores": Reader("odd.json", json.dumps(SCORES, indent=1).encode() + b"\n",
                          ("trace", "--policy", "headkv", "--head-scores", "odd.json", "--dry-run", *RUN)),
    "positions in JSON": Reader("odd.json", json.dumps({"kept": KEPT}, indent=1).encode() + b"\n",
                                ("audit", "odd.json", *_AUDIT)),
    "positions in npz": Reader("odd.npz", npz(**ARRAYS), ("audit", "odd.npz", *_AUDIT), ("as it should be",)),
    "sweep": Reader("odd.yaml", b"budget: [24, 40]\nwindow: 8\npolicy: [snapkv, 'adakv(floor=0.1)']\n",
                    ("trace", "--config", "odd.yaml", "--dry-run", "--model", MODEL, *RUN[-4:])),
    "policy": Reader("odd.py", SCORE_CODE, ("trace", "--policy", "odd.py:Peak", "--dry-run", *RUN)),
    "eviction": Reader("odd.py", EVICTION_CODE,
        ("audit", "odd.py:evict", *_AUDIT, "--situation", "single", "--steps", "1")),
    "answers before": Reader("out/generation.jsonl", b"{}\n",
        ("generate", "--max-new-tokens", "2", "-o", "out", *RUN), (),
                             (*_ABSENT, "empty")),
    "summary before": Reader("out/summary.json", b"{}\n", ("heads", TRACE, "--format", "svg", "-o", "out"), (),
        _ABSENT),
    "trace": Reader("odd.h5", b"", ("list", "odd.h5"), ()),
}  # fmt: skip


def cases(shared: Path, seed: int) -> Iterator[Case]:
    """Yield readers × files, rows × fields, documents with one odd thing, and damaged files."""
    for name, reader in READERS.items():
        for what, change in WRONG.items():
            if what not in reader.fine:
                yield _case(f"{name}: files", what, reader, partial(_write, reader.file, change(reader.right)))
        for what, make in NO_FILE.items():
            if what not in reader.fine:
                yield _case(f"{name}: files", what, reader, partial(_make, reader.file, make))
        for what in reader.forms:
            spoil = partial(_write, reader.file, RIGHT[what](reader.right))
            yield _case(f"{name}: files", what, reader, spoil, answers)
    for name, (line, read) in _rows().items():
        lines = line if isinstance(line, tuple) else (json.dumps({"id": "first", "prompt": TEXT}), line)
        content = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
        words = "'1' has 5000000 tokens" if name == "a prompt of 5 MB" else "rows.jsonl, line 2"
        argv = ("trace", "--dataset", "rows.jsonl", "-o", "out", *SMALL)
        expected = answers if read else refused(words, alone=True)
        yield Case(f"row: {name}", argv, expected, partial(_write, "rows.jsonl", content), "rows")
    for name, (wrong, right) in DOCUMENTS.items():
        for what, content in wrong.items():
            yield _case(f"{name}: documents", what, READERS[name], partial(_write, READERS[name].file, content))
        for what, content in right.items():
            yield _case(
                f"{name}: documents", what, READERS[name], partial(_write, READERS[name].file, content), answers
            )
    draw = random.Random(seed)
    for number in range(80):
        name = draw.choice([name for name, reader in READERS.items() if reader.forms])
        content = _damaged(READERS[name].right, random.Random(draw.random()))
        yield _case("damaged", f"{name} {number}", READERS[name], partial(_write, READERS[name].file, content), _either)


def _case(kind: str, name: str, reader: Reader, spoil: Callable[[Path], object], expected: Any = None) -> Case:
    return Case(f"{kind}: {name}", reader.argv, expected or _refused(Path(reader.file).name), spoil, kind)


def _refused(name: str) -> Callable[[Outcome, Path], Flaw]:
    """Expect one line that names the file; an audit may call an eviction unreadable instead."""

    def flaw(outcome: Outcome, folder: Path) -> Flaw:
        unreadable = outcome.code == 2 and outcome.out.startswith("unreadable") and not outcome.left and not outcome.err
        return crashed(outcome) if unreadable else refused(name, alone=True)(outcome, folder)

    return flaw


def _either(outcome: Outcome, folder: Path) -> Flaw:
    return _refused("")(outcome, folder) if outcome.code else answers(outcome, folder)


def _write(name: str, content: bytes, folder: Path) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)


def _make(name: str, make: Callable[[Path], object], folder: Path) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    make(folder / name)


def _damaged(right: bytes, draw: random.Random) -> bytes:
    """Change, remove or insert a few bytes."""
    content = bytearray(right)
    tokens = ("null", "NaN", "[", "]", "{", '"', ":", ",", "\\", "-1", "1e999", "\x00", "\\ud800", "true", "\n", "é")
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(content))
        end, new = draw.choice([
            (at + 1, bytes([draw.randrange(256)])), (at + draw.randint(1, 8), b""), (at, draw.choice(tokens).encode()),
            (at, bytes(content[: draw.randint(1, 30)])),
        ])  # fmt: skip
        content[at:end] = new
        content = content or bytearray(b" ")
    return bytes(content)


# Documents that are right but for one thing.
ODD = {"null": "null", "true": "true", "a text": '"3"', "an object": "{}", "an empty list": "[]", "a list": "[[[1]]]",
       "a negative": "-1", "a fraction": "1.5", "400 digits": "1" + "0" * 400, "NaN": "NaN", "Infinity": "Infinity",
       "1e999": "1e999", "5,000 digits": DIGITS}  # fmt: skip
"""JSON values."""


def _with(document: Any, path: tuple[Any, ...], value: str) -> bytes:
    """Return the document's JSON with this text at a path."""
    document = copy.deepcopy(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "HERE"
    return json.dumps(document).replace('"HERE"', value, 1).encode()


def _odd(document: Any, path: tuple[Any, ...], fine: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Return the document with each odd value at a path, but for those that are fine there."""
    return {f"{path} is {what}": _with(document, path, ODD[what]) for what in ODD if what not in fine}


def _named(document: Any, path: tuple[Any, ...], values: Mapping[str, Any]) -> dict[str, bytes]:
    return {f"{path} is {what}": _with(document, path, json.dumps(value)) for what, value in values.items()}


def _sweep() -> tuple[dict[str, bytes], dict[str, bytes]]:
    laughs = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    wrong = {
        "billions of laughs": laughs, "an unknown alias": "x: &a [24, 40]\nbudget: *b\n", "itself": "&a budget: *a\n",
        "an object": "budget: !!python/object/apply:os.system ['touch out']\n",
        "a key twice": "budget: 24\nbudget: 40\n",
        "two documents": "budget: 24\n---\nbudget: 40\n", "a tab": "budget:\n\t- 24\n",
        "a list as key": "? [budget]\n: 24\n",
        "5,000 digits": f"budget: {DIGITS}\n", "samples of 5,000 digits": f"samples: {DIGITS}\n",
        "a fraction of samples": "samples: 1.5\n", "an escape code as key": '"\\x1b[2J": 1\n',
        "an escape code as policy": 'policy: "\\x1b]0;x\\x07"\n', "half a pair as policy": 'policy: "\\ud800"\n',
        "markup as policy": "policy: '[/INST]'\n", "NaN": "alpha: .nan\n", "a deep list": f"policy: {'[' * 20_000}\n",
        "a deep mapping": "budget: " + "{a: " * 20_000 + "\n", "a key of 100 kB": f"{'k' * 100_000}: 1\n",
        "a date": "budget: 2020-01-01\n", "bytes": "policy: !!binary aGVsbG8=\n",
    }  # fmt: skip
    right = {
        "one budget": "budget: 24\nwindow: 8\n", "quoted": 'budget: "24"\n"window": 8\n',
        "braces": "{budget: [24], window: 8}\n",
        "an alias": "budget: [&b 24]\nwindow: 8\n", "other letters": "# é 漢字 🙂\nbudget: 24\nwindow: 8\n",
    }  # fmt: skip
    return {name: text.encode() for name, text in wrong.items()}, {name: text.encode() for name, text in right.items()}


def _code(right: bytes, name: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    text = "\\x1b[2J [/INST]\\n\\x07" * 40
    first = {
        "a syntax error": "def f(:", "an exit": "raise SystemExit(0)",
        "an exit with words": "import sys; sys.exit('bye')",
        "a quick exit": "exit()", "an odd message": f"raise ValueError('{text}')", "an error": "raise RuntimeError",
        "an error without text": "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
        "a missing package": "import no_such_package_of_anybody", "recursion": "def f(): f()\nf()",
        "memory": "x = bytearray(2**62)", "an assertion": "assert False", "half a pair": "raise ValueError('\\ud800')",
        "StopIteration": "raise StopIteration", "GeneratorExit": "raise GeneratorExit",
        "a BaseException": "class E(BaseException): pass\nraise E('x')",
    }  # fmt: skip
    wrong = {f"{what} first": f"{line}\n".encode() + right for what, line in first.items()}
    wrong |= {"a number": f"{name} = 3\n".encode(), "a module": f"import sys as {name}\n".encode()}
    return wrong, {"prints": b"print('hello')\n" + right, "other letters": "# é 漢字\n".encode() + right}


DOCUMENTS = {"sweep": _sweep(), "policy": _code(SCORE_CODE, "Peak"), "eviction": _code(EVICTION_CODE, "evict")}
"""Reader -> documents that are refused, and documents that are read."""


def _rows() -> dict[str, tuple[Any, bool]]:
    """Return name -> the second line of a file, or all lines, and whether it is read."""
    ids = {
        "NUL": "a\0b",
        "half a pair": "\ud800",
        "the other half": "x\udfff",
        "100 kB": "x" * 100_000,
        "again": "first",
    }
    lists = {"numbers": [1], "mixed": ["a", None], "half a pair": ["\ude00"]}
    prompt, question = {"prompt": TEXT}, {"context": TEXT, "input": "Who?"}
    whole = ("a text", "a negative", "400 digits", "null")
    wrong: dict[str, Any] = {
        **_odd({**prompt}, ("id",), whole), **_named(prompt, ("id",), ids),
        **_odd({**question}, ("_id",), whole),
        **_named(question, ("_id",), {k: v for k, v in ids.items() if k != "again"}),
        **{name: line for row, field in (({"id": "a"}, "prompt"), (prompt, "answer_prefix"), (question, "context"),
                (question, "input"))
           for name, line in _odd({**row}, (field,), ("a text", "null")).items()},
        **_odd({**prompt}, ("answers",), ("an empty list", "null")), **_named(prompt, ("answers",), lists),
        **_named({**question, "dataset": "trec"}, ("all_classes",), {"a text": "a", "numbers": [1]}),
        **_named({}, ("prompt",), {"half a pair": f"{TEXT}\ud83d", "empty": "", "white": " \n\t\u00a0"}),
        "no prompt": '{"text": "x"}', "empty context and input": '{"context": "", "input": ""}',
        "odd keys": json.dumps({"\x1b[2J": 1, "\ud800": 2, "[bold]": 3, "\u202e": 4}),
        "trec without input": json.dumps({"context": TEXT, "dataset": "trec"}),
        "a deep value": f'{{"prompt": "x", "more": {"[" * DEEP}{"]" * DEEP}}}',
        "a deep object": '{"a":' * DEEP + "1" + "}" * DEEP,
        "a value of 5,000 digits": _with({**prompt}, ("more",), DIGITS),
        "control characters": b'{"prompt": "a\x01b"}', "raw NUL": b'{"prompt": "a\x00b"}', "no JSON": "prompt: x",
        "a key twice": f'{{"prompt": "x", "prompt": {json.dumps(TEXT)}}}',
        "two objects": '{"prompt": "x"} {"prompt": "y"}', "half a row": '{"prompt": "x',
        "a prompt of 5 MB": json.dumps({"prompt": "word " * 1_000_000}), "10 MB of brackets": "[" * 10_000_000,
        "10 MB without a prompt": json.dumps({"more": "word " * 2_000_000}),
        "200,000 keys": json.dumps({f"key{number}": number for number in range(200_000)}),
    }  # fmt: skip
    right = {
        "NaN beside": _with({**prompt}, ("length",), "NaN"),
        "-Infinity beside": _with({**prompt}, ("length",), "[-Infinity]"),
        "numbers as ids": tuple(json.dumps({"id": id_, "prompt": TEXT}) for id_ in (1, "2")),
        "an id of 30 digits": _with({**prompt}, ("id",), "7" * 30),
        "NUL in the prompt": json.dumps({"prompt": f"{TEXT}\0"}), "white around": f"  {json.dumps(prompt)}\t",
        "blank lines": f"\n \t\n{json.dumps(prompt)}", "answers": json.dumps({**prompt, "answers": ["12"]}),
        **_named(prompt, ("id",), {f"word: {what}": word for what, word in WORDS.items()}),
    }  # fmt: skip
    return {name: (line, False) for name, line in wrong.items()} | {name: (line, True) for name, line in right.items()}
