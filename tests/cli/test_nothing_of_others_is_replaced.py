from __future__ import annotations

import errno
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perturbkv.pipeline.sample import one_sample
from perturbkv.storage.output import Lock, lock_path
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import FailedSample
from tests.support.asked import refused
from tests.support.screens import run

Run = Callable[..., Any]
PRECIOUS = b'{"mine": 1}\n'


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Path:
    """A trace of two samples, made once."""
    path = tmp_path_factory.mktemp("made") / "t.h5"
    options = ["--model", model, "--dataset", data, "--samples", 2, "--budget", 24, "--window", 8, "-o", path]
    assert run("trace", *options).code == 0
    return path


@pytest.fixture
def made(finished: Path, tmp_path: Path) -> str:
    shutil.copy(finished, tmp_path / "t.h5")
    return "t.h5"


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_figure_of_somebody_else_stays(perturbkv: Run, made: str, suffix: str) -> None:
    figure = Path(f"heads.{suffix}")
    figure.write_bytes(PRECIOUS)
    refused(perturbkv("heads", made, "--format", suffix), f"expected a figure of ours at {figure}", "--overwrite")
    assert figure.read_bytes() == PRECIOUS
    assert not Path("summary.json").exists()
    assert perturbkv("heads", made, "--format", suffix, "--overwrite").code == 0
    ours = figure.read_bytes()
    assert ours != PRECIOUS
    assert perturbkv("heads", made, "--format", suffix).code == 0, "our own is replaced unasked"


def test_a_figure_in_the_way_is_known_before_a_model_is_loaded(
    perturbkv: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perturbkv.pipeline.run.plan.load_weights", None)
    Path("out").mkdir()
    Path("out/layers-samples.png").write_bytes(PRECIOUS)
    ran = perturbkv("layers", *tiny, "--per-sample", "-o", "out")
    refused(ran, "expected a figure of ours at out/layers-samples.png")
    assert [path.name for path in Path("out").iterdir()] == ["layers-samples.png"]


@pytest.mark.parametrize("content", [PRECIOUS, b"", b"[1, 2]\n", bytes(range(256)), b'{"run": [], "format": 1}'])
def test_answers_of_somebody_else_stay(perturbkv: Run, tiny: list[object], content: bytes) -> None:
    Path("generation.jsonl").write_bytes(content)
    command = ["generate", *tiny, "--max-new-tokens", 2, "-o", "."]
    refused(perturbkv(*command), "generation.jsonl", "give --overwrite or another --output")
    assert Path("generation.jsonl").read_bytes() == content
    assert perturbkv(*command, "--overwrite").code == 0


def test_a_line_of_answers_that_is_not_whole_is_answered_again(perturbkv: Run, tiny: list[object]) -> None:
    command = ["generate", *tiny, "--max-new-tokens", 2, "-o", "."]
    assert perturbkv(*command).code == 0
    header, first, second = Path("generation.jsonl").read_text().splitlines(keepends=True)
    for broken in (second[:40], "[]\n"):
        Path("generation.jsonl").write_text(header + first + broken)
        ran = perturbkv(*command)
        assert "1 sample of 2" in ran.err
        assert Path("generation.jsonl").read_text() == header + first + second


@pytest.mark.parametrize(
    "content", [b"mine", b'{"trace": 3, "trace_digest": [], "analyses": {"heads": 7}}', bytes(range(256))]
)
def test_a_summary_of_somebody_else_is_replaced_only_when_asked(perturbkv: Run, made: str, content: bytes) -> None:
    Path("summary.json").write_bytes(content)
    refused(perturbkv("assumption", made), "expected a summary of ours at summary.json")
    assert Path("summary.json").read_bytes() == content
    assert perturbkv("assumption", made, "--overwrite").code == 0
    assert list(json.loads(Path("summary.json").read_text())["analyses"]) == ["assumption"]


def test_a_table_does_not_replace_its_trace(perturbkv: Run, made: str) -> None:
    content = Path(made).read_bytes()
    Path("t.csv").symlink_to(made)
    refused(perturbkv("export", made, "-o", "t.csv", "--overwrite"), "expected another file than the trace")
    assert Path(made).read_bytes() == content


@pytest.mark.parametrize(
    ("command", "held"),
    [
        (["trace", "-o", "out"], "out/trace.h5"),
        (["heads", "-o", "out"], "out/trace.h5"),
        (["generate", "-o", "out"], "out/generation.jsonl"),
    ],
    ids=lambda one: one[0],
)
def test_who_holds_an_output_is_told_before_anything_is_loaded(
    perturbkv: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch, command: list[str], held: str
) -> None:
    monkeypatch.setattr("perturbkv.models.loading.open_model", None)
    with Lock(Path(held)):
        refused(perturbkv(command[0], *tiny, *command[1:]), f"expected {held} for this command alone", "--wait")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        ["trace", "--head-scores", "out.json", "--length", 256, "--samples", 1],
        ["audit", "kept.json", "-o", "."],
    ],
    ids=lambda one: str(one[0]),
)
def test_other_outputs_have_one_writer_too(perturbkv: Run, model: Path, command: list[object]) -> None:
    name = "audit.json" if command[0] == "audit" else "out.json"
    Path("kept.json").touch()
    with Lock(Path(name)):
        refused(
            perturbkv(command[0], *command[1:], "--model", model),
            f"expected {name} for this command alone",
            "wait until",
        )


def test_a_command_that_waits_goes_on_from_what_the_other_left(
    perturbkv: Run, tiny: list[object], made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perturbkv.storage.output._POLL_S", 0.01)
    held = threading.Event()

    def hold() -> None:
        with Lock(Path(made)):
            held.set()
            time.sleep(0.6)

    threading.Thread(target=hold).start()
    held.wait()
    ran = perturbkv("trace", *tiny, "-o", made, "--wait")
    assert ran.code == 0, ran.err
    assert "waiting for the process that writes" in ran.err
    assert "2 of 2" in ran.err
    assert not lock_path(Path(made)).exists()


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_sigterm_ends_a_run_as_ctrl_c_does(
    perturbkv: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, code: int
) -> None:
    measure = one_sample.trace_sample

    def terminated(adapter: Any, prompt: Any, *more: Any) -> Any:
        if prompt.sample_id == "p1":
            signal.raise_signal(sent)
        return measure(adapter, prompt, *more)

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background jobs
    before = signal.getsignal(sent)
    with monkeypatch.context() as patch:
        patch.setattr(one_sample, "trace_sample", terminated)
        ran = perturbkv("trace", *tiny, "-o", "out")
    assert ran.code == code
    assert perturbkv("list", "out/trace.h5").code == 2
    assert ran.err.splitlines()[-1].startswith("error: interrupted: 1 of 2 ") and "out/trace.h5" in ran.err
    assert signal.getsignal(sent) is before
    signal.signal(signal.SIGINT, usual)
    assert "1 of 2" in perturbkv("trace", *tiny, "-o", "out").err


def test_an_interrupted_command_that_keeps_nothing_says_so(
    perturbkv: Run, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*given: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("perturbkv.storage.trace.trace_file.read_trace", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background jobs
    try:
        ran = perturbkv("heads", made, "--json")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ran.code, ran.json()["error"]["exit_code"]) == (130, 130)
    assert ran.err.startswith("error: interrupted") and len(list(Path().iterdir())) == 1


def test_interrupted_answers_are_kept(perturbkv: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    from perturbkv.pipeline.answers import answer_rows

    answer = answer_rows.answer

    def interrupted(adapter: Any, prompt: Any, *more: Any, **options: Any) -> Any:
        if prompt.sample_id == "p1":
            raise KeyboardInterrupt
        return answer(adapter, prompt, *more, **options)

    command = ["generate", *tiny, "--max-new-tokens", 2, "-o", "."]
    with monkeypatch.context() as patch:
        patch.setattr(answer_rows, "answer", interrupted)
        ran = perturbkv(*command)
    assert ran.code == 130
    assert "interrupted: 1 of 2 " in ran.err and "generation.jsonl" in ran.err
    assert "1 sample of 2" in perturbkv(*command).err


def test_answers_on_a_full_disk_are_one_line(
    perturbkv: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    command = ["generate", *tiny, "--max-new-tokens", 2, "-o", "."]
    with monkeypatch.context() as patch:
        patch.setattr("perturbkv.storage.json_lines.os.fsync", full)
        refused(perturbkv(*command), "expected room for generation.jsonl, got 'No space left on device'; make some")
    assert perturbkv(*command).code == 0


@pytest.mark.slow
def test_where_all_samples_fail_the_reasons_are_told(
    perturbkv: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_fail(adapter: Any, prompts: Any, run: Any, resources: Any, finished: Any, wanted: Any) -> None:
        for prompt in prompts:
            finished(FailedSample(prompt.sample_id, f"{prompt.sample_id} broke"))

    monkeypatch.setattr("perturbkv.engines.engine_choice.trace", all_fail)
    for command in (["heads", *tiny, "-o", "out"], ["layers", "out/trace.h5"], ["assumption", "out/trace.h5"]):
        ran = perturbkv(*command)
        assert ran.code == 1
        assert ran.err.startswith("error: ") and ran.err.endswith("p0 broke; p1 broke\n")
    ran = perturbkv("trace", *tiny, "-o", "out")
    assert (ran.code, ran.err.count("failed: ")) == (1, 2)
    assert read_trace("out/trace.h5").failures == {"p0": "p0 broke", "p1": "p1 broke"}


@pytest.mark.slow
def test_a_figures_name_is_no_longer_than_a_file_may_have(perturbkv: Run, tiny: list[object]) -> None:
    kinds = ("attention", "two-stage", "random", "value", "attention-unpooled", "two-stage-uniform")
    names = [f"{policy}:{kind}" for policy in ("snapkv", "pyramidkv", "adakv") for kind in kinds]
    ran = perturbkv("heads", *tiny, "--compare", ",".join(names), "-o", "out", "--format", "png")
    assert ran.code == 0, ran.err
    assert len("-".join(names)) > 255
    (figure,) = Path("out").glob("heads-*.png")
    assert figure.name.startswith("heads-snapkv-attention-snapkv-two-stage-")
