"""studies/second_model.py: the same whole prompts for two models, and one table of what both show."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from perturbkv.storage.trace.trace_file import read_trace
from tests.support.folders import model_folder
from tests.support.scripts import STUDIES, functions, perturbkv, study
from tests.support.scripts import tables as tables_of

pytestmark = pytest.mark.slow
LONGEST, AROUND = 500, 83 + 58
"""Tokens of a prompt; bytes of LongBench's words before and after a multi_news context."""
NEEDLES = 12
WINDOW, SLIDING = 120, 512
"""Of needle prompts: bytes that are always kept, a number at the text's end among them, and a sliding layer's reach."""
SMALL = ["--format", "png", "--no-chat-template"]
FIRST = ["--steps", 1]
SIDES = ["--compare", "attention,two-stage,two-stage-uniform,attention-unpooled"]
Tables = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two layers that are all measured, and six of which 1, 3, 5 are; a token is a byte, the second's a <bos> more."""
    folder = tmp_path_factory.mktemp("models")
    plain = model_folder(folder / "plain", positions=1100)
    mixed = model_folder(folder / "mixed", "gemma3_text", layers=3, kv_heads=1, positions=1100)
    tokenizer = Tokenizer.from_file(str(mixed / "tokenizer.json"))
    tokenizer.add_special_tokens(["<bos>"])
    begins = [("<bos>", tokenizer.token_to_id("<bos>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=begins)
    tokenizer.save(str(mixed / "tokenizer.json"))
    return [plain, mixed]


@pytest.fixture(scope="module")
def longbench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contexts of which the third makes a prompt of LONGEST bytes, the fourth one of a byte less."""
    folder = tmp_path_factory.mktemp("longbench")
    room = LONGEST - AROUND
    texts = ["The river is wide. " * 9, "The hills are green. " * 100, "x" * room, "The road goes on. " * 30]
    texts[3] = texts[3][: room - 1]
    rows = [{"_id": f"n{place}", "input": "", "context": text, "answers": ["a"]} for place, text in enumerate(texts)]
    (folder / "multi_news.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory, models: list[Path], longbench: Path) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    asked = ["--longest", LONGEST, "--news", 4, "--needles", NEEDLES, "--lengths", 600, 900, "-o", folder]
    study("second_model", "prompts", longbench, folder, "--models", *models, *asked)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, models: list[Path], prompts: Path) -> list[Path]:
    """What the commands of `make second-model` leave, of two news prompts and twelve numbers."""
    made = [tmp_path_factory.mktemp("runs") / name for name in ("plain", "mixed")]
    for model, folder in zip(models, made, strict=True):
        news = ["--model", model, "--dataset", prompts / "news.jsonl", "--samples", 2, "--window", 8, *SMALL]
        hidden = [
            "--model",
            model,
            "--dataset",
            prompts / "needle.jsonl",
            "--samples",
            NEEDLES,
            "--window",
            WINDOW,
            *SMALL,
        ]
        both = ["--granularity", "query", "--granularity", "kv", "--compare", "attention,two-stage"]
        perturbkv("heads", *news, *FIRST, "--budget", 40, *SIDES, "-o", folder / "heads")
        perturbkv("ablation", *news, *FIRST, "--budget", 40, "-o", folder / "ablation")
        perturbkv("bound-tightness", *news, *FIRST, "--budget", 0.1, "--budget", 0.4, "-o", folder / "shares")
        perturbkv("assumption", folder / "shares" / "trace.h5", "--format", "png")
        perturbkv("layers", folder / "shares" / "trace.h5", "--per-sample", "--format", "png")
        perturbkv("horizon", *news, "--budget", 40, "--steps", 6, "-o", folder / "horizon")
        perturbkv("quality", *hidden, *both, "--budget", 160, "--max-new-tokens", 4, "-o", folder / "needle")
    return made


@pytest.fixture(scope="module")
def said(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    figures = tmp_path_factory.mktemp("figures")
    found = study("second_model", "tables", *folders, "--names", "A", "B", "-o", figures)
    assert {path.name for path in figures.iterdir()} == {"second_model.json", "second_model.png"}
    return found


def tables(said: str) -> Tables:
    """Title -> rows, each a dictionary of heading -> cell."""
    return {
        title: [dict(zip(heads, row, strict=True)) for row in rows] for title, (heads, *rows) in tables_of(said).items()
    }


def test_prompts_are_whole_texts_that_neither_model_finds_too_long(prompts: Path, longbench: Path) -> None:
    rows = [json.loads(line) for line in (prompts / "news.jsonl").read_text().splitlines()]
    contexts = [json.loads(line)["context"] for line in (longbench / "multi_news.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["0-n0", "3-n3"]  # of 500 bytes, the third is one too long with its <bos>
    for row, context in zip(rows, (contexts[0], contexts[3]), strict=True):
        assert f"News:\n{context}\n\nNow, write" in row["prompt"]
        assert row.keys() == {"id", "prompt"}


@pytest.mark.slow
def test_the_second_models_measured_layers_are_told(said: str, folders: list[Path]) -> None:
    rows = {row[""]: (row["A"], row["B"]) for row in tables(said)["models"]}
    assert rows["layers measured"] == ("all 2", "1 3 5 of 6")
    assert rows["heads"] == ("8 of 2 layers", "12 of 3 layers")
    lengths = [read_trace(folder / "heads" / "trace.h5").arrays["prompt_tokens"].tolist() for folder in folders]
    assert lengths[0] == [AROUND + 9 * 19, LONGEST - 1]
    assert lengths[1] == [AROUND + 9 * 19 + 1, LONGEST]
    assert rows["news prompts"][1].startswith("2: 313 to 500 tokens")


def test_a_row_holds_both_models_numbers(said: str, folders: list[Path]) -> None:
    (row,) = [row for row in tables(said)["heads"] if row["treatment"] == "two-stage"]
    for name, folder in zip("AB", folders, strict=True):
        trace = read_trace(folder / "heads" / "trace.h5")
        for kind in ("isolated", "propagated"):
            total = {"attention": 0.0, "two-stage": 0.0}
            for place, config in enumerate(trace.run.configs):
                if config.selection.name in total:
                    total[config.selection.name] = sum(
                        trace.arrays[f"perturbation_{kind}"][:, place, 0].ravel().tolist()
                    )
            expected = f"{total['two-stage'] / total['attention']:.2f}"
            assert row[f"{name}: {kind}: Σ"].split()[0] == expected


def test_the_first_measured_layer_stands_apart_from_all_others(said: str, folders: list[Path]) -> None:
    first, others, *shares = tables(said)["two-stage over attention, by layer"]
    assert [row["setting"].partition(" ")[0] for row in (first, others, *shares)] == [
        *["b=40"] * 2, *["b=0.1"] * 2, *["b=0.4"] * 2
    ]  # fmt: skip
    assert (first["layers"], others["layers"]) == ("first measured", "all others")
    for name, folder in zip("AB", folders, strict=True):
        trace = read_trace(folder / "heads" / "trace.h5")
        names = [config.selection.name for config in trace.run.configs]
        for kind in ("isolated", "propagated"):
            found = trace.arrays[f"perturbation_{kind}"][:, :, 0]
            for row, layers in ((first, [0]), (others, range(1, found.shape[2]))):
                sums = [sum(float(found[:, names.index(side), layer].sum()) for layer in layers)
                        for side in ("attention", "two-stage")]  # fmt: skip
                assert row[f"{name}: {kind} Σ"].split()[0] == f"{sums[1] / sums[0]:.2f}"


def test_what_one_token_is_to_one_head_is_told(folders: list[Path], tmp_path: Path) -> None:
    path = folders[1] / "heads" / "trace.h5"
    trace, position = read_trace(path), 7
    said = study("readings", path, "--token", 3, 1, position, "-o", tmp_path)
    _, *rows = tables_of(said)["token 7 in head 3-1"]
    for config, (_, *cells) in enumerate(rows):
        with_it: list[float] = []
        without: list[float] = []
        for sample in range(2):
            kept = trace.kept(sample, config, 1, 1).tolist()  # layer 3 is the second that is measured
            lost = float(trace.arrays["perturbation_isolated"][sample, config, 0, 1, 1])
            (with_it if position in kept else without).append(lost)
        means = [f"{sum(some) / len(some):.1f}" if some else "–" for some in (with_it, without)]
        assert cells == [f"{len(with_it)} of 2", *means]


def behind(prompts: Path) -> list[int]:
    """Bytes, which are tokens, from the number's first digit to the end of each needle prompt."""
    found = []
    for line in (prompts / "needle.jsonl").read_text().splitlines():
        row = json.loads(line)
        text = f"{row['prompt']}\n{row['answer_prefix']}".encode()
        found.append(len(text) - text.index(row["answers"][0].encode()))
    return found


def test_numbers_are_near_or_far_by_their_place_in_the_prompt(said: str, folders: list[Path], prompts: Path) -> None:
    zones = {"near": lambda far: WINDOW < far <= SLIDING, "far": lambda far: far > SLIDING}
    chosen = {
        name: [place for place, far in enumerate(behind(prompts)) if inside(far)] for name, inside in zones.items()
    }
    assert min(map(len, chosen.values())) > 2
    rows = tables(said)["needle"]
    assert [row[""] for row in rows][:1] == ["full cache"]
    for name, folder in zip("AB", folders, strict=True):
        trace = read_trace(folder / "needle" / "needle" / "trace.h5")
        for zone, places in chosen.items():
            cells = [row[f"{name}: digits, {zone} (n = {len(places)})"] for row in rows]
            for cell, digits in zip(cells, [trace.arrays["digits_full"], *trace.arrays["digits"].T], strict=True):
                mean = sum(float(digits[place]) for place in places) / len(places)
                assert cell.startswith(f"{100 * mean:.0f} %")


def test_what_heads_keep_of_a_number_is_counted(said: str, folders: list[Path], prompts: Path) -> None:
    trace = read_trace(folders[1] / "needle" / "needle" / "trace.h5")
    layers, heads = trace.arrays["kept_count"].shape[2:]
    kept = []
    for sample, far in enumerate(behind(prompts)):
        first = int(trace.arrays["prompt_tokens"][sample]) - far
        if far > WINDOW:
            sets = [trace.kept(sample, 0, layer, head) for layer in range(layers) for head in range(heads)]
            kept.append(np.mean([sum(first <= place < first + 7 for place in one.tolist()) for one in sets]))
    assert tables(said)["needle"][1]["B: tokens kept"] == f"{np.mean(kept):.2f}"


def test_a_table_of_both_has_each_rows_name_once_and_no_other_rows() -> None:
    beside = functions("second_model", STUDIES)["join_tables"]
    heads = ["treatment, budget", "after the first measured layer", "after the middle measured layer",
             "after the last measured layer", "samples better"]  # fmt: skip
    first, second = (["two-stage, 0.1", f"{x}1", f"{x}2", f"{x}3", f"{x}4"] for x in "ab")
    title, columns, rows = beside([("layers", heads, [first]), ("layers", heads, [second])], ["A", "B"])
    assert title == "layers"
    assert rows == [["two-stage, 0.1", "a1", "a3", "a4", "b1", "b3", "b4"]]
    assert [column.partition(": ")[0] for column in columns] == ["treatment, budget", *"AAABBB"]
    assert beside([("layers, 8", heads, [first]), ("layers, 9", heads, [second])], "AB")[0] == "layers, 8 | layers, 9"
    second[0] = "two-stage, 0.2"
    with pytest.raises(ValueError, match="two-stage, 0.1.*two-stage, 0.2"):
        beside([("layers", heads, [first]), ("layers", heads, [second])], ["A", "B"])
