"""What policies read, few bits, shares of stage 1: said and used by every command that takes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.storage.trace.trace_file import read_trace
from tests.support.scripts import study

Run = Callable[..., Any]
QUEST, SLASH = "quest(page=4)", "vertical-slash(last=20)"
SAID = {
    QUEST: "quest: nothing is evicted; the cache share is what each head reads at a step",
    SLASH: "vertical-slash: nothing is evicted; the cache share is that of the pairs of query and entry that its own "
    "prefill",
}


def words(text: str) -> str:
    """Without the places where lines end."""
    return " ".join(text.split())


@pytest.mark.parametrize("policy", [QUEST, pytest.param(SLASH, marks=pytest.mark.slow)])
def test_its_own_choice_is_compared_with_the_criterion_s(perturbkv: Run, tiny: list[object], policy: str) -> None:
    sides = f"{policy}:attention,{policy}:two-stage(alpha=0)"
    ran = perturbkv("heads", *tiny, "--compare", sides, "-o", "out", "--explain")
    assert ran.code == 0, ran.err
    assert SAID[policy] in words(ran.out)
    assert ("masks dense: attention" in words(ran.out)) == (policy == SLASH)
    assert len(list(Path("out").glob("*.png"))) == 1
    found = read_trace(Path("out/trace.h5"))
    assert [config.label().split(" ")[0] for config in found.run.configs] == [
        f"{policy}:attention", f"{policy}:two-stage(alpha=0.0)",
    ]  # fmt: skip
    if policy == QUEST:  # a tail of 10, the window of 8 in it, and three pages
        assert [config.kept_entries(182) for config in found.run.configs] == [22, 22]
        assert found.arrays["held_share"] == pytest.approx(2 * 22 / 182)
    else:
        assert (found.arrays["held_share"] < 1).all() and (found.arrays["held_share"] > 0).all()
        assert (found.arrays["prefill_seconds"] > 0).all() and (found.arrays["prefill_seconds_full"] > 0).all()


@pytest.mark.parametrize(
    ("policy", "command"),
    [
        (QUEST, "generate"),
        *(pytest.param(*one, marks=pytest.mark.slow)
          for one in ((QUEST, "bound-tightness"), (QUEST, "assumption"), (SLASH, "layers"))),
    ],
)  # fmt: skip
def test_every_command_says_it(perturbkv: Run, tiny: list[object], policy: str, command: str) -> None:
    more = {
        "assumption": [],
        "generate": ["--selection", "attention", "--selection", "hindsight", "--max-new-tokens", 4],
    }
    compared = more.get(command, ["--compare", "attention,two-stage"])
    ran = perturbkv(command, *tiny, "--policy", policy, *compared, "-o", "out")
    assert ran.code == 0, ran.err
    assert SAID[policy] in words(ran.out)


@pytest.mark.slow
def test_evictions_and_others_are_sides_of_one_comparison(perturbkv: Run, tiny: list[object]) -> None:
    sides = f"snapkv:attention,{QUEST}:attention,{SLASH}:attention,vertical-slash:random"
    ran = perturbkv("heads", *tiny, "--compare", sides, "-o", "out", "--json")
    assert ran.code == 0, ran.err
    trace, found = read_trace(Path("out/trace.h5")), ran.json()["comparisons"]
    assert [one["treatment"]["policy"].partition("(")[0] for one in found] == ["quest", *["vertical-slash"] * 2]
    assert {one["baseline"]["policy"] for one in found} == {"snapkv"}
    assert np.isnan(trace.arrays["prefill_seconds"][:, :2]).all()
    for place, one in enumerate(found[1:], start=2):
        assert one["prefill_seconds_baseline"] is None
        assert one["prefill_seconds_treatment"] == pytest.approx(trace.arrays["prefill_seconds"][:, place].mean())
        assert one["prefill_seconds_full"] == pytest.approx(trace.arrays["prefill_seconds_full"].mean())
        assert one["held_over_full_treatment"] == pytest.approx(trace.arrays["held_share"][:, place].mean())


@pytest.mark.slow
def test_a_trace_goes_on_with_lines_beside_what_it_has(perturbkv: Run, tiny: list[object]) -> None:
    asked = [*tiny, "--steps", 1, "--selection", "attention", "-o", "out"]
    for policies in (["snapkv"], ["snapkv", SLASH]):
        ran = perturbkv("trace", *asked, *(word for name in policies for word in ("--policy", name)))
        assert ran.code == 0, ran.err
    found = read_trace(Path("out/trace.h5")).arrays
    assert np.isnan(found["prefill_seconds"][:, 0]).all() and (found["prefill_seconds"][:, 1] > 0).all()
    assert (found["prefill_seconds_full"] > 0).all() and (found["held_share"][:, 1] < 1).all()


@pytest.fixture
def answerable(model: Path, tmp_path: Path) -> list[object]:
    """A run without budget: prompts of 182 tokens with accepted answers, window 8."""
    text, rows = "The quick brown fox jumps over the lazy dog. " * 4, tmp_path / "prompts.jsonl"
    rows.write_text("\n".join(json.dumps({"id": f"p{i}", "prompt": f"{i} {text}", "answers": ["17"]}) for i in (1, 2)))
    return ["--model", model, "--dataset", rows, "--samples", 2, "--window", 8]


@pytest.fixture
def equal_bytes(answerable: list[object], tmp_path: Path) -> dict[str, Any]:
    """The document of the study of equal bytes, which measures this run in `out`."""
    study("equal_bytes", *answerable, "--answers", "--max-new-tokens", 3, "-o", tmp_path / "out")
    return dict(json.loads((tmp_path / "out" / "equal_bytes.json").read_text()))


@pytest.mark.slow
def test_a_budget_of_bytes_is_filled_with_entries(equal_bytes: dict[str, Any], tmp_path: Path) -> None:
    """One prefill a sample: every number of bits at every budget, everything in few bits, and answers of all."""
    for base, *others in equal_bytes["settings"]:
        assert [row["bits"] for row in (base, *others)] == [16, 8, 4, 2]
        assert "precision" not in base["config"] and base["config"]["granularity"] == "kv"
        assert base["held"] == pytest.approx(base["bytes"])
        held = [row["held"] for row in (base, *others)]
        assert held == sorted(held)
        for row in others:
            assert row["bytes"] <= base["bytes"]
            assert row["held"] == 1 or row["bytes"] > 0.9 * base["bytes"]
            assert 0 <= row["score"] <= 1
    assert [row["bits"] for row in equal_bytes["everything"]] == [8, 4, 2]
    assert all(row["held"] == 1 and row["kind"] == "rounded" for row in equal_bytes["everything"])
    assert len(equal_bytes["settings"]) == 2 * 3
    assert (tmp_path / "out" / "equal_bytes.png").exists()


@pytest.mark.slow
def test_rows_in_16_bits_are_plain_eviction(perturbkv: Run, answerable: list[object], tmp_path: Path) -> None:
    """The configuration is the one that any other command has: what it keeps and loses is the same."""
    study("equal_bytes", *answerable, "--budget", 0.3, "-o", tmp_path / "out")
    both = ["--granularity", "kv", "--selection", "attention", "--selection", "two-stage"]
    perturbkv("trace", *answerable, "--budget", 0.3, "--steps", 1, *both, "-o", "plain.h5")
    out, plain = read_trace(tmp_path / "out" / "trace.h5"), read_trace(Path("plain.h5"))
    places = [out.run.configs.index(config) for config in plain.run.configs]
    for name in ("kept_count", "held_share", "held_bytes", "theta"):
        assert np.array_equal(out.arrays[name][:, places], plain.arrays[name]), name
    found, expected = (one.arrays["perturbation_propagated"] for one in (out, plain))
    np.testing.assert_allclose(found[:, places], expected, rtol=1e-4, atol=1e-7)


def test_precisions_sweep_like_other_choices(perturbkv: Run, answerable: list[object]) -> None:
    Path("sweep.yaml").write_text("selection: attention\nbudget: 64\nprecision: [full, quantise]\nbits: [8, 2]\n")
    told = perturbkv("trace", *answerable, "--config", "sweep.yaml", "--dry-run", "--json").json()
    labels = [one["config"]["label"].partition("query")[2] for one in told["kept"]]
    assert labels == ["", " quantise(bits=8)", " quantise(bits=2)"]
    both = ["--precision", "full", "--precision", "quantise(bits=2)", "--budget", 64]
    told = perturbkv("heads", *answerable, *both, "--dry-run", "--json").json()
    assert len(told["kept"]) == 4


def test_generate_says_what_its_caches_take(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("generate", *tiny, "--precision", "quantise(bits=2)", "--max-new-tokens", 3, "-o", "out")
    assert ran.code == 0 and "of bytes" in ran.out


def test_what_looks_at_answers_tells_bytes_too(perturbkv: Run, tiny: list[object]) -> None:
    few = ["--precision", "full", "--precision", "quantise(bits=2)", "--selection", "attention", "--divergence"]
    perturbkv("generate", *tiny, *few, "--max-new-tokens", 3, "-o", "out")
    ran = perturbkv("quality", "--divergence", "out/generation.jsonl", "--format", "png", "--explain")
    assert "what is stored" in ran.out, ran.err
    rows = [json.loads(line) for line in Path("out/generation.jsonl").read_text().splitlines()[1:]]
    for row in rows:
        whole, two = (made for label, made in sorted(row["evicted"].items(), key=lambda one: len(one[0])))
        assert whole["bytes_share"] == pytest.approx(whole["held_share"])
        assert two["bytes_share"] < two["held_share"] == whole["held_share"]


@pytest.fixture
def six(tiny: list[object]) -> list[object]:
    return [*tiny[:4], "--samples", 6, *tiny[6:], "--format", "png"]


@pytest.mark.slow
def test_workers_and_resumed_runs_need_no_file(perturbkv: Run, six: list[object]) -> None:
    Path("a.json").write_text(json.dumps({"by": "head", "alpha": [[0, 0.5, 1, 0.25]] * 2, "layers": [0, 1]}))
    asked = ["--selection", "two-stage(alpha=a.json)", "--selection", "attention"]
    first = perturbkv("trace", *six[:-2], *asked, "-o", "one.h5")
    ran = perturbkv("trace", *six[:-2], *asked, "--engine", "workers", "--workers", 2, "-o", "two.h5")
    assert (first.code, ran.code) == (0, 0), ran.err
    one, two = (pk.read_trace(path) for path in ("one.h5", "two.h5"))
    np.testing.assert_array_equal(one.arrays["kept_code"], two.arrays["kept_code"])
    np.testing.assert_array_equal(one.arrays["stage1_count"], two.arrays["stage1_count"])
    assert len(np.unique(one.arrays["stage1_count"][:, 0])) == 4


@pytest.mark.parametrize("granularity", ["query", "kv"])
def test_answers_whose_cache_is_compressed_again_take_a_table(
    perturbkv: Run, tiny: list[object], granularity: str
) -> None:
    """Of equal shares what the number gives, of others something else."""
    equal, other = [[0.75] * 4] * 2, [[0, 0.5, 1, 0.25], [1, 1, 0, 0.9]]
    for name, rows in (("equal", equal), ("other", other)):
        Path(f"{name}.json").write_text(json.dumps({"by": "head", "alpha": rows, "layers": [0, 1]}))
    names = ["0.75", "equal.json", "other.json"]
    asked = ["--max-new-tokens", 12, "--compress-over", 28, "--granularity", granularity, "-o", "out"]
    chosen = [part for name in names for part in ("--selection", f"two-stage(alpha={name})")]
    ran = perturbkv("generate", *tiny, *chosen, *asked)
    assert ran.code == 0, ran.err
    rows = [json.loads(line) for line in Path("out/generation.jsonl").read_text().splitlines()]
    answers = [[one["tokens"] for one in row["evicted"].values()] for row in rows if "evicted" in row]
    assert len(answers) == 2 and all(number == table for number, table, _ in answers)
    assert any(number != table for number, _, table in answers)


OWN = """
from transformers import DynamicCache

def halves(model, input_ids, attention_mask):
    cache = DynamicCache()
    model(input_ids=input_ids, past_key_values=cache)
    for layer in cache.layers:
        layer.values = layer.values / 2
    return cache
"""


def test_beside_somebodys_cache_a_method_keeps_a_set_per_key_value_head(perturbkv: Run, tiny: list[object]) -> None:
    """As that cache does: sets per query head would hold more, and are none that it can be compared with."""
    Path("own.py").write_text(OWN)
    ran = perturbkv("heads", *tiny, "--compare", "snapkv:attention,cache:own.py:halves", "-o", "out", "--json")
    assert ran.code == 0, ran.err
    assert [str(config.granularity) for config in read_trace(Path("out/trace.h5")).run.configs] == ["kv", "kv"]
