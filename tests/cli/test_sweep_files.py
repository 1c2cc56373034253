"""`trace --config`: the grid that a file describes, and what overrides it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from perturbkv.cli import sweep_file
from perturbkv.cli.commands import trace
from perturbkv.cli.commands.trace import resolve_sweep
from perturbkv.cli.options import RunOptions
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.selection import grid
from perturbkv.selection.grid import configuration
from perturbkv.storage.trace.trace_file import read_trace
from tests.support.commands import command_of

Run = Callable[..., Any]
BOTH = ["attention", "two-stage"]
SELECTIONS = ["attention", "attention-unpooled", "two-stage", "two-stage-uniform", "value", "random", "hindsight",
              "hindsight-attention"]  # fmt: skip
VOTING = ["snapkv", "pyramidkv", "adakv", "headkv", "h2o", "scissorhands", "tova", "random"]
GRIDS = [
    {"policy": VOTING, "selection": SELECTIONS, "budget": [24, 0.3], "granularity": ["query", "kv"]},
    {"policy": "streaming-llm", "selection": "position", "positions": ["kept", "in-cache"], "budget": [24, 0.3]},
    {"preset": ["paper-v2", "released-v2"], "policy": ["snapkv", "adakv", "pyramidkv"], "budget": 24,
     "selection": ["attention", "two-stage"]},
    {"policy": "adakv", "floor": [0.0, 0.5], "safeguard": ["mixture", "guaranteed"], "budget": 24},
    {"policy": "pyramidkv", "line": ["prefix", "total"], "beta": 5, "budget": 24},
    {"policy": "headkv", "beta": 1.2, "budget": 24},
    {"policy": ["h2o", "scissorhands"], "recent": 0.25, "history": 30, "budget": 24},
    {"policy": "streaming-llm", "selection": "position", "sinks": 2, "budget": 24},
    {"selection": "two-stage", "alpha": [0, 0.5, 1], "split": ["prefix", "total"], "score": "pooled",
     "epsilon": 0.001, "budget": 24},
    {"selection": "two-stage", "granularity": "kv", "reduce": ["mean", "max"],
     "product": ["product-of-means", "mean-of-products"], "pool": "average", "kernel": 5, "budget": 24},
    {"selection": "attention", "granularity": "kv", "reduce": ["mean", "max"], "pool": "average", "kernel": 5,
     "budget": 24},
    {"selection": ["random", "two-stage"], "protect-first": 4, "protect-recent": 0.5, "budget": 24},
]  # fmt: skip
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "sweep.yaml"


class Sweep(NamedTuple):
    """What a sweep file asks for."""

    run: RunOptions
    configs: tuple[EvictionConfig, ...]


def resolved(tmp_path: Path, text: str) -> Sweep:
    path = tmp_path / "sweep.yaml"
    path.write_text(dedent(text))
    return Sweep(*resolve_sweep(path, RunOptions(), BOTH, frozenset()))


@pytest.mark.slow
def test_a_sweep_over_all_that_can_be_chosen_asks_for_each_configuration_once(tmp_path: Path) -> None:
    text = yaml.safe_dump({"window": 8, "grids": GRIDS})
    configs = resolved(tmp_path, text).configs
    assert len(configs) == len({config.label() for config in configs}) == 305


@pytest.fixture
def asked(perturbkv: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """What the command would plan to run: options and configurations."""
    plans: list[Any] = []

    def note(*plan: Any) -> None:
        plans.append(plan)
        raise typer.Exit(0)

    monkeypatch.setattr(trace, "plan", note)

    def ask(text: str, *arguments: object) -> tuple[RunOptions, tuple[EvictionConfig, ...]]:
        (tmp_path / "sweep.yaml").write_text(dedent(text))
        ran = perturbkv("trace", "--config", "sweep.yaml", *arguments)
        assert ran.code == 0, ran.err
        return plans.pop()  # type: ignore[no-any-return]

    return ask


def test_the_example_is_three_policies_two_selections_and_four_budgets() -> None:
    sweep = Sweep(*resolve_sweep(EXAMPLE, RunOptions(), BOTH, frozenset()))
    expected = [
        configuration(budget, policy=policy, selection=selection)
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
    assert [(config.policy.name, config.selection.name, config.selection["alpha"]) for config in sweep.configs] == [
        ("snapkv", "attention", 0.25),
        ("snapkv", "two-stage", 0.0),
        ("snapkv", "two-stage", 0.25),
        ("snapkv", "two-stage", 0.5),
        ("streaming-llm", "position", 0.25),
    ]


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
    kvpress = {"split": "total", "score": "pooled", "epsilon": 1e-4, "pool": "average", "kernel": 5}
    expected = [
        configuration(budget, selection=selection, window=8, alpha=alpha, granularity=granularity, **preset)
        for preset, budget, alpha, granularity, selection in product(
            (kvpress, {}), (0.05, 64), (0.0, 0.001), ("query", "kv"), ("value", "two-stage")
        )
    ]
    assert sweep.configs == tuple(expected)


def test_a_policy_keeps_its_own_defaults_until_the_file_chooses(tmp_path: Path) -> None:
    sweep = resolved(tmp_path, "policy: [scissorhands, tova]\nselection: attention\npool: [none, max]\nbudget: 64")
    assert [(one.policy.name, one.window, one.policy["pool"]) for one in sweep.configs] == [
        ("scissorhands", 10, "none"),
        ("tova", 1, "none"),
        ("scissorhands", 10, "max"),
        ("tova", 1, "max"),
    ]
    assert resolved(tmp_path, "policy: tova").configs[0].policy["pool"] == "none"


def test_a_selection_may_name_its_policy(tmp_path: Path) -> None:
    sweep = resolved(tmp_path, "policy: adakv\nselection: [value, 'h2o:value', streaming-llm]")
    assert [(one.policy.name, one.selection.name) for one in sweep.configs] == [
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
        *(configuration(b, selection=f"random(seed={seed})", window=8) for b in (64, 128) for seed in (1, 2)),
        *(configuration(256, selection="two-stage", window=8, alpha=alpha) for alpha in (0.0, 0.5)),
        *(
            configuration(b, policy="streaming-llm", selection="position", window=8, sinks=2, positions=positions)
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
    assert resolved(tmp_path, "dataset: qasper\ndata_dir: a folder").run.data_dir == Path("a folder")
    assert (run.head_scores, run.output) == (Path.home() / "scores.json", Path("runs/x.h5"))
    assert (run.max_tokens, run.chunk_mib, run.chat_template, run.steps) == (10, 1024, False, 3)
    assert (run.lengths, run.depths, run.save) == ((500, 700, 900), (0.1,), ["outputs"])


def test_one_definition_serves_several_keys(tmp_path: Path) -> None:
    sweep = resolved(tmp_path, "length: &sizes [200, 400]\nbudget: *sizes\nselection: value")
    assert sweep.run.lengths == (200, 400)
    assert [str(one.budget) for one in sweep.configs] == ["200", "400"]


def test_every_long_option_is_a_key_but_those_that_say_what_to_do_this_time() -> None:
    options = command_of(["trace"]).params
    long = {name[2:]: one.name for one in options for name in one.opts if name.startswith("--")}
    not_keys = {"config", "shard", "shard-by", "overwrite", "wait", "dry-run", "json", "help"}
    assert not_keys - {"help"} <= set(long)
    expected = {name: field for name, field in long.items() if name not in not_keys}
    options = {name.replace("_", "-"): name for name in grid.known_options()}
    assert {name: key.field for name, key in sweep_file.known_keys().items()} == expected | options
    assert {"floor", "kernel", "beta", "score", "positions"} <= set(options)


def test_what_is_typed_replaces_the_files_key_as_a_whole(asked: Run) -> None:
    text = """
        budget: [64, 128]
        selection: [value, random]
        policy: [snapkv, adakv]
        steps: 2
        samples: 3
        """
    run, configs = asked(text, "--budget", 512, "--selection", "two-stage", "--steps", 1)
    assert [(one.budget.value, one.policy.name, one.selection.name) for one in configs] == [
        (512, "snapkv", "two-stage"),
        (512, "adakv", "two-stage"),
    ]
    assert (run.steps, run.samples) == (1, 3)


def test_a_default_that_is_typed_counts_as_typed(asked: Run) -> None:
    run, configs = asked("policy: adakv\nmodel: random:smollm2-135m\nseed: 3", "--policy", "snapkv", "--seed", 0)
    assert [one.policy.name for one in configs] == ["snapkv", "snapkv"]
    assert (run.seed, run.model) == (0, "random:smollm2-135m")


def test_what_is_typed_replaces_the_key_in_every_grid(asked: Run) -> None:
    text = """
        budget: 64
        grids:
          - {selection: value, alpha: [0, 0.5], seed: [1, 2]}
          - {selection: random, budget: [128, 256]}
        """
    _, configs = asked(text, "-b", 0.5, "-b", 80, "--alpha", 1, "--seed", 9)
    assert [(str(one.selection), one.budget.value) for one in configs] == [
        ("value(alpha=1.0)", 0.5),
        ("value(alpha=1.0)", 80),
        ("random(alpha=1.0, seed=9)", 0.5),
        ("random(alpha=1.0, seed=9)", 80),
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


def test_a_sweep_runs_and_its_trace_holds_the_resolved_grid(
    perturbkv: Run, tmp_path: Path, model: Path, data: Path
) -> None:
    (tmp_path / "sweep.yaml").write_text(
        f"model: {model}\ndataset: {data}\nsamples: 1\nwindow: [4, 8]\nbudget: [24, 0.25]\noutput: t.h5\n"
    )
    dry = perturbkv("trace", "--config", "sweep.yaml", "--dry-run")
    assert dry.code == 0, dry.err
    assert "snapkv:two-stage b=0.25 " in dry.out
    assert not (tmp_path / "t.h5").exists()
    assert perturbkv("trace", "--config", "sweep.yaml").code == 0
    assert read_trace(tmp_path / "t.h5").run.configs == tuple(
        configuration(budget, selection=selection, window=window)
        for budget in (24, 0.25)
        for window in (4, 8)
        for selection in BOTH
    )


def test_help_puts_the_file_first_and_reads_no_yaml(perturbkv: Run) -> None:
    options = [line for line in perturbkv("trace", "--help").out.splitlines() if line.startswith("  --")]
    assert options[0].startswith("  --config")
    code = (
        "import sys\nfrom perturbkv.cli.main import app\nfrom typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['trace', '--help']).exit_code == 0\n"
        "sys.stdout.write(str('yaml' in sys.modules or 'torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False"
