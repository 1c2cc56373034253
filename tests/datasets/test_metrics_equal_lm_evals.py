"""Metrics and RULER's tasks are those of lm-eval."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import os
import random
import re
import signal
import string
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from perturbkv.datasets import metrics
from perturbkv.datasets.dataset_registry import DatasetOptions, LoadedDataset, load
from perturbkv.datasets.needle import sentences
from perturbkv.errors import DatasetError
from tests.support import lm_eval_ruler, ruler_data

ANSWERS = 200
ZH = ("北京是中国的首都，人口超过两千万。", "会议讨论了今年的预算，并决定推迟项目。", "他在一九九八年毕业于清华大学。",
      "新闻、体育！财经？", "产品经理说：“下周发布。”")  # fmt: skip
CLASSES = ("Number of something", "Number", "Date", "City", "Other location", "Individual", "Food", "体育", "财经")
"""One lies inside another, as in trec."""
CODE = tuple(line for line in inspect.getsource(textwrap).splitlines() if line.strip())
GERMAN, ARABIC = "Größe über Maß", "مرحبا بالعالم"

REFERENCES: dict[str, Callable[[random.Random], str]] = {
    "qa_f1": lambda draw: " ".join(draw.choice(sentences()).split()[:12]),
    "qa_f1_zh": lambda draw: draw.choice(ZH),
    "rouge": lambda draw: " ".join(draw.sample(sentences(), 3)),
    "rouge_zh": lambda draw: "".join(draw.sample(ZH, 2)),
    "classification": lambda draw: draw.choice(CLASSES),
    "retrieval": lambda draw: f"Paragraph {draw.randrange(1, 31)}",
    "retrieval_zh": lambda draw: f"段落{draw.randrange(1, 31)}",
    "count": lambda draw: str(draw.randrange(1, 40)),
    "code_sim": lambda draw: draw.choice(CODE),
}
TASKS = {
    "qa_f1": ("qasper", "triviaqa"), "qa_f1_zh": ("multifieldqa_zh",), "rouge": ("gov_report", "samsum"),
    "rouge_zh": ("vcsum",), "classification": ("trec", "lsht"), "retrieval": ("passage_retrieval_en",),
    "retrieval_zh": ("passage_retrieval_zh",), "count": ("passage_count",), "code_sim": ("lcc", "repobench-p"),
}  # fmt: skip
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
"""Whose answers end with their first line."""


def altered(text: str, draw: random.Random) -> str:
    """An answer as models give them: right, cut, out of order, with digits, other letters, lines and marks in it."""
    words = text.split(" ")
    shuffled = draw.sample(words, len(words))
    place = draw.randrange(len(text) + 1)
    return draw.choice(
        (
            text, "", " ", text[:place], text[place:], " ".join(shuffled), text.upper(), f"The answer is {text}.",
            f"{text} {draw.randrange(40)} {draw.randrange(40)}", f"{text[:place]} {GERMAN} {text[place:]}",
            f"{ARABIC} {text}", f"{text}\n{text}", f"\n{text}\nand more", f"# comment\n```\n{text}", f"{text} {text}",
            f"“{text}”, of an “a”.", ".", "\N{GRINNING FACE} " + text,
        )
    )  # fmt: skip


def cases(kind: str, task: str) -> list[tuple[str, list[str]]]:
    """Answers and the accepted ones, one to three, of which any may be meant."""
    draw = random.Random(f"{kind}/{task}")
    found = []
    for _ in range(ANSWERS):
        accepted = [REFERENCES[kind](draw) for _ in range(draw.randrange(1, 4))]
        found.append((altered(draw.choice(accepted), draw), accepted))
    return found


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    """lm-eval's metrics as its file has them."""
    found = importlib.util.find_spec("lm_eval")
    assert found is not None
    path = Path((found.submodule_search_locations or [""])[0]) / "tasks" / "longbench" / "metrics.py"
    spec = importlib.util.spec_from_file_location("lm_evals_own_metrics", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
        module.jieba.lcut("开始")
    return module


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        pytest.param(kind, task, marks=[pytest.mark.slow] if kind == "rouge" else [])
        for kind, tasks in TASKS.items()
        for task in tasks
    ],
)
def test_longbenchs_metrics_equal_lm_evals_own(kind: str, task: str, theirs: ModuleType) -> None:
    metric = metrics.find_metric(task)
    assert metric is not None
    one_answer = getattr(theirs, f"{kind}_score")
    scores = []
    for text, accepted in cases(kind, task):
        said = text.partition("\n")[0] if task in FIRST_LINE else text
        bare = said if kind == "code_sim" else said.strip()
        expected = max(one_answer(bare, answer, all_classes=list(CLASSES)) for answer in accepted)
        scores.append(metric.grade(text, accepted, CLASSES if kind == "classification" else ()))
        assert scores[-1] == pytest.approx(expected, abs=1e-12), (text, accepted)
    assert metric.name == kind
    assert min(scores) == 0
    assert max(scores) == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_f1_and_rouge_l_of_any_prompts_equal_lm_evals_too(theirs: ModuleType) -> None:
    for choice, kind in (("f1", "qa_f1"), ("rouge-l", "rouge")):
        metric = metrics.find_metric(choice)
        assert metric is not None
        assert metric.name == choice
        for text, accepted in cases(kind, "any"):
            expected = max(getattr(theirs, f"{kind}_score")(text.strip(), answer) for answer in accepted)
            assert metric.grade(text, accepted, ()) == pytest.approx(expected, abs=1e-12), (text, accepted)


def words(text: str) -> list[str]:
    """One character after the other, as SQuAD's evaluation says it: lower case, no punctuation, no articles."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"(?<!\w)(a|an|the)(?!\w)", " ", kept).split()


def shared(found: list[str], expected: list[str]) -> float:
    left, common = list(expected), 0
    for word in found:
        if word in left:
            left.remove(word)
            common += 1
    if common == 0:
        return 0.0
    precision, recall = common / len(found), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def alike(text: str, answer: str) -> tuple[list[str], list[str]]:
    """Both as words; with articles and then with punctuation where the answer would have none."""
    if words(answer):
        return words(text), words(answer)
    spoken = ["".join(letter for letter in one.lower() if letter not in string.punctuation) for one in (text, answer)]
    found, expected = spoken if spoken[1].split() else (text.lower(), answer.lower())
    return found.split(), expected.split()


def test_words_are_compared_as_a_loop_over_them_does() -> None:
    oracles: dict[str, Callable[[str, str], float]] = {
        "exact-match": lambda text, answer: float(len({tuple(one) for one in alike(text, answer)}) == 1),
        "f1": lambda text, answer: shared(*alike(text, answer)),
    }
    for choice, oracle in oracles.items():
        metric = metrics.find_metric(choice)
        assert metric is not None
        scores: list[float] = []
        for kind in ("qa_f1", "qa_f1_zh", "rouge", "count", "code_sim"):
            for text, accepted in cases(kind, "loop"):
                scores.append(metric.grade(text, accepted, ()))
                assert scores[-1] == pytest.approx(max(oracle(text, one) for one in accepted)), (choice, text, accepted)
        assert {0.0, 1.0} <= set(scores)


@pytest.mark.parametrize(
    ("choice", "text", "answers", "score"),
    [
        ("exact-match", " The  Eiffel-Tower! ", ["Paris", "eiffeltower"], 1),
        ("exact-match", "the tower", ["tower of Pisa"], 0),
        ("exact-match", "", ["the"], 0),
        ("exact-match", "A", ["A"], 1),
        ("exact-match", "a.", ["A"], 1),
        ("exact-match", "The", ["A"], 0),
        ("exact-match", "", ["A"], 0),
        ("exact-match", "B", ["A"], 0),
        ("exact-match", "The B.", ["A", "B"], 1),
        ("f1", "A", ["A"], 1),
        ("f1", "", ["A"], 0),
        ("f1", "The", ["A"], 0),
        ("f1", "A) Paris", ["A"], 2 / 3),
        ("f1", "+", ["+"], 1),
        ("f1", "-", ["+"], 0),
        ("exact-match", " % ", ["%"], 1),
        ("exact-match", "", ["%"], 0),
        ("f1", "a cat", ["cat", "A"], 1),
        ("f1", "It is 42.", ["42"], 0.5),
        ("f1", "a cat and the dog", ["cat", "dog and cat"], 1),
        ("f1", "", ["cat"], 0),
        ("exact-number", "It is 1,042.", ["1042"], 1),
        ("contains", "Marta keeps it Under the blue flowerpot.", ["under the blue flowerpot"], 1),
        ("contains", "It leaves at 12:00.", ["at noon", "12:00"], 1),
        ("contains", "flowerpot", ["under the blue flowerpot"], 0),
        ("contains", "", ["noon"], 0),
        ("string_match_all", "FOO and bar", ["foo", "Bar", "baz", "bat"], 0.5),
    ],
)
def test_what_is_chosen_gives_what_it_gives_by_hand(choice: str, text: str, answers: list[str], score: float) -> None:
    metric: Any = metrics.find_metric(choice)
    assert metric.grade(text, answers, ()) == pytest.approx(score)


@pytest.mark.parametrize("name", ["contains", "string_match_all"])
def test_an_empty_answer_which_every_text_contains_is_refused(name: str) -> None:
    metric: Any = metrics.find_metric(name)
    metrics.check_gradable(metric, ["a"], (), "s")
    with pytest.raises(DatasetError, match=f"sample 's': the metric {name} needs answers that are not empty; got"):
        metrics.check_gradable(metric, ["a", ""], (), "s")


def test_grading_imports_nothing_of_lm_eval() -> None:
    metrics.find_metric("qasper")
    metrics.find_metric("rouge-l")
    assert not [name for name in sys.modules if name == "lm_eval" or name.startswith("lm_eval.")]


@pytest.mark.slow
@pytest.mark.parametrize("words", [300, 700, 1500])
def test_rouge_l_of_long_texts_is_not_given_up(words: int) -> None:
    reference = [f"w{number % 97}x{number}" for number in range(words)]
    answer = reference[: words // 2] + [f"other{number}" for number in range(words // 2)]
    found = metrics.find_metric("rouge-l")
    assert found is not None
    assert found.grade(" ".join(answer), [" ".join(reference)], ()) == pytest.approx(0.5, abs=1e-3)  # P = R = 1/2


def test_a_ctrl_c_while_grading_is_no_score() -> None:
    found = metrics.find_metric("rouge-l")
    assert found is not None
    text = " ".join(f"w{number}" for number in range(5000))
    timer = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
    before, end = signal.signal(signal.SIGINT, signal.default_int_handler), time.monotonic() + 60
    gc.disable()  # an interrupt inside a callback of the collector would be lost
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            while time.monotonic() < end:
                found.grade(text, [text], ())
    finally:
        gc.enable()
        timer.join()
        signal.signal(signal.SIGINT, before)


OFFLINE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
WITH_DATA = (*lm_eval_ruler.ESSAYS, "qa_squad", "qa_hotpot")
ASKED = [
    *((task, 1000, 0) for task in OFFLINE + WITH_DATA),
    *((task, 2000, 7) for task in ("niah_multikey_2", "vt", "fwe")),
    ("cwe", 4200, 0),
]
"""Task, length, seed."""


def recorded(draw: random.Random) -> list[tuple[str, list[str]]]:
    """200 answers of models, right, wrong and in between."""
    numbers = [str(draw.randrange(10**6)) for _ in range(40)]
    said = (" {}.", "{}", "The number is {}\x07 and {}", "{} {} {}", "", "\n\n", "none of it", "{}".upper() + "\t{}")
    return [
        (draw.choice(said).format(*draw.choices(numbers, k=3)), draw.sample(numbers, draw.randrange(1, 11)))
        if i % 2
        else (f"Foo{draw.choice(said)} BAR", draw.sample(["foo", "Bar", "foo}{", "x"], 2))
        for i in range(200)
    ]


@pytest.fixture
def official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, Any]]:
    """The folder of the data, and what lm-eval makes and says."""
    ruler_data.write(tmp_path)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk_data"))
    texts = {"process_results": recorded(random.Random(1)), "process_results_part": recorded(random.Random(2))}
    (tmp_path / "asked.json").write_text(json.dumps({"tasks": ASKED, "texts": texts}))
    ran = subprocess.run(
        [sys.executable, lm_eval_ruler.__file__, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return tmp_path, {**json.loads((tmp_path / "made.json").read_text()), "texts": texts}


def made(folder: Path, task: str, lengths: tuple[int, ...], seed: int, samples: int) -> LoadedDataset:
    return load(
        f"ruler:{task}", DatasetOptions(samples, seed=seed, data_dir=folder, lengths=lengths), ruler_data.Words()
    )


@pytest.mark.slow
def test_every_sample_and_score_is_lm_evals(official: tuple[Path, dict[str, Any]]) -> None:
    import nltk

    folder, told = official
    nltk.data.path.insert(0, os.environ["NLTK_DATA"])
    try:
        for asked, rows in zip(ASKED, told["rows"], strict=True):
            check(folder, *asked, rows)
    finally:
        nltk.data.path.remove(os.environ["NLTK_DATA"])
    for (name, texts), scores in zip(told["texts"].items(), told["scores"], strict=True):
        graded = metrics.find_metric("ruler:vt" if name == "process_results" else "ruler:qa_squad")
        assert graded is not None
        assert [graded.grade(text, answers, ()) for text, answers in texts] == scores
        assert 0.1 < sum(score == 0 for score in scores) / len(scores) < 0.9


def check(folder: Path, task: str, length: int, seed: int, rows: list[dict[str, Any]]) -> None:
    """Some are made between samples of another length, which do not move their random numbers."""
    lengths = (length, 1500) if seed else (length,)
    found = made(folder, task, lengths, seed, len(lengths) * len(rows)).samples[:: len(lengths)]
    assert len(rows) == lm_eval_ruler.ROWS
    assert [one.prompt for one in found] == [row["input"] for row in rows], task
    assert [list(one.answers) for one in found] == [row["outputs"] for row in rows], task
    assert [one.answer_prefix for one in found] == [row["gen_prefix"] for row in rows], task
