"""Worker processes give the trace of one process, bit for bit, also where some of them are killed or hang."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

import perturbkv as pk
from perturbkv.api.inputs import make_plan
from perturbkv.cli.main import app
from perturbkv.configs.resources import Resources, Workers
from perturbkv.configs.run import Settings
from perturbkv.engines.engine_choice import LocalEngine, WorkerEngine
from perturbkv.engines.processes import Processes
from perturbkv.engines.scheduler import Scheduler
from perturbkv.engines.worker import WorkerDevice
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import run_in_memory, run_to_file
from perturbkv.schema import KEPT, PREFILLS
from tests.support.alike import assert_close_where_rounded, differing
from tests.support.dying import MOMENTS
from tests.support.every_policy import head_scores, of_every_policy
from tests.support.mischief import Mischief
from tests.support.pages import commands


@pytest.fixture(scope="module")
def model(folder: Path) -> Adapter:
    return pk.load_model(str(folder))


@pytest.fixture(scope="module")
def two() -> Iterator[Scheduler]:
    """Two processes, started by the first test and used by all."""
    crew = Processes([WorkerDevice("cpu", 1)] * 2)
    yield Scheduler(crew)
    crew.close()


def plan_of(model: Adapter, data: Path, configs: Any, **settings: Any) -> Plan:
    chosen = Settings(head_scores=head_scores(model), **settings)
    return make_plan(model, pk.load_prompts(str(data), model), configs, chosen, Resources())


@pytest.mark.slow
def test_every_policy_gives_the_same_trace(model: Adapter, data: Path, two: Scheduler, tmp_path: Path) -> None:
    plan = plan_of(model, data, of_every_policy(), steps=2, generate=3)
    assert len(plan.run.configs) > 15
    alone = run_to_file(plan, LocalEngine(), tmp_path / "here.h5")
    told: list[tuple[int, int]] = []
    engine = WorkerEngine(Workers("workers"), [plan], two)
    spread = run_to_file(plan, engine, tmp_path / "spread.h5", progress=lambda *done: told.append(done))
    assert differing(alone, spread) == []
    assert told == [(done, 6) for done in range(7)]
    assert engine.describe_workers() == "2 of 2 workers"
    assert not list(tmp_path.glob("*.journal"))


@pytest.mark.slow
def test_prefills_of_their_own_are_read_elsewhere_too(
    model: Adapter, data: Path, two: Scheduler, tmp_path: Path
) -> None:
    """But for how long they took."""
    plan = plan_of(model, data, pk.grid(30, policy="vertical-slash", selection=("attention", "random"), window=8))
    alone = run_to_file(plan, LocalEngine(), tmp_path / "here.h5")
    spread = run_to_file(plan, WorkerEngine(Workers("workers"), [plan], two), tmp_path / "spread.h5")
    assert set(differing(alone, spread)) <= set(PREFILLS)
    assert (pk.read_trace(spread).arrays["held_share"] < 1).all()


@pytest.mark.slow
def test_configurations_are_shared_out_and_joined_again(
    model: Adapter, data: Path, two: Scheduler, tmp_path: Path
) -> None:
    plan = plan_of(model, data, pk.grid((16, 20, 24), selection=("attention", "two-stage"), window=8))
    engine = WorkerEngine(Workers("workers", by_configs=True), [plan], two)
    spread = run_to_file(plan, engine, tmp_path / "spread.h5")
    held = run_in_memory(plan, engine)
    assert differing(held, spread) == []
    alone = run_in_memory(plan, LocalEngine())
    for name, array in alone.arrays.items():
        if "bytes" not in name and "floor" not in name and name not in KEPT:
            assert_close_where_rounded(held.arrays[name], array, name)
    for place in np.ndindex(len(alone.sample_ids), len(alone.run.configs)):
        np.testing.assert_array_equal(held.kept_masks(*place), alone.kept_masks(*place))


@pytest.mark.slow
@pytest.mark.parametrize(
    "harms", [{180: "kill"}, pytest.param({120: "kill once", 210: "hang once"}, marks=pytest.mark.chaos)]
)
def test_workers_that_are_killed_or_hang_cost_an_attempt_each(
    model: Adapter,
    data: Path,
    two: Scheduler,
    mischief: Mischief,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    harms: dict[int, str],
) -> None:
    plan = plan_of(model, data, pk.grid(24, policy=mischief.policy, window=8))
    alone = run_in_memory(plan, LocalEngine())
    for tokens, harm in harms.items():
        mischief.on(tokens, harm)
    engine = WorkerEngine(Workers("workers", timeout_per_sample=4), [plan], two)
    harmed = pk.read_trace(run_to_file(plan, engine, tmp_path / "harmed.h5"))
    failed = {f"p{tokens}": "its worker ended twice (signal 9) on sample 'p180'" for tokens in harms if tokens == 180}
    assert harmed.failures == failed
    assert {tokens: len(mischief.met(tokens)) for tokens in harms} == {
        tokens: 1 if "once" in harm else 2 for tokens, harm in harms.items()
    }
    again = sum("what it did is done again" in one.getMessage() for one in caplog.records)
    assert again == len(harms)
    mischief.off()
    run_to_file(plan, engine, tmp_path / "harmed.h5")
    assert differing(alone, tmp_path / "harmed.h5") == [], "the failed sample alone was measured again"


@pytest.mark.chaos
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_that_is_killed_at_any_moment_of_a_sample_changes_no_bit(
    model: Adapter,
    data: Path,
    two: Scheduler,
    mischief: Mischief,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    moment: str,
) -> None:
    plan = plan_of(model, data, pk.grid(24, policy=mischief.policy, window=8))
    alone = run_to_file(plan, LocalEngine(), tmp_path / "here.h5")
    mischief.on(180, f"kill once {moment}")
    harmed = run_to_file(plan, WorkerEngine(Workers("workers"), [plan], two), tmp_path / "harmed.h5")
    assert len(mischief.met(180)) == 1
    assert differing(alone, harmed) == []
    assert pk.read_trace(harmed).failures == {}


@pytest.mark.slow
def test_a_worker_that_dies_with_nothing_to_do_is_replaced(model: Adapter, data: Path, two: Scheduler) -> None:
    plan = plan_of(model, data, pk.grid(24, window=8))
    engine = WorkerEngine(Workers("workers"), [plan], two)
    before = run_in_memory(plan, engine)
    hired = _hired()
    killed = min(hired, key=lambda process: process.pid)
    killed.kill()
    assert differing(run_in_memory(plan, engine), before) == []
    after = _hired()
    assert len(hired) == len(after) == 2
    assert killed not in after


def _hired() -> set[psutil.Process]:
    """The living workers that this process started; it may have other children too."""
    alive = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    return {one for one in alive if any("perturbkv.engines.process" in word for word in one.cmdline())}


@pytest.mark.slow
def test_a_script_measures_in_workers(model: Adapter, data: Path) -> None:
    """Without a guard of `__main__`: a worker imports nothing of the program."""
    prompts, configs = pk.load_prompts(str(data), model, samples=2), pk.grid(24, window=8)
    alone = pk.measure(model, prompts, configs, progress=False)
    spread = pk.measure(model, prompts, configs, workers=pk.Workers("workers", workers=1), progress=False)
    assert differing(alone, spread) == []


@pytest.mark.slow
def test_the_page_has_commands_that_run(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = f"--model {folder} --dataset {data} --window 8 --budget 40"
    for line in commands("## Worker processes on one machine").splitlines():
        words = shlex.split(line.replace("--length 200", tiny))[1:]
        ran = CliRunner().invoke(app, words)
        assert ran.exit_code == 0, (words, ran.output)
    assert (tmp_path / "run" / "heads.png").exists()


@pytest.mark.slow
def test_answers_are_those_of_one_process(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose lines came as they were done is in the run's order once it is whole, also gone on with."""
    monkeypatch.chdir(tmp_path)
    asked = ["generate", "--model", folder, "--dataset", data, "--budget", 40, "--window", 8, "--max-new-tokens", 4]
    more = {"here": [], "spread": ["--engine", "workers", "--workers", 2]}
    for name, engine in more.items():
        ran = CliRunner().invoke(app, [*map(str, asked), "--compress-over", "44", "--divergence", "-o", name, *engine])
        assert ran.exit_code == 0, ran.output
    alone, spread = (Path(name, "generation.jsonl").read_text().splitlines() for name in more)
    assert spread[1:] == alone[1:]
    Path("spread/generation.jsonl").write_text("\n".join([spread[0], spread[4], spread[2]]) + "\n")
    ran = CliRunner().invoke(app, [*map(str, asked), "--compress-over", "44", "--divergence", "-o", "spread"])
    assert ran.exit_code == 0, ran.output
    assert Path("spread/generation.jsonl").read_text().splitlines()[1:] == alone[1:]
