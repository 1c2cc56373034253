"""`perturbkv trace --head-scores PATH`: each head's attention on the answer's sentence, for the policy headkv."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from perturbkv.cli import console, option_refusals
from perturbkv.cli.options import RunOptions
from perturbkv.cli.saving import new_file
from perturbkv.errors import ConfigError

_SHOWN = 10
_SAMPLES, _LENGTH, _SEED = 8, 1000, 1
_OPTIONS = frozenset({
    "head_scores", "model", "revision", "dataset", "samples", "length", "haystack", "seed", "dtype", "device",
    "overwrite", "as_json",
})  # fmt: skip


def measure_head_scores(run: RunOptions) -> None:
    """Measure head scores on needle prompts, write them to the file of --head-scores, and print the highest.

    The method is that of HeadKV's released detection: the model's own greedy answer, right answers only, a distractor
    beside the needle. The prompts are ours, so that the scores are not those of the released files. Raises
    PerturbkvErrors.
    """
    from perturbkv.scoring.head_scores import as_json

    output = _output_path(run)
    run.check_names()
    samples = _SAMPLES if run.samples is None else run.samples
    with new_file(output, run.overwrite) as temporary:
        layers, scores, right = _measure(run, samples)
        temporary.write_text(as_json(scores, layers))
    rows = zip(layers, scores, strict=True)
    ranked = sorted(((score, layer, head) for layer, row in rows for head, score in enumerate(row)), reverse=True)
    if run.as_json:
        names = {f"{layer}-{head}": score for score, layer, head in ranked}
        document = {"model": run.model, "samples": samples, "right": right, "file": str(output), "scores": names}
        console.print_json(document)
        return
    total = sum(score for score, _, _ in ranked) or 1.0
    cells = [(f"{layer}-{head}", f"{score:.4f}", f"{100 * score / total:.1f} %") for score, layer, head in ranked]
    console.table(f"{run.model}: heads that look at the answer", ["layer-head", "#score", "#of all"], cells[:_SHOWN])
    console.say(
        "Score: attention on the answer's sentence while the model answers, over tokens of sentence and answer; mean "
        f"of the {right} of {samples} prompts that were answered right. All {len(ranked)} heads: {output}"
    )


def _output_path(run: RunOptions) -> Path:
    """Return the path of --head-scores. Raises ConfigError for an option without effect, and for an existing file."""
    assert run.head_scores is not None
    for name in sorted(run.typed_options - _OPTIONS):
        raise ConfigError(
            f"{option_refusals.option_flag(name)} has no effect here: --head-scores needs --policy headkv to be read; "
            "without it scores are measured, and no trace; leave one of them out"
        )
    if run.dataset != "needle":
        raise ConfigError(f"head scores are measured on needle's prompts; leave --dataset out, got '{run.dataset}'")
    if run.head_scores.exists() and not run.overwrite:
        raise ConfigError(
            f"expected no file at {run.head_scores}, got one; --policy headkv reads it, --overwrite measures it again"
        )
    return run.head_scores


def _measure(run: RunOptions, samples: int) -> tuple[tuple[int, ...], list[list[float]], int]:
    """Return the measured layers, the scores [layer][head], and the number of correctly answered prompts."""
    from perturbkv.datasets import dataset_registry as datasets
    from perturbkv.datasets.encode import check_length, check_vocabulary, encode
    from perturbkv.datasets.needle import add_distraction
    from perturbkv.models.loading import load_weights, open_model, pick_device, pick_dtype
    from perturbkv.pipeline.answers.answer_heads import Evidence, head_scores

    device = pick_device(run.device)
    seed = run.seed if "seed" in run.typed_options else _SEED
    files = open_model(run.model, seed, run.revision or "")
    options = datasets.DatasetOptions(samples, seed, haystack=run.haystack)
    options = dataclasses.replace(options, lengths=run.lengths or (_LENGTH,))
    template = bool(files.tokenizer.chat_template)
    prompts = [
        Evidence(encode(sample, files.tokenizer, chat_template=template, max_tokens=None), sentence)
        for plain in datasets.load("needle", options, files.tokenizer).samples
        for sample, sentence in [add_distraction(plain, seed)]
    ]
    positions = int(files.config.max_position_embeddings)
    lengths = itertools.cycle([length for length in options.lengths for _ in options.depths])
    for one, length in zip(prompts, lengths, strict=False):
        check_vocabulary(one.prompt, int(files.config.vocab_size), files.name)
        check_length(one.prompt, positions, len(one.prompt.answers[0]) + 1, length)
    adapter = load_weights(files, pick_dtype(run.dtype, device), device, seed)
    with console.progress("prompts", len(prompts)) as bar:
        result = head_scores(adapter, prompts, bar.advance)
    return adapter.layer_indices, result.scores.tolist(), result.right
