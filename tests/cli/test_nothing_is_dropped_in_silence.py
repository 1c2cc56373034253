"""What is typed counts or is refused: an option given twice, one without effect, results that would be replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perturbkv.cli import option_refusals
from perturbkv.cli.command_line import option_fields
from perturbkv.cli.options import RunOptions
from perturbkv.selection.policies import registry
from perturbkv.storage.trace.trace_file import read_run
from tests.support.asked import instead, refused
from tests.support.commands import command_of
from tests.support.measured import MEASURED

Run = Callable[..., Any]


TWICE = {
    "a model, in two spellings": (["heads", "-m", "a", "--model", "b"], "--model/-m once, got it 2 times"),
    "a value behind a sign": (["trace", "--window=8", "--window", "8"], "--window once"),
    "a scenario": (["heads", "--scenario", "regular", "--scenario", "context-only"], "--scenario once"),
    "a flag": (["list", "models", "--json", "--json"], "--json once"),
    "a flag and its opposite": (
        ["trace", "--chat-template", "--no-chat-template"],
        "--no-chat-template once, got it 2",
    ),
    "three times": (["list", "datasets", "--json", "--json", "--json"], "3 times"),
    "of a command of its own": (["trace", "--head-scores", "s.json", "--seed", "1", "--seed", "2"], "--seed once"),
    "of a group": (["doctor", "bench", "--tokens", "2048", "--tokens", "4096"], "--tokens once"),
    "of a subcommand": (
        ["doctor", "bench", "compare", "a", "b", "--tolerance", "1", "--tolerance", "2"],
        "--tolerance once",
    ),
    "the same budget": (["trace", "-b", "128", "--budget", "128"], "different values for --budget, got 128 twice"),
    "the same budget, spelled otherwise": (["trace", "-b", "0.1", "-b", "0.10"], "--budget, got 0.1 twice"),
    "the same policy": (["trace", "--policy", "adakv", "--policy", "adakv"], "--policy, got adakv twice"),
    "the same alpha": (["trace", "--alpha", "0.5", "--alpha", ".5"], "--alpha, got 0.5 twice"),
    "the same length behind a comma": (["trace", "--length", "300,300"], "--length, got 300 twice"),
    "the same selection": (["trace", "--selection", "value", "--selection", "value"], "--selection, got value twice"),
    "the same side": (["heads", "--compare", "attention,value,attention"], "--compare, got attention twice"),
    "the same method": (["needle", "--compare", "snapkv:value,snapkv:value"], "--compare, got snapkv:value twice"),
    "the same file": (["export", "t.h5", "-o", "a.csv", "-o", "a.csv"], "--output, got a.csv twice"),
    "before a subcommand": (
        ["doctor", "bench", "--tokens", "2048", "compare", "a", "b"],
        "--tokens has no effect on doctor bench comp",
    ),
}


@pytest.mark.parametrize(("command", "words"), TWICE.values(), ids=TWICE)
def test_what_is_given_twice_is_an_error(perturbkv: Run, tmp_path: Path, command: list[str], words: str) -> None:
    refused(perturbkv(*command), words)
    assert list(tmp_path.iterdir()) == []


def test_what_is_repeatable_makes_every_combination(perturbkv: Run, tiny: list[object]) -> None:
    several = ["--policy", "snapkv", "--policy", "adakv", "--granularity", "query", "--granularity", "kv"]
    ran = perturbkv("heads", *tiny, *several, "--preset", "paper", "--preset", "paper-v2", "-o", "out", "--json")
    assert ran.code == 0, ran.err
    configs = read_run(Path("out/trace.h5")).configs
    assert len(configs) == len({(one.policy, one.granularity, one.selection) for one in configs}) == 16
    pairs = [(one["baseline"]["policy"], one["treatment"]["policy"]) for one in ran.json()["comparisons"]]
    assert sorted(pairs) == [("adakv", "adakv")] * 4 + [("snapkv", "snapkv")] * 4


def test_help_is_given_whatever_stands_beside_it(perturbkv: Run) -> None:
    assert perturbkv("heads", "--seed", 1, "--seed", 2, "--help").code == 0


IDLE = {
    "a length of a file": (["trace", "--length", "300"], ["--length", "--dataset needle"]),
    "a depth of a file": (["trace", "--depth", "0.5"], ["--depth", "--dataset needle"]),
    "a haystack of a file": (["trace", "--haystack", "noise"], ["--haystack", "--dataset needle"]),
    "a folder for a file": (["trace", "--data-dir", "x"], ["--data-dir", "a LongBench name"]),
    "a folder for what is made": (["trace", "--dataset", "ruler:vt", "--data-dir", "x"], ["--data-dir", "reads files"]),
    "a depth of RULER's": (["trace", "--dataset", "ruler:vt", "--depth", "0.5"], ["--depth", "--dataset needle"]),
    "a folder for needle": (["trace", "--dataset", "needle", "--data-dir", "x"], ["--data-dir"]),
    "a seed of nothing drawn": (["trace", "--seed", "3"], ["--seed", "random"]),
    "headkv's scores": (["heads", "--head-scores", "x.json"], ["--head-scores", "--policy headkv"]),
    "recent entries that the window holds": (["trace", "--protect-recent", "7"], ["--protect-recent", "the window"]),
    "recent entries that the window is": (["generate", "--protect-recent", "8"], ["--protect-recent", "the window"]),
    "a kernel of nothing pooled": (
        ["trace", "--policy", "snapkv(pool=none, kernel=3)"],
        ["kernel of policy 'snapkv'", "a pool other than none"],
    ),
    "a pool of values": (
        ["trace", "--selection", "value", "--policy", "snapkv(pool=average)"],
        ["pool of policy", "looks at attention"],
    ),
    "a second stage of nothing pooled": (
        ["trace", "--policy", "snapkv(pool=none)", "--selection", "two-stage(score=pooled)"],
        ["score of selection"],
    ),
    "a product without a second stage": (
        ["trace", "--selection", "attention", "--granularity", "kv(product=mean-of-products)"],
        ["product of granularity 'kv'", "a two-stage selection"],
    ),
    "α of answers": (["generate", "--selection", "value", "--alpha", "0.5"], ["--alpha", "two-stage"]),
    "steps of answers": (["generate", "--steps", "2"], ["--steps", "--max-new-tokens"]),
    "outputs of answers": (["generate", "--save", "outputs"], ["--save", "perturbkv trace"]),
    "a step of all": (["horizon", "--steps", "4", "--step", "1"], ["--step has no effect on horizon"]),
    "a policy that all name": (["heads", "--policy", "adakv", "--compare", "h2o:value,snapkv:value"], ["--policy"]),
}


@pytest.mark.parametrize(("command", "words"), IDLE.values(), ids=IDLE)
def test_an_option_without_effect_is_an_error(
    perturbkv: Run, tiny: list[object], tmp_path: Path, command: list[str], words: list[str]
) -> None:
    refused(perturbkv(command[0], *instead(tiny, *command[1:]), "-o", "out"), *words, "has no effect", "leave it out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "more",
    [
        ["--policy", "adakv(floor=0.3)", "--protect-first", 4],
        ["--protect-recent", 9],
        ["--protect-recent", 0],
        ["--protect-recent", 0.25],
        ["--compare", "attention,adakv(floor=0.3)"],
        ["--seed", 1, "--compare", "attention,random"],
        ["--alpha", 0.5, "--compare", "attention,value"],
        ["--compare", "attention(alpha=0.5, split=total),two-stage(alpha=0.5, split=total)"],
        ["--granularity", "kv(reduce=max)"],
        ["--policy", "adakv(kernel=3)", "--compare", "value,random"],
        ["--overwrite", "--columns", 1, "--format", "png"],
        ["--dataset", "ruler:niah_single_1", "--length", 512, "--seed", 3],
        ["--compare", "snapkv:value,streaming-llm(positions=in-cache)"],
    ],
    ids=lambda more: " ".join(map(str, more)),
)
def test_an_option_with_effect_is_none(perturbkv: Run, tiny: list[object], more: list[object]) -> None:
    ran = perturbkv("heads", *instead(tiny, *more), "--dry-run")
    assert ran.code == 0, ran.err


def test_the_environment_is_not_typed(perturbkv: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERTURBKV_DATA_DIR", "somewhere")
    assert perturbkv("heads", *tiny, "--dry-run").code == 0


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    return Path(shutil.copy(MEASURED, tmp_path / "measured.h5"))


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("heads", ["--budget", "7"]),
        ("heads", ["--dry-run"]),
        ("layers", ["--model", "smollm2-135m"]),
        ("ablation", ["--chat-template"]),
        ("assumption", ["--alpha", "0.5"]),
        ("bound-tightness", ["--compare", "attention,value"]),
        ("needle", ["--max-new-tokens", "3"]),
        ("needle", ["--compare", "snapkv:attention"]),
        ("correlation", ["--max-new-tokens", "3"]),
        ("horizon", ["--steps", "4"]),
        ("horizon", ["--step", "1"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_finished_trace_takes_no_option_that_makes_one(
    perturbkv: Run, measured: Path, command: str, option: list[str]
) -> None:
    refused(perturbkv(command, measured, *option, "-o", "out"), f"{option[0]} has no effect", "leave it out")
    assert not Path("out").exists()


def test_a_benchmark_says_what_its_rows_do_not_look_at(perturbkv: Run, tmp_path: Path) -> None:
    ran = perturbkv("doctor", "bench", "--only", "norms-time", "--tokens", 2048, "-o", "b.json")
    refused(ran, "--tokens has no effect on norms-time", "leave it out")
    ran = perturbkv("doctor", "bench", "--only", "quality-12", "--tokens", 2048, "-o", "b.json")
    refused(ran, "--tokens has no effect on quality-12", "leave it out")
    assert list(tmp_path.iterdir()) == []


def test_a_benchmark_replaces_no_file_unasked(perturbkv: Run, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("mine")
    refused(perturbkv("doctor", "bench", "--only", "norms-time", "-o", "b.json"), "got one; --overwrite replaces it")
    assert (tmp_path / "b.json").read_text() == "mine"


SWEEPS = {
    "a key of another policy": ("samples: 1\nfloor: 0.3", 2, "floor", "policy adakv"),
    "a key that no grid uses": ("floor: 0.3\ngrids:\n- policy: h2o\n- policy: tova", 1, "floor", "policy adakv"),
    "a grid's key": ("grids:\n- {policy: adakv, floor: 0.1}\n- {floor: 0.2}", 3, "floor", "policy adakv"),
    "recent entries of the window": ("window: 32\nprotect-recent: 32", 2, "protect-recent", "more entries than the"),
    "one such value": ("window: 32\nprotect-recent: [0, 16, 40]", 2, "protect-recent", "more entries than the"),
    "a length of LongBench": ("dataset: qasper\n\nlength: 500", 3, "length", "--dataset needle"),
    "a value twice": ("samples: 1\nbudget:\n- 64\n- 128\n- 64", 5, "budget", "every value once, got 64 in line 3"),
    "a budget spelled otherwise": ("budget: [0.05, 0.050]", 1, "budget", "every value once, got 0.05 in line 1"),
}


@pytest.mark.parametrize(("text", "line", "key", "words"), SWEEPS.values(), ids=SWEEPS)
def test_a_key_without_effect_is_told_with_its_line(
    perturbkv: Run, tmp_path: Path, text: str, line: int, key: str, words: str
) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    refused(perturbkv("trace", "--config", "sweep.yaml"), f"error: sweep.yaml:{line}: {key}: ", words)


def test_a_key_that_one_grid_uses_is_right(perturbkv: Run, tmp_path: Path, model: Path, data: Path) -> None:
    text = f"model: {model}\ndataset: {data}\nsamples: 1\nwindow: 8\nbudget: 24\nfloor: 0.3\n"
    (tmp_path / "sweep.yaml").write_text(text + "grids:\n- {policy: adakv}\n- {selection: value}\n")
    ran = perturbkv("trace", "--config", "sweep.yaml", "--dry-run")
    assert ran.code == 0, ran.err
    typed = perturbkv("trace", "--config", "sweep.yaml", "--policy", "snapkv", "--dry-run")
    refused(typed, "sweep.yaml:6: floor: has no effect")


def test_results_of_another_question_are_not_replaced(perturbkv: Run, measured: Path) -> None:
    ask = ["heads", measured, "-o", "out", "--format", "png", "--compare"]
    assert perturbkv(*ask, "attention,value").code == 1  # a sample of it failed
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    again = perturbkv(*ask, "attention,random")
    refused(again, "out/summary.json holds heads with --compare attention,value", "--overwrite")
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before
    assert perturbkv(*ask, "attention,value").code == 1
    assert perturbkv(*ask, "attention,random", "--overwrite").code == 1
    told = json.loads(Path("out/summary.json").read_text())["analyses"]["heads"]
    assert told["asked"]["compare"] == "attention,random"


def test_a_question_that_only_adds_is_answered(perturbkv: Run, measured: Path) -> None:
    assert perturbkv("layers", measured, "-o", "out", "--format", "png").code == 1
    assert perturbkv("layers", measured, "-o", "out", "--format", "png", "--per-sample").code == 1
    refused(perturbkv("layers", measured, "-o", "out"), "with --per-sample; this one is without --per-sample")


def test_every_name_of_the_table_is_an_option() -> None:
    assert set(option_refusals.NEEDS) <= set(option_fields(RunOptions))
    for command, names in option_refusals.UNUSED.items():
        words = [word for word in command.split() if not word.startswith("-")]
        assert set(names) <= {parameter.name for parameter in command_of(words).params}


def test_an_option_whose_help_names_what_it_is_for_needs_that() -> None:
    known = {name: f"--policy {name}" for name in registry.names()} | {"needle": "--dataset needle"}
    for name, annotated in option_fields(RunOptions).items():
        said = next(option.help for option in annotated.__metadata__).partition(":")[0]
        if said in known:
            assert option_refusals.NEEDS[name].text == known[said]
