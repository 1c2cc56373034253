"""Options with values that nobody should give: no numbers, enormous ones, unknown names, sweeps without end."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from perturbkv.configs.precision import CORRECTION_OPTIONS, PRECISION_OPTIONS
from perturbkv.configs.selections import GRANULARITY_OPTIONS, SELECTION_OPTIONS
from perturbkv.selection.policies import registry
from tests.attack.case import Case, answers_or_refused, refused
from tests.attack.materials import EVICT, MODEL, TRACE
from tests.support.commands import command_of, every_command

COUNT = 320
LARGEST = 2**63 - 1
SLOW = ("doctor selfcheck",)
"""Commands of which a valid value takes minutes: what they must refuse is tried alone."""


@dataclass(frozen=True)
class Range:
    """The numbers that an option takes; `share`: a decimal point makes it a share of at most 1."""

    low: float
    high: float = LARGEST
    whole: bool = True
    open: bool = False
    share: bool = False

    def holds(self, text: str) -> bool:
        """Return whether the text is such a number, as Python reads numbers: `1_6` and ` 5` are, `0x10` is not."""
        try:
            number, whole = Fraction(int(text)), True
        except ValueError:
            try:
                number, whole = Fraction(float(text)), False
            except (ValueError, OverflowError):
                return False
        if self.whole and not whole and not self.share:
            return False
        high = 1 if self.share and not whole else self.high
        return (number > self.low if self.open else number >= self.low) and number <= high


_COUNT, _INDEX, _FRACTION = Range(1), Range(0), Range(0, 1, whole=False)
_OPEN_FRACTION = Range(0, 1, whole=False, open=True)
RANGES: Mapping[str, Range] = {
    **dict.fromkeys(("--samples", "--window", "--steps", "--chunk-mib", "--max-new-tokens", "--compress-every",
            "--compress-over", "--isolated-every", "--tokens",
                     "--repeats", "--entries", "--for-length", "--for-batch"), _COUNT),
    **dict.fromkeys(("--step", "--sample", "--layer", "--head"), _INDEX),
    **dict.fromkeys(("--depth", "--alpha"), _FRACTION), **dict.fromkeys(("--lost", "--min-top1"), _OPEN_FRACTION),
    **dict.fromkeys(("--protect-first", "--protect-recent"), Range(0, share=True)),
    **dict.fromkeys(("--permutations", "--greedy"), Range(0, 100_000)),
    "--budget": Range(0, open=True, share=True), "--seed": Range(-LARGEST), "--length": Range(128),
    "--max-tokens": Range(2), "--columns": Range(1, 2), "--tolerance": Range(0, math.inf, whole=False),
    "--right": Range(0, math.nextafter(1, 0), whole=False), "--max-kl": Range(0, math.inf, whole=False, open=True),
    "--max-drop": Range(0, 100, whole=False, open=True),
}  # fmt: skip
"""What each numeric option may be, apart from the code that refuses the rest; it may still not fit the others."""
NUMBERS = ("nan", "inf", "-inf", "1e999", str(10**20), "-1", "0", "1e-320", "", "1_6", " 5", "٣", "0x10")
NAMES = ("nonsense", "", "x" * 100_000, "a\x1b[31mb\x07", "a\nb", "None", "../../x", "💥" * 50)
VALUES = {
    "--length": ("9999999", str(10**9), str(10**20), ",".join(map(str, range(200, 20_200)))),
    "--samples": ("1000000", str(10**9)), "--steps": ("1000000", str(10**9)),
    "--max-new-tokens": ("1000000", str(10**9)),
    "--max-memory": ("9" * 400, "1e3", "-1MiB", "0", "nan", "inf", "1" + "0" * 30 + "GiB", "5TiB", "MiB"),
    "--depth": (",".join(str(number / 20_000) for number in range(20_000)), "0.5,0.5", ",", "0;1"),
    "--device": ("meta", "cuda:99", "cuda:-1", "mps", "cpu:5", "cpu:-1", "xla", "hpu", "nonsense", "", "cuda:x"),
    "--dtype": ("float64", "int8", "complex64", "torch.float32", "nonsense", ""),
    "--device-map": ("balanced", "", "AUTO"), "--norm-kernel": ("triton", "nonsense", ""),
    "--engine": ("rays", "", "HERE"), "--ray-address": ("127.0.0.1:1", "", "ray://a:1", ":::", "a:99999"),
}  # fmt: skip
"""More values of single options."""
CALLS = ("", "snapkv(", "snapkv)", "snapkv()()", "snapkv(kernel)", "snapkv(=5)", "snapkv(kernel=)", "(", "," * 1000,
         "snapkv(" * 1000, "snapkv(kernel=" + "9" * 5000 + ")", "snapkv('", "snapkv(kernel=7,kernel=9)", "no.py:No",
         "kvpress:Nothing", "given:x", "snapkv(by=snapkv)", "snapkv(by=caote(by=caote))", "\x00", "a" * 100_000,
         "snapkv:nonsense", ":", "::", "snapkv(kernel=1e400)", "/dev/zero.py:X", "..py:X")  # fmt: skip


def line(command: str, option: str, *values: str) -> tuple[str, ...]:
    """Return a command line that works, but for these values of the option."""
    options = {"--model": MODEL, "--samples": "1", "--length": "400", "--budget": "24", "--window": "8",
               "--device": "cpu", "--output": "out"}  # fmt: skip
    names = {
        "audit": "--model --samples --length --device --output", "tokens": "", "export": "--output",
        "list datasets": "--model --length", "doctor selfcheck": "--device --output",
        **dict.fromkeys(("doctor", "list", "list models", "list policies"), ""),
    }  # fmt: skip
    arguments = {"audit": (EVICT,), "list datasets": ("needle", "--show"),
                 **dict.fromkeys(("tokens", "export"), (TRACE,))}  # fmt: skip
    others: dict[str, dict[str, str]] = {
        "export": {"--output": "out.csv"}, "needle": {"--samples": "6"}, "horizon": {"--steps": "3"},
        "budget": {"--max-kl": "9"},
        **dict.fromkeys(SLOW, {"--output": "out.json"}),
    }  # fmt: skip
    given = {name: options[name] for name in names.get(command, " ".join(options)).split()} | others.get(command, {})
    if option.startswith("--compress-") and command == "generate":
        given["--max-new-tokens"] = "4"
    if option == "--isolated-every":
        given["--compress-every"] = "2"
    words = [word for name, value in given.items() if name != option for word in (name, value)]
    return (
        *command.split(),
        *arguments.get(command, ()),
        *words,
        *(word for value in values for word in (option, value)),
    )


def cases(shared: Path, seed: int) -> Iterator[Case]:
    """Yield every option with odd values, every policy's options, too many configurations, and sweep files."""
    yield from _options(seed)
    yield from (_case("single values", option, value, command=_one_of(option, value, seed))
                for option, values in VALUES.items() for value in values)  # fmt: skip
    yield from _calls()
    yield from (_case("policies", "--policy", text, never=True) for text in CALLS)
    yield from _many()
    for kind, table in SWEEPS.items():
        for name, content in table.items():
            options = [word for word in line("trace", "--budget")[1:] if word not in ("--window", "8")]
            argv = ("trace", *options, "--config", "sweep.yaml")
            yield Case(f"{kind}: {name}", argv, _expected(kind == "sweep files"), partial(_write, content), kind)


def _case(kind: str, option: str, *values: str, command: str = "trace", never: bool = False) -> Case:
    """Return a case; `never`: the value can only be refused."""
    name = f"{command} {option} {values[0][:60]!r}" + f" and {len(values) - 1:,} more" * (len(values) > 1)
    return Case(name, line(command, option, *values), _expected(never), kind=kind)


def _expected(never: bool) -> Any:
    return refused() if never else answers_or_refused


def _options(seed: int) -> Iterator[Case]:
    """Yield each numeric option with every number, each other one with every name, at a command drawn for each."""
    draw = random.Random(f"options/{seed}")
    commands: dict[str, list[str]] = {}
    numeric: set[str] = set()
    for words in every_command():
        for option in command_of(words).params if words[-1] != "trace.h5" else ():
            if option.param_type_name == "option" and not option.is_flag and "--install" not in option.opts[-1]:
                commands.setdefault(option.opts[0], []).append(" ".join(words))
                if option.metavar in ("N", "X", "B"):
                    numeric.add(option.opts[0])
    for option, having in commands.items():
        values = NUMBERS if option in numeric else NAMES
        order = itertools.cycle(draw.sample(having, len(having)))
        for command, value in zip(order, draw.sample(values, len(values)), strict=False):
            never = option in RANGES and option in numeric and not RANGES[option].holds(value)
            kind = f"numbers {NUMBERS.index(value) % 4}" if option in numeric else "names"
            if command in SLOW and not never:
                yield _case(kind, "--device", value, never=True)
            else:
                yield _case(kind, option, value, command=command, never=never)


def _one_of(option: str, value: str, seed: int) -> str:
    """Draw a command that has the option."""
    commands = [name for name in ("trace", "generate", "heads", "layers") if name == "generate" or "new" not in option]
    return random.Random(f"{option}/{value}/{seed}").choice(commands)


def _calls() -> Iterator[Case]:
    """Yield every option of every policy, selection, granularity, precision and correction with every number."""
    tables: dict[str, dict[str, Mapping[str, Any]]] = {
        "--policy": {name: registry.policy_class(name).options() for name in registry.names()},
        "--selection": {name: options for name, options in SELECTION_OPTIONS.items() if name != "given"},
        "--granularity": dict(GRANULARITY_OPTIONS), "--precision": dict(PRECISION_OPTIONS),
        "--correction": dict(CORRECTION_OPTIONS),
    }  # fmt: skip
    for argument, owners in tables.items():
        for owner, options in owners.items():
            for option, known in options.items():
                for value in NUMBERS if isinstance(known.default, int | float) else NAMES[:2]:
                    yield _case("calls", argument, f"{owner}({option}={value})")


def _many() -> Iterator[Case]:
    """Yield more configurations than anybody waits for."""
    budgets = [word for budget in range(20, 221) for word in ("--budget", str(budget))]
    alphas = [str(number / 100) for number in range(101)]
    policies = [f"adakv(floor={number / 1000})" for number in range(1000)]
    for command, more, option, values in (
        ("trace", budgets, "--alpha", alphas),
        ("heads", budgets, "--alpha", alphas),
        ("trace", [word for alpha in alphas for word in ("--alpha", alpha)], "--policy", policies),
        ("trace", [], "--budget", [str(budget) for budget in range(20, 20_020)]),
        ("trace", [], "--budget", ["24"] * 20_000),
        ("generate", [], "--alpha", [str(number / 10_000) for number in range(10_001)]),
    ):
        case = _case("many configurations", option, *values, command=command, never=True)
        yield Case(case.name, (*case.argv, *more), case.expected, kind=case.kind)


def _listed(values: Sequence[object] | Iterator[object]) -> str:
    return f"[{', '.join(map(str, values))}]"


def _write(content: object, folder: Path) -> None:
    """Write a sweep file, or make what is none."""
    path = folder / "sweep.yaml"
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else str(content).encode())


_LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(12)
)
_OF_NUMBERS = ("budget window alpha samples steps max-tokens chunk-mib length depth kernel floor epsilon seed block "
               "max-memory protect-first")  # fmt: skip
_OF_WORDS = ("model dataset policy preset granularity precision correction device dtype scenario cache data-dir text "
             "save head-scores pool")  # fmt: skip
_YAML_NUMBERS = (".nan", "nan", ".inf", "1e999", str(10**20), "-1", "0", "1e-320", "''", "1_000", "٣", "0x10", "1:30",
                 "null", "true", "{}", "[]", "[[1]]", "!!binary aGk=",
                 "!!python/object/apply:os.system ['touch opened']")  # fmt: skip
_YAML_WORDS = ("nonsense", "''", "null", "[a, b]", "{a: b}", '"\\e[31m"', "x" * 100_000, "5", "*x")
SWEEPS: Mapping[str, Mapping[str, object]] = {
    "sweep numbers": {f"{key} = {one}": f"{key}: {one}\n" for key in _OF_NUMBERS.split() for one in _YAML_NUMBERS},
    "sweep words": {f"{key} = {one[:20]!r}": f"{key}: {one}\n" for key in _OF_WORDS.split() for one in _YAML_WORDS},
    "sweep files": {
        "aliases of aliases": _LAUGHS, "aliases of aliases of a key": _LAUGHS + "budget: *m\n",
        "a list in itself": "budget: &a [*a]\n", "a mapping in itself": "grids: &a [{policy: *a}]\n",
        "a grid in itself": "grids: &a [*a]\n", "100,000 lists in one another": "budget: " + "[" * 100_000,
        "100,000 mappings in one another": "{a: " * 100_000,
        "900 lists in one another": f"budget: {'[' * 900}1{']' * 900}",
        "an object": "!!python/object/apply:os.system ['touch opened']\n", "a merge": "base: &b {budget: 24}\n<<: *b\n",
        "a key twice": "budget: 24\nbudget: 25\n", "a key that is a list": "? [a, b]\n: 1\n",
        "50,000 keys": "".join(f"k{number}: 1\n" for number in range(50_000)),
        "one value 100,000 times": f"budget: {_listed([24] * 100_000)}\n",
        "100,000 values": f"budget: {_listed(range(20, 100_020))}\n",
        "10,001 values": f"budget: 24\nwindow: 8\nalpha: {_listed(n / 10_001 for n in range(10_001))}\n",
        "20,000 lengths": f"length: {_listed(range(200, 20_200))}\n",
        "200 × 200 values": f"budget: {_listed(range(20, 220))}\nwindow: {_listed(range(1, 201))}\n",
        "60 × 200": f"grids:\n- alpha: {_listed(n / 60 for n in range(60))}\n  budget: {_listed(range(20, 220))}",
        "20,000 grids": "window: 8\ngrids:\n" + "".join(f"- budget: {20 + n}\n" for n in range(20_000)),
        "a number of 100,000 digits": "budget: " + "9" * 100_000, "two documents": "budget: 24\n---\nbudget: 25\n",
        "a directive": "%YAML 9.9\n---\nbudget: 24\n", "only a comment": "# nothing\n", "no text": bytes(range(256)),
        "zeros": bytes(1000), "UTF-16": "budget: 24\n".encode("utf-16"), "nothing": "", "a pipe": os.mkfifo,
        "zeros without end": lambda path: path.symlink_to("/dev/zero"), "a folder": Path.mkdir,
        "a link to itself": lambda path: path.symlink_to(path),
    },
    "sweep files that are large": {
        "a byte order mark": "\ufeffbudget: 24\nwindow: 8\n", "10 MB of one word": b"model: " + b"x" * 10**7,
        "2 MB of comments": b"# nothing\n" * 200_000 + b"budget: 24\nwindow: 8\n",
    },
}  # fmt: skip
