"""Whether reading a text in parts, beside others or after another equals reading it at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from perturbkv.models import recurrent_states
from perturbkv.models.attention_facts import LayerFacts, RefusedError
from perturbkv.models.interface import AttentionFunction, implementation, intercept, text_config
from perturbkv.models.proof.calls import ERRORS, LOGIT_ERRORS, Call, probe_text, read_tokens, record
from perturbkv.models.proof.layers import IGNORED_KEYWORDS, USED_KEYWORDS, check_entries, sink_parameter


def check_reading(
    model: Any, ids: Tensor, layers: Sequence[LayerFacts], calls: Mapping[int, Call], by_kernel: Tensor
) -> None:
    """Raise RefusedError unless reading in parts equals reading at once, also where another text is read in between.

    What attention is given must be the same too, keys and values among it; `calls` are those of the whole text, and
    `by_kernel` the logits of the attention implementation that the model is loaded with.
    """
    tail, modules = min(4, ids.shape[1] - 1), {index: call.module for index, call in calls.items()}
    whole = read_tokens(model, ids, DynamicCache(config=model.config))[0, -tail:].double()
    if not bool(whole.isfinite().all()):
        return  # which every run says of its samples
    bound = LOGIT_ERRORS[model.dtype] * float((whole - whole.mean()).norm())

    def measure(found: Tensor) -> float:
        return float((found.double() - whole[-len(found) :]).norm()) / bound

    def check(name: str, found: Tensor, seen: str) -> None:
        if not (off := measure(found)) <= 1:
            raise RefusedError(name, f"{seen} (logits off by {off:.1g} bounds){recurrent_states.version_note()}")

    kernel = implementation(model)
    check("kernel", by_kernel[0, -tail:], f"computes by its attention implementation '{kernel}' what attention is not")
    check("logits", read_tokens(model, ids, logits_to_keep=1)[0, -1:], "reads a text otherwise for its last logits")
    check("random", read_tokens(model, ids)[0, -tail:], "reads the same text otherwise a second time")
    rows = torch.cat([ids, probe_text(model, seed=2), probe_text(model, seed=3)])
    check("rows", read_tokens(model, rows)[0, -tail:], "reads a text otherwise beside others in a batch")
    for name, between, seen in (
        ("parts", False, "reads a text in two parts otherwise than at once"),
        ("state", True, "remembers another text outside its cache"),
    ):
        cache = DynamicCache(config=model.config)
        own = vars(cache).keys()
        read_tokens(model, ids[:, :-tail], cache)
        if between:
            read_tokens(model, probe_text(model, seed=1), DynamicCache(config=model.config))
        found, read = _read_on(model, ids[:, -tail:], cache, layers, modules)
        if not between and not measure(found) <= 1 and measure(_read_one_by_one(model, ids, tail)) <= 1:
            seen = "reads on from a cache one token at a time, and several at once otherwise than in one text"
        check(name, found, seen)
        for index, call in read:
            _check_same_entries(index, call, calls[index], LOGIT_ERRORS[model.dtype])
        if more := sorted(vars(cache).keys() - own):
            raise RefusedError("state", f"keeps '{more[0]}' on the cache beside its layers")


def _read_one_by_one(model: Any, ids: Tensor, tail: int) -> Tensor:
    """Return the logits of the last `tail` tokens of a text, each read alone after the ones before it."""
    cache = DynamicCache(config=model.config)
    read_tokens(model, ids[:, :-tail], cache)
    return torch.cat([read_tokens(model, token, cache)[0] for token in torch.split(ids[:, -tail:], 1, dim=1)])


def check_streams(model: Any, ids: Tensor, path: str) -> None:
    """Raise RefusedError unless layers put out a residual stream (row, token, d_model), or several (stream, …)."""
    shapes, expected = list[tuple[int, ...]](), (5, 2, text_config(model).hidden_size)
    with ExitStack() as stack:
        for layer in model.get_submodule(path):
            hook = layer.register_forward_hook(
                lambda module, args, output: shapes.append((output[0] if isinstance(output, tuple) else output).shape)
            )
            stack.callback(hook.remove)
        read_tokens(model, ids[:, :2].expand(5, -1))
    for index, shape in enumerate(shapes):
        if shape[-3:] != expected or len(shape) > 4:
            raise RefusedError("streams", f"puts out numbers of the shape {tuple(shape)}, no residual streams", index)


def _read_on(
    model: Any, ids: Tensor, cache: Cache, layers: Sequence[LayerFacts], modules: Mapping[int, nn.Module]
) -> tuple[Tensor, list[tuple[int, Call]]]:
    """Return the logits of the next tokens of a text, the last two read one by one, and the last one's attention calls.

    Each attention must be what it was for the whole text, and read what its cache holds, or makes of a latent there.
    Raises RefusedError.
    """
    logits, calls = [], list[tuple[int, Call]]()
    for part in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
        calls, found = observe_part(model, part, cache, modules)
        logits.append(found[0])
        for index, call in calls:
            facts = layers[index]
            check_entries(index, call, cache, facts.owner)
            if (call.options["scaling"], call.options.get("softcap")) != (facts.scale, facts.cap):
                raise RefusedError("decoding", "has another scale or cap while it decodes", index)
            if call.options.keys() - IGNORED_KEYWORDS - USED_KEYWORDS or sink_parameter(index, call) != facts.sinks:
                raise RefusedError("decoding", "gives its attention other keywords while it decodes", index)
            if not call.error <= ERRORS[call.query.dtype]:
                off = f"off by {call.error:.1g}"
                raise RefusedError("decoding", f"has an attention that is no softmax while it decodes ({off})", index)
    return torch.cat(logits), calls


def observe_part(
    model: Any, ids: Tensor, cache: Cache, modules: Mapping[int, nn.Module]
) -> tuple[list[tuple[int, Call]], Tensor]:
    """Read the next tokens of a text; return the attention calls with their layers' indices, and the logits."""
    indices, calls = {id(module): index for index, module in modules.items()}, list[tuple[int, Call]]()

    def attend(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        found = stock(module, *args, **kwargs)
        calls.append((indices[id(module)], record(module, args, kwargs, found[0])))
        return found

    with intercept(implementation(model), list(modules.values()), attend):
        logits = read_tokens(model, ids, cache)
    if [index for index, _ in calls] != sorted(modules):
        missing = sorted(modules.keys() - {index for index, _ in calls})
        raise RefusedError("decoding", "does not call the attention interface while it decodes", *missing[:1])
    return calls, logits


def _check_same_entries(index: int, last: Call, whole: Call, bound: float) -> None:
    """Raise RefusedError unless a text's last token reads what is read where the text is read at once.

    A sliding layer reads the last entries.
    """
    for what, read, other in (("keys", last.key, whole.key), ("values", last.value, whole.value)):
        found, expected = read.double(), other[:, :, -read.shape[2] :].double()
        if found.shape != expected.shape or not (found - expected).norm() <= bound * expected.norm():
            raise RefusedError("decoding", f"reads other {what} while it decodes", index)
