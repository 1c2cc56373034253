from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturbkv.datasets import dataset_registry, metrics
from perturbkv.datasets import jsonl as jsonl_files
from perturbkv.datasets.dataset_registry import DatasetInfo, DatasetOptions, load
from perturbkv.datasets.encode import Prompt, check_length, cut_middle, encode
from perturbkv.datasets.jsonl import FIELDS
from perturbkv.datasets.needle import sentences
from perturbkv.datasets.sample import Sample
from perturbkv.errors import ConfigError, DatasetError, UnknownNameError


class Words:
    """One token per word, numbered by its length; a chat template of two words around the turn."""

    def __init__(self, chat_template: str | None = "yes") -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": ([0] if add_special_tokens else []) + [len(word) for word in text.split()]}

    def apply_chat_template(self, turns: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        return f"<user> {turns[0]['content']} <assistant> "


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def loaded(name: str | Path, samples: int = 1, **options: Any) -> dataset_registry.LoadedDataset:
    return load(str(name), DatasetOptions(samples, **options), Words())


def count(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("haystack", ["prose", "noise"])
def test_needle_prompts_have_their_length_and_hide_one_needle(haystack: str) -> None:
    data = loaded("needle", 6, lengths=(200, 400), depths=(0.0, 0.5, 1.0), haystack=haystack)
    lengths = [200] * 3 + [400] * 3
    for sample, length in zip(data.samples, lengths, strict=True):
        assert length - 60 < count(sample.prompt) <= length
        assert sample.context.count(sample.answers[0]) == 1
        assert sample.answers[0] not in sample.question + sample.answer_prefix
        assert sample.answer_prefix in sample.context


def test_the_needle_lies_at_its_depth() -> None:
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    for sample, depth in zip(loaded("needle", 5, lengths=(1000,), depths=depths).samples, depths, strict=True):
        before = count(sample.context.partition(sample.answer_prefix)[0])
        assert abs(before / count(sample.context) - depth) < 0.05


def test_a_needle_sample_does_not_depend_on_how_many_are_asked_for() -> None:
    few, many = loaded("needle", 2).samples, loaded("needle", 6).samples
    assert few == many[:2]
    assert len({sample.id for sample in many}) == 6
    assert loaded("needle", 2, seed=1).samples != few
    assert loaded("needle", 2).samples == few


def test_the_prose_is_prose() -> None:
    text = sentences()
    assert len(text) > 500
    assert len(set(text)) == len(text)
    assert not any(mark in sentence for sentence in text for mark in ("::", "**", "``", "\n", "==="))


def test_longbench_rows_keep_context_and_question_apart(tmp_path: Path) -> None:
    rows = [{"context": f"A story {i}.", "input": "Who {is} it?", "answers": ["he"], "_id": "x"} for i in range(3)]
    for place in ("qasper.jsonl", "longbench/qasper.jsonl", "data/qasper.jsonl"):
        path = tmp_path / place
        path.parent.mkdir(exist_ok=True)
        jsonl(path, *rows)
        data = loaded("qasper", 2, data_dir=tmp_path)
        assert [sample.id for sample in data.samples] == ["0-x", "1-x"]
        assert data.samples[1].context.endswith("A story 1.")
        assert "Who {is} it?" in data.samples[1].question
        assert data.samples[1].answers == ("he",)
        assert list(data.options["wording"]) == ["qasper"]
        assert len(data.options["file_sha256"]) == 64
        path.unlink()


def test_a_row_keeps_its_own_id_whatever_else_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    asked = {"context": "c", "input": "q", "answers": ["a"]}
    jsonl(path, {"id": "a", "prompt": "p"}, {"id": "c", **asked}, {"id": 7, "dataset": "qasper", **asked},
          {"_id": "x", **asked}, {"id": None, **asked}, asked, {"_id": 0, **asked})  # fmt: skip
    assert [sample.id for sample in loaded(str(path), 7).samples] == ["a", "c", "7", "3-x", "4", "5", "6-0"]
    jsonl(path, {"id": "c", **asked}, {"id": "c", **asked})
    with pytest.raises(DatasetError, match="line 2: expected every id once, got 'c' again"):
        loaded(str(path), 2)


def test_a_folder_of_data_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(tmp_path / "qasper.jsonl", {"context": "c", "input": "q"})
    monkeypatch.setenv("PERTURBKV_DATA_DIR", str(tmp_path))
    assert len(loaded("qasper").samples) == 1


def test_without_a_hub_the_file_and_both_ways_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with caplog.at_level("INFO"), pytest.raises(DatasetError) as told:
        loaded("qasper", data_dir=tmp_path)
    assert not caplog.records, "nothing is said to be downloaded offline"
    for wanted in ("qasper.jsonl", "zai-org/LongBench/data.zip", "--data-dir", "HF_HOME", "HF_HUB_OFFLINE is set"):
        assert wanted in str(told.value)
    assert "\n" not in str(told.value)


def test_a_prompt_field_is_used_verbatim(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", {"prompt": " As it is. ", "id": 7, "answer_prefix": "So"}, "", {"prompt": "b"})
    first, second = loaded(path, 2).samples
    assert (first.prompt, first.id, first.answer_prefix) == (" As it is. ", "7", "So")
    assert second.id == "1"


def test_question_and_input_are_two_words_for_one_field(tmp_path: Path) -> None:
    rows = [
        {"context": "c", "question": "q"},
        {"context": "c", "input": "q"},
        {"context": "c", "question": "q", "input": "q"},
        {"context": "c", "question": "q", "answer_prefix": "It is"},
        {"context": "c", "question": "q", "dataset": "qasper"},
        {"context": "c", "input": "q", "dataset": "qasper"},
    ]
    *plain, prefixed, asked, longbench = loaded(jsonl(tmp_path / "d.jsonl", *rows), 6).samples
    assert {(sample.context, sample.question) for sample in [*plain, prefixed]} == {("c", "\n\nq")}
    assert prefixed.answer_prefix == "It is"
    assert (asked.prompt, asked.task) == (longbench.prompt, "qasper")


def test_a_description_names_every_row_that_a_run_refuses(tmp_path: Path) -> None:
    rows = [{"context": "c" * 5, "question": "q", "answers": ["a"], "id": "x"}, {"contxt": "c"}, "{no json", "",
            {"prompt": "p", "id": "x"}, {"prompt": "long"}]  # fmt: skip
    found = jsonl_files.describe(Path(jsonl(tmp_path / "d.jsonl", *rows)))
    assert (found.rows, found.graded, found.characters) == (5, 1, (8, 4))
    assert found.first is not None and found.first.prompt == "ccccc\n\nq"
    assert found.fields == {"context": 1, "question": 1, "answers": 1, "id": 2, "contxt": 1, "prompt": 2}
    lines = [re.search(r"line (\d+): (.*)", text) for text in found.refusals]
    assert [match and match[1] for match in lines] == ["2", "3", "5"]
    for row, refusal in zip(rows[1:3], found.refusals, strict=False):
        with pytest.raises(DatasetError) as raised:
            loaded(jsonl(tmp_path / "d.jsonl", *rows[: rows.index(row) + 1]), 9)
        assert str(raised.value) == refusal


def test_longbench_fields_in_any_file_get_their_wording(tmp_path: Path) -> None:
    rows = [
        {"context": "c", "input": "", "dataset": "multi_news"},
        {"context": "c", "input": "q", "dataset": None},
        {"context": "c"},
        {"input": "q"},
    ]
    data = loaded(jsonl(tmp_path / "d.jsonl", *rows), 4)
    assert data.samples[0].question == "\n\nNow, write a one-page summary of all the news.\n\nSummary:"
    assert [sample.prompt for sample in data.samples[1:]] == ["c\n\nq", "c", "q"]
    assert list(data.options["wording"]) == ["multi_news"]


def test_rows_as_nvidias_ruler_writes_them_are_prompts_graded_by_its_match(tmp_path: Path) -> None:
    row = {"index": 9, "input": "A number is 7. What is it?", "outputs": ["7", "8"], "length": 40}
    more = {"length_w_model_temp": 60, "answer_prefix": " It is", "token_position_answer": None, "index": 0}
    rows = [row, {**row, **more}, {**row, "index": 4, "metric": "contains"}, {"input": "q", "outputs": ["a"]}]
    first, prefixed, qa, bare = loaded(jsonl(tmp_path / "validation.jsonl", *rows), 4).samples
    assert (first.id, first.prompt, first.question, first.answers) == ("9", row["input"], "", ("7", "8"))
    assert (prefixed.id, prefixed.prompt, prefixed.answer_prefix) == ("0", row["input"], " It is")
    assert [sample.metric for sample in (first, prefixed, qa)] == ["string_match_all", "string_match_all", "contains"]
    assert bare.id == "3"
    match = metrics.find_metric(first.metric)
    assert match is not None
    assert [match.grade(text, first.answers, ()) for text in ("7 and 8", "It is 7.", "none")] == [1, 0.5, 0]
    (graded,) = loaded(tmp_path / "validation.jsonl", metric="contains").samples
    assert graded.metric == "contains"


@pytest.mark.parametrize("way", [{"prompt": "p"}, {"context": "c", "question": "q"},
                                 {"messages": [{"role": "user", "content": "m"}]}])  # fmt: skip
def test_null_is_a_field_that_is_missing(tmp_path: Path, way: dict[str, Any]) -> None:
    absent = {name: None for name in FIELDS if name not in way}
    rows = [loaded(jsonl(tmp_path / "d.jsonl", row), 1).samples[0] for row in (way, {**absent, **way})]
    assert replace(rows[0], chat=None) == replace(rows[1], chat=None)
    assert rows[1].id == "0"


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (['{"prompt": "a"}', "{no json"], "line 2: expected a JSON object, got text that is no JSON"),
        (["[1, 2]"], "line 1: expected a JSON object, got a list"),
        (['{"contxt": "a"}'], r"line 1: unknown field `contxt`; did you mean `context`\?$"),
        (['{"contxt": "a", "question": "b"}'], r"line 1: unknown field `contxt`; did you mean `context`\?$"),
        (['{"prompt": "a"}', '{"prompt": "b", "url": "c"}'], "line 2: expected the fields .*`url`; take it out"),
        (['{"answers": ["a"]}'], r"line 1: expected the field `prompt`, `messages`.*got \['answers'\]"),
        (['{"prompt": "a", "question": "b"}'], "line 1: expected `prompt` or `question`, got both; leave one out"),
        (['{"context": "a", "question": "b", "input": "c"}'], "line 1: .* mean the same, got both with different"),
        (['{"context": "a", "question": "b", "input": ""}'], "line 1: .* mean the same, got both with different"),
        (['{"prompt": "  "}'], "line 1: sample '0' has an empty prompt"),
        (
            ['{"prompt": "a"}', '{"prompt": "b", "text": " \\n"}'],
            "line 2: .* words in its `text`, got white space; leave",
        ),
        (['{"context": "", "input": ""}'], "line 1: the prompt is empty"),
        (['{"prompt": null}'], "line 1: expected the field `prompt`, .*; got none that is not null"),
        (['{"context": "a", "input": "b", "dataset": "qaspr"}'], "line 1: unknown dataset of .*'qaspr'; .*: qasper, "),
        (['{"context": "a", "input": "b", "dataset": 7}'], "line 1: expected `dataset` to be text, got a number"),
        (['{"prompt": "a", "dataset": "qasper"}'], "line 1: `dataset` has no effect beside `prompt`; leave it out"),
        (['{"messages": [], "_id": "a"}'], "line 1: `_id` has no effect beside `messages`; leave it out"),
        (['{"prompt": "a", "all_classes": ["b"]}'], "line 1: `all_classes` has no effect beside `prompt`"),
        (['{"context": "a", "all_classes": ["b"]}'], "line 1: `all_classes` has no effect without `dataset`"),
        (['{"prompt": "a", "metric": "f1", "answers": []}'], "line 1: `metric` has no effect without `answers`"),
        (['{"index": 0, "outputs": ["a"]}'], r"line 1: expected the field `input`, RULER's prompt; got"),
        (['{"input": "a", "outputs": "b"}'], "line 1: expected `outputs` to be a list of texts, got text"),
        (['{"input": 7, "outputs": ["b"]}'], "line 1: expected `input` to be text, got a number"),
        (['{"input": "a", "outputs": ["b"], "context": "c"}'], "line 1: expected the fields index, .*got `context`"),
        (['{"input": "a", "outputs": [], "metric": "f1"}'], "line 1: `metric` has no effect without `outputs`"),
        (['{"input": "a", "output": ["b"]}'], "line 1: expected the fields prompt, .*, got `output`; take it out"),
        (['{"index": 1, "input": "a", "outputs": ["b"]}'] * 2, "line 2: expected every id once, got '1' again"),
        (['{"prompt": 7}'], "line 1: expected `prompt` to be text, got a number"),
        (['{"prompt": "a"}', '{"prompt": ["b"]}'], "line 2: expected `prompt` to be text, got a list"),
        (['{"prompt": "\\ud800"}'], "line 1: .*expected its prompt to be text, got half of a surrogate pair"),
        (['{"prompt": "a", "answer_prefix": {}}'], "line 1: expected `answer_prefix` to be text, got an object"),
        (['{"prompt": "a", "id": 0}', '{"prompt": "b", "id": "0"}'], "line 2: expected every id once, got '0' again"),
        (['{"prompt": "a", "answers": "b"}'], "line 1: expected `answers` to be a list of texts, got text"),
        (['{"prompt": "a", "answers": ["b", 3]}'], "line 1: expected `answers` to be a list of texts, got a number"),
        (['{"context": "a", "input": true}'], "line 1: expected `input` to be text, got true or false"),
        (
            ['{"context": "a", "dataset": "qasper"}'],
            "line 1: expected the field `question` .*, which qasper's prompt has",
        ),
        (['{"input": "a", "dataset": "lcc"}'], "line 1: expected the field `context`, which lcc's prompt has"),
        (['{"context": " ", "dataset": "lcc"}'], "line 1: the context is empty"),
        ([""], "expected at least one sample"),
        (['{"prompt": "a"}'], "has 1 samples, fewer than --samples 2"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_line(tmp_path: Path, rows: list[str], told: str) -> None:
    with pytest.raises(DatasetError, match=told):
        loaded(jsonl(tmp_path / "d.jsonl", *rows), 2)


def test_fewer_samples_will_do_where_nobody_asked_for_more(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", *[{"prompt": str(i)} for i in range(3)])
    assert len(loaded(path, 8, at_most=True).samples) == 3
    assert len(loaded(path, 2, at_most=True).samples) == 2
    with pytest.raises(DatasetError, match="fewer than --samples 8"):
        loaded(path, 8)


def test_a_missing_or_binary_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="expected a jsonl file .*none.jsonl, got nothing"):
        loaded(tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatasetError, match="UTF-8"):
        loaded(tmp_path / "b.jsonl")


def test_unknown_names_are_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError) as told:
        loaded("quasper")
    assert told.value.known[0] == "qasper"
    assert ".jsonl" in str(told.value)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ConfigError, match="registered already"):
        dataset_registry.register(DatasetInfo("needle", "", "", "", ""))


@pytest.mark.parametrize(
    "options",
    [{"samples": 0}, {"lengths": (10,)}, {"depths": (0.5, 1.5)}, {"depths": (-0.1,)}, {"haystack": "hay"}],
    ids=str,
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, UnknownNameError)):
        DatasetOptions(**{"samples": 1, **options})


@given(st.lists(st.integers(), min_size=1), st.integers(2, 50))
def test_the_cut_keeps_both_ends(ids: list[int], most: int) -> None:
    kept = cut_middle(tuple(ids), most)
    assert len(kept) == min(len(ids), most)
    half = most // 2
    if len(ids) > most:
        assert kept[-half:] == tuple(ids[-half:])
        assert kept[: most - half] == tuple(ids[: most - half])


def test_encoding_with_and_without_a_chat_template() -> None:
    sample = Sample("s", "aa bbb", " cccc", answer_prefix="ddddd")
    chat = encode(sample, Words(), chat_template=True, max_tokens=None)
    assert chat.token_ids == (6, 2, 3, 4, 11, 5)
    plain = encode(sample, Words(), chat_template=False, max_tokens=4)
    assert plain == Prompt("s", (0, 2, 4, 5), 1, question_tokens=2)
    with pytest.raises(ConfigError, match="chat template"):
        encode(sample, Words(None), chat_template=True, max_tokens=None)


def test_a_prompt_longer_than_the_model_is_refused() -> None:
    prompt = Prompt("s", (1,) * 100, 0)
    check_length(prompt, positions=101, steps=1)
    with pytest.raises(DatasetError, match="use --max-tokens 99 or less"):
        check_length(prompt, positions=101, steps=2)
    with pytest.raises(DatasetError, match="positions; decode fewer tokens, or use a model of more positions$"):
        check_length(prompt, positions=101, steps=100)
    with pytest.raises(DatasetError, match="decode fewer tokens, or use a model"):
        check_length(prompt, positions=100, steps=2**40)
    with pytest.raises(DatasetError, match="no tokens"):
        Prompt("s", (), 0)


@pytest.mark.parametrize(
    ("text", "answers", "exact", "digits"),
    [
        (" 1234567.", ("1234567",), 1, 1),
        ("It is 1,234,567!", ("1234567",), 1, 1),
        (" 1234.", ("1234567",), 0, 4 / 7),
        (" 12345678", ("1234567",), 0, 1),
        ("none at all", ("1234567",), 0, 0),
        ("7 or 1234567", ("1234567",), 0, 0),
        (" 42", ("7", "42"), 1, 1),
        (" 1000 or so", ("1,000",), 1, 1),
        ("four", ("four", "4"), 0, 0),
        (" 42", (), math.nan, math.nan),
        ("Paris", ("Paris",), math.nan, math.nan),
        ("in 1889", ("in 1889", "the year 1889"), math.nan, math.nan),
    ],
)
def test_answers_that_are_numbers_are_scored_by_their_first_number_and_others_not_at_all(
    text: str, answers: tuple[str, ...], exact: float, digits: float
) -> None:
    assert metrics.exact_number(text, answers) == pytest.approx(exact, nan_ok=True)
    assert metrics.leading_digits(text, answers) == pytest.approx(digits, nan_ok=True)


def test_a_question_is_told_apart_from_its_context_on_the_prompts_own_tokens() -> None:
    sample = Sample("s", "aa bbb", " cccc", answer_prefix="ddddd")
    plain = encode(sample, Words(), chat_template=False, max_tokens=None)
    assert plain.parts("regular") == (plain.token_ids, ())
    context, question = plain.parts("context-only")
    assert context + question == plain.token_ids
    assert question == (4, 5)
    chat = encode(sample, Words(), chat_template=True, max_tokens=None)
    assert chat.parts("context-only")[1] == chat.token_ids[-chat.question_tokens :]
    assert chat.question_tokens >= 2
    assert encode(Sample("s", "aa bbb"), Words(), chat_template=False, max_tokens=None).question_tokens == 0


class Trimming:
    """One token per character; a chat template that strips the turn, as Llama's does."""

    chat_template = "yes"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}

    def apply_chat_template(self, turns: list[dict[str, str]], **more: Any) -> str:
        return f"<user: ask is>{turns[0]['content'].strip()}</user><assistant>"


@pytest.mark.parametrize(
    ("context", "question", "prefix", "found"),
    [
        ("A story.\n", "\n\nNow sum it up.", "", "\n\nNow sum it up.</user><assistant>"),
        (" \nA story.", "\nsum it up \n\n", "", "\nsum it up</user><assistant>"),
        ("It is", " is", "is", " is</user><assistant>is"),
        ("a", "s", "", "s</user><assistant>"),
        ("a", "user: ask", "as", "user: ask</user><assistant>as"),
        ("What is it? What is it?", "What is it?", "What is it?", "What is it?</user><assistant>What is it?"),
        (" ", "question", "", "question</user><assistant>"),
        ("a story", " \n", "", ""),
    ],
)
def test_the_question_is_found_where_a_template_strips_and_where_its_text_stands_elsewhere_too(
    context: str, question: str, prefix: str, found: str
) -> None:
    prompt = encode(Sample("s", context, question, (), prefix), Trimming(), chat_template=True, max_tokens=None)
    text = "".join(map(chr, prompt.token_ids))
    assert text[len(text) - prompt.question_tokens :] == found
    assert text.startswith("<user: ask is>")


class Merging:
    """Two characters of one kind, and a space with what it stands before, are one token; a template without marks."""

    chat_template = "yes"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        pieces = [found.group() for found in re.finditer(r"(\w)\1| .|.|\n", text)]
        return {"input_ids": [int.from_bytes(piece.encode()) for piece in pieces]}

    def apply_chat_template(self, turns: list[dict[str, str]], **more: Any) -> str:
        return f"ask {turns[0]['content']}xyz "


@pytest.mark.parametrize(
    ("question", "prefix", "found"),
    [
        ("abc", "", "xyz "),
        ("abx", "", "yz "),  # `xx` is a token of both
        ("ab ", "", "yz "),  # ` x` is
        ("abc", "d", "xyz"),  # ` d` is, of the template and of the answer
        ("ab ", "d", "yz"),
    ],
)
def test_a_token_with_a_part_of_the_text_is_no_token_of_the_templates_end(
    question: str, prefix: str, found: str
) -> None:
    prompt = encode(Sample("s", "some", question, (), prefix), Merging(), chat_template=True, max_tokens=None)
    told = prompt.token_ids[prompt.template_tail.start : prompt.template_tail.stop]
    assert "".join(token.to_bytes(2).decode().lstrip("\0") for token in told) == found


@given(st.integers(1, 30), st.integers(1, 30), st.integers(2, 40))
def test_a_cut_leaves_the_question_whole_or_is_refused_with_the_least_that_does(
    context: int, question: int, most: int
) -> None:
    def encoded(most: int) -> Prompt:
        return encode(Sample("s", "c" * context, "q" * question), Trimming(), chat_template=False, max_tokens=most)

    def is_whole(most: int) -> bool:
        return cut_middle((ord("c"),) * context + (ord("q"),) * question, most).count(ord("q")) == question

    enough = next(most for most in range(2, 61) if all(map(is_whole, range(most, 61))))
    if most < enough:
        with pytest.raises(DatasetError, match=f"'s' whole, got {most}.*; {question} tokens .* {enough} or more"):
            encoded(most)
        return
    cut = encoded(most)
    assert cut.question_tokens == sum(token == ord("q") for token in cut.token_ids) == question
    assert cut.cut_index == (None if context + question <= most else (most + 1) // 2)


def test_a_prompt_without_a_question_is_cut_wherever_it_must_be() -> None:
    cut = encode(Sample("s", "c" * 90, answer_prefix="a" * 9), Trimming(), chat_template=True, max_tokens=4)
    assert (len(cut.token_ids), cut.question_tokens) == (4, 0)


def test_a_cut_leaves_the_question_whole_where_it_fits_the_last_half() -> None:
    sample = Sample("s", " ".join(["aa"] * 40), " cccc dddd")
    cut = encode(sample, Words(), chat_template=False, max_tokens=10)
    assert cut.question_tokens == encode(sample, Words(), chat_template=False, max_tokens=None).question_tokens == 2
    assert cut.parts("context-only")[1] == (4, 4)
