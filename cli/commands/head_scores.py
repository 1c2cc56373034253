"""`perturbkv head-scores`: which heads look at the sentence that holds the answer, for the policy headkv."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Annotated

from typer import Option

from perturbkv.cli import console
from perturbkv.cli.options import JsonOption
from perturbkv.cli.saving import claimed
from perturbkv.models.aliases import DEFAULT

_SHOWN = 10


def head_scores(
    model: Annotated[str, Option("--model", "-m", metavar="NAME", help="As for the other commands")] = DEFAULT,
    revision: Annotated[str, Option(metavar="NAME", help="Branch, tag or commit", show_default="the newest")] = "",
    samples: Annotated[int, Option(metavar="N", help="Needle prompts")] = 8,
    length: Annotated[list[int] | None, Option(metavar="N", help="Tokens of a prompt", show_default="1000")] = None,
    haystack: Annotated[str, Option(metavar="NAME", help="prose or noise")] = "prose",
    seed: Annotated[int, Option(metavar="N", help="Of the prompts")] = 1,
    dtype: Annotated[str, Option(metavar="NAME", help="auto, float32, bfloat16, float16")] = "auto",
    device: Annotated[str, Option(metavar="NAME", help="auto, cpu, cuda, cuda:1, …")] = "auto",
    output: Annotated[Path, Option("--output", "-o", metavar="PATH", help="The JSON file")] = Path("head-scores.json"),
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file")] = False,
    as_json: JsonOption = False,
) -> None:
    """Score heads by their attention on the answer's sentence.

    While the model answers; the file is for --head-scores of the policy headkv. As HeadKV's released detection: the
    model's own greedy answer, right answers only, a distractor beside the needle; but on needle's prompts, so that
    scores are not those of the released files.
    """
    with claimed(output, overwrite) as beside:
        asked = (model, revision, samples, tuple(length or (1000,)), haystack, seed, dtype, device)
        layers, scores, right = _measure(*asked)
        beside.write_text(_text(scores, layers))
    named = zip(layers, scores, strict=True)
    ranked = sorted(((score, layer, head) for layer, row in named for head, score in enumerate(row)), reverse=True)
    if as_json:
        names = {f"{layer}-{head}": score for score, layer, head in ranked}
        console.print_json({"model": model, "samples": samples, "right": right, "file": str(output), "scores": names})
        return
    total = sum(score for score, _, _ in ranked) or 1.0
    rows = [(f"{layer}-{head}", f"{score:.4f}", f"{100 * score / total:.1f} %") for score, layer, head in ranked]
    console.table(f"{model}: heads that look at the answer", ["layer-head", "#score", "#of all"], rows[:_SHOWN])
    console.say(
        "Score: attention on the answer's sentence while the model answers, over tokens of sentence and answer; mean "
        f"of the {right} of {samples} prompts that were answered right. All {len(ranked)} heads: {output}"
    )


def _measure(
    model: str, revision: str, samples: int, lengths: tuple[int, ...], haystack: str, seed: int, dtype: str, device: str
) -> tuple[tuple[int, ...], list[list[float]], int]:
    """The measured layers, a row of scores for each, and how many prompts were answered right."""
    from perturbkv.datasets import dataset_registry as datasets
    from perturbkv.datasets.distraction import distracted
    from perturbkv.datasets.encode import check_length, check_vocabulary, encode
    from perturbkv.models.loading import load_weights, open_model, pick_device, pick_dtype
    from perturbkv.pipeline.answers.answer_heads import Evidence
    from perturbkv.pipeline.answers.answer_heads import head_scores as measured

    place = pick_device(device)
    files = open_model(model, seed, revision)
    asked = dataclasses.replace(datasets.DatasetOptions(samples, seed, haystack=haystack), lengths=lengths)
    template = bool(files.tokenizer.chat_template)
    prompts = [
        Evidence(encode(sample, files.tokenizer, chat_template=template, max_tokens=None), sentence)
        for plain in datasets.load("needle", asked, files.tokenizer).samples
        for sample, sentence in [distracted(plain, seed)]
    ]
    positions = int(files.config.max_position_embeddings)
    asked_for = itertools.cycle([length for length in lengths for _ in asked.depths])
    for one, length in zip(prompts, asked_for, strict=False):
        check_vocabulary(one.prompt, int(files.config.vocab_size), files.name)
        check_length(one.prompt, positions, len(one.prompt.answers[0]) + 1, length)
    adapter = load_weights(files, pick_dtype(dtype, place), place, seed)
    with console.progress("prompts", len(prompts)) as bar:
        found = measured(adapter, prompts, bar.one_more)
    return adapter.layer_indices, found.scores.tolist(), found.right


def _text(scores: list[list[float]], layers: tuple[int, ...]) -> str:
    from perturbkv.scoring.head_scores import as_json

    return as_json(scores, layers)
