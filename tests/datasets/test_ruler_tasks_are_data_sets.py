"""What a RULER task is made into, what it needs, what is said where that is missing; rows are tested elsewhere."""

from __future__ import annotations

import importlib.metadata
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from perturbkv.datasets import dataset_registry, metrics, wording
from perturbkv.datasets.dataset_registry import DatasetOptions, LoadedDataset, load
from perturbkv.datasets.encode import encode
from perturbkv.datasets.ruler import samples, tasks
from perturbkv.errors import ConfigError, DatasetError
from perturbkv.models.loading import ByteTokenizer
from tests.support import lm_eval_ruler, ruler_data

LENGTHS = {
    "niah_single_1": 128, "niah_single_2": 128, "niah_single_3": 128, "niah_multikey_1": 128, "niah_multikey_2": 128,
    "niah_multikey_3": 128, "niah_multivalue": 128, "niah_multiquery": 128, "vt": 30, "cwe": 120, "fwe": 50,
    "qa_squad": 32, "qa_hotpot": 32,
}  # fmt: skip
QUESTIONS = {
    "niah_single_1": r"\nWhat is the special magic number for [\w-]+ mentioned in the provided text\?",
    "niah_multikey_3": r"\nWhat is the special magic uuid for [\w-]{36} mentioned in the provided text\?",
    "vt": r"\nQuestion: Find all variables that are assigned the value \d{5} in the text above\.",
    "cwe": r"\nQuestion: What are the 10 most common words in the above list\?",
    "fwe": r"\nQuestion: Do not provide any explanation\. .*\?",
    "qa_squad": r"\n\nAnswer the question based on the given documents\. .*\n\nQuestion: What is \d+-\d-\d\?",
}
INSTALL = re.escape("pip install '.[ruler]' in the checkout")


def made(task: str, samples: int = 2, **options: Any) -> LoadedDataset:
    return load(f"ruler:{task}", DatasetOptions(samples, **options), ruler_data.Words())


def test_there_are_13_of_which_6_need_no_data() -> None:
    names = [info.name for info in dataset_registry.all_datasets() if dataset_registry.in_ruler(info.name)]
    assert sorted(names) == sorted(f"ruler:{name}" for name in LENGTHS)
    offline = {name for name in names if not dataset_registry.uses_option(name, "data_dir")}
    assert offline == {
        f"ruler:{name}" for name in ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
    }
    for info in dataset_registry.all_datasets():
        assert dataset_registry.uses_option(info.name, "lengths") == (
            info.name == "needle" or dataset_registry.in_ruler(info.name)
        )
    assert not dataset_registry.uses_option("some.jsonl", "lengths")


@pytest.mark.parametrize("task", LENGTHS)
def test_answers_are_as_long_and_graded_as_rulers(task: str) -> None:
    read = tasks.read(f"ruler:{task}")
    assert read.generation_length == LENGTHS[task]
    assert read.metric == ("string_match_part" if task.startswith("qa_") else "string_match_all")
    record = read.record()
    assert record["from"] == f"lm-eval {importlib.metadata.version('lm_eval')}"
    assert record["template"].count("{context}") == 1


@pytest.mark.parametrize("task", QUESTIONS)
def test_the_question_is_what_follows_the_haystack(task: str, tmp_path: Path) -> None:
    ruler_data.write(tmp_path)
    data = made(task, data_dir=tmp_path)
    assert data.generation_length == LENGTHS[task]
    assert data.chat_template
    for sample in data.samples:
        assert re.fullmatch(QUESTIONS[task], sample.question, re.DOTALL), sample.question
        assert all(answer in sample.context for answer in sample.answers) or task == "qa_squad"
        assert sample.task == f"ruler:{task}"


def test_the_answers_beginning_stands_where_the_assistant_speaks_or_where_lm_eval_puts_it() -> None:
    for task, delimiter in (("vt", " "), ("cwe", "\n\n")):
        (sample,) = made(task, 1).samples
        chat = encode(sample, ruler_data.Words(spelled=True), chat_template=True, max_tokens=None)
        assert "".join(map(chr, chat.token_ids)) == f"<user>{sample.prompt}</user><assistant>{sample.answer_prefix}"
        context, question = chat.parts("context-only")
        assert "".join(map(chr, context)) == f"<user>{sample.context}"
        plain = encode(sample, ruler_data.Words(spelled=True), chat_template=False, max_tokens=None)
        assert "".join(map(chr, plain.token_ids)) == sample.prompt + delimiter + sample.answer_prefix


def test_samples_go_through_the_lengths_and_do_not_depend_on_how_many_are_asked_for() -> None:
    few, many = made("niah_single_1", 3, lengths=(400, 800)), made("niah_single_1", 7, lengths=(400, 800))
    assert few.samples == many.samples[:3]
    assert [sample.id for sample in few.samples] == ["0-400", "1-800", "2-400"]
    for sample, length in zip(many.samples, (400, 800) * 3, strict=False):
        assert length - 128 - 150 < len(lm_eval_ruler.words(sample.prompt)) <= length - 128
    assert made("niah_single_1", 3, lengths=(400, 800), seed=1).samples != few.samples
    assert made("niah_single_1", 1, lengths=(800,)).samples[0].prompt == few.samples[1].prompt


def test_nothing_is_printed_imported_seeded_or_asked_of_the_network(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *args: pytest.fail("asked the network"))
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **more: pytest.fail("asked the network"))
    before = {name for name in sys.modules if name.split(".")[0] in ("lm_eval", "nltk", "datasets", "requests")}
    states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    for task in ("niah_multikey_2", "vt", "fwe"):
        made(task)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # noqa: NPY002
    after = {name for name in sys.modules if name.split(".")[0] in ("lm_eval", "nltk", "datasets", "requests")}
    assert after == before
    assert not any("ruler" in name for name in sys.modules if not name.startswith(("perturbkv", "tests")))
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(("task", "length"), [("niah_single_1", 128), ("vt", 300), ("cwe", 400)])
def test_a_length_that_is_too_short_names_one_that_does(task: str, length: int) -> None:
    with pytest.raises(DatasetError, match=rf"no prompt of 'ruler:{task}' fits {length} tokens") as told:
        made(task, lengths=(length,))
    enough = re.search(r"; use --length (\d+) or more$", str(told.value))
    assert enough is not None
    assert len(made(task, lengths=(int(enough[1]),)).samples) == 2


def test_a_tokenizer_that_makes_an_example_of_500_tokens_too_long_is_told() -> None:
    with pytest.raises(DatasetError, match="fits 1,000 tokens .*; take another task, or a model of another tokenizer"):
        load("ruler:vt", DatasetOptions(1), ByteTokenizer())


def test_data_is_found_under_every_name_and_noted(tmp_path: Path) -> None:
    ruler_data.write(tmp_path)
    first = None
    for name, place in (
        ("squad.json", "squad.json"),
        ("squad.json", "ruler/squad.json"),
        ("dev-v2.0.json", "data/dev-v2.0.json"),
    ):
        folder = tmp_path / place.replace("/", "-").removesuffix(".json")
        (folder / place).parent.mkdir(parents=True)
        (tmp_path / name).rename(folder / place) if name != "squad.json" else (folder / place).write_bytes(
            (tmp_path / name).read_bytes()
        )
        found = made("qa_squad", data_dir=folder)
        assert found.options["source"] == "file"
        assert len(found.options["file_sha256"]) == 64
        first = first or found.samples
        assert found.samples == first


def test_questions_whose_documents_are_too_long_are_passed_over(tmp_path: Path) -> None:
    ruler_data.write(tmp_path)
    data = made("qa_hotpot", 3, data_dir=tmp_path, lengths=(1000,))
    assert [sample.answers for sample in data.samples] == [("number 1",), ("number 2",), ("number 3",)]
    assert [sample.id for sample in data.samples] == ["0-1000", "1-1000", "2-1000"]


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (
            "qa_squad",
            r"'ruler:qa_squad' needs squad.json, which no .* from https://.*/dev-v2.0.json with .* holding squad.json$",
        ),
        ("qa_hotpot", "'ruler:qa_hotpot' needs hotpotqa.json, and the hub did not give namlh2004/hotpotqa/hotpot_dev"),
        (
            "niah_single_2",
            "'ruler:niah_single_2' needs PaulGrahamEssays.json, and the hub did not give baber/paul_graham_",
        ),
    ],
)
def test_missing_data_is_told_with_what_to_bring(
    task: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DatasetError, match=told) as error:
        made(task, data_dir=tmp_path)
    assert "\n" not in str(error.value)


def test_what_the_hub_holds_is_what_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ruler_data.write(tmp_path)
    text = json.loads((tmp_path / "PaulGrahamEssays.json").read_text())["text"]
    half = text.index("\n")
    parquet.write_table(pa.table({"text": [text[:half], text[half:]]}), tmp_path / "essays.parquet")
    asked = []

    def given(task: str, local: str, repo: str, file: str, revision: str = "") -> Path:
        asked.append(repo)
        return tmp_path / ("essays.parquet" if file.endswith("parquet") else "hotpotqa.json")

    monkeypatch.setattr("perturbkv.datasets.ruler.samples.hub_file", given)
    monkeypatch.setattr(samples, "split_sentences", lambda text: re.split(r"(?<=\.) ", text))
    for task in ("niah_multivalue", "qa_hotpot"):
        fetched, local = made(task, data_dir=tmp_path / "none"), made(task, data_dir=tmp_path)
        assert fetched.samples == local.samples
        assert fetched.options["source"].split("/")[-1] in ("paul_graham_essays", "hotpot_dev_distractor_v1.json")
    assert asked == ["baber/paul_graham_essays", "namlh2004/hotpotqa"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("squad.json", "{", "expected a JSON file .*squad.json, got text that is no JSON"),
        (
            "squad.json",
            '{"data": [{}]}',
            r"makes it from .*squad.json, got .*KeyError: 'paragraphs'\); bring the whole",
        ),
        ("PaulGrahamEssays.json", '["text"]', "PaulGrahamEssays.json, got no object with a text `text`"),
    ],
)
def test_data_of_another_kind_is_told(name: str, content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DatasetError, match=told):
        made("qa_squad" if name == "squad.json" else "niah_single_2", data_dir=tmp_path)


def test_without_nltks_own_data_its_command_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk

    ruler_data.write(tmp_path)
    monkeypatch.setattr(nltk.data, "path", [])
    nltk.tokenize._get_punkt_tokenizer.cache_clear()
    with pytest.raises(DatasetError, match=r"lacks its punkt_tab; .*python -m nltk.downloader punkt_tab.*NLTK_DATA"):
        made("niah_single_2", data_dir=tmp_path)


@pytest.mark.parametrize("package", ["lm_eval", "wonderwords"])
def test_a_package_that_is_missing_is_told_with_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    samples._needle_keys.cache_clear()
    with pytest.raises(DatasetError, match=f"not installed; {INSTALL}"):
        made("cwe")


@pytest.mark.parametrize(
    "broken",
    [
        lambda folder: (folder / "vt.yaml").unlink(),
        lambda folder: (folder / "vt.yaml").write_text("a: {"),
        lambda folder: (folder / "vt.yaml").write_text("custom_dataset: vt_utils.get_vt_dataset"),
        lambda folder: (folder / "vt_utils.py").write_text("TEMPLATE = '{context} and no more"),
        lambda folder: (folder / "vt_utils.py").write_text("TEMPLATE = '{context}'"),
        lambda folder: (folder / "vt_utils.py").write_text("TEMPLATE = '{context}\\nWhat?'"),
        lambda folder: (folder / "common_utils.py").write_text("def get_tokenizer(): ..."),
    ],
)
def test_a_package_of_another_shape_is_told(
    broken: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in tasks.folder().glob("*.[yp]*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    broken(tmp_path)
    monkeypatch.setattr(wording, "lm_eval_folder", lambda *who: tmp_path)
    with pytest.raises(DatasetError, match=f"expected 'ruler:vt' as lm-eval 0.4.13 makes it, got .*; {INSTALL}"):
        made("vt")


@pytest.mark.parametrize(
    ("task", "text", "answers", "score"),
    [
        ("vt", "ABC and def", ["ABC", "DEF", "GHI", "JKL"], 0.5),
        ("niah_single_1", " 123.", ["123"], 1),
        ("niah_single_1", "", ["123"], 0),
        ("fwe", "one\x00two", ["one two"], 0),
        ("qa_squad", "It is Paris", ["Paris", "the city of Paris"], 0.5),  # RULER's own counts 1, lm-eval's 1/2
    ],
)
def test_metrics_give_what_they_give_by_hand(task: str, text: str, answers: list[str], score: float) -> None:
    metric = metrics.find_metric(f"ruler:{task}")
    assert metric is not None
    assert metric.grade(text, answers, ()) == pytest.approx(score)
    metrics.check_gradable(metric, answers, (), "s")


def test_a_short_length_is_refused_for_what_it_is() -> None:
    with pytest.raises(ConfigError, match="at least 128 tokens, got --length 100"):
        made("vt", lengths=(100,))


def test_a_longer_prompt_than_the_model_takes_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from perturbkv.datasets import prompts

    monkeypatch.setattr(dataset_registry, "load", lambda *args: pytest.fail("made it"))
    with pytest.raises(
        DatasetError, match="a ruler:vt prompt of 9,000 tokens is longer than the model's 8192 positions"
    ):
        prompts.load("ruler:vt", SimpleNamespace(), lengths=(9000,), positions=8192)
