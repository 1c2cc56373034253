"""Soft caps, and keys wider than values, through the whole pipeline; what needs plain logits is refused."""

from __future__ import annotations

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.api.inputs import make_plan
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig, Settings
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ModelError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.run import plan
from perturbkv.scoring import score_registry
from perturbkv.selection.compatibility import check_soft_cap
from perturbkv.selection.grid import configuration
from perturbkv.selection.resolved_config import resolve
from perturbkv.theory import Softmax
from perturbkv.trace import SampleTrace
from tests.oracle import theory
from tests.oracle.sample import Reference, attention_of
from tests.support.models import exact_adapter, tiny_adapter, token_ids, wide_adapter
from tests.support.resolved import answer, prefill_and_evict, trace_sample
from tests.support.traces import kept_of

LENGTH, STEPS, WINDOW = 36, 2, 5
PROMPT = Prompt("s", token_ids(LENGTH, seed=1), 0)
CONFIGS = (
    configuration(14, policy="snapkv(kernel=3)", window=WINDOW, granularity="query"),
    configuration(14, policy="snapkv(kernel=3)", window=WINDOW, selection="attention", granularity="kv"),
    configuration(14, policy="adakv(kernel=3)", window=WINDOW, granularity="kv"),
    configuration(14, policy="h2o", window=WINDOW, granularity="query"),
    configuration(14, policy="snapkv", window=WINDOW, selection="hindsight", granularity="query"),
)


Case = tuple[Adapter, SampleTrace, Reference]


@pytest.fixture(scope="module", params=["capped", "wide"])
def case(request: pytest.FixtureRequest) -> Case:
    """A Gemma 2, whose every second layer slides, or a llama whose values have 5 components and keys 8."""
    adapter = wide_adapter() if request.param == "wide" else exact_adapter("gemma2", 4, 2)
    run = RunConfig("m", "d", CONFIGS, steps=STEPS)
    return adapter, trace_sample(adapter, PROMPT, run), Reference(adapter.model, PROMPT.token_ids, run)


def test_kept_sets_and_isolated_quantities_are_the_naive_decoders(case: Case) -> None:
    _, sample, reference = case
    decoder, apart = reference.decoder, 0.0
    assert sample.arrays["token_id"].tolist() == reference.tokens[:STEPS]
    for index, config in enumerate(CONFIGS):
        for layer in range(decoder.layers):
            for step in range(STEPS):
                held, norms = reference.layer(layer, step), reference.norms(layer, step)
                attention = attention_of(held, decoder.scale, decoder.cap)
                apart = max(apart, float(np.abs(attention - attention_of(held, decoder.scale)).max()))
                for head, (chosen, _) in enumerate(reference.kept(layer, config)):
                    assert kept_of(sample.arrays, index, layer, head) == chosen
                    kept = [i in chosen or i >= LENGTH for i in range(LENGTH + step + 1)]
                    a, values = list(attention[head]), held["value"][head // 2]
                    projection = theory.head_slice(held["w_o"], head, decoder.d_value)
                    for name, expected in (
                        ("perturbation_isolated", theory.perturbation(a, kept, values, projection)),
                        ("theta", theory.theta(a, list(norms[head]), kept)),
                        ("retained_mass", theory.mass(a, kept)),
                    ):
                        found = float(sample.arrays[name][index, step, layer, head])
                        assert found == pytest.approx(expected, rel=1e-5, abs=1e-12), (name, index, layer, step, head)
    assert decoder.cap is None or apart > 0.05, "the cap is far below the logits"


def test_decoding_from_what_is_kept_is_the_naive_decoders(case: Case) -> None:
    """Sliding layers among them; what a model's own attention rounds to float32 is all that is left."""
    _, sample, reference = case
    for index, config in enumerate(CONFIGS):
        for step, evicted in enumerate(reference.evicted(config)):
            full = reference.full[step]
            for layer in range(reference.decoder.layers):
                w_o = reference.decoder.w_o(layer)
                for head in range(reference.decoder.heads):
                    moved = full.head_output[layer][head] - evicted.head_output[layer][head]
                    expected = theory.l1(moved @ theory.head_slice(w_o, head, reference.decoder.d_value))
                    found = float(sample.arrays["perturbation_propagated"][index, step, layer, head])
                    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
            found = float(sample.arrays["logit_kl"][index, step])
            assert found == pytest.approx(theory.kl(full.logits, evicted.logits), rel=1e-4, abs=1e-9)


def test_bytes_are_of_both_widths(case: Case) -> None:
    adapter, sample, reference = case
    entry = reference.decoder.d_head + reference.decoder.d_value
    assert (adapter.d_key, adapter.d_value) == (8, 8 if reference.decoder.cap else 5)
    entries = len(adapter.layers) * adapter.kv_heads * LENGTH
    windows = sample.arrays["unmeasured_bytes"]
    full = entries * entry * 2 + windows
    assert sample.arrays["full_bytes"] == full
    np.testing.assert_allclose(sample.arrays["held_bytes"], sample.arrays["held_share"] * full)
    packed = sample.arrays["cache_bytes"] - sample.arrays["cache_padding_bytes"]
    assert packed == pytest.approx((sample.arrays["held_bytes"] - windows).sum() * 4)


REFUSED = {
    "expected-attention": {"policy": "expected-attention"},
    "obcache-key": {"policy": "obcache-key"},
    "obcache-joint": {"policy": "adakv(by=obcache-joint)"},
    "corrected(mass=linear)": {"correction": "corrected(mass=linear)"},
}


def test_every_other_score_and_correction_takes_capped_logits() -> None:
    plain = {name for name in score_registry.SCORES.names() if score_registry.SCORES.load(name).plain_logits}
    assert plain == set(REFUSED) - {"corrected(mass=linear)"}
    others = [configuration(40, policy=name, window=4) for name in ("snapkv", "caote", "kvzip", "quest")]
    others += [configuration(12, window=4, correction=name) for name in ("corrected(mass=stored)", "corrected-oracle")]
    check_soft_cap(map(resolve, others), 50.0, "m")
    check_soft_cap([resolve(configuration(12, window=4, **more)) for more in REFUSED.values()], None, "m")


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_plain_logits_is_one_line_at_every_door(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, chosen = tiny_adapter(), configuration(12, window=4, **REFUSED[name])
    monkeypatch.setattr(Adapter, "softmax", lambda self, layer: Softmax(self.scale(layer), 50.0))
    doors = (
        lambda: trace_sample(adapter, PROMPT, RunConfig("m", "d", (chosen,))),
        lambda: prefill_and_evict(adapter, PROMPT.token_ids, [chosen], "s"),
        lambda: answer(adapter, PROMPT, [chosen], 2),
    )
    for door in doors:
        with pytest.raises(ModelError) as caught:
            door()
        assert f"'{name}' needs plain logits: it takes a" in str(caught.value) and "\n" not in str(caught.value)
        assert str(caught.value).endswith("and model 'tiny-llama' soft-caps its logits at 50; leave it out")


def test_a_plan_is_refused_before_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "soft_cap", lambda config: 50.0)
    prompts = [pk.Prompt("p", PROMPT.token_ids, 0)]
    with pytest.raises(ModelError, match="score 'obcache-key' needs plain logits: .* soft-caps its logits at 50"):
        make_plan(tiny_adapter(), prompts, [configuration(12, window=4, policy="obcache-key")], Settings(), Resources())
