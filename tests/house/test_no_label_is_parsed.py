"""A configuration's label is printed and is a key; what it says is never read: any other text would do as well."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.text import Text

from perturbkv.analyses import names
from perturbkv.analyses.identity import RunIdentity
from perturbkv.cli import console, saving
from perturbkv.cli.commands import generate
from perturbkv.cli.main import main
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.figures import style
from perturbkv.selection.grid import configuration
from perturbkv.storage.trace import trace_file
from perturbkv.trace import SampleTrace, Trace
from tests.support.traces import sample_trace, trace

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("analyses", "figures", "cli", "docs")
READING = ("split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix", "startswith", "endswith",
           "find", "index", "replace", "search", "match", "fullmatch", "sub", "findall")  # fmt: skip
SIDES = (("snapkv", "attention"), ("snapkv", "two-stage-uniform"), ("snapkv", "two-stage"), ("adakv", "two-stage"))
CONFIGS = (
    *(
        configuration(budget, policy=policy, selection=selection)
        for budget, (policy, selection) in itertools.product((64, 128), SIDES)
    ),
    configuration(64, alpha=0.5),
    *(
        configuration(0.2, selection=selection, granularity="kv", score="pooled", protect_first=4)
        for selection in ("attention", "random", "two-stage")
    ),
)
RESTRICTED = tuple(
    configuration(128, selection=selection, granularity=granularity)
    for granularity in ("kv", "kv(block=16)", "layer", "query") for selection in ("attention", "two-stage")
)  # fmt: skip
RANKED = tuple(
    configuration(128, policy=policy, selection=selection)
    for policy, selection in (
        ("snapkv", "attention"),
        ("snapkv", "random"),
        ("snapkv", "two-stage"),
        ("tova", "attention"),
        ("h2o", "attention"),
    )
)
LINKED = tuple(
    configuration(budget, selection=selection)
    for budget in (64, 128, 0.2) for selection in ("attention", "two-stage", "random")
)  # fmt: skip
SWEPT = tuple(
    configuration(budget, selection=selection)
    for selection in ("attention", "two-stage") for budget in (0.1, 0.2, 0.4, 0.6, 0.8)
)  # fmt: skip
BYTES = (
    *(configuration(budget, selection="attention", granularity="kv") for budget in (0.1, 0.2, 0.4)),
    configuration(0.2, policy="streaming-llm", selection="position", granularity="kv"),
    configuration(0.2, selection="attention", granularity="kv", precision="quantise(bits=4)"),
    configuration(1.0, selection="attention", granularity="kv", precision="quantise(bits=4)"),
)
OWN = {
    "ablation --bytes": BYTES,
    "ablation --restrictions": RESTRICTED,
    "ablation --methods": RANKED,
    "correlation": LINKED,
    "budget": SWEPT,
    "budget --cliff": SWEPT,
}
"""Analyses that are asked of a trace of their own."""
OPAQUE = {config: f"c{place:02}" for place, config in enumerate(dict.fromkeys(sum(OWN.values(), CONFIGS)))}
COMMANDS = {
    "heads": ["--compare", "attention,two-stage,adakv:two-stage"],
    "layers": ["--per-sample", "--budgets", "--compare", "attention,two-stage,random"],
    "assumption": [],
    "bound-tightness": ["--selection", "two-stage"],
    "ablation": [],
    "ablation --methods": ["all"],
    "ablation --restrictions": [],
    "ablation --bytes": [],
    "horizon": ["--compare", "attention,two-stage"],
    "needle": [],
    "correlation": [],
    "quality": [],
    "quality --metric perplexity": [],
    "budget --cliff": [],
    "budget": [
        "--max-kl",
        "200",
        "--max-perplexity",
        "9",
        "--max-drop",
        "99",
        "--min-top1",
        "0.01",
        "--for-length",
        "2000",
        "--for-batch",
        "3",
    ],
}


def asked_of(command: str) -> Trace:
    """The trace that an analysis is asked of."""
    return made(OWN.get(command, CONFIGS))


def made(configs: Sequence[EvictionConfig] = CONFIGS) -> Trace:
    """What every other analysis can be asked of: L ≤ θ ≤ θ̂ ≤ θ̂_relax, three steps, answers to needle prompts."""
    samples = []
    for place in range(5):
        arrays: dict[str, Any] = dict(sample_trace(f"s{place}", configs=len(configs), steps=3, seed=place).arrays)
        draw = np.random.default_rng(place)
        moved = arrays["perturbation_isolated"]
        arrays |= {"theta": 3 * moved, "theta_hat": 4 * moved, "theta_hat_relax": 5 * moved}
        arrays |= {name: draw.uniform(0.51, 1, moved.shape) for name in ("sigma_topk", "sigma_stage1", "retained_mass")}
        arrays |= {"prompt_tokens": np.asarray(500)}
        arrays["evicted"] = np.array([config.budget.value != 1 for config in configs], dtype=np.uint8)
        arrays |= {name: np.full_like(arrays[name], 1e-3) for name in ("noise_floor", "noise_floor_isolated")}
        arrays |= {"score": draw.integers(0, 2, len(configs)).astype(float), "score_full": np.asarray(1.0)}
        arrays |= {"digits": draw.uniform(0, 1, len(configs)), "digits_full": np.asarray(1.0)}
        arrays["held_share"] = draw.uniform(0.1, 0.5, len(configs))
        arrays |= {"resident_bytes": 1000 * arrays["held_share"], "full_bytes": np.asarray(1000.0)}
        arrays["held_bytes"] = arrays["resident_bytes"] / [4 if config.quantised else 1 for config in configs]
        arrays |= {"next_token_id": np.ones(3, dtype=np.int64), "text_logp_full": -draw.uniform(0.1, 1, 3)}
        arrays["text_logp"] = arrays["text_logp_full"] - draw.normal(0.1, 0.1, (len(configs), 3))
        arrays |= {"cache_bytes": np.asarray(90_000), "cache_padding_bytes": np.asarray(500)}
        arrays["draft_acceptance"] = np.exp(-arrays["logit_kl"])
        arrays["token_kind"] = draw.integers(1, 6, 3).astype(np.uint8)
        samples.append(SampleTrace(f"s{place}", arrays))
    options = {"lengths": [100, 200], "depths": [0.0, 1.0], "haystack": "noise"}
    return trace(*samples, dataset="needle", dataset_options=options, generate=8, configs=tuple(configs))


def drawn(figure: Figure, identity: RunIdentity, stem: Path, formats: list[str], overwrite: bool) -> list[str]:
    """In place of a figure's files: every word on it, every name of an artist, and what its metadata say."""
    gids = [str(one.get_gid()) for one in figure.findobj(Artist) if one.get_gid()]
    texts = [one.get_text() for one in figure.findobj(Text)]
    return [stem.name, *gids, *texts, *style.metadata(identity, "svg").values()]


def told(command: str, folder: Path) -> str:
    """What an analysis of the trace prints, draws and writes."""
    out = io.StringIO()
    screens = mock.patch.multiple(console, out=console.Console(file=out, width=400), err=console.Console(file=out))
    argv = mock.patch.object(
        sys, "argv", ["perturbkv", *command.split(), *COMMANDS[command], "made.h5", "-o", str(folder)]
    )
    made_trace = asked_of(command)
    finished = mock.patch.object(trace_file, "read_trace", lambda path: made_trace)
    with screens, argv, finished, mock.patch.object(saving, "save_figure", drawn), contextlib.suppress(SystemExit):
        main()
    numbers = json.loads((folder / "summary.json").read_text())["analyses"]
    return f"{out.getvalue()}\n{json.dumps(numbers, indent=0, ensure_ascii=False)}".replace(str(folder), "FOLDER")


def hidden(text: str) -> str:
    """The text with each label as its opaque one: the longest first, as one may begin another."""
    for config in sorted(OPAQUE, key=lambda config: -len(config.label())):
        text = text.replace(config.label(), OPAQUE[config])
    return text


@pytest.fixture
def opaque(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(EvictionConfig, "label", lambda config: OPAQUE[config])


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_analysis_says_the_same_whatever_the_labels_are(
    opaque: Callable[[], None], tmp_path: Path, command: str
) -> None:
    usual = hidden(told(command, tmp_path / "usual"))
    assert any(label in usual for label in OPAQUE.values())
    opaque()
    assert told(command, tmp_path / "opaque") == usual


@pytest.mark.slow
def test_a_label_that_is_parsed_is_found(
    opaque: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def parsed(configs: Sequence[EvictionConfig], *without: str) -> list[dict[int, str]]:
        return [dict(enumerate(config.label().split())) for config in configs]

    monkeypatch.setattr(names, "distinct_choices", parsed)
    usual = hidden(told("assumption", tmp_path / "usual"))
    opaque()
    assert told("assumption", tmp_path / "opaque") != usual


def test_answers_are_named_whatever_the_labels_are(opaque: Callable[[], None]) -> None:
    def shown() -> str:
        out, answer = io.StringIO(), {"tokens": [1], "text": "a", "held_share": 0.5}
        evicted = {config.label(): answer for config in CONFIGS[:3]}
        row = {"sample": "s", "prompt_tokens": 9, "full": answer, "evicted": evicted, "compressions": []}
        with mock.patch.object(console, "out", console.Console(file=out, width=400)):
            generate.show_sample(row, CONFIGS[:3])
        return out.getvalue()

    usual = shown()
    assert "two-stage-uniform" in usual
    opaque()
    assert shown() == usual


def parsed(source: str) -> list[str]:
    """Expressions that read a text called a label, or what `.label()` gives."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READING:
            read = [node.func.value, *node.args] if ast.unparse(node.func.value) == "re" else [node.func.value]
            found += [ast.unparse(node) for one in read if "label" in ast.unparse(one)]
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("label()"):
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("place", PLACES)
def test_no_source_reads_a_label(place: str) -> None:
    found = {path.name: parsed(path.read_text()) for path in (ROOT / place).rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "setting = label.partition(' ')[2]",
        "name = config.label().split()[0]",
        "name = labels[0].split(':')[1]",
        "found = re.search('b=([0-9]+)', one.label)",
        "two = label.startswith('snapkv')",
        "first = config.label()[:6]",
    ],
)
def test_a_planted_line_that_does_is_found(line: str) -> None:
    assert parsed(line)
