"""Commands that generate, follow answers, or link them to perturbation: what they leave, print and go on with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from transformers import AutoTokenizer

from perturbkv.schema import ANSWER_TEXT, TEXT
from perturbkv.storage.trace.trace_file import read_run, read_trace
from perturbkv.trace import Trace
from tests.support.asked import refused
from tests.support.folders import chat_folder
from tests.support.linked import answered, methods

Run = Callable[..., Any]


@pytest.fixture
def small(model: Path) -> list[object]:
    """Needle prompts of 150 byte tokens and more for the tiny model."""
    return ["--model", model, "--budget", 40, "--window", 8]


GRID = ["--lengths", "300,340", "--depths", "0,1", "--haystack", "noise", "--steps", 2, "--max-new-tokens", 5]


@pytest.mark.slow
def test_needle_in_context_only_compares_methods_whose_options_have_commas(perturbkv: Run, small: list[object]) -> None:
    methods = "snapkv(pool=average, kernel=5):attention,two-stage(alpha=0.5, score=pooled)"
    ran = perturbkv("needle", *small, *GRID, "--scenario", "context-only", "--compare", methods, "-o", "out", "--json")
    assert ran.code == 0, ran.err
    assert ran.json()["scenario"] == "context-only"
    assert (read_trace(Path("out/trace.h5")).arrays["question_tokens"] > 50).all()
    labels = read_run(Path("out/trace.h5")).labels()
    assert len(labels) == 2, labels
    assert ("kernel=5" in labels[0], "alpha=0.5" in labels[1]) == (True, True), labels


def test_generate_writes_a_line_per_sample_and_goes_on(perturbkv: Run, tiny: list[object]) -> None:
    options = [*tiny, "--max-new-tokens", 6, "-o", "out"]
    ran = perturbkv("generate", *options)
    assert ran.code == 0, ran.err
    path = Path("out/generation.jsonl")
    header, *rows = map(json.loads, path.read_text().split("\n")[:-1])
    assert header["run"]["generate"] == 6
    assert (header["made_with"]["seed"], header["made_with"]["random_weights"]) == (0, False)
    assert [row["sample"] for row in rows] == ["p0", "p1"]
    assert [label.partition(" ")[0] for label in rows[0]["evicted"]] == ["snapkv:attention", "snapkv:two-stage"]
    assert all(len(made["tokens"]) <= 6 for row in rows for made in row["evicted"].values())
    assert [made["held_share"] for made in rows[0]["evicted"].values()] == [pytest.approx(2 * 24 / 182)] * 2
    assert ran.out.count("0.26") == 4
    whole = path.read_text()
    path.write_text("\n".join(whole.splitlines()[:2]) + '\n{"sample": "p1", "unfini')
    again = perturbkv("generate", *options)
    assert again.code == 0, again.err
    assert "1 sample of 2" in again.err
    assert path.read_text() == whole
    other = perturbkv("generate", *tiny, "--max-new-tokens", 7, "-o", "out")
    assert other.code == 2
    assert "--overwrite" in other.err
    assert path.read_text() == whole


@pytest.mark.slow
def test_long_generation_records_every_compression(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("generate", *tiny, "--policy", "adakv", "--max-new-tokens", 40, "--compress-over", 36, "-o", "out")
    assert "36 entries" in " ".join(ran.out.split())
    assert ran.code == 0, ran.err
    assert "compressions, Σ L / Σ ‖o_h‖₁" in ran.out
    _, row, _ = map(json.loads, Path("out/generation.jsonl").read_text().split("\n")[:-1])
    one = row["compressions"][0]
    assert (one["entries_before"], one["entries_after"]) == (37.0, 24.0)
    assert len(one["perturbation"]) == 2
    assert len(one["perturbation"][0]) == 4
    assert 0 < one["relative"] == pytest.approx(sum(map(sum, one["perturbation"])) / sum(map(sum, one["output_norm"])))


@pytest.mark.slow
def test_head_scores_are_measured_written_and_used(perturbkv: Run, model: Path, tiny: list[object]) -> None:
    measure = ("trace", "--head-scores", "scores.json", "--model", model, "--samples", 2, "--length", 300)
    refused = perturbkv(*measure)
    assert (refused.code, Path("scores.json").exists()) == (2, False)
    assert "2 prompts" in refused.err
    with mock.patch("perturbkv.pipeline.answers.answer_heads.is_right", return_value=True):
        ran = perturbkv(*measure)
    assert ran.code == 0, ran.err
    assert "2 of 2" in ran.out
    scores = json.loads(Path("scores.json").read_text())
    assert set(scores) == {f"{layer}-{head}" for layer in range(2) for head in range(4)}
    ran = perturbkv("trace", *tiny, "--policy", "headkv", "--head-scores", "scores.json", "-o", "t.h5")
    assert ran.code == 0, ran.err
    trace = read_trace(Path("t.h5"))
    assert trace.run.head_scores == tuple(tuple(scores[f"{la}-{h}"] for h in range(4)) for la in range(2))
    counts = trace.arrays["kept_count"][0, 0]
    assert counts.sum() == 24 * 8
    assert counts.min() < counts.max()
    best = max(scores, key=lambda name: scores[name])
    layer, head = map(int, best.split("-"))
    assert counts[layer, head] == counts.max()


@pytest.mark.slow
def test_info_reports_the_padding_of_ragged_caches(perturbkv: Run, tiny: list[object]) -> None:
    perturbkv("trace", *tiny, "--policy", "adakv", "-o", "t.h5")
    arrays = read_trace(Path("t.h5")).arrays
    held, padding = int(arrays["cache_bytes"].sum()), int(arrays["cache_padding_bytes"].sum())
    entries = int(arrays["kept_count"].sum()) * 2 * 8 * 4  # keys and values, head size 8, float32
    assert held == entries + padding
    assert 0 < padding <= entries / 8
    ran = perturbkv("list", "t.h5")
    assert f"{held:,} " in ran.out and f"{padding:,}" in ran.out
    rectangular = perturbkv("trace", *tiny, "--policy", "pyramidkv", "--cache", "rectangular", "-o", "r.h5")
    assert rectangular.code == 0, rectangular.err
    assert read_trace(Path("r.h5")).arrays["cache_padding_bytes"].sum() == 0


PROMPTS = ["--lengths", "300,340", "--depths", "0,1", "--haystack", "noise", "--max-new-tokens", 5]
NEEDLE = [*PROMPTS, "--steps", 1, "--compare", "snapkv:attention,snapkv:two-stage", "--json"]

GENERATE = ["--dataset", "needle", "--samples", 4, "--policy", "snapkv", "--selection", "attention", "--selection",
            "two-stage"]  # fmt: skip


@pytest.fixture
def needles(model: Path) -> list[object]:
    return ["--model", model, "--budget", 40, "--window", 8]


def answers(trace: Trace) -> dict[str, list[str]]:
    """Sample -> the full cache's answer and every evicted one's."""
    rows = zip(trace.sample_ids, trace.arrays["answer_full"].tolist(), trace.arrays["answer"].tolist(), strict=True)
    return {name: [full, *evicted] for name, full, evicted in rows}


@pytest.mark.slow
def test_its_answers_are_the_tokenizers_and_those_that_generate_writes(
    perturbkv: Run, needles: list[object], model: Path
) -> None:
    ran = perturbkv("needle", *needles, *NEEDLE, "-o", "out")
    assert ran.code == 0, ran.err
    trace, tokenizer = read_trace(Path("out/trace.h5")), AutoTokenizer.from_pretrained(model)
    found = answers(trace)
    for place, name in enumerate(trace.sample_ids):
        rows = [trace.arrays["generated_full"][place], *trace.arrays["generated"][place]]
        tokens = [[token for token in row.tolist() if token >= 0] for row in rows]  # type: ignore[union-attr]
        shown = [tokenizer.decode(row, skip_special_tokens=True).replace("\0", "\u2400") for row in tokens]
        assert found[name] == shown
    generated = perturbkv("generate", *needles, *PROMPTS, *GENERATE, "-o", "answers", "--json")
    assert generated.code == 0, generated.err
    written = [json.loads(line) for line in Path("answers/generation.jsonl").read_text().splitlines()[1:]]
    assert [row["sample"] for row in written] == list(trace.sample_ids)
    for row in written:
        texts = [row["full"]["text"], *(one["text"] for one in row["evicted"].values())]
        assert [text.replace("\0", "\u2400") for text in texts] == found[row["sample"]]
    expected = [json.loads(str(text)) for text in trace.arrays["expected_answers"]]
    assert expected == [row["answers"] for row in written]
    assert all(len(one) == 1 and one[0].isdigit() for one in expected)


@pytest.mark.slow
def test_no_text_leaves_answers_out(perturbkv: Run, needles: list[object]) -> None:
    path = Path("out/trace.h5")
    assert perturbkv("needle", *needles, *NEEDLE, "--no-prompts", "-o", "out").code == 0
    without = read_trace(path)
    assert set(without.arrays).isdisjoint((*TEXT, *ANSWER_TEXT))
    assert perturbkv("list", path, "--json").json()["with_answers"] == []


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer has a chat template."""
    return chat_folder(tmp_path_factory.mktemp("models") / "chatty", TEMPLATE, positions=512)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    turns = [("user", "Read this. " * 9), ("assistant", "I did. " * 6), ("user", "And now?")]
    rows = [
        {"id": f"c{place}", "messages": [{"role": role, "content": f"{place} {text}"} for role, text in turns]}
        for place in range(2)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def made(perturbkv: Run, chatty: Path, chats: Path) -> Path:
    """The answers of both chats, compressed as they grow, read by every cache."""
    options = ["--budget", 24, "--window", 8, "--max-new-tokens", 30, "--compress-over", 40, "--divergence"]
    ran = perturbkv("generate", "--model", chatty, "--dataset", chats, *options, "-o", "out")
    assert ran.code == 0, ran.err
    return Path("out/generation.jsonl")


@pytest.mark.slow
def test_long_answers_to_chats_are_followed_and_gone_on_with(
    perturbkv: Run, chatty: Path, chats: Path, made: Path
) -> None:
    header, first, _ = map(json.loads, made.read_text().splitlines())
    assert (header["run"]["compress_over"], header["divergence"]) == (40, True)
    assert first["question"].startswith("0 And now?")
    assert first["prompt"].startswith("<user>0 Read this.")
    steps = len(first["full"]["tokens"])
    assert steps == len(first["divergence"]["noise_floor"]) > 20
    for read in first["divergence"]["caches"].values():
        assert len(read["kl"]) == len(read["top1"]) == steps
    assert first["compressions"]
    whole = made.read_text()
    made.write_text("\n".join(whole.splitlines()[:2]) + '\n{"sample": "c1", "unfini')
    same = ["generate", "--model", chatty, "--dataset", chats, "--budget", 24, "--window", 8, "--max-new-tokens", 30,
            "--compress-over", 40, "-o", "out"]  # fmt: skip
    other = perturbkv(*same)
    assert (other.code, made.read_text().splitlines()[-1]) == (2, '{"sample": "c1", "unfini')
    again = perturbkv(*same, "--divergence")
    assert again.code == 0, again.err
    assert made.read_text() == whole


@pytest.mark.slow
def test_where_answers_part_is_shown_drawn_and_written(perturbkv: Run, made: Path) -> None:
    ran = perturbkv("quality", "--divergence", made, "--format", "png")
    assert ran.code == 0, ran.err
    for heading in ("first", "ROUGE", "KL"):
        assert heading in ran.out
    document = json.loads(Path("out/quality-divergence.json").read_text())
    assert document["figures"] == ["out/quality-divergence.png"]
    assert document["samples"] == ["c0", "c1"]
    again = perturbkv("quality", "--divergence", made, "--format", "png", "--json")  # what is ours is replaced
    assert again.json()["configs"] == document["configs"]
    Path("out/quality-divergence.json").write_text("my own")
    refused(perturbkv("quality", "--divergence", made), "out/quality-divergence.json")
    assert Path("out/quality-divergence.json").read_text() == "my own"
    assert perturbkv("quality", "--divergence", made, "--overwrite").code == 0


@pytest.fixture
def linked(tmp_path: Path) -> Callable[..., Path]:
    """A trace of two budgets in the current folder, of one data set."""

    def save(dataset: str, samples: int = 6, **more: Any) -> Path:
        draw = np.random.default_rng(len(dataset))
        moved = draw.lognormal(size=(samples, 6))
        scores = (moved * draw.lognormal(size=(samples, 6)) < 1).astype(float)
        configs = [*methods(3, 0.1), *methods(3, 0.2)]
        trace = answered(configs, scores, np.ones(samples), {"propagated": moved}, dataset=dataset, **more)
        return trace.save(tmp_path / f"{dataset}.h5")

    return save


@pytest.mark.slow
def test_traces_of_several_data_sets_are_pooled(perturbkv: Run, linked: Callable[..., Path]) -> None:
    linked("qasper"), linked("triviaqa", 5)
    ran = perturbkv("correlation", "qasper.h5", "triviaqa.h5", "-o", "out", "--format", "png")
    assert ran.code == 0, ran.err
    assert "11 samples" in ran.out
    told = json.loads(Path("out/summary.json").read_text())["analyses"]["correlation"]
    assert [(part["dataset"], part["trace"], part["samples"]) for part in told["parts"]] == [
        ("qasper", "qasper.h5", 6), ("triviaqa", "triviaqa.h5", 5)
    ]  # fmt: skip
    assert [one["dataset"] for one in told["overall"]] == ["", "qasper", "triviaqa"]
    first_alone = perturbkv("correlation", "qasper.h5", "-o", "out")
    assert first_alone.code == 2
    assert "--trace" in first_alone.err and "triviaqa.h5" in first_alone.err


@pytest.mark.slow
def test_perturbation_along_the_answer_is_linked_with_free_answers(perturbkv: Run, model: Path, tmp_path: Path) -> None:
    """The tiny model answers nothing rightly: scores are drawn, as if it had."""
    rows = [
        {"prompt": f"{word} is a word. " * 8, "answers": [answer]}
        for word, answer in zip("four summer winter leaf stone".split(), "yes never ab no maybe".split(), strict=True)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = ["--model", model, "--dataset", "rows.jsonl", "--budget", 24, "--window", 8, "--no-chat-template"]
    saved = ["--text", "answer", "--steps", 4, "--save", "effect", "--max-new-tokens", 4]
    ran = perturbkv("correlation", *made, *saved, "-o", "out", "--format", "png")
    assert ran.code == 0, ran.err
    assert "the full cache answers none of 5 prompts" in " ".join(ran.out.split())
    draw, trace = np.random.default_rng(0), read_trace(Path("out/trace.h5"))
    scores = {"score": draw.integers(0, 3, trace.arrays["score"].shape) / 2, "score_full": np.ones(5)}
    dataclasses.replace(trace, arrays={**trace.arrays, **scores}).save("scored.h5")
    ran = perturbkv("correlation", "scored.h5", "-o", "two", "--format", "png", "--explain")
    assert ran.code == 0, ran.err
    said = " ".join(ran.out.split())
    assert said.startswith(
        "Whether the methods of a prompt that have the larger isolated perturbation along its accepted"
    )
    assert "mean over up to 4 steps of an accepted answer" in said
    assert "circular: of the right answer's own tokens these nearly are the score" in said
    told = json.loads(Path("two/summary.json").read_text())["analyses"]["correlation"]
    (setting,) = told["settings"]
    assert (told["text"], [one["measure"] for one in setting["strengths"]]) == ("answer", [
        "isolated", "isolated_first", "effect", "effect_size", "theta", "theta_hat", "lost",
        "propagated", "effect_propagated", "kl", "drift", "text_loss",
    ])  # fmt: skip
    assert all(one["rho"]["prompts"] for one in setting["strengths"] if one["measure"] != "theta_hat")


@pytest.mark.slow
def test_a_failed_sample_of_any_trace_is_told(perturbkv: Run, linked: Callable[..., Path]) -> None:
    linked("qasper"), linked("trec")
    from perturbkv.storage.trace.trace_file import read_trace

    trace = read_trace(Path("trec.h5"))
    trace.failures["trec5"] = "planted"  # type: ignore[index]
    trace.save("trec.h5")
    ran = perturbkv("correlation", "qasper.h5", "trec.h5", "-o", "out", "--json")
    assert ran.code == 1
    assert "failed: planted" in ran.err
    assert ran.json()["failed"] == {"trec: trec5": "planted"}
