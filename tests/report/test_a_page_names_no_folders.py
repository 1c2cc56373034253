"""A page that is mailed says nothing of the folders of the machine that it was made on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from perturbkv.reporting.html import page
from perturbkv.reporting.payload import payload, trace_name, without_folders
from perturbkv.trace import Trace
from tests.report.test_pages_of_traces_that_lack_parts import OPTIONAL, small, with_failures, without
from tests.support.decoded import trace_of
from tests.support.paged import configs

FOLDER = "/home/ada/secret place"


def of(source: str = "", reason: str = "", **run: Any) -> Trace:
    made = with_failures(small(), "p1", reason=reason) if reason else small()
    return dataclasses.replace(made, source=source, run=dataclasses.replace(made.run, **run))


@pytest.mark.parametrize("lacking", [(), OPTIONAL, ("score_full", "score"), ("answer", "answer_full")])
@pytest.mark.parametrize("one_side", [False, True])
def test_no_sentence_names_the_folder_of_trace_model_or_data(lacking: tuple[str, ...], one_side: bool) -> None:
    made = small(of=configs(1)) if one_side else small()
    run = dataclasses.replace(made.run, model=f"{FOLDER}/m.gguf", dataset=f"{FOLDER}/d.jsonl")
    trace = dataclasses.replace(without(made, *lacking), source=f"{FOLDER}/deep/trace.h5", run=run)
    text = page(payload([trace, dataclasses.replace(trace, source="/home/ada/b.h5")]))
    assert "deep/trace.h5" in text and "b.h5" in text and "m.gguf" in text and "d.jsonl" in text
    assert "/home" not in text and "ada/" not in text and "secret place" not in text


def test_sentences_name_the_file_that_a_reader_is_told_of() -> None:
    told = trace_of(payload([of("/home/ada/needle/trace.h5")]))
    assert told["name"] == "needle/trace.h5" and dict(told["facts"])["Trace"] == "needle/trace.h5"
    assert " needle/trace.h5" in told["lacks"]["steps"] and "/home" not in told["lacks"]["steps"]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/a/b/news.h5", "news.h5"),
        ("/a/b/trace.h5", "b/trace.h5"),
        ("/a/b/../c/trace.h5", "c/trace.h5"),
        ("/trace.h5", "trace.h5"),
        ("/a/\u202eb/trace.h5", "\\u202eb/trace.h5"),
        ("", "in memory"),
    ],
)
def test_a_trace_of_the_usual_name_has_its_folder_before_it(source: str, name: str) -> None:
    assert trace_name(of(source)) == name
    assert trace_name(of(without_folders(of(source)).source)) == name or source == "/trace.h5"


def test_a_trace_in_the_working_folder_has_that_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needle").mkdir()
    monkeypatch.chdir(tmp_path / "needle")
    assert trace_name(of("trace.h5")) == "needle/trace.h5"
    assert trace_name(of("../trace.h5")) == f"{tmp_path.name}/trace.h5"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("clients/acme/model", "model"), ("acme/secret.jsonl", "secret.jsonl"), (r"acme\m", "m"),
        ("needle", "needle"), ("/root/models/m/", "m"), ("~/m.gguf", "m.gguf"),
        ("../up/m", "m"), (r"C:\Users\ada\m.gguf", "m.gguf"), (r"\\host\share\m", "m"), ("/", "/"),
        ("<script>", "<script>"), ("__proto__", "__proto__"), ("ruler:vt", "ruler:vt"),
    ],
)  # fmt: skip
def test_models_and_data_that_are_files_are_told_by_their_names(given: str, shown: str) -> None:
    found = without_folders(of(model=given, dataset=given)).run
    assert (found.model, found.dataset) == (shown, shown)


@pytest.mark.parametrize(
    ("model", "revision", "shown"),
    [
        ("org/model", "0123456789" * 4, "org/model"),
        ("org/model:sub/m.gguf", "sha256:0123456789abcdef", "org/model:sub/m.gguf"),
        ("acme/model", "sha256:0123456789abcdef", "model"),
        ("acme/model", "", "model"),
        ("/home/model", "0123456789" * 4, "model"),
    ],
)
def test_a_model_of_the_hub_keeps_its_owner_and_a_folder_does_not(model: str, revision: str, shown: str) -> None:
    assert without_folders(of(model=model, revision=revision)).run.model == shown


def test_reasons_do_not_name_the_folders_of_the_runs_data() -> None:
    made = of(reason="acme/secret.jsonl, line 3: no text", dataset="acme/secret.jsonl")
    assert without_folders(made).failures == {"p1": "secret.jsonl, line 3: no text"}


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("cannot read '/home/ada/x/d.jsonl': no file", "cannot read 'd.jsonl': no file"),
        ("cannot read '/home/ada/my texts/d.jsonl'", "cannot read 'd.jsonl'"),
        ("File /usr/lib/a.py, line 3", "File a.py, line 3"),
        ("of file:///home/ada/a.h5 (/home/ada/b.h5)", "of file://a.h5 (b.h5)"),
        (r"open C:\Users\ada\d.bin failed", "open d.bin failed"),
        ("in ~/runs/a.h5 and ../b/c.h5", "in a.h5 and c.h5"),
        ("1/2/3 of 4/5, N/A; see https://a.org/b/c", "1/2/3 of 4/5, N/A; see https://a.org/b/c"),
        ("</script><img src=x onerror=alert(1)>", "</script><img src=x onerror=alert(1)>"),
    ],
)
def test_reasons_of_failures_name_files_alone(reason: str, shown: str) -> None:
    assert without_folders(of(reason=reason)).failures == {"p1": shown}
