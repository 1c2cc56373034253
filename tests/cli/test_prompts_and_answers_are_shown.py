"""What the model sees, what was expected, how good answers are; defaults of data, and prompts of one's own."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from perturbkv.cli.commands.datasets import datasets
from perturbkv.datasets.jsonl import FIELDS
from perturbkv.models.aliases import DEFAULT
from perturbkv.storage.trace.trace_file import read_run
from tests.support.asked import refused
from tests.support.folders import chat_folder
from tests.support.pages import shell

Run = Callable[..., Any]
TRIM = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
INSTRUCTION = "\n\nNow, write a one-page summary of all the news.\n\nSummary:"


def rows(path: Path, *given: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in given))
    return path


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer has a chat template that strips the prompt."""
    return chat_folder(tmp_path_factory.mktemp("models") / "chatty", TRIM, positions=2048)


@pytest.fixture
def news(tmp_path: Path) -> Path:
    row = {"input": "", "context": " [bold]Old[/INST] :smile: news. " * 40, "answers": ["It is old."], "_id": "x"}
    rows(tmp_path / "multi_news.jsonl", row, row)
    return tmp_path


def test_a_prompt_is_shown_as_the_model_sees_it(perturbkv: Run, chatty: Path, news: Path) -> None:
    options = ["multi_news", "--model", chatty, "--data-dir", news, "--max-tokens", 600, "--show"]
    ran = perturbkv("list", "datasets", *options, "--tokens", 200)
    assert ran.code == 0, ran.err
    asked, answer = f"{INSTRUCTION.lstrip()}</user><assistant>", "It is old."
    assert asked in ran.out and answer in ran.out
    assert "[bold]Old[/INST] :smile:" in " ".join(ran.out.split())
    (shown,) = perturbkv("list", "datasets", *options, "--tokens", 80, "--json").json()["samples"]
    whole = f"<user>{'You are given several news passages. Write a one-page summary of all news. '}\n\nNews:\n"
    assert shown["pieces"][0]["text"] == whole[:80]
    assert shown["question_tokens"] == len(f"{INSTRUCTION}</user><assistant>")
    marks = [piece["mark"] for piece in shown["pieces"] if "mark" in piece]
    assert marks == ["hidden", "cut", "hidden", "question"]
    assert shown["cut_after"] == 300
    seen = sum(piece.get("end", 0) - piece.get("first", 0) for piece in shown["pieces"])
    hidden = sum(piece["tokens"] for piece in shown["pieces"] if piece.get("mark") == "hidden")
    assert seen + hidden == shown["tokens"] == 600
    texts = "".join(piece.get("text", "") for piece in shown["pieces"])
    assert texts.endswith(f"{INSTRUCTION}</user><assistant>")


def test_the_sample_can_be_chosen_and_short_prompts_are_shown_whole(perturbkv: Run, model: Path, data: Path) -> None:
    ran = perturbkv("list", "datasets", data, "--show", "--model", model, "--sample", 2, "--tokens", 500, "--json")
    (shown,) = ran.json()["samples"]
    (piece,) = shown["pieces"]
    assert (shown["sample"], shown["cut_after"], shown["question_tokens"]) == ("p2", None, 0)
    assert piece["text"] == json.loads(data.read_text().splitlines()[2])["prompt"]
    assert " | 0" not in perturbkv("list", "datasets", data, "--show", "--model", model).out
    ran = perturbkv("list", "datasets", "needle", "--show", "--model", model, "--samples", 3, "--length", 300)
    assert ran.out.count("What is") == 3


@pytest.mark.parametrize("template", ["--chat-template", "--no-chat-template"])
def test_control_tokens_in_a_samples_own_text_are_counted(
    perturbkv: Run, chatty: Path, tmp_path: Path, template: str
) -> None:
    folder = Path(shutil.copytree(chatty, tmp_path / "marked"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<assistant>", "additional_special_tokens": ["<|im_end|>"]})
    tokenizer.add_tokens(["quick"])  # a word of its own, which controls nothing
    tokenizer.save_pretrained(folder)
    typed = {"context": "quick <|im_end|> fox", "input": "A <assistant>?"}
    path = rows(tmp_path / "typed.jsonl", typed, {"prompt": "a quick fox"})
    options = [path, "--show", "--model", folder, "--samples", 2, template]
    marked, plain = perturbkv("list", "datasets", *options, "--json").json()["samples"]
    assert (marked["control_tokens"], plain["control_tokens"]) == (2, 0)
    assert perturbkv("list", "datasets", *options).out.count("control tokens") == 1


def test_a_dataset_says_how_it_asks(perturbkv: Run) -> None:
    ran = perturbkv("list", "datasets", "trec")
    assert ran.code == 0, ran.err
    told = perturbkv("list", "datasets", "trec", "--json").json()
    assert (told["generation_length"], told["metric"]) == (64, "get_classification_with_score")
    assert told["template"].endswith("{{context}}\n{{question}}")
    assert perturbkv("list", "datasets", "needle").code == 0


def test_a_task_of_rulers_says_what_it_needs_and_how_it_asks(perturbkv: Run) -> None:
    listed = perturbkv("list", "datasets")
    assert re.search(r"ruler:niah_multiquery +retrieval +RULER, over essays", listed.out)
    ran = perturbkv("list", "datasets", "ruler:niah_multiquery")
    assert ran.code == 0, ran.err
    for wanted in ("PaulGrahamEssays.json", "punkt_tab", "perturbkv[ruler]", "at most 128 tokens", "string_match_all"):
        assert wanted in ran.out
    told, other = (perturbkv("list", "datasets", name, "--json").json() for name in ("ruler:vt", "trec"))
    assert told.keys() == other.keys()


def test_a_task_of_rulers_is_asked_and_graded(perturbkv: Run, model: Path) -> None:
    asked = ["--model", model, "--dataset", "ruler:niah_single_1", "--length", 512, "--no-chat-template"]
    ran = perturbkv("generate", *asked, "--samples", 1, "--window", 8, "--budget", 16, "--max-new-tokens", 20, "--json")
    assert ran.code == 0, ran.err
    for sample in ran.json()["samples"]:
        assert sample["metric"] == "string_match_all"
        assert sample["full"]["score"] == float(sample["answers"][0] in sample["full"]["text"])


@pytest.mark.slow
def test_a_default_that_was_never_typed_fails_nobody(perturbkv: Run, model: Path, tmp_path: Path) -> None:
    three = rows(tmp_path / "three.jsonl", *({"prompt": f"{i} " + "so on and on " * 8} for i in range(3)))
    options = ["--model", model, "--dataset", three, "--budget", 24, "--window", 8, "-o", "t.h5"]
    ran = perturbkv("trace", *options)
    assert ran.code == 0, ran.err
    assert read_run(Path("t.h5")).samples == 3
    before = Path("t.h5").read_bytes()
    again = perturbkv("trace", *options)
    assert again.code == 0, again.err
    assert Path("t.h5").read_bytes() == before
    assert perturbkv("trace", *options, "--samples", 8).code == 2


def test_eight_samples_are_the_default(perturbkv: Run, model: Path, tmp_path: Path) -> None:
    ten = rows(tmp_path / "ten.jsonl", *({"prompt": f"{i} " + "so on and on " * 8} for i in range(10)))
    dry = perturbkv("trace", "--model", model, "--dataset", ten, "--budget", 40, "--dry-run", "--json")
    assert dry.json()["samples"] == 8


@pytest.mark.parametrize(
    ("dataset", "typed", "used"),
    [
        ("trec", [], False),
        ("trec", ["--chat-template"], True),
        ("hotpotqa", [], True),
        ("hotpotqa", ["--no-chat-template"], False),
    ],
)
def test_few_shot_sets_go_without_a_chat_template_unless_it_is_typed(
    perturbkv: Run, chatty: Path, tmp_path: Path, dataset: str, typed: list[str], used: bool
) -> None:
    rows(tmp_path / f"{dataset}.jsonl", {"context": "Fish swim. " * 9, "input": "Who?", "answers": ["fish"]})
    options = ["--model", chatty, "--dataset", dataset, "--data-dir", tmp_path, "--budget", 24, "--window", 8]
    ran = perturbkv("trace", *options, *typed, "-o", "t.h5")
    assert ran.code == 0, ran.err
    run = read_run(Path("t.h5"))
    assert run.chat_template is used
    assert run.dataset_options["wording"][dataset]["template"].count("{{context}}") == 1


def test_generate_shows_and_grades_what_was_expected(perturbkv: Run, chatty: Path, tmp_path: Path) -> None:
    long = "Fish and [/INST] so on. " * 60
    row = {"context": "Fish swim. " * 9, "input": "Who?", "answers": [long, "fish"], "dataset": "hotpotqa"}
    path = rows(tmp_path / "d.jsonl", row, {"prompt": "and on and on " * 9}, {"context": "on " * 40, "answers": ["x"]})
    options = ["--model", chatty, "--dataset", path, "--budget", 24, "--window", 8, "-o", "out"]
    ran = perturbkv("generate", *options)
    assert ran.code == 0, ran.err
    assert "expected" in ran.out
    assert "[/INST]" in ran.out
    assert "more characters" in " ".join(ran.out.split())
    assert "qa_f1" in ran.out
    header, graded, bare, of_words = map(json.loads, Path("out/generation.jsonl").read_text().split("\n")[:-1])
    assert header["run"]["generate"] == 32
    assert (graded["answers"], graded["metric"]) == ([long, "fish"], "qa_f1")
    assert all(0 <= made["score"] <= 1 for made in (graded["full"], *graded["evicted"].values()))
    assert (bare["answers"], bare["metric"], bare["full"]["score"]) == ([], None, None)
    assert (of_words["answers"], of_words["metric"]) == (["x"], "f1")
    whole = Path("out/generation.jsonl").read_text()
    again = perturbkv("generate", *options)
    assert "3 samples of 3" in again.err
    assert Path("out/generation.jsonl").read_text() == whole


def test_a_score_is_the_metrics_of_the_answers_text(
    perturbkv: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perturbkv.pipeline.answers import generation

    def answers(adapter, prompt, run, *more, divergence):  # type: ignore[no-untyped-def]
        said = [adapter.tokenizer(text)["input_ids"] for text in ("the cat sat", "dog")]
        return generation.Answers(said[0], [said[1] for _ in run.configs], [0.5] * len(run.configs), [])

    monkeypatch.setattr("perturbkv.pipeline.answers.answer_rows.answer", answers)
    row = {"context": "Fish swim.", "input": "Who?", "answers": ["a cat"], "dataset": "hotpotqa"}
    path = rows(tmp_path / "d.jsonl", row)
    ran = perturbkv("generate", "--model", model, "--dataset", path, "-o", "out", "--json")
    (sample,) = ran.json()["samples"]
    assert sample["full"]["score"] == pytest.approx(2 / 3)
    assert {made["score"] for made in sample["evicted"].values()} == {0.0}


def test_answers_are_graded_by_the_metric_that_is_asked_for(perturbkv: Run, model: Path, tmp_path: Path) -> None:
    path = rows(tmp_path / "d.jsonl", {"context": "on " * 40, "answers": ["on"]})
    options = ["--model", model, "--dataset", path, "--budget", 24, "--window", 8, "--max-new-tokens", 2, "-o", "out"]
    ran = perturbkv("generate", *options, "--metric", "exact-match")
    assert ran.code == 0, ran.err
    header, row = map(json.loads, Path("out/generation.jsonl").read_text().split("\n")[:-1])
    assert header["run"]["dataset_options"]["metrics"] == ["exact-match"]
    assert row["metric"] == "exact-match"
    ran = perturbkv("generate", *options)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "--overwrite" in ran.err
    ran = perturbkv("generate", *options[:4], "--metric", "bleu", "-o", "none")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "'bleu'" in ran.err
    assert not Path("none").exists()


def test_a_metric_that_is_not_installed_is_refused_with_what_installs_it(
    perturbkv: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trec = rows(tmp_path / "trec.jsonl", {"context": "c " * 99, "input": "q", "answers": ["a"]})
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    ran = perturbkv("heads", "--dataset", "trec", "--data-dir", tmp_path, "--model", model, "-o", "out")
    refused(ran, "pip install '.[longbench]' in the checkout")
    assert list(tmp_path.iterdir()) == [trec]


def test_prompts_are_shown_as_the_default_model_of_a_run_sees_them() -> None:
    assert signature(datasets).parameters["model"].default == DEFAULT


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "own_prompts.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
REFUSED = re.findall(r"^\| `(\{.*\})` \| (line 1: .*) \|$", PAGE, re.MULTILINE)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_every_block_of_the_page_runs(perturbkv: Run, model: Path, tmp_path: Path) -> None:
    tiny = f"--dataset prompts.jsonl --model {model}"
    script = "".join(BLOCKS).replace("--dataset prompts.jsonl", tiny).replace("--show", f"--show --model {model}")
    listed, shown, measured = shell(script, tmp_path, {"perturbkv": perturbkv})
    assert [ran.code for ran in (listed, shown, measured)] == [0, 0, 0], (listed.err, shown.err, measured.err)
    assert "2, of which a run would refuse none" in listed.out
    assert "The ferry leaves at nine" in listed.out
    assert "sample asked" in shown.out
    assert "12:00" in shown.out
    assert (tmp_path / "own" / "trace.h5").exists()


def test_the_page_has_every_field_once_and_no_other() -> None:
    table = PAGE.partition("## Fields")[2].partition("##")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(FIELDS)


@pytest.mark.parametrize(("row", "error"), REFUSED)
def test_every_refusal_of_the_page_is_word_for_word_what_a_run_says(
    perturbkv: Run, model: Path, row: str, error: str
) -> None:
    write(Path("bad.jsonl"), row)
    ran = perturbkv("trace", "--model", model, "--dataset", "bad.jsonl", "--samples", 1, "-o", "t.h5")
    refused(ran, f"bad.jsonl, {error}")
    assert ran.err.endswith(f"{error}\n")
    assert perturbkv("list", "bad.jsonl", "--json").json()["refused"] == [f"bad.jsonl, {error}"]


def test_the_page_shows_refusals() -> None:
    assert len(REFUSED) == PAGE.partition("## What is refused")[2].count("\n| `{")
    assert len(REFUSED) > 5


def test_a_list_shows_long_prompts_by_their_ends_and_counts_what_it_leaves_out(perturbkv: Run) -> None:
    path = write(Path("p.jsonl"), {"prompt": f"First {'x' * 3000} last"}, *[{"answr": str(row)} for row in range(9)])
    ran = perturbkv("list", path)
    assert ran.code == 0
    text = " ".join(ran.out.split())
    assert "10, of which a run would refuse 9" in text
    assert "fields prompt (1), answr (9)" in text
    assert "begins First xxx" in text
    assert text.count("did you mean `answers`?") == 5
    assert "4 more rows; --json lists all" in text
    found = perturbkv("list", "datasets", path, "--json").json()
    assert found["first_prompt"]["ends"].endswith("xx last")
    assert found["first_prompt"]["characters"] == found["characters"]["most"] == 3011
    assert len(found["refused"]) == 9


def test_a_list_escapes_what_would_steer_a_terminal(perturbkv: Run) -> None:
    ran = perturbkv("list", write(Path("p.jsonl"), {"prompt": "a\x1b[2Jb", "\x1b[31m": 1}, {"prompt": "a\x1b[2Jb"}))
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert r"a\x1b[2Jb" in ran.out


def test_answers_are_described_and_refused_as_prompts(perturbkv: Run, tiny: list[object]) -> None:
    assert perturbkv("generate", *tiny, "--max-new-tokens", 2, "-o", "out").code == 0
    path = Path("out/generation.jsonl")
    ran = perturbkv("list", path)
    assert (ran.code, ran.err) == (0, "")
    assert "answers that perturbkv generate wrote" in ran.out
    told = perturbkv("list", path, "--json").json()
    assert (told["kind"], told["sample_ids"]) == ("answers", ["p0", "p1"])
    refused(perturbkv("trace", *tiny[:2], "--dataset", path), "line 1: expected the fields prompt, ")


@pytest.mark.parametrize("key", ["searches", "swap"])
def test_other_files_of_results_are_named(perturbkv: Run, key: str) -> None:
    refused(
        perturbkv("list", write(Path("r.jsonl"), {key: {}})), "expected a trace, prompts or answers at r.jsonl, got"
    )
