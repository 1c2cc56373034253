"""The variables of a trace: names, axes, units and types, declared once.

The pipeline fills a `SampleTrace` from this declaration, the storage writes and reads it, analyses take a `Trace`. Axis
names everywhere: sample config step layer decoder_layer head answer_token d_value d_model key kept_byte prompt_entry
lost_entry place; `layer` has the measured layers alone, `decoder_layer` all. A trace file holds these variables and the
state of each sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.errors import TraceError

KEY_AXIS = "key"
"""An axis whose length differs from sample to sample: shorter samples are padded with NaN."""
ROWS = {
    "kept_byte": ("kept_offset", "kept_length"),
    "prompt_entry": ("prompt_offset", "prompt_count"),
}
"""Axis along which the data of all samples are concatenated -> variables with each sample's offset and count."""


@dataclass(frozen=True)
class Variable:
    """A stored variable: axes without `sample`, unit, long name, dtype, and whether it is optional in a trace.

    `save` is the `--save` that stores it, empty where every run does.
    """

    dims: tuple[str, ...]
    units: str
    long_name: str
    dtype: str = "float64"
    optional: bool = False
    save: str = ""

    @property
    def axes(self) -> tuple[str, ...]:
        """The variable's axes in a trace: `sample` first, unless samples are concatenated along one axis."""
        return self.dims if self.is_concatenated else ("sample", *self.dims)

    @property
    def is_large(self) -> bool:
        """True for positions, text and raw outputs, which may be larger than memory should hold."""
        return self.raw or self.is_concatenated or self.dtype == "str"

    @property
    def is_concatenated(self) -> bool:
        """True if the values of all samples are concatenated along one axis, instead of stacked by sample."""
        return not ROWS.keys().isdisjoint(self.dims)

    @property
    def raw(self) -> bool:
        """True if the variable holds vectors, or a number for every entry of the cache."""
        return not {"d_value", "d_model", "key"}.isdisjoint(self.dims)


_HEADS = ("config", "step", "layer", "head")
_LAYERS = ("config", "step", "decoder_layer")
_FLOORS = ("step", "layer", "head")
_LOST = ("config", "layer", "head", "lost_entry")
_GONE = (*_HEADS, "place")

VARIABLES: dict[str, Variable] = {
    "perturbation_isolated": Variable(_HEADS, "L1", "isolated perturbation L_h of the head's output"),
    "perturbation_eviction": Variable(
        _HEADS,
        "L1",
        "isolated perturbation by eviction alone, nothing moved, rounded or corrected",
        optional=True,
    ),
    "perturbation_change": Variable(
        _HEADS, "L1", "isolated distance that moving, rounding or correcting adds to it", optional=True
    ),
    "perturbation_propagated": Variable(_HEADS, "L1", "propagated perturbation of the head's output"),
    "perturbation_isolated_l2": Variable(_HEADS, "L2", "isolated perturbation in L2", optional=True),
    "perturbation_isolated_cosine": Variable(
        _HEADS, "1", "isolated perturbation as 1 - cos of full and evicted output", optional=True
    ),
    "perturbation_propagated_l2": Variable(_HEADS, "L2", "propagated perturbation in L2", optional=True),
    "perturbation_propagated_cosine": Variable(
        _HEADS, "1", "propagated perturbation as 1 - cos of full and evicted output", optional=True
    ),
    "theta": Variable(_HEADS, "L1", "bound of Theorem 2"),
    "theta_hat": Variable(_HEADS, "L1", "bound of Theorem 3; evidence only where sigma_stage1 > 0.5"),
    "theta_hat_relax": Variable(_HEADS, "L1", "bound of Theorem 4; holds only where sigma_stage1 > 0.5"),
    "sigma_topk": Variable(_HEADS, "1", "Assumption 1: attention of the top floor(alpha b) entries"),
    "sigma_stage1": Variable(_HEADS, "1", "Assumption 1: attention of stage 1 and the always-kept entries"),
    "retained_mass": Variable(_HEADS, "1", "attention S of the kept entries"),
    "noise_floor": Variable(_FLOORS, "L1", "propagated perturbation with everything kept"),
    "noise_floor_isolated": Variable(_FLOORS, "L1", "isolated perturbation with everything kept"),
    "noise_floor_l2": Variable(_FLOORS, "L2", "propagated perturbation with everything kept, in L2", optional=True),
    "noise_floor_cosine": Variable(
        _FLOORS, "1", "propagated perturbation with everything kept, as 1 - cos", optional=True
    ),
    "noise_floor_isolated_l2": Variable(
        _FLOORS, "L2", "isolated perturbation with everything kept, in L2", optional=True
    ),
    "noise_floor_isolated_cosine": Variable(
        _FLOORS, "1", "isolated perturbation with everything kept, as 1 - cos", optional=True
    ),
    "output_norm": Variable(_FLOORS, "L1", "norm of the head's full-cache output o_h"),
    "output_norm_l2": Variable(_FLOORS, "L2", "norm of the head's full-cache output o_h", optional=True),
    "gate_size": Variable(
        _FLOORS, "1", "mean size of the head's gate at the step, 1 without one; in models with gates", optional=True
    ),
    "hidden_drift_l1": Variable(_LAYERS, "L1", "drift of the residual stream after the layer"),
    "hidden_drift_l2": Variable(_LAYERS, "L2", "drift of the residual stream after the layer"),
    "hidden_drift_cosine": Variable(_LAYERS, "1", "cosine distance of the residual stream after the layer"),
    "hidden_norm": Variable(("step", "decoder_layer"), "L1", "norm of the full-cache residual stream after the layer"),
    "hidden_noise_floor": Variable(("step", "decoder_layer"), "L1", "drift after the layer with everything kept"),
    "hidden_norm_l2": Variable(
        ("step", "decoder_layer"), "L2", "norm of the full-cache residual stream after the layer", optional=True
    ),
    "hidden_noise_floor_l2": Variable(
        ("step", "decoder_layer"), "L2", "drift after the layer with everything kept", optional=True
    ),
    "hidden_noise_floor_cosine": Variable(
        ("step", "decoder_layer"), "1", "cosine distance after the layer with everything kept", optional=True
    ),
    "final_drift_l1": Variable(("config", "step"), "L1", "drift after the final norm"),
    "final_drift_l2": Variable(("config", "step"), "L2", "drift after the final norm"),
    "final_drift_cosine": Variable(("config", "step"), "1", "cosine distance after the final norm"),
    "final_norm": Variable(("step",), "L1", "norm of the full-cache hidden state after the final norm"),
    "final_noise_floor": Variable(("step",), "L1", "drift after the final norm with everything kept"),
    "final_noise_floor_l2": Variable(("step",), "L2", "drift after the final norm with everything kept", optional=True),
    "final_noise_floor_cosine": Variable(
        ("step",), "1", "cosine distance after the final norm with everything kept", optional=True
    ),
    "logit_kl": Variable(("config", "step"), "nat", "KL(full || evicted) of the next token's distribution"),
    "logit_kl_noise_floor": Variable(("step",), "nat", "KL(full || everything kept)"),
    "top1_agreement": Variable(("config", "step"), "1", "1 where full and evicted run pick the same token", "uint8"),
    "draft_acceptance": Variable(
        ("config", "step"),
        "1",
        "probability that the full run takes a token that the evicted run drafts, by rejection sampling",
        optional=True,
    ),
    "effect_isolated": Variable(
        _HEADS,
        "nat",
        "first-order change of the text's log p by the head's isolated loss",
        optional=True,
        save="effect",
    ),
    "effect_propagated": Variable(
        _HEADS,
        "nat",
        "first-order change of the text's log p by the head's propagated loss",
        optional=True,
        save="effect",
    ),
    "effect_noise_floor": Variable(
        _FLOORS, "nat", "size of the propagated effect with everything kept", optional=True, save="effect"
    ),
    "effect_noise_floor_isolated": Variable(
        _FLOORS, "nat", "rounding of the isolated effect", optional=True, save="effect"
    ),
    "entry_effect": Variable(
        ("config", "key"),
        "nat",
        "the entry's part of the isolated effect of all layers, heads and steps; NaN past n",
        optional=True,
        save="effect",
    ),
    "held_entries": Variable(
        _HEADS,
        "entry",
        "entries that the head's query attends to, in a run that compresses caches again",
        "int32",
        True,
    ),
    "perturbation_carried": Variable(
        _HEADS,
        "L1",
        "at a compression, isolated perturbation by what was gone before; NaN at other steps",
        optional=True,
    ),
    "perturbation_added": Variable(
        _HEADS, "L1", "at a compression, distance of the outputs before and after it; NaN at other steps", optional=True
    ),
    "went_entries": Variable(_GONE, "entry", "entries that went right before the step, by place", "int32", True),
    "went_output": Variable(
        _GONE, "1", "their share of the sum of A ν at the step, by place", "float32", optional=True
    ),
    "gone_attention": Variable(
        _GONE, "1", "attention of the step on entries that are gone, by place", "float32", optional=True
    ),
    "missed_attention": Variable(
        ("config", "step"),
        "1",
        "attention of later steps on the step's token while it is gone, mean over heads and layers",
        optional=True,
    ),
    "token_id": Variable(("step",), "1", "token decoded at the step: the text's, by default the full run's", "int64"),
    "token_kind": Variable(
        ("step",),
        "1",
        "kind of that token: 1 special, 2 formatting, 3 number, 4 name, 5 word; 0 unknown",
        "uint8",
        optional=True,
    ),
    "token_text": Variable(
        ("step",),
        "1",
        "text of token_id, in a run that compresses caches again; empty past the end",
        "str",
        optional=True,
    ),
    "next_token_id": Variable(("step",), "1", "token after it in the text; -1 where the text ends", "int64", True),
    "text_logp": Variable(
        ("config", "step"), "nat", "log probability of next_token_id; NaN where there is none", optional=True
    ),
    "text_logp_full": Variable(("step",), "nat", "log probability of next_token_id from the full cache", optional=True),
    "first_logp": Variable(
        ("config",), "nat", "log probability of token_id at step 0, after the question (context-only)", optional=True
    ),
    "first_logp_full": Variable((), "nat", "the same from the full cache (context-only)", optional=True),
    "text_tokens": Variable((), "token", "tokens of the text that was given (answer, given)", "int64", optional=True),
    "steps_measured": Variable(
        (), "1", "decode steps before the text ends; later steps hold no numbers", "int64", optional=True
    ),
    "prompt_tokens": Variable((), "token", "entries n in the cache after the prefill", "int64"),
    "question_tokens": Variable(
        (), "token", "tokens run over the compressed cache before step 0 (context-only)", "int64", optional=True
    ),
    "cache_bytes": Variable(
        (), "byte", "evicted caches of all configurations, padding included", "int64", optional=True
    ),
    "cache_padding_bytes": Variable((), "byte", "bytes of cache_bytes that hold no entry", "int64", optional=True),
    "cut_tokens": Variable((), "token", "tokens cut out of the prompt's middle", "int64"),
    "evicted": Variable(("config",), "1", "1 where anything was evicted, 0 where b covers n", "uint8"),
    "held_share": Variable(
        ("config",),
        "1",
        "entries of the evicted cache over those of the full cache, all layers",
        optional=True,
    ),
    "held_bytes": Variable(
        ("config",), "byte", "the evicted cache as stored, all layers, scales and minima among them", optional=True
    ),
    "resident_bytes": Variable(
        ("config",),
        "byte",
        "the evicted cache in memory while it is read, 16 bits per number of the model's type",
        optional=True,
    ),
    "own_entries": Variable(
        ("config",),
        "1",
        "of somebody's caches: 0 a kept set, 1 entries that each stand for one of the prompt's, 2 other ones",
        "uint8",
        optional=True,
    ),
    "full_bytes": Variable((), "byte", "the full cache in 16 bits, all layers", optional=True),
    "unmeasured_bytes": Variable(
        (), "byte", "windows and recurrent states that no eviction touches, in held_bytes and full_bytes", optional=True
    ),
    "prefill_seconds": Variable(
        ("config",), "s", "prefill of its own, lines chosen, masks dense; NaN where it has none", optional=True
    ),
    "prefill_seconds_full": Variable((), "s", "the full cache's prefill beside it, nothing watched", optional=True),
    "kept_count": Variable(("config", "layer", "head"), "entry", "entries kept of the prompt", "int64"),
    "stage1_count": Variable(("config", "layer", "head"), "entry", "prefix entries that stage 1 took", "int64"),
    "kept_offset": Variable(
        ("config", "layer", "head"), "1", "first of the head's kept_length places in kept_code", "int64", optional=True
    ),
    "kept_length": Variable(
        ("config", "layer", "head"), "byte", "bytes of the head's kept positions in kept_code", "int64", optional=True
    ),
    "kept_code": Variable(
        ("kept_byte",), "1", "kept positions as a bit mask or as gaps, whichever is shorter", "uint8", optional=True
    ),
    "kept_digest": Variable(
        ("config", "layer", "head"),
        "1",
        "digest of the kept positions, where these are not stored",
        "int64",
        optional=True,
    ),
    "lost_position": Variable(
        _LOST,
        "token",
        "evicted positions with the largest A ν at step 0, that first; -1 past the last",
        "int32",
        optional=True,
    ),
    "lost_output": Variable(
        _LOST, "L1", "A ν of these positions at step 0: what each adds to the output", "float32", optional=True
    ),
    "weighted_norm": Variable(("layer", "head"), "L1", "C at step 0, the sum of A ν over all entries", optional=True),
    "prompt_count": Variable((), "token", "tokens of the prompt that are stored; 0 without its text", "int64", True),
    "prompt_offset": Variable((), "1", "first of the sample's prompt_count places in prompt_token", "int64", True),
    "prompt_token": Variable(("prompt_entry",), "1", "tokens of the prompt, its question behind them", "int32", True),
    "prompt_start": Variable(
        ("prompt_entry",),
        "character",
        "where the token begins in prompt_text; it ends where the next begins",
        "int32",
        optional=True,
    ),
    "prompt_text": Variable((), "1", "the prompt as the model got it, decoded token by token", "str", optional=True),
    "generated_full": Variable(
        ("answer_token",), "1", "tokens generated from the full cache; -1 past the end", "int64", optional=True
    ),
    "generated": Variable(
        ("config", "answer_token"),
        "1",
        "tokens generated from the evicted cache; -1 past the end",
        "int64",
        optional=True,
    ),
    "score_full": Variable(
        (), "1", "score of the full cache's answer, 0 to 1; NaN where no metric grades it", optional=True
    ),
    "score": Variable(
        ("config",), "1", "score of the evicted cache's answer, 0 to 1; NaN where no metric grades it", optional=True
    ),
    "answer_full": Variable((), "1", "the full cache's answer as it is graded, without special tokens", "str", True),
    "answer": Variable(
        ("config",), "1", "the evicted cache's answer as it is graded, without special tokens", "str", optional=True
    ),
    "expected_answers": Variable(
        (), "1", "accepted answers as a JSON list; empty where the answers' text is not stored", "str", optional=True
    ),
    "digits_full": Variable((), "1", "share of the answer's leading digits that the full cache gives", optional=True),
    "digits": Variable(
        ("config",), "1", "share of the answer's leading digits that the evicted cache gives", optional=True
    ),
    "head_output_full": Variable(
        ("step", "layer", "head", "d_value"),
        "1",
        "full-cache head output before W_O",
        "float32",
        optional=True,
        save="outputs",
    ),
    "head_output": Variable(
        ("config", "step", "layer", "head", "d_value"),
        "1",
        "evicted head output before W_O",
        "float32",
        optional=True,
        save="outputs",
    ),
    "hidden_full": Variable(
        ("step", "decoder_layer", "d_model"),
        "1",
        "full-cache residual stream after the layer",
        "float32",
        optional=True,
        save="outputs",
    ),
    "hidden": Variable(
        ("config", "step", "decoder_layer", "d_model"),
        "1",
        "evicted residual stream after the layer",
        "float32",
        optional=True,
        save="outputs",
    ),
    "attention_full": Variable(
        ("step", "layer", "head", "key"),
        "1",
        "full-cache attention weights; NaN past n+t+1",
        "float32",
        optional=True,
        save="outputs",
    ),
}

PLACES = ("sink", "prompt", "own text", "recent")
"""Where an entry stood that went: among the first, in the prompt or its question, in the text, or just before the
compression; the axis `place`."""

TOKEN_KINDS = ("unknown", "special", "formatting", "number", "name", "word")
"""Kinds of decoded tokens (METHOD: kinds of tokens); `token_kind` stores a kind as its place here."""

MEASURED_LAYERS = "measured_layers"
"""Trace attribute with the measured layers, where not all are, as `configs.layer_types.format_measured` writes it."""

TEXT = ("prompt_count", "prompt_offset", "prompt_token", "prompt_start", "prompt_text")
"""Variables with the prompt's text and tokens: not measurements, and optional in a trace."""

ANSWER_TEXT = ("answer_full", "answer", "expected_answers")
"""Variables with the answers' text, decoded from the stored tokens; optional in a trace."""

TEXTS = (*TEXT, "token_text", *ANSWER_TEXT)
"""All variables with text, that of the decoded tokens among them: no other variable depends on them."""

KEPT = ("kept_offset", "kept_length", "kept_code")
"""Variables that store which entries were kept, not only how many; optional in a trace."""
DIGEST = "kept_digest"
"""The variable that identifies equal kept sets in a trace without kept positions."""

OF_KEPT_SETS = (
    "theta", "theta_hat", "theta_hat_relax", "sigma_stage1", "sigma_topk", "retained_mass", "perturbation_eviction",
    "perturbation_change",
)  # fmt: skip
"""Variables that are NaN for configurations whose entries stand for none of the prompt's (`own_entries` 2)."""
ISOLATED = ("perturbation_isolated", "perturbation_isolated_l2", "perturbation_isolated_cosine", "effect_isolated")
"""Variables that are NaN for entries of their own whose prompt was read otherwise, or whose attention is their own."""

AT_CHOSEN_STEPS = (
    *OF_KEPT_SETS, *(name for name in ISOLATED if name != "effect_isolated"), "noise_floor_isolated",
    "noise_floor_isolated_l2", "noise_floor_isolated_cosine",
)  # fmt: skip
"""Variables that are NaN at the steps that `isolated_steps` leaves out, unless the cache was compressed there."""

APART = ("perturbation_eviction", "perturbation_change")
"""Parts of the isolated perturbation, in runs of configurations that do more than evict."""

OF_COMPRESSIONS = (
    "held_entries", "perturbation_carried", "perturbation_added", "went_entries", "went_output", "gone_attention",
    "missed_attention",
)  # fmt: skip
"""Variables of runs that compress caches again."""

PREFILLS = ("prefill_seconds", "prefill_seconds_full")
"""Durations of prefills, for configurations that have a prefill of their own; NaN for others."""

SUMS = ("cache_bytes", "cache_padding_bytes")
"""Variables summed over all configurations; undefined for a subset of them."""


def isolated_steps(measured: NDArray[np.bool_], every: int) -> NDArray[np.bool_]:
    """Return (sample, step) where the isolated quantities of all configurations are measured.

    These are every `every`-th of the `measured` steps (sample, step), from the first on, and each sample's last.
    """
    following = np.pad(measured, ((0, 0), (0, 1)))[:, 1:]
    return np.asarray(measured & ((np.arange(measured.shape[1]) % every == 0) | ~following))


def axis_lengths(sample_id: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return axis name -> length, from variable name -> shape. Raises TraceError for contradictory lengths."""
    lengths: dict[str, int] = {}
    for name, shape in shapes.items():
        dims = VARIABLES[name].dims
        if len(dims) != len(shape):
            raise TraceError(f"sample '{sample_id}': {name} has axes {dims}, got shape {shape}")
        for dim, length in zip(dims, shape, strict=True):
            if lengths.setdefault(dim, length) != length:
                raise TraceError(
                    f"sample '{sample_id}': {name} has {length} along {dim}, another variable {lengths[dim]}"
                )
    return lengths


FORMAT, FORMAT_VERSION = "perturbkv-trace", 5
AXES = {
    "sample": "sample id",
    "config": "eviction configuration",
    "step": "decode step",
    "layer": "measured decoder layer",
    "decoder_layer": "decoder layer, measured or not",
    "head": "query head",
    "answer_token": "place in a generated answer",
    "d_value": "component of a head's output",
    "d_model": "component of a hidden state",
    "key": "position of a cache entry",
    "kept_byte": "place in kept_code",
    "prompt_entry": "place in prompt_token",
    "lost_entry": "place among the evicted entries that add most",
    "place": "where entries stood that went: 0 sink, 1 prompt, 2 own text, 3 recent",
}
"""Axis of a trace file -> the meaning of its coordinate."""
FLAGS = {
    "failure": Variable((), "1", "why the sample failed; empty where it is complete", "str"),
    "complete": Variable((), "1", "1 where every number of the sample is there", "uint8"),
}
"""Variables of a trace file beyond those of a trace: the state of each sample."""
STORED = {**VARIABLES, **FLAGS}
"""All variables of a trace file."""


def least_bytes(sizes: Mapping[str, int], names: set[str]) -> int:
    """Return a lower bound of a trace file's bytes: those of its prompts' tokens, which are uncompressed.

    `sizes` are the lengths of its axes, `names` those of its variables. Codes of kept sets are compressed.
    """
    variables = [
        variable
        for name, variable in VARIABLES.items()
        if name in names and variable.is_concatenated and name != "kept_code"
    ]
    return sum(
        math.prod(sizes[axis] for axis in variable.axes) * np.dtype(variable.dtype).itemsize for variable in variables
    )
