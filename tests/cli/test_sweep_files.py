"""`trace --config`: the grid that a file describes, what overrides it, and the line of every mistake."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import typer

from perturbkv.cli import sweep_keys, sweeping
from perturbkv.cli.main import app
from perturbkv.cli.options import RunOptions
from perturbkv.cli.sweeping import resolve
from perturbkv.configs.budget import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.storage.trace_file import read_trace

Run = Callable[..., Any]
BOTH = ["attention", "two-stage"]
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "sweep.yaml"


def resolved(tmp_path: Path, text: str) -> sweeping.Sweep:
    path = tmp_path / "sweep.yaml"
    path.write_text(dedent(text))
    return resolve(path, RunOptions(), BOTH, frozenset())


@pytest.fixture
def asked(perturbkv: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """What the command would plan to run: options and configurations."""
    plans: list[Any] = []

    def note(*plan: Any) -> None:
        plans.append(plan)
        raise typer.Exit(0)

    monkeypatch.setattr(sweeping, "plan", note)

    def ask(text: str, *arguments: object) -> tuple[RunOptions, tuple[EvictionConfig, ...]]:
        (tmp_path / "sweep.yaml").write_text(dedent(text))
        ran = perturbkv("trace", "--config", "sweep.yaml", *arguments)
        assert ran.code == 0, ran.err
        return plans.pop()  # type: ignore[no-any-return]

    return ask


def test_the_example_is_three_policies_two_selections_and_four_budgets() -> None:
    sweep = resolve(EXAMPLE, RunOptions(), BOTH, frozenset())
    expected = [
        EvictionConfig(Budget(budget), policy, selection)
        for budget in (64, 128, 0.2, 0.4)
        for policy in ("snapkv", "pyramidkv", "adakv")
        for selection in ("attention", "two-stage")
    ]
    assert sweep.configs == tuple(expected)
    assert (sweep.run.model, sweep.run.dataset, sweep.run.samples) == ("smollm2-135m-q4_1", "needle", 4)
    assert (sweep.run.lengths, sweep.run.depths) == ((500, 1000), (0.25, 0.75))


def test_the_grids_that_the_example_comments_on_are_grids(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    shown = text[text.index("# grids:") :].replace("# ", "")
    sweep = resolved(tmp_path, "budget: 64\n" + shown)
    assert [(config.policy, config.selection, config.alpha) for config in sweep.configs] == [
        ("snapkv", "attention", 0.25),
        ("snapkv", "two-stage", 0.0),
        ("snapkv", "two-stage", 0.25),
        ("snapkv", "two-stage", 0.5),
        ("streaming-llm", "position", 0.25),
    ]


def test_an_empty_mapping_is_the_command_without_options(tmp_path: Path) -> None:
    sweep = resolved(tmp_path, "{}")
    assert sweep.configs == RunOptions().configs(BOTH)
    assert sweep.run == RunOptions()


def test_lists_make_the_product(tmp_path: Path) -> None:
    sweep = resolved(
        tmp_path,
        """
        selection: [value, two-stage]
        granularity: [query, kv]
        alpha: [0, 1e-3]
        window: 8
        budget: [0.05, 64]
        preset: [kvpress, paper]
        """,
    )
    kvpress = {"split": "total", "stage2_score": "pooled", "epsilon": 1e-4, "pool": "average", "kernel": 5}
    kvpress |= {"pyramid_line": "total", "safeguard": "guaranteed"}
    expected = [
        EvictionConfig(Budget(budget), "snapkv", selection, 8, alpha, granularity=granularity, **preset)  # type: ignore[arg-type]
        for preset, budget, alpha, granularity, selection in product(
            (kvpress, {}), (0.05, 64), (0.0, 0.001), ("query", "kv"), ("value", "two-stage")
        )
    ]
    assert sweep.configs == tuple(expected)


def test_a_policy_keeps_its_own_defaults_until_the_file_chooses(tmp_path: Path) -> None:
    sweep = resolved(tmp_path, "policy: [scissorhands, tova]\nselection: attention\npool: [none, max]\nbudget: 64")
    assert [(one.policy, one.window, one.pool) for one in sweep.configs] == [
        ("scissorhands", 10, "none"),
        ("tova", 1, "none"),
        ("scissorhands", 10, "max"),
        ("tova", 1, "max"),
    ]
    assert resolved(tmp_path, "policy: tova").configs[0].pool == "none"


def test_a_selection_may_name_its_policy(tmp_path: Path) -> None:
    sweep = resolved(tmp_path, "policy: adakv\nselection: [value, 'h2o:value', streaming-llm]")
    assert [(one.policy, one.selection) for one in sweep.configs] == [
        ("adakv", "value"),
        ("h2o", "value"),
        ("streaming-llm", "position"),
    ]


def test_grids_take_the_rest_from_above_and_stand_one_after_the_other(tmp_path: Path) -> None:
    sweep = resolved(
        tmp_path,
        """
        budget: [64, 128]
        window: 8
        seed: 5
        grids:
          - {selection: [random], seed: [1, 2]}
          - selection: two-stage
            alpha: [0, 0.5]
            budget: 256
          - {policy: streaming-llm, selection: position, sinks: 2, positions: [kept, in-cache]}
          - {selection: random, seed: 2}
        """,
    )
    expected = [
        *(EvictionConfig(Budget(b), "snapkv", "random", 8, seed=seed) for b in (64, 128) for seed in (1, 2)),
        *(EvictionConfig(Budget(256), "snapkv", "two-stage", 8, alpha, seed=5) for alpha in (0.0, 0.5)),
        *(
            EvictionConfig(Budget(b), "streaming-llm", "position", 8, sinks=2, seed=5, positions=positions)
            for b in (64, 128)
            for positions in ("kept", "in-cache")
        ),
    ]
    assert sweep.configs == tuple(expected)
    assert sweep.run.seed == 5


def test_other_keys_are_read_as_the_command_line_reads_them(tmp_path: Path) -> None:
    sweep = resolved(
        tmp_path,
        """
        model: random:smollm2-135m
        head-scores: ~/scores.json
        policy: headkv
        max_tokens: 010
        chunk-mib: 1_024
        chat-template: no
        lengths: [500, '700,900']
        depth: 1e-1
        save: outputs
        steps: "3"
        output: runs/x.h5
        """,
    )
    run = sweep.run
    assert run.model == "random:smollm2-135m"
    assert resolved(tmp_path, "dataset: qasper\ndata_dir: folder/of data").run.data_dir == Path("folder/of data")
    assert (run.head_scores, run.output) == (Path.home() / "scores.json", Path("runs/x.h5"))
    assert (run.max_tokens, run.chunk_mib, run.chat_template, run.steps) == (10, 1024, False, 3)
    assert (run.lengths, run.depths, run.save) == ((500, 700, 900), (0.1,), ["outputs"])


def test_one_definition_serves_several_keys(tmp_path: Path) -> None:
    sweep = resolved(tmp_path, "length: &sizes [200, 400]\nbudget: *sizes\nselection: value")
    assert sweep.run.lengths == (200, 400)
    assert [str(one.budget) for one in sweep.configs] == ["200", "400"]


def test_every_long_option_is_a_key_but_those_that_say_what_to_do_this_time() -> None:
    options = typer.main.get_command(app).commands["trace"].params  # type: ignore[attr-defined]
    long = {name[2:]: one.name for one in options for name in one.opts if name.startswith("--")}
    not_keys = {"config", "overwrite", "dry-run", "json", "help"}
    assert not_keys - {"help"} <= set(long)
    expected = {name: field for name, field in long.items() if name not in not_keys}
    assert {name: key.field for name, key in sweep_keys.known().items()} == expected


def test_what_is_typed_replaces_the_files_key_as_a_whole(asked: Run) -> None:
    text = """
        budget: [64, 128]
        selection: [value, random]
        policy: [snapkv, adakv]
        steps: 2
        samples: 3
        """
    run, configs = asked(text, "--budget", 512, "--selection", "two-stage", "--steps", 1)
    assert [(one.budget.value, one.policy, one.selection) for one in configs] == [
        (512, "snapkv", "two-stage"),
        (512, "adakv", "two-stage"),
    ]
    assert (run.steps, run.samples) == (1, 3)


def test_a_default_that_is_typed_counts_as_typed(asked: Run) -> None:
    run, configs = asked("policy: adakv\nmodel: tiny\nseed: 3", "--policy", "snapkv", "--seed", 0)
    assert [one.policy for one in configs] == ["snapkv", "snapkv"]
    assert (run.seed, run.model) == (0, "tiny")


def test_what_is_typed_replaces_the_key_in_every_grid(asked: Run) -> None:
    text = """
        budget: 64
        grids:
          - {selection: value, alpha: [0, 0.5], seed: [1, 2]}
          - {selection: random, budget: [128, 256]}
        """
    _, configs = asked(text, "-b", 0.5, "-b", 80, "--alpha", 1, "--seed", 9)
    assert [(one.selection, one.budget.value, one.alpha, one.seed) for one in configs] == [
        ("value", 0.5, 1.0, 9),
        ("value", 80, 1.0, 9),
        ("random", 0.5, 1.0, 9),
        ("random", 80, 1.0, 9),
    ]


def test_the_file_goes_before_the_environment_and_after_the_command_line(
    asked: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERTURBKV_DATA_DIR", "environment")
    assert asked("samples: 1")[0].data_dir == Path("environment")
    assert asked("data-dir: file\ndataset: qasper")[0].data_dir == Path("file")
    assert asked("data-dir: file\ndataset: qasper", "--data-dir", "typed")[0].data_dir == Path("typed")


def test_a_flag_of_two_faces_overrides_either_way(asked: Run) -> None:
    assert asked("chat-template: yes")[0].chat_template is True
    assert asked("chat-template: yes", "--no-chat-template")[0].chat_template is False


def test_a_key_that_is_overridden_need_not_suit_this_machine(asked: Run) -> None:
    run, _ = asked("device: cuda:99", "--device", "cpu")
    assert run.device == "cpu"


BAD = {
    "no YAML": ("budget: 64\nmodel: [a\nsteps: 2", 3, "", ["expected YAML", "expected ',' or ']'"]),
    "a tab": ("budget: 64\n\twindow: 3", 2, "", ["expected YAML", "'\\t'"]),
    "a control character": ("samples: 1\nmodel: \x01", 2, "", ["special characters are not allowed"]),
    "two documents": ("samples: 1\n---\nsamples: 2", 2, "", ["single document"]),
    "an anchor that is not there": ("samples: 1\nbudget: *sizes", 2, "", ["undefined alias"]),
    "a bottomless list": ("[" * 3000, 1, "", ["expected YAML", "too deep"]),
    "a list": ("- budget: 64", 1, "", ["expected a mapping", "got a list"]),
    "text": ("\n\nbudget", 3, "", ["expected a mapping", "got 'budget'"]),
    "a key twice": ("budget: 64\nsteps: 1\nbudget: 128", 3, "budget", ["every key once", "line 1"]),
    "a key twice, spelled otherwise": ("max-tokens: 64\nmax_tokens: 65", 2, "max_tokens", ["line 1"]),
    "an option twice": ("length: 200\nlengths: 300", 2, "lengths", ["line 1"]),
    "a key twice in a grid": ("grids:\n- alpha: 0\n  alpha: 1", 3, "alpha", ["line 2"]),
    "grids twice": ("grids:\n- alpha: 0\ngrids: []", 3, "grids", ["line 1"]),
    "an unknown key": ("samples: 1\n\nbugdet: 64", 3, "bugdet", ["unknown key 'bugdet'; known: budget, "]),
    "an option that is typed": ("dry-run: true", 1, "dry-run", ["unknown key 'dry-run'"]),
    "a merge key": ("<<: {budget: 64}", 1, "<<", ["unknown key"]),
    "a list as key": ("? [a]\n: 1", 1, "", ["the name of an option", "got a list"]),
    "an unknown key in a grid": ("grids:\n- policy: adakv\n  alfa: 1", 3, "alfa", ["known: alpha"]),
    "an option of the run in a grid": ("grids:\n- steps: 2", 2, "steps", ["stand outside the grids"]),
    "grids in a grid": ("grids:\n- grids: []", 2, "grids", ["unknown key 'grids'"]),
    "grids that are none": ("grids: {alpha: 1}", 1, "grids", ["a list of mappings", "got a mapping"]),
    "no grid": ("samples: 1\ngrids: []", 2, "grids", ["got an empty list"]),
    "a grid that is text": ("grids:\n- alpha: 1\n- beta", 3, "grids", ["expected a mapping", "got 'beta'"]),
    "a list where one is taken": ("samples: 1\nsteps: [1, 2]", 2, "steps", ["a whole number, got a list", "evict"]),
    "a list of seeds": ("seed: [1, 2]", 1, "seed", ["got a list", "under 'grids'"]),
    "a list of one where one is taken": ("model: [tiny]", 1, "model", ["got a list"]),
    "an empty list": ("samples: 1\nbudget: []", 2, "budget", ["tokens (128) or a fraction (0.05)", "an empty list"]),
    "an empty list of lengths": ("length: []", 1, "length", ["an empty list"]),
    "nothing": ("samples: 1\nwindow:\nsteps: 1", 2, "window", ["a whole number, got nothing", "leave the key out"]),
    "null": ("pool: ~", 1, "pool", ["expected text, got nothing (null)"]),
    "null in a list": ("alpha:\n- 0.5\n- null", 3, "alpha", ["expected a number, got nothing"]),
    "a mapping": ("budget: {a: 1}", 1, "budget", ["got a mapping"]),
    "a list in a list": ("budget:\n- 64\n- [128]", 3, "budget", ["got a list"]),
    "a list of itself": ("budget: &b\n- 64\n- *b", 1, "budget", ["got a list"]),
    "an object": ("model: !!python/name:os.system x", 1, "model", ["got 'x' with the tag", "python"]),
    "a budget in words": ("samples: 1\nbudget: many", 2, "budget", ["tokens (128) or a fraction (0.05), got 'many'"]),
    "a budget of nothing": ("budget:\n- 64\n- 0\n- 128", 3, "budget", ["must be positive, got 0"]),
    "a budget of all and a half": ("budget: [64,\n1.5]", 2, "budget", ["at most 1, got 1.5"]),
    "a fraction of a query": ("window: 3.5", 1, "window", ["expected a whole number, got '3.5'"]),
    "samples in words": ('samples: "x"', 1, "samples", ["expected a whole number, got 'x'"]),
    "truth for a number": ("steps: yes", 1, "steps", ["expected a whole number, got 'yes'"]),
    "sixty as YAML counts": ("window: 1:30", 1, "window", ["expected a whole number, got '1:30'"]),
    "a share in words": ("alpha: half", 1, "alpha", ["expected a number, got 'half'"]),
    "perhaps": ("chat-template: perhaps", 1, "chat-template", ["expected true or false, got 'perhaps'"]),
    "alpha out of range": ("alpha:\n- 0.5\n- 1.5\n", 3, "alpha", ["must lie in [0, 1], got 1.5"]),
    "alpha out of range in a grid": ("grids:\n- policy: adakv\n- alpha: 2", 3, "alpha", ["[0, 1], got 2"]),
    "alpha that is none": ("alpha: .nan", 1, "alpha", ["expected a number, got '.nan'"]),
    "an even kernel": ("kernel: 6", 1, "kernel", ["odd and positive, got 6"]),
    "an unknown pool": ("pool: [max, None]", 1, "pool", ["unknown pool 'None'; known: none"]),
    "an unknown policy": ("policy:\n- snapkv\n- snapvk", 3, "policy", ["unknown policy 'snapvk'; known: snapkv"]),
    "an unknown selection": ("selection: twostage", 1, "selection", ["unknown selection 'twostage'"]),
    "an unknown policy of a selection": ("selection: ada:value", 1, "selection", ["unknown policy 'ada'"]),
    "an unknown preset": ("preset: papr", 1, "preset", ["unknown preset 'papr'; known: paper"]),
    "an unknown cache": ("cache: padded", 1, "cache", ["unknown cache 'padded'"]),
    "an unknown scenario": ("scenario: context", 1, "scenario", ["known: context-only"]),
    "an unknown haystack": ("haystack: hay", 1, "haystack", ["unknown haystack"]),
    "something else to save": ("save:\n- outputs\n- all", 3, "save", ["unknown --save 'all'"]),
    "no sample": ("steps: 1\nsamples: 0", 2, "samples", ["at least 1 sample, got 0"]),
    "no step": ("steps: 0", 1, "steps", ["at least 1 decode step, got 0"]),
    "too few tokens": ("max-tokens: 1", 1, "max-tokens", ["at least 2, got 1"]),
    "too little memory": ("chunk-mib: 0", 1, "chunk-mib", ["at least 1, got 0"]),
    "a short prompt": ("length:\n- 500\n- 5", 3, "length", ["at least 128 tokens"]),
    "half a token": ("length: 200.5", 1, "length", ["whole numbers"]),
    "a depth below": ("depth: [0.5, 2]", 1, "depth", ["a depth must lie in [0, 1], got 2"]),
    "no such device": ("device: tpu9", 1, "device", ["got 'tpu9'"]),
    "no such dtype": ("samples: 1\ndtype: int8", 2, "dtype", ["unknown dtype 'int8'"]),
    "no such model": ("samples: 1\nmodel: smolm2", 2, "model", ["unknown model 'smolm2'; known: smollm2-135m"]),
    "no such folder": ("samples: 1\nmodel: ./nowhere", 2, "model", ["got './nowhere'"]),
    "no such dataset": ("samples: 1\ndataset: nedle", 2, "dataset", ["unknown dataset 'nedle'; known: needle"]),
    "a budget within the window": ("budget:\n- 64\n- 16", 3, "budget", ["window of 32", "under 'grids'"]),
    "a window above the budget": ("window: [8, 128]", 1, "window", ["window of 128", "under 'grids'"]),
    "a preset's window above the budget": ("preset:\n- kvpress\nbudget: [64]", 3, "budget", ["window of 64"]),
    "what a policy refuses": (
        "policy: [snapkv, streaming-llm]\nselection:\n- attention\n- two-stage", 3, "selection",
        ["'streaming-llm' does not combine with selection 'attention'", "under 'grids'"],
    ),
    "what a policy refuses of the defaults": (
        "budget: 64\npolicy:\n- snapkv\n- streaming-llm", 4, "policy",
        ["'streaming-llm' does not combine with selection 'attention'", "under 'grids'"],
    ),
    "what a policy refuses in a grid": (
        "selection: value\ngrids:\n- selection: random\n- policy: streaming-llm", 1, "selection",
        ["'streaming-llm' does not combine with selection 'value'"],
    ),
    "positions that a policy refuses": (
        "selection: [streaming-llm, value]\npositions:\n- kept\n- in-cache", 4, "positions",
        ["'snapkv' leaves every entry at its own position", "a grid of its own in a --config file"],
    ),
    "positions that are none": ("positions: [kept, inside]", 1, "positions", ["unknown positions 'inside'"]),
    "what a cache refuses": (
        "cache: rectangular\nselection: value\npolicy:\n- snapkv\n- adakv", 5, "policy", ["rectangular cache cannot"],
    ),
    "what a cache refuses of a selection's policy": (
        "cache: rectangular\npolicy: snapkv\nselection:\n- value\n- adakv:value", 5, "selection", ["rectangular"],
    ),
}  # fmt: skip


def refused(ran: Any, start: str, *words: str) -> None:
    assert ran.code == 2, (ran.out, ran.err)
    (line,) = ran.err.splitlines()
    assert line.startswith(f"error: {start}"), line
    for word in words:
        assert word in line


@pytest.mark.parametrize(("text", "line", "key", "words"), BAD.values(), ids=BAD)
def test_a_mistake_is_told_with_file_line_and_key(
    perturbkv: Run, tmp_path: Path, text: str, line: int, key: str, words: list[str]
) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    ran = perturbkv("trace", "--config", "sweep.yaml", "-o", "out")
    refused(ran, f"sweep.yaml:{line}: {key}: " if key else f"sweep.yaml:{line}: expected ", *words)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


def test_a_file_that_cannot_be_read(perturbkv: Run, tmp_path: Path) -> None:
    refused(perturbkv("trace", "--config", "none.yaml"), "expected a sweep file (YAML) at none.yaml", "No such file")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    refused(perturbkv("trace", "--config", "empty.yaml"), "empty.yaml: expected a mapping", "an empty file")
    (tmp_path / "latin.yaml").write_bytes(b"model: \xe9")
    refused(perturbkv("trace", "--config", "latin.yaml"), "expected a sweep file", "latin.yaml", "no UTF-8")
    refused(perturbkv("trace", "--config", "."), "expected a sweep file (YAML) at .", "directory")


def test_what_is_typed_wrongly_is_not_blamed_on_the_file(perturbkv: Run, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("budget: 64\nwindow: 16\nselection: value")

    def trace(*typed: str) -> Any:
        return perturbkv("trace", "--config", "sweep.yaml", *typed)

    refused(trace("--budget", "many"), "a budget is tokens")
    refused(trace("--kernel", "6"), "the pooling kernel must be odd")
    refused(trace("--policy", "snapvk"), "unknown policy 'snapvk'")
    refused(trace("--window", "8", "--budget", "4", "--selection", "random"), "budget 4 keeps 4 entries")
    refused(trace("--budget", "12"), "sweep.yaml:2: window: budget 12 keeps 12 entries")
    refused(trace("--policy", "streaming-llm"), "sweep.yaml:3: selection: policy 'streaming-llm' does not")


def test_what_the_prompts_refuse_is_told_with_its_line(perturbkv: Run, tmp_path: Path, model: Path, data: Path) -> None:
    def trace(more: str) -> Any:
        (tmp_path / "sweep.yaml").write_text(f"model: {model}\nwindow: 8\ndataset: {data}\n{more}")
        return perturbkv("trace", "--config", "sweep.yaml")

    refused(trace("budget:\n- 0.5\n- 0.01"), "sweep.yaml:6: budget: budget 0.01 of 182 tokens", "window of 8")
    refused(trace("samples: 99"), "sweep.yaml:3: dataset: dataset", "has 6 samples, fewer than --samples 99")
    missing = "policy: headkv\nhead-scores: none.json"
    refused(trace(missing), "sweep.yaml:5: head-scores: expected head scores at none.json")
    refused(trace("policy: headkv"), "sweep.yaml:4: policy: policy 'headkv' needs scores")


def test_a_sweep_runs_and_its_trace_holds_the_resolved_grid(
    perturbkv: Run, tmp_path: Path, model: Path, data: Path
) -> None:
    (tmp_path / "sweep.yaml").write_text(
        f"model: {model}\ndataset: {data}\nsamples: 1\nwindow: [4, 8]\nbudget: [24, 0.25]\noutput: t.h5\n"
    )
    dry = perturbkv("trace", "--config", "sweep.yaml", "--dry-run")
    assert dry.code == 0, dry.err
    assert all(len(line) <= 80 for line in dry.out.splitlines())
    assert "snapkv:two-stage b=0.25 a=0.25 w=8 max7 query" in dry.out
    assert not (tmp_path / "t.h5").exists()
    assert perturbkv("trace", "--config", "sweep.yaml").code == 0
    assert read_trace(tmp_path / "t.h5").run.configs == tuple(
        EvictionConfig(Budget(budget), "snapkv", selection, window)
        for budget in (24, 0.25)
        for window in (4, 8)
        for selection in BOTH
    )


def test_help_puts_the_file_first_and_reads_no_yaml(perturbkv: Run) -> None:
    options = [line for line in perturbkv("trace", "--help").out.splitlines() if line.startswith("│ --")]
    assert options[0].startswith("│ --config")
    code = (
        "import sys\nfrom perturbkv.cli.main import app\nfrom typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['trace', '--help']).exit_code == 0\n"
        "sys.stdout.write(str('yaml' in sys.modules or 'torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False"
