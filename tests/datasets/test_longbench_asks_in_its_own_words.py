"""The oracle: each YAML file's prompt read as one line of text and filled by str.replace, and endings typed by hand."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perturbkv.datasets import dataset_registry, metrics, wording
from perturbkv.datasets.dataset_registry import DatasetOptions, LoadedDataset, load
from perturbkv.datasets.encode import encode
from perturbkv.errors import ConfigError, DatasetError
from perturbkv.models.loading import ByteTokenizer

EMPTY_INPUT = ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
LENGTHS = {
    "narrativeqa": 128, "qasper": 128, "multifieldqa_en": 64, "multifieldqa_zh": 64, "hotpotqa": 32, "2wikimqa": 32,
    "musique": 32, "dureader": 128, "gov_report": 512, "qmsum": 512, "multi_news": 512, "vcsum": 512, "trec": 64,
    "triviaqa": 32, "samsum": 128, "lsht": 64, "passage_count": 32, "passage_retrieval_en": 32,
    "passage_retrieval_zh": 32, "lcc": 64, "repobench-p": 64,
}  # fmt: skip
METRICS = {
    "qa_f1": ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"),
    "qa_f1_zh": ("multifieldqa_zh",),
    "rouge": ("gov_report", "qmsum", "multi_news", "samsum"),
    "rouge_zh": ("dureader", "vcsum"),
    "classification": ("trec", "lsht"),
    "count": ("passage_count",),
    "retrieval": ("passage_retrieval_en",),
    "retrieval_zh": ("passage_retrieval_zh",),
    "code_sim": ("lcc", "repobench-p"),
}
ENDINGS = {
    "multi_news": "\n\nNow, write a one-page summary of all the news.\n\nSummary:",
    "gov_report": "\n\nNow, write a one-page summary of the report.\n\nSummary:",
    "vcsum": "\n\n会议总结：",
    "passage_count": "The output format should only contain the number, such as 1, 2, 3, and so on.\n\n"
    "The final answer is:",
    "lcc": "Next line of code:",
    "repobench-p": "{{ what }} % {# is #} it?Next line of code:",
    "trec": "\n{{ what }} % {# is #} it?",
    "qasper": "\n\nQuestion: {{ what }} % {# is #} it?\n\nAnswer:",
    "multifieldqa_zh": "问题：{{ what }} % {# is #} it?\n回答：",
    "qmsum": "\n\nQuery: {{ what }} % {# is #} it?\nAnswer:",
}
QUESTION = "{{ what }} % {# is #} it?"
CONTEXT = " A {{context}} of {{question}} and {% raw %}.\n" + "文 text, and more of it. " * 150


def row(name: str, **more: Any) -> dict[str, Any]:
    """As LongBench's files hold it, its text full of what a template would read."""
    return {
        "input": "" if name in EMPTY_INPUT else QUESTION,
        "context": CONTEXT,
        "answers": ["one", "two"],
        "length": 1234,
        "dataset": name,
        "language": "en",
        "all_classes": ["one", "two", "three"] if name in ("trec", "lsht") else None,
        "_id": f"id of {name}",
        **more,
    }


def expected(name: str, question: str) -> str:
    """The prompt by lm-eval's file alone."""
    found = importlib.util.find_spec("lm_eval")
    assert found is not None
    path = Path((found.submodule_search_locations or [""])[0]) / "tasks" / "longbench" / f"{name}.yaml"
    (line,) = [line for line in path.read_text().splitlines() if line.startswith("doc_to_text: ")]
    before, after = json.loads(line.removeprefix("doc_to_text: ")).split("{{context}}")
    return "".join((before.replace("{{question}}", question), CONTEXT, after.replace("{{question}}", question)))


def named(tmp_path: Path, name: str, *rows: dict[str, Any]) -> LoadedDataset:
    (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load(name, DatasetOptions(len(rows), data_dir=tmp_path), ByteTokenizer())


def test_there_are_21() -> None:
    assert {info.name for info in dataset_registry.all_datasets() if dataset_registry.in_longbench(info.name)} == set(
        LENGTHS
    )
    assert sorted(name for names in METRICS.values() for name in names) == sorted(LENGTHS)


@pytest.mark.parametrize("name", LENGTHS)
def test_every_dataset_asks_as_lm_eval_writes_it(tmp_path: Path, name: str) -> None:
    data = named(tmp_path, name, row(name))
    (sample,) = data.samples
    assert sample.prompt == expected(name, "" if name in EMPTY_INPUT else QUESTION)
    assert sample.context.endswith(CONTEXT)
    assert sample.question.endswith(ENDINGS.get(name, ""))
    assert (sample.id, sample.answers, sample.task) == (f"0-id of {name}", ("one", "two"), name)
    assert data.generation_length == LENGTHS[name]
    recorded = data.options["wording"][name]
    assert recorded["from"] == f"lm-eval {importlib.metadata.version('lm-eval')}"
    assert (
        recorded["template"]
        .replace("{{context}}", CONTEXT)
        .endswith(sample.question if name in EMPTY_INPUT else ENDINGS.get(name, "").replace(QUESTION, "{{question}}"))
    )
    assert (recorded["generation_length"], recorded["metric"].removeprefix("get_").removesuffix("_with_score")) == (
        LENGTHS[name], next(metric for metric, names in METRICS.items() if name in names)
    )  # fmt: skip
    assert recorded["until"] == (["\n"] if name in ("trec", "triviaqa", "samsum", "lsht") else [])


@pytest.mark.parametrize("name", LENGTHS)
def test_every_closing_instruction_outlives_the_cut_and_is_context_onlys_question(tmp_path: Path, name: str) -> None:
    (sample,) = named(tmp_path, name, row(name)).samples
    prompt = encode(sample, ByteTokenizer(), chat_template=False, max_tokens=900)
    assert prompt.cut_tokens > 1000
    context, question = prompt.parts("context-only")
    closing = expected(name, "" if name in EMPTY_INPUT else QUESTION).rpartition(CONTEXT)[2]
    assert bytes(question).decode() == closing
    assert bytes(context).endswith(CONTEXT[-20:].encode())
    assert bytes(prompt.parts("regular")[0]).endswith(closing.encode())


@pytest.mark.parametrize("name", ["qasper", "lsht"])
def test_an_empty_question_leaves_the_rest_of_the_prompt(tmp_path: Path, name: str) -> None:
    (sample,) = named(tmp_path, name, row(name, input="")).samples
    assert sample.prompt == expected(name, "")


@pytest.mark.parametrize("name", LENGTHS)
def test_only_few_shot_and_code_sets_go_without_a_chat_template(tmp_path: Path, name: str) -> None:
    without = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
    assert named(tmp_path, name, row(name)).chat_template == (name not in without)


def test_a_file_of_both_kinds_wants_to_be_told(tmp_path: Path) -> None:
    path = tmp_path / "both.jsonl"
    path.write_text("\n".join(json.dumps(row(name)) for name in ("trec", "qmsum")))
    data = load(str(path), DatasetOptions(2), ByteTokenizer())
    assert data.generation_length == 512
    with pytest.raises(ConfigError, match="trec goes without.*--chat-template or --no-chat-template"):
        _ = data.chat_template
    path.write_text("\n".join(json.dumps({**row("trec"), "_id": i}) for i in range(2)))
    assert not load(str(path), DatasetOptions(2), ByteTokenizer()).chat_template


@pytest.mark.parametrize(
    ("task", "text", "answers", "score"),
    [
        ("qasper", "The cat sat.", ["a cat"], 2 / 3),
        ("qasper", "nothing", ["dog", "Nothing!"], 1),
        ("qasper", "", ["dog"], 0),
        ("triviaqa", "a cat\nQuestion: dog", ["cat"], 1),
        ("multifieldqa_zh", "北京。", ["北京"], 1),
        ("multi_news", "a b c d", ["a c e"], 4 / 7),
        ("multi_news", "", ["a"], 0),
        ("samsum", "a b\nc d", ["a b"], 1),
        ("vcsum", "北京", ["北京"], 1),
        ("trec", "one", ["one"], 1),
        ("trec", "one two", ["one"], 0.5),
        ("trec", "one\ntwo", ["one"], 1),
        ("passage_count", "There are 5, or 6", ["5"], 0.5),
        ("passage_retrieval_en", "3, not 4 or 5", ["Paragraph 3"], 1 / 3),
        ("passage_retrieval_zh", "段落3", ["段落3"], 1),
        ("lcc", "# a comment\nreturn y\nreturn z", ["return x"], 0.88),
        ("lcc", "return x", ["return x"], 1),
        ("needle", " 1,234 and 5", ["1234"], 1),
    ],
)
def test_metrics_give_what_they_give_by_hand(task: str, text: str, answers: list[str], score: float) -> None:
    metric = metrics.find_metric(task)
    assert metric is not None
    assert metric.grade(text, answers, ("one", "two", "three") if task == "trec" else ()) == pytest.approx(score)
    assert metric.name == next((name for name, tasks in METRICS.items() if task in tasks), "exact-number")


def test_a_prompt_of_no_dataset_has_no_metric() -> None:
    assert metrics.find_metric("") is None


def test_answers_that_a_metric_cannot_read_are_told_before_anything_runs() -> None:
    trec, retrieval = metrics.find_metric("trec"), metrics.find_metric("passage_retrieval_en")
    assert trec is not None
    assert retrieval is not None
    metrics.check_gradable(trec, ["one"], ["one", "two"], "s")
    with pytest.raises(DatasetError, match="sample 's': the metric classification needs the field 'all_classes'"):
        metrics.check_gradable(trec, ["one"], (), "s")
    with pytest.raises(DatasetError, match="needs answers as LongBench writes them; got the answers 'third'"):
        metrics.check_gradable(retrieval, ["third"], (), "s")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """An installation that lacks a package."""
    monkeypatch.setattr(metrics, "_grading_functions", metrics._grading_functions.__wrapped__)
    return lambda package: monkeypatch.setitem(sys.modules, package, None)


def test_without_the_extra_its_name_is_told(tmp_path: Path, bare: Callable[[str], None]) -> None:
    bare("lm_eval")
    install = r"pip install '\.\[longbench\]' in the checkout"
    with pytest.raises(DatasetError, match=f"dataset 'qasper'.*not installed; {install}"):
        load("qasper", DatasetOptions(1, data_dir=tmp_path), ByteTokenizer())
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps(row("lcc")))
    with pytest.raises(DatasetError, match=f"d.jsonl, line 2: dataset 'lcc'.*{install}"):
        load(str(path), DatasetOptions(2), ByteTokenizer())
    assert load(str(path), DatasetOptions(1), ByteTokenizer()).samples[0].prompt == "a"


@pytest.mark.parametrize("package", ["jieba", "fuzzywuzzy", "rouge"])
def test_without_what_the_metrics_need_the_extra_is_told(package: str, bare: Callable[[str], None]) -> None:
    bare(package)
    with pytest.raises(DatasetError, match=r"not installed; pip install '\.\[longbench\]' in"):
        metrics.find_metric("qasper")


def test_a_package_of_another_shape_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wording, "lm_eval_folder", lambda who: tmp_path)
    for text in ("doc_to_text: a", "- 1", "{", "doc_to_text: a\nprocess_results: b\ngeneration_kwargs: {until: []}"):
        (tmp_path / "lcc.yaml").write_text(text)
        with pytest.raises(DatasetError, match="expected lcc.yaml as lm-eval 0.4.13 has it"):
            wording.read("lcc")
    whole = "doc_to_text: a\nprocess_results: b\ngeneration_kwargs: {until: [], max_gen_toks: 3}"
    (tmp_path / "lcc.yaml").write_text(whole)
    with pytest.raises(DatasetError, match="once in lcc.yaml"):
        wording.read("lcc")


def test_reading_the_wording_imports_nothing_of_lm_eval() -> None:
    wording.read("qasper")
    assert not [name for name in sys.modules if name == "lm_eval" or name.startswith("lm_eval.")]


def shared_multi_news() -> Path:
    folders = [Path(__file__).resolve().parents[2].parent / "shared" / "data" / "longbench"]
    if named_folder := os.environ.get("PERTURBKV_DATA_DIR"):
        folders.insert(0, Path(named_folder))
    return next((folder for folder in folders if (folder / "multi_news.jsonl").is_file()), folders[0])


def test_real_multi_news_ends_with_its_instruction() -> None:
    folder = shared_multi_news()
    if not (folder / "multi_news.jsonl").is_file():
        pytest.skip("LongBench's multi_news.jsonl is not there; PERTURBKV_DATA_DIR names its folder")
    data = load("multi_news", DatasetOptions(8, data_dir=folder), ByteTokenizer())
    for sample in data.samples:
        assert sample.prompt.startswith("You are given several news passages. Write a one-page summary of all news. \n")
        assert sample.prompt.endswith(ENDINGS["multi_news"])
        prompt = encode(sample, ByteTokenizer(), chat_template=False, max_tokens=1500)
        assert bytes(prompt.parts("context-only")[1]).decode() == ENDINGS["multi_news"]
