"""Options with values that nobody should give: no numbers, enormous ones, names that are none, sweeps without end."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perturbkv.configs.precision import CORRECTION_OPTIONS, PRECISION_OPTIONS
from perturbkv.configs.selections import GRANULARITY_OPTIONS, SELECTION_OPTIONS
from perturbkv.selection.policies import registry
from tests.attack import sweeps
from tests.attack.evenly import evenly
from tests.attack.option_ranges import RANGES
from tests.attack.running import Case, Outcome, flaw_of_refusal, run
from tests.attack.tiny_runs import MODEL, answered_or_refused
from tests.support.commands import command_of, every_command
from tests.support.folders import model_folder

COUNT = 320
NUMBERS = ("nan", "inf", "-inf", "1e999", str(10**20), "-1", "0", "1e-320", "", "1_6", " 5", "٣", "0x10")
NAMES = ("nonsense", "", "x" * 100_000, "a\x1b[31mb\x07", "a\nb", "None", "../../x", "💥" * 50)
ENORMOUS = {
    "--length": ("9999999", str(10**9), str(10**20), ",".join(map(str, range(200, 20_200)))),
    "--samples": ("1000000", str(10**9)),
    "--steps": ("1000000", str(10**9)),
    "--max-new-tokens": ("1000000", str(10**9)),
    "--max-memory": ("9" * 400, "1e3", "-1MiB", "0", "nan", "inf", "1" + "0" * 30 + "GiB", "5TiB", "MiB"),
    "--depth": (",".join(str(place / 20_000) for place in range(20_000)), "0.5,0.5", ",", "0;1"),
    "--device": ("meta", "cuda:99", "cuda:-1", "mps", "cpu:5", "cpu:-1", "xla", "hpu", "nonsense", "", "cuda:x"),
    "--dtype": ("float64", "int8", "complex64", "torch.float32", "nonsense", ""),
    "--device-map": ("balanced", "", "AUTO"),
    "--norm-kernel": ("triton", "nonsense", ""),
    "--engine": ("rays", "", "HERE"),
    "--ray-address": ("127.0.0.1:1", "", "ray://a:1", ":::", "a:99999"),
}
"""Values of single options beside those that every number and every name is tried with."""
_WHOLE = ("list models", "list policies", "list datasets", "doctor", "export")
"""Commands that run no model."""
_MINUTES = ("doctor selfcheck", "doctor bench", "doctor bench scale")
"""Commands of which a valid value takes minutes: what they must refuse is tried alone."""


@dataclass(frozen=True)
class Attack:
    """A command line, and whether it can only be refused."""

    name: str
    argv: tuple[str, ...]
    never: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)


_FIVE = tuple(word for budget in ("16", "20", "24", "32", "40") for word in ("--budget", budget))


def cases(workshop: Path, seed: int, count: int) -> Iterator[Case]:
    """Each in a folder of its own; the model, and a trace of it, lie beside them."""
    whole = _prepared(workshop / "whole")
    for place, attack in enumerate(evenly(_kinds(whole, seed), seed, count)):
        folder = workshop / str(place)
        folder.mkdir()
        for name, content in attack.files.items():
            sweeps.write(folder / name, content)
        yield Case(attack.name, folder, attack.argv, _fine(attack.never))


def _fine(never: bool) -> Any:
    return functools.partial(_short, flaw_of_refusal if never else answered_or_refused)


def _short(flaw: Any, outcome: Outcome) -> str | None:
    """Beside the flaw: a line that no terminal shows."""
    line = (outcome.err.strip().splitlines() or [""])[-1]
    if found := flaw(outcome):
        return str(found)[:300]
    if len(line) > 3000:
        return f"a line of {len(line):,} characters"
    return "control characters in the line" if any(ord(letter) < 32 for letter in line) else None


@dataclass(frozen=True)
class Whole:
    """What every case may use."""

    model: str
    trace: str
    press: str
    report: str
    answers: str

    def base(self, command: str) -> dict[str, tuple[str, ...]]:
        """A command line that works: option -> itself and its value; the arguments under ''."""
        model, run_ = {"--model": ("--model", self.model)}, {"--output": ("--output", "out")}
        cpu, one = {"--device": ("--device", "cpu")}, {"--samples": ("--samples", "1")}
        needle = {"--length": ("--length", "400")}
        small = {"--budget": ("--budget", "24"), "--window": ("--window", "8")}
        own: dict[str, dict[str, tuple[str, ...]]] = {
            "audit": {"": (self.press,), **model, **one, **needle, **cpu, **run_},
            "tokens": {"": (self.trace,)},
            "export": {"": (self.trace,), "--output": ("--output", "out.csv")},
            "list datasets": {"": ("needle", "--show"), **model, **needle},
            "doctor selfcheck": {**cpu, "--output": ("--output", "gpu.json")},
            "doctor bench": {**model, **cpu, "--output": ("--output", "bench.json")},
            "doctor bench scale": {**model, **one, "--output": ("--output", "scale.json")},
            "doctor bench compare": {"": (self.report, self.report)},
            "doctor": {}, "list models": {}, "list policies": {}, "list": {}, "question": {},
            "needle": {**model, **needle, **small, **cpu, **run_, "--samples": ("--samples", "6")},
            "horizon": {**model, **one, **needle, **small, **cpu, **run_, "--steps": ("--steps", "3")},
            "budget": {**model, **one, **needle, **small, **cpu, **run_, "--max-kl": ("--max-kl", "9")},
            "question alpha": {**model, **needle, **small, **cpu, **run_, "--samples": ("--samples", "4")},
            "question stability": {"": (self.trace,), **run_},
        }  # fmt: skip
        return own.get(command, {**model, **one, **needle, **small, **cpu, **run_})

    def line(self, command: str, option: str, *values: str) -> tuple[str, ...]:
        """The command line with the option's value instead of its own."""
        base = {name: words for name, words in self.base(command).items() if name != option}
        given = {"--compress-every": ("--max-new-tokens", "4"), "--max-new-tokens": ()}.get(option, ())
        options = [word for words in base.values() for word in words]
        return (*command.split(), *options, *given, *(word for value in values for word in (option, value)))


def _prepared(folder: Path) -> Whole:
    model = model_folder(folder / MODEL, positions=1024)
    (folder / "evict.py").write_text(_PRESS)
    report = {"format": 2, "machine": {}, "settings": {}, "rows": []}
    (folder / "bench.json").write_text(json.dumps(report))
    trace, benched, answers = (str(folder / name) for name in ("trace.h5", "bench.json", "generation.jsonl"))
    whole = Whole(str(model), trace, f"{folder / 'evict.py'}:keep", benched, answers)
    short = ("--max-new-tokens", "2")
    for line in (whole.line("trace", "--output", trace), (*whole.line("generate", "--output", str(folder)), *short)):
        made = run((*line, "--seed", "0"), folder, limit=60)
        if made.code:
            raise RuntimeError(made.err)
    return whole


_PRESS = """
from transformers import DynamicCache

def keep(model, input_ids, attention_mask):
    cache = DynamicCache()
    model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache)
    return cache
"""


def _kinds(whole: Whole, seed: int) -> Mapping[str, Sequence[Attack]]:
    """Everything that is tried, by kind."""
    numeric, names = _asked(whole, seed)
    return {
        **{f"numbers {place}": numeric[place::4] for place in range(4)},
        "names": names,
        "values": [_single(whole, option, value, seed) for option, values in ENORMOUS.items() for value in values],
        "calls": list(_calls(whole)),
        "policies": [Attack(f"--policy {text[:60]!r}", whole.line("trace", "--policy", text), True) for text in CALLS],
        "many": _many(whole),
        **{kind: [_sweep(whole, name, *held) for name, held in files.items()] for kind, files in sweeps.FILES.items()},
    }


def _commands() -> dict[str, Any]:
    """Return name -> command, subcommands under all their names."""
    return {" ".join(words): command_of(words) for words in every_command() if words[-1] != "trace.h5"}


def _asked(whole: Whole, seed: int) -> tuple[list[Attack], list[Attack]]:
    """Every numeric option with every number, every other one with every name: a command for each, drawn from those
    that have it, so that all commands get their share."""
    draw = random.Random(f"options/{seed}")
    having: dict[str, list[str]] = {}
    numeric: set[str] = set()
    for command, made in _commands().items():
        for option in made.params:
            if option.param_type_name != "option" or option.is_flag or option.opts[-1].startswith("--install"):
                continue
            having.setdefault(option.opts[0], []).append(command)
            if option.metavar in ("N", "X", "B"):
                numeric.add(option.opts[0])
    attacks: dict[bool, list[Attack]] = {True: [], False: []}
    for option, commands in having.items():
        of_both = draw.sample(commands, len(commands))
        values = NUMBERS if option in numeric else NAMES
        for command, value in zip(itertools.cycle(of_both), draw.sample(values, len(values)), strict=False):
            attacks[option in numeric].append(_attack(whole, command, option, value, option in numeric))
    return [one for one in attacks[True] if one], [one for one in attacks[False] if one]


def _attack(whole: Whole, command: str, option: str, value: str, numeric: bool) -> Attack:
    valid = option not in RANGES or RANGES[option].holds(value)
    name = f"{command} {option} {value[:30]!r}"
    if command in _MINUTES and (valid or not numeric):
        return Attack(f"trace --device {value[:30]!r}", whole.line("trace", "--device", value), True)
    return Attack(name, whole.line(command, option, value), numeric and not valid)


def _single(whole: Whole, option: str, value: str, seed: int) -> Attack:
    having = [name for name in ("trace", "generate", "heads", "layers") if name == "generate" or "new" not in option]
    command = random.Random(f"{option}/{value}/{seed}").choice(having)
    return Attack(f"{command} {option} {value[:30]!r}", whole.line(command, option, value))


def _calls(whole: Whole) -> Iterator[Attack]:
    """Every option of every policy, selection, granularity, precision and correction, with every number."""
    owners: list[tuple[str, str, Mapping[str, Any]]] = [
        *(("--policy", name, registry.info(name).options()) for name in registry.names()),
        *(("--selection", name, options) for name, options in SELECTION_OPTIONS.items() if name != "given"),
        *(("--granularity", name, options) for name, options in GRANULARITY_OPTIONS.items()),
        *(("--precision", name, options) for name, options in PRECISION_OPTIONS.items()),
        *(("--correction", name, options) for name, options in CORRECTION_OPTIONS.items()),
    ]
    for where, owner, options in owners:
        for option, known in options.items():
            values = NUMBERS if isinstance(known.default, int | float) else NAMES[:2]
            for value in values:
                text = f"{owner}({option}={value})"
                yield Attack(f"{where} {text[:60]!r}", whole.line("trace", where, text))


CALLS = ("", "snapkv(", "snapkv)", "snapkv()()", "snapkv(kernel)", "snapkv(=5)", "snapkv(kernel=)", "(", "," * 1000,
         "snapkv(" * 1000, "snapkv(kernel=" + "9" * 5000 + ")", "snapkv('", "snapkv(kernel=7,kernel=9)", "no.py:No",
         "kvpress:Nothing", "given:x", "snapkv(by=snapkv)", "snapkv(by=caote(by=caote))", "\x00", "a" * 100_000,
         "snapkv:nonsense", ":", "::", "snapkv(kernel=1e400)", "/dev/zero.py:X", "..py:X")  # fmt: skip


def _many(whole: Whole) -> list[Attack]:
    """More configurations than anybody waits for."""

    def listed(option: str, values: Sequence[object]) -> list[str]:
        return [word for value in values for word in (option, str(value))]

    budgets, alphas = listed("--budget", range(20, 221)), listed("--alpha", [place / 100 for place in range(101)])
    policies = listed("--policy", [f"adakv(floor={place / 1000})" for place in range(1000)])
    base, fine = whole.line("trace", "--budget"), [place / 10_000 for place in range(10_001)]
    return [
        Attack("201 budgets × 101 alphas", (*base, *budgets, *alphas), True),
        Attack("1,000 policies × 101 alphas", (*whole.line("trace", "--policy"), *policies, *alphas), True),
        Attack("201 budgets × 101 alphas, of heads", (*whole.line("heads", "--budget"), *budgets, *alphas), True),
        Attack("20,000 budgets", (*base, *listed("--budget", range(20, 20_020))), True),
        Attack("10,001 alphas", (*whole.line("generate", "--alpha"), *listed("--alpha", fine)), True),
        Attack("the same budget 20,000 times", (*base, *listed("--budget", [24] * 20_000)), True),
    ]  # fmt: skip


def _sweep(whole: Whole, name: str, content: bytes, never: bool) -> Attack:
    base = {option: words for option, words in whole.base("trace").items() if option not in ("--budget", "--window")}
    options = [word for words in base.values() for word in words]
    return Attack(
        f"a sweep file: {name}", ("trace", *options, "--config", "sweep.yaml"), never, {"sweep.yaml": content}
    )
