"""What cannot be spread, and where: one line each, before a weight is loaded."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import perturbkv as pk
from perturbkv.api.inputs import make_plan
from perturbkv.cli.main import app
from perturbkv.cli.options import RunOptions
from perturbkv.configs.resources import Resources, Workers
from perturbkv.configs.run import Settings
from perturbkv.engines import engine_choice, processes, work_items
from perturbkv.engines import ray as joining
from perturbkv.engines import ray as nodes
from perturbkv.engines.ray import Node
from perturbkv.errors import ConfigError, ModelError, NoMemoryError, PerturbkvError, UnknownNameError
from perturbkv.pipeline.run.plan import Plan

GIB = 2**30


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"engine": "rya"}, "unknown engine 'rya'; known: ray"),
        ({"engine": "workers", "workers": 0}, "from 1 to 4,096, got 0"),
        ({"engine": "workers", "workers": -1}, "from 1 to 4,096, got -1"),
        ({"engine": "ray", "workers": 10**9}, "from 1 to 4,096, got 1000000000"),
        ({"engine": "workers", "workers": True}, "got True"),
        ({"engine": "workers", "cpus_per_worker": 0}, "--cpus-per-worker"),
        ({"engine": "workers", "timeout_per_sample": 0.0}, "seconds above 0, got 0.0"),
        ({"engine": "workers", "timeout_per_sample": float("nan")}, "takes seconds above 0, got nan"),
        ({"workers": 2}, r"--workers \(workers=…\) has no effect here: it needs --engine workers or --engine ray"),
        ({"timeout_per_sample": 2.0}, "--timeout-per-sample .* has no effect here"),
        ({"engine": "workers", "ray_address": "a:1"}, "it needs --engine ray; leave it out"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=words):
        Workers(**asked)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "rays"], "unknown engine 'rays'"),
        (["--workers", "2"], "--workers (workers=…) has no effect here: it needs --engine workers or --engine ray"),
        (["--engine", "workers", "--workers", "0"], "from 1 to 4,096, got 0"),
        (["--engine", "workers", "--workers", "4096"], "at most one worker for each of this machine's"),
        (["--engine", "workers", "--ray-address", "a:1"], "--ray-address (ray_address=…) has no effect here: it needs"),
        (["--engine", "workers", "--device-map", "auto"], "each worker has its own"),
        (["--engine", "ray"], "--ray-address or RAY_ADDRESS, and got neither"),
        (["--engine", "ray", "--ray-address", "nowhere"], "host:port"),
        (["--engine", "ray", "--ray-address", "ray://127.0.0.1:10001"], "host:port"),
        (["--engine", "ray", "--ray-address", "127.0.0.1:1"], "expected a Ray cluster at 127.0.0.1:1, got"),
    ],
    ids=lambda told: " ".join(told) if isinstance(told, list) else "",
)
def test_a_command_refuses_in_one_line(
    folder: Path, data: Path, tmp_path: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    where = ["trace", "--model", folder, "--dataset", data, "--budget", 24, "--window", 8, "-o", tmp_path / "out"]
    ran = CliRunner().invoke(app, [*map(str, where), *words])
    assert isinstance(ran.exception, PerturbkvError)
    assert said in str(ran.exception)
    assert "\n" not in str(ran.exception)
    assert ran.exception.exit_code == 2
    assert not (tmp_path / "out" / "trace.h5").exists()


def test_without_ray_the_command_that_brings_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[ray\]'"):
        joining.import_ray()


@pytest.mark.slow
def test_a_port_at_which_somebody_else_answers_is_no_cluster() -> None:
    """One that says something, and one that says nothing, which is waited for no longer than seconds."""
    for reply in (b"HTTP/1.1 400 Bad Request\r\n", b""):
        with socket.create_server(("127.0.0.1", 0)) as server:
            threading.Thread(target=_answer, args=(server, reply), daemon=True).start()
            began = time.monotonic()
            with pytest.raises(ConfigError, match="expected a Ray cluster at 127.0.0.1:"):
                joining.check_address(f"127.0.0.1:{server.getsockname()[1]}")
            assert time.monotonic() - began < 15


def _answer(server: socket.socket, reply: bytes) -> None:
    taken, _ = server.accept()
    taken.sendall(reply) if reply else time.sleep(6)
    taken.close()


def test_what_ray_says_of_another_version_is_one_line() -> None:
    def init(**asked: Any) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.9.1")

    ray = SimpleNamespace(init=init, __name__="ray", exceptions=SimpleNamespace(RayError=ValueError))
    with pytest.raises(
        ConfigError, match="from one of its nodes, got: Version mismatch: The cluster was .* Ray: 2.9.0"
    ):
        joining._connect(ray, "10.0.0.1:6379")


def plan_of(model: pk.Adapter, data: Path) -> Plan:  # type: ignore[name-defined]
    return make_plan(model, pk.load_prompts(str(data), model), pk.grid(24, window=8), Settings(), Resources())


@pytest.fixture(scope="module")
def plan(folder: Path, data: Path) -> Plan:
    return plan_of(pk.load_model(str(folder)), data)


def test_a_model_that_was_given_loaded_is_refused(folder: Path, data: Path) -> None:
    named = pk.load_model(str(folder))
    given = pk.load_model(named.model, tokenizer=named.tokenizer)
    prompts = pk.load_prompts(str(data), given, samples=1)
    with pytest.raises(ModelError, match=r"can open by its name.*was given loaded; name it"):
        pk.measure(given, prompts, pk.grid(24, window=8), workers=pk.Workers("workers", workers=1), progress=False)


def test_one_gpu_by_its_number_is_no_place_for_workers(plan: Plan) -> None:
    placed = dataclasses.replace(plan.placement, device=torch.device("cuda:1"))
    with pytest.raises(ConfigError, match="cuda:1 is one GPU, and workers take one each; say --device cuda"):
        processes.check_device(dataclasses.replace(plan, placement=placed))


def test_more_workers_than_gpus_are_refused(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    placed = dataclasses.replace(plan, placement=dataclasses.replace(plan.placement, device=torch.device("cuda")))
    assert [place.device for place in processes.worker_devices(Workers("workers"), placed)] == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match="each of this machine's 2 GPUs, got --workers 3"):
        processes.worker_devices(Workers("workers", workers=3), placed)


def test_workers_that_do_not_fit_the_memory_together_are_refused(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perturbkv.memory.free_bytes", lambda device: processes.needed_bytes(plan) * 3 // 2)
    monkeypatch.setattr(processes, "cores", lambda: 8)
    assert len(processes.worker_devices(Workers("workers", workers=1), plan)) == 1
    with pytest.raises(NoMemoryError, match="2 workers, each with model .* fewer --workers take less"):
        processes.worker_devices(Workers("workers", workers=2), plan)


def test_threads_are_the_cores_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert processes.threads_per_worker(Workers("workers"), 4) == 4
    assert processes.threads_per_worker(Workers("workers", cpus_per_worker=3), 4) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert processes.threads_per_worker(Workers("workers"), 4) == 2


def test_workers_that_want_more_cores_than_there_are_are_refused(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cores", lambda: 8)
    assert len(processes.worker_devices(Workers("workers", workers=2, cpus_per_worker=4), plan)) == 2
    with pytest.raises(ConfigError, match="this machine's 8 cores, got 2 with --cpus-per-worker 5"):
        processes.worker_devices(Workers("workers", workers=2, cpus_per_worker=5), plan)


BIG, SMALL = Node("big", "10.0.0.1", 8, 2, 64 * GIB, 80 * GIB), Node("small", "10.0.0.2", 8, 4, 64 * GIB, 16 * GIB)


def test_actors_go_where_gpus_hold_the_model() -> None:
    seats = nodes.assign_seats(Workers("ray"), [SMALL, BIG], "cuda", 40 * GIB)
    assert [(seat.key, seat.gpus) for seat in seats] == [("big", 1)] * 2
    assert len(nodes.assign_seats(Workers("ray"), [SMALL, BIG], "cuda", 10 * GIB)) == 6
    with pytest.raises(NoMemoryError, match="need 100.0 GiB, and the largest free GPU of the Ray cluster has 80.0 GiB"):
        nodes.assign_seats(Workers("ray"), [SMALL, BIG], "cuda", 100 * GIB)
    with pytest.raises(ConfigError, match="the Ray cluster's 2 free GPUs that hold the model, got --workers 3"):
        nodes.assign_seats(Workers("ray", workers=3), [SMALL, BIG], "cuda", 40 * GIB)
    busy = [dataclasses.replace(node, gpus=0) for node in (SMALL, BIG)]
    with pytest.raises(ConfigError, match="a free GPU in the Ray cluster, got none"):
        nodes.assign_seats(Workers("ray"), busy, "cuda", GIB)


def test_actors_on_cpus_share_cores_and_memory() -> None:
    two = [Node("a", "a", 5, 0, 10 * GIB), Node("b", "b", 5, 0, 100 * GIB)]
    seats = nodes.assign_seats(Workers("ray", workers=4), two, "cpu", 6 * GIB)
    assert [(seat.key, seat.cpus) for seat in seats] == [("b", 1), ("b", 1), ("b", 1), ("b", 1)]
    assert all(seat.memory == 6 * GIB for seat in seats)
    with pytest.raises(NoMemoryError, match="no node of the Ray cluster has more than 100.0 GiB free"):
        nodes.assign_seats(Workers("ray"), two, "cpu", 200 * GIB)


def test_a_score_of_the_program_itself_is_refused(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    run = dataclasses.replace(plan.run, plugins={"snapkv": "0"})
    assert work_items.registered_modules(run) == ("perturbkv.scoring.scores.snapkv",)
    monkeypatch.setattr(work_items._plugin_class("snapkv"), "__module__", "__main__")
    with pytest.raises(ConfigError, match="'snapkv' is defined in the program itself"):
        work_items.registered_modules(run)


def test_another_version_of_a_score_is_refused_where_it_is_loaded(plan: Plan) -> None:
    with pytest.raises(PerturbkvError, match="expected 'snapkv' as the run was planned with it, got another version"):
        work_items.import_plugins((), dataclasses.replace(plan.run, plugins={"snapkv": "0"}))


def test_the_device_of_a_cluster_need_not_be_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert engine_choice.pick_run_device(Workers("ray"), "cuda") == torch.device("cuda")
    with pytest.raises(ConfigError, match="this machine has 0"):
        engine_choice.pick_run_device(Workers("workers"), "cuda")


def test_a_sweep_file_takes_the_engine_too() -> None:
    assert RunOptions(engine="workers", workers=2).engine_config == Workers("workers", 2)
    with pytest.raises(ConfigError, match="no effect"):
        _ = RunOptions(workers=2).engine_config
