"""A dry run's memory is that of the tensors which a sample has at once, on a GPU that is not there."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

import perturbkv as pk
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import Settings
from perturbkv.datasets.prompts import collect
from perturbkv.models.loading import ModelFiles, open_model
from perturbkv.models.stored_weights import WeightStorage
from perturbkv.pipeline.run import footprint
from perturbkv.pipeline.run.plan import Placement, plan
from tests.rehearsal.models import ONE, WITH_COMPILER, tiny
from tests.rehearsal.paper_gpu import Counting, counting_gpu, on_paper
from tests.rehearsal.pretend_gpu import MEMORY
from tests.support.models import tiny_model, token_ids
from tests.support.resolved import resolved_run, trace_sample

pytestmark = WITH_COMPILER
GRID = pk.grid((0.05, 0.1, 0.2, 0.4), policy=("snapkv", "adakv", "pyramidkv"), selection=("attention", "two-stage"))
WITHIN = {"prefill": 0.02, "layer": 0.15, "decoding": 0.3}
"""Stage -> relative error; an index of a kept entry is planned with more bytes than it takes."""


def told(config: Any, tokens: int, configs: list[EvictionConfig], **settings: Any) -> footprint.Memory:
    """What is estimated for a model of these shapes in bfloat16, on a GPU of 80 GiB."""
    files = ModelFiles("paper", None, config, None, "", WeightStorage("unknown"), True)
    placement = Placement(torch.bfloat16, torch.device("meta"))
    prompts = collect([pk.Prompt("p", (5,) * tokens, 0, text_tokens=(5,) * 100)])
    with mock.patch.object(footprint, "block_bytes", lambda device: MEMORY // 64):
        return footprint.estimate_memory(plan(files, placement, prompts, configs, Settings(**settings), Resources()))


def check(found: Counting, estimate: footprint.Memory) -> None:
    """Every stage takes what was told, beside what stays."""
    stays = estimate.weights + estimate.full_cache
    for stage, error in WITHIN.items():
        expected = estimate.statistics + getattr(estimate, stage)
        assert found.peaks[stage] - stays == pytest.approx(expected, rel=error), stage
    assert max(found.peaks.values()) == pytest.approx(estimate.total, rel=0.05)


def llama(layers: int, **more: Any) -> tuple[Any, Any]:
    """Llama 3.1 8B with fewer layers, without weights, and its configuration."""
    config = open_model("random:llama-3.1-8b").config
    config.num_hidden_layers = layers
    return _empty(config), config


def _empty(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


@pytest.mark.parametrize(
    ("tokens", "layers", "steps"), [(8192, 2, 1), (8192, 2, 16), pytest.param(32768, 8, 1, marks=pytest.mark.slow)]
)
def test_an_8b_model_takes_what_was_told(tokens: int, layers: int, steps: int) -> None:
    model, config = llama(layers)
    check(on_paper(model, tokens, GRID, steps=steps), told(config, tokens, GRID, steps=steps))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("granularity", "least"), [("head(product=mean-of-products)", 1.2), ("model(reduce=union)", 1.4), ("model", 0.8)]
)
def test_sets_that_layers_share_take_what_was_told(granularity: str, least: float) -> None:
    """In many layers their joined scores take more than measuring a layer does; means of groups do not."""
    configs = pk.grid(0.1, granularity=granularity, selection="two-stage")
    model, config = llama(24)
    found, estimate = on_paper(model, 8192, configs), told(config, 8192, configs, steps=1)
    stays = estimate.weights + estimate.full_cache + estimate.statistics
    assert found.peaks["layer"] - stays == pytest.approx(estimate.layer, rel=WITHIN["layer"])
    assert max(found.peaks.values()) == pytest.approx(estimate.total, rel=0.05)
    plain = told(config, 8192, pk.grid(0.1, granularity="kv", selection="two-stage"), steps=1)
    assert estimate.layer > least * plain.layer


@pytest.mark.parametrize("policy", ["kvzip", "scissorhands"])
def test_shorter_loops_take_less_than_was_told(policy: str) -> None:
    configs = pk.grid((0.1, 0.4), policy=policy, selection="attention")
    model, config = llama(1)
    assert max(on_paper(model, 4096, configs).peaks.values()) < told(config, 4096, configs).total


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "knorm", "defensive", "r-kv"])
def test_scores_take_what_was_told(policy: str) -> None:
    """Blocks of long loops take most of a short prompt's prefill."""
    configs = pk.grid((0.1, 0.4), policy=policy, selection="attention")
    model, config = llama(2)
    assert max(on_paper(model, 8192, configs).peaks.values()) == pytest.approx(
        told(config, 8192, configs).total, rel=0.15
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "qwen3", "phi3"])
def test_families_take_what_was_told(family: str) -> None:
    model = tiny_model(family, 8, 4, d_head=64, positions=4096, intermediate_size=1536, dtype=torch.bfloat16).to("meta")
    configs = pk.grid((0.1, 0.4), selection=("attention", "two-stage"))
    found, estimate = on_paper(model, 4000, configs), told(model.config, 4000, configs)
    stays = estimate.weights + estimate.full_cache + estimate.statistics
    assert found.peaks["prefill"] - stays == pytest.approx(estimate.prefill, rel=0.15)


@pytest.mark.slow
def test_numbers_change_no_size() -> None:
    """A sample with numbers, whose heads keep unequal numbers of entries, takes what it takes on paper."""
    shapes = {"d_head": 32, "layers": 2, "positions": 4096, "dtype": torch.bfloat16}
    configs = pk.grid((0.1, 0.4), policy=("snapkv", "adakv"), selection=("attention", "two-stage"))
    with counting_gpu() as found:
        trace_sample(tiny(devices=ONE, **shapes), pk.Prompt("p", token_ids(1500), 0), resolved_run(configs))
    paper = on_paper(tiny_model(**shapes).to("meta"), 1500, configs)
    for stage in ("layer", "decoding"):
        assert found.peaks[stage] == pytest.approx(paper.peaks[stage], rel=0.05), stage


@pytest.mark.slow
def test_masks_of_compressions_take_what_was_told() -> None:
    """Against a run that is compressed at the prompt's end alone, at equally many steps."""
    shapes = {"d_head": 32, "layers": 1, "positions": 4096, "dtype": torch.bfloat16}
    configs, tokens, steps = pk.grid((16, 24, 32, 40), window=8, selection="attention"), 1500, 12
    prompt = pk.Prompt("p", token_ids(tokens), 0, text_tokens=token_ids(steps + 1, seed=2))
    found, estimates = [], []
    for every in (2, 1000):
        fields = {"steps": steps, "compress_every": every, "isolated_every": 16, "text": "given"}
        with counting_gpu() as counted:
            adapter = tiny(devices=ONE, **shapes)
            trace_sample(adapter, prompt, resolved_run(configs, **fields))
        found.append(counted.peaks)
        estimates.append(told(adapter.config, tokens, configs, **fields))
    more = {stage: getattr(estimates[0], stage) - getattr(estimates[1], stage) for stage in ("layer", "decoding")}
    assert {stage: found[0][stage] - found[1][stage] for stage in more} == pytest.approx(more, rel=0.25)
