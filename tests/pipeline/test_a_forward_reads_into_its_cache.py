"""A model gets its cache under the name that its forward gives it, and one that runs without it is found."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ModelError
from perturbkv.models import forward
from perturbkv.models.forward import CACHE_ARGUMENTS, cache_argument, run_with_cache
from perturbkv.selection.grid import configuration
from tests.support.models import FAMILIES, tiny_adapter, token_ids
from tests.support.resolved import answer, trace_sample

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("perturbkv", "analyses", "figures", "cli", "studies", "benchmarks", "docs")
IDS = torch.tensor([token_ids(12)])


class Newer(nn.Module):
    def forward(self, input_ids: Tensor, cache: Cache | None = None, **more: Any) -> SimpleNamespace:
        return SimpleNamespace(cache=cache)


class Older(nn.Module):
    def forward(self, input_ids: Tensor, past_key_values: Cache | None = None, **more: Any) -> SimpleNamespace:
        return SimpleNamespace(past_key_values=past_key_values)


class Nameless(nn.Module):
    def forward(self, input_ids: Tensor, **more: Any) -> SimpleNamespace:
        return SimpleNamespace(past_key_values=DynamicCache())


class Forgetful(nn.Module):
    """Names the argument and makes a cache of its own."""

    def forward(self, input_ids: Tensor, past_key_values: Cache | None = None, **more: Any) -> SimpleNamespace:
        return SimpleNamespace(past_key_values=DynamicCache())


@pytest.mark.parametrize(("model", "name"), [(Newer(), "cache"), (Older(), "past_key_values")])
def test_the_forwards_signature_says_what_its_cache_is_called(model: nn.Module, name: str) -> None:
    cache = DynamicCache()
    assert cache_argument(type(model).forward)[0] == name
    assert getattr(run_with_cache(model, IDS, cache), name) is cache


def test_a_forward_that_names_no_cache_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Nameless.forward to take a cache as .*, got \(input_ids, more\)"):
        run_with_cache(Nameless(), IDS, DynamicCache())


def test_a_forward_that_makes_another_cache_is_found() -> None:
    with pytest.raises(ModelError, match="Forgetful ran without the cache that it was given as past_key_values"):
        run_with_cache(Forgetful(), IDS, DynamicCache())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_name_that_a_forward_passes_over_is_an_error_and_no_wrong_number(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, caches = tiny_adapter(family).model, (DynamicCache(), DynamicCache())
    with torch.inference_mode():
        right = run_with_cache(model, IDS, caches[0]).logits, run_with_cache(model, IDS[:, :1], caches[0]).logits
        monkeypatch.setattr(forward, "cache_argument", lambda forward: ("kept_entries", True))
        assert not torch.equal(right[1], model(input_ids=IDS[:, :1], kept_entries=caches[0]).logits)
        with pytest.raises(ModelError, match="ran without the cache"):
            run_with_cache(model, IDS, caches[1])
    assert caches[1].get_seq_length() == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_takes_a_cache_by_the_same_name(family: str) -> None:
    model, cache, ids = tiny_adapter(family).model, DynamicCache(), IDS[:, :1]
    with torch.inference_mode():
        run_with_cache(model, IDS, cache)
        whole = torch.cat([IDS, ids], dim=1)
        options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
        continued = model.generate(whole, **{cache_argument(type(model).forward)[0]: cache}, **options)
        expected = model(input_ids=whole).logits[0, -1].argmax()
    assert continued[0, -1] == expected
    assert cache.get_seq_length() == whole.shape[1]


def test_measuring_and_generating_use_nothing_that_is_deprecated() -> None:
    adapter, prompt = tiny_adapter(), Prompt("s", token_ids(40), 0, question_tokens=3)
    configs = tuple(configuration(16, policy=name, window=5) for name in ("snapkv", "kvzip", "vertical-slash"))
    run = RunConfig("m", "d", configs, scenario="context-only")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace_sample(adapter, prompt, run)
        answer(adapter, prompt, configs, 4, scenario="context-only")


def named(source: str) -> list[str]:
    """The names of a cache's argument by which calls in a source pass something."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [keyword.arg for call in calls for keyword in call.keywords if keyword.arg == CACHE_ARGUMENTS[1]]


def test_no_call_of_ours_uses_the_deprecated_name() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "_build" not in path.parts]
    assert len(paths) > 300
    assert [path.name for path in paths if named(path.read_text())] == []


def test_a_planted_call_by_the_deprecated_name_is_found() -> None:
    assert named("model(input_ids=ids, past_key_values=cache)") == ["past_key_values"]


class FromZero(nn.Module):
    """Begins at position 0, whatever is cached, unless it is told the positions."""

    def forward(self, input_ids: Tensor, position_ids: Any = None, past_key_values: Any = None, **more: Any) -> Any:
        return SimpleNamespace(past_key_values=past_key_values, positions=position_ids)


def test_a_forward_is_told_the_positions_that_follow_what_is_cached() -> None:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 7, 4), torch.zeros(1, 2, 7, 4), 0)
    assert run_with_cache(FromZero(), IDS, cache).positions.tolist() == [list(range(7, 19))]
    assert run_with_cache(FromZero(), IDS, DynamicCache()).positions.tolist() == [list(range(12))]
    assert run_with_cache(FromZero(), IDS, cache, position_ids=IDS).positions is IDS
