"""One sample through the whole pipeline against the naive decoder, which evicts by masking."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.models.adapter import Adapter
from perturbkv.trace import SampleTrace
from tests.oracle import correction, pages, quantisation, selection, theory
from tests.oracle.decoder import Decoder, Step
from tests.oracle.sample import QUESTION, Reference
from tests.support.configs import flat
from tests.support.models import HEADS, exact_adapter, token_ids
from tests.support.oracle_cases import CASES, CONFIGS
from tests.support.resolved import trace_sample
from tests.support.traces import kept_of

LENGTH, STEPS = 36, 2
TEMPLATE = range(LENGTH - 4, LENGTH - 1)
"""Inside the window, before the answer's first token; silent where the text's queries alone vote."""
HEAD_SCORES = ((1.0, 5.0, 2.0, 2.0), (3.0, 1.0, 1.0, 9.0))
RELATIVE = 1e-5
SAVE = ("outputs", "effect")
LEAST = {"perturbation_isolated_cosine": 1e-24, "effect_isolated": 1e-9}
"""Rounding of numbers whose own is not 1e-12: differences of log p are exact to 1e-10."""


@functools.cache
def adapter_of(family: str, heads: str) -> Adapter:
    """A model whose full run and gradients its cases share."""
    return exact_adapter(family, *HEADS[heads])


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[SampleTrace, Reference]:
    family, heads, granularity, scenario, kind = request.param
    adapter, ids = adapter_of(family, heads), token_ids(LENGTH, seed=1)
    chosen = CONFIGS[kind](granularity)
    run = RunConfig("m", "d", chosen, steps=STEPS, save=SAVE, scenario=scenario, head_scores=HEAD_SCORES)
    prompt = Prompt("s", ids, 0, question_tokens=QUESTION, template_tail=TEMPLATE)
    return trace_sample(adapter, prompt, run), Reference(adapter.model, ids, run, TEMPLATE)


def test_tokens_are_the_full_runs_greedy_choice(case: tuple[SampleTrace, Reference]) -> None:
    sample, reference = case
    assert sample.arrays["token_id"].tolist() == reference.tokens[:STEPS]


def test_kept_positions(case: tuple[SampleTrace, Reference]) -> None:
    sample, reference = case
    for index, config in enumerate(reference.run.configs):
        for layer in range(reference.decoder.layers):
            for head, (kept, stage1) in enumerate(reference.kept(layer, config)):
                assert kept_of(sample.arrays, index, layer, head) == kept
                assert sample.arrays["kept_count"][index, layer, head] == len(kept)
                assert sample.arrays["stage1_count"][index, layer, head] == len(stage1) - config.window


def entries_of_windows(reference: Reference) -> int:
    """Entries that the sliding layers hold whatever is evicted, in all key/value heads."""
    decoder = reference.decoder
    sliding = decoder.config.num_hidden_layers - decoder.layers
    return sliding * decoder.kv_heads * min(reference.n, decoder.config.sliding_window or 0) if sliding else 0


def test_the_cache_holds_each_set_once_per_key_value_head(case: tuple[SampleTrace, Reference]) -> None:
    """A set of all heads is held once for each key/value head; what a block holds counts whole."""
    sample, reference = case
    kv_heads, layers, windows = reference.decoder.kv_heads, reference.decoder.layers, entries_of_windows(reference)
    full = layers * kv_heads * reference.n + windows
    for index, config in enumerate(reference.run.configs):
        sets = [reference.kept(layer, config) for layer in range(layers)]
        stored = len(sets[0]) if config.granularity.name == "query" else kv_heads
        held = sum(len(kept) for layer in sets for kept, _ in layer) * stored / len(sets[0])
        assert sample.arrays["held_share"][index] == pytest.approx((held + windows) / full)
    copied = [index for index, config in enumerate(reference.run.configs) if not config.reads_pages]
    assert sample.arrays["cache_bytes"] - sample.arrays["cache_padding_bytes"] == pytest.approx(
        (sample.arrays["held_share"][copied] * full - windows).sum() * 2 * reference.decoder.d_head * 8
    )


def test_bytes_are_those_of_what_is_stored(case: tuple[SampleTrace, Reference]) -> None:
    """A number takes its bits, a group 32 more, whatever type the run computes in."""
    sample, reference = case
    kv_heads, layers, d_head = reference.decoder.kv_heads, reference.decoder.layers, reference.decoder.d_head
    windows = entries_of_windows(reference) * 2 * 2 * d_head
    assert sample.arrays["unmeasured_bytes"] == windows
    assert sample.arrays["full_bytes"] == layers * kv_heads * reference.n * 2 * 2 * d_head + windows
    for index, config in enumerate(reference.run.configs):
        sets = [reference.kept(layer, config) for layer in range(layers)]
        stored = len(sets[0]) if config.granularity.name == "query" else kv_heads
        asked, places = flat(config), reference.decoder.places
        bits = [
            quantisation.bits_held(asked, len(kept), reference.n, d_head, places[layer])
            for layer, one in enumerate(sets)
            for kept, _ in one
        ]
        gone, sharing = [reference.n - len(kept) for one in sets for kept, _ in one], len(sets[0]) // stored
        bits = [b + correction.bits(flat(config).mass, g, sharing, d_head) for b, g in zip(bits, gone, strict=True)]
        whole = layers * kv_heads * 4 * d_head * (reference.n + len(pages.page_table(flat(config), reference.n)))
        expected = whole if config.reads_pages else sum(bits) * stored / len(sets[0]) / 8
        assert sample.arrays["held_bytes"][index] == expected + windows


def test_bounds_stand_in_their_order(case: tuple[SampleTrace, Reference]) -> None:
    sample, reference = case
    evicts = [index for index, config in enumerate(reference.run.configs) if config.only_evicts]
    moved, theta, hat, relaxed = (
        sample.arrays[name][evicts] for name in ("perturbation_isolated", "theta", "theta_hat", "theta_hat_relax")
    )
    assert (moved <= theta * (1 + 1e-9) + 1e-12).all()
    assert (theta <= hat * (1 + 1e-9) + 1e-12).all()
    evidence = sample.arrays["sigma_stage1"][evicts] > 0.5
    assert (hat <= relaxed * (1 + 1e-9) + 1e-12)[evidence].all()


def alpha_of(reference: Reference, config: EvictionConfig, layer: int, head: int) -> float:
    """The share of stage 1 of the kept set that a query head has."""
    members = selection.groups(flat(config), reference.decoder.heads, reference.decoder.kv_heads)
    return float(selection.alpha(flat(config), next(one for one in members if head in one), layer))


def stored_output(
    reference: Reference, layer: int, head: int, config: EvictionConfig, held: dict[str, Any], kept: list[bool]
) -> np.ndarray:
    """Σ A' V of one head, from the softmax over what is kept, as it is stored; a moved key as far as it moved."""
    few, inside = reference.stored(layer, config, config.in_cache)[head], config.in_cache
    own = head // (reference.decoder.heads // reference.decoder.kv_heads)
    seen = [i for i in range(len(held["key"][own])) if kept[i]]
    keys = [few[i][0] if i in few else held["key"][own][i] for i in seen]
    if inside:
        gap, decoder = len(held["key"][own]) - len(seen), reference.decoder
        unturned = [decoder.unrotated[decoder.places[layer]][own][i] for i in seen]
        keys = [
            further(decoder, few[i][0], gap, layer) if i in few else decoder.rotate(key, gap + stands, layer)
            for stands, (i, key) in enumerate(zip(seen, unturned, strict=True))
        ]
    values = [few[i][1] if i in few else held["value"][own][i] for i in seen]
    logits = [float(held["query"][head] @ key) * reference.decoder.scale for key in keys]
    logits += [] if held["sinks"] is None else [float(held["sinks"][head])]
    return np.sum([a * v for a, v in zip(theory.softmax(logits), values, strict=False)], axis=0)


def further(decoder: Decoder, key: np.ndarray, gap: int, layer: int) -> np.ndarray:
    """A rotated key, rotated on by `gap` positions."""
    return decoder.rotate(key, gap, layer)


def corrected_output(
    reference: Reference, layer: int, head: int, config: EvictionConfig, held: dict[str, Any], kept: list[bool]
) -> np.ndarray:
    """Σ A' V of one head, from the softmax over what is kept and what stands in for the rest."""
    own, query = head // (reference.decoder.heads // reference.decoder.kv_heads), held["query"][head]
    extra = reference.extras(layer, config)[head]
    seen = [i for i in range(len(held["key"][own])) if kept[i]]
    logits = [float(query @ held["key"][own][i]) * reference.decoder.scale for i in seen]
    values = [held["value"][own][i] for i in seen]
    if extra is not None:
        logits, values = [*logits, extra.logit(query)], [*values, extra.value]
    logits += [] if held["sinks"] is None else [float(held["sinks"][head])]
    return np.sum([a * v for a, v in zip(theory.softmax(logits), values, strict=False)], axis=0)


def test_isolated_quantities(case: tuple[SampleTrace, Reference]) -> None:
    sample, reference = case
    heads, group = reference.decoder.heads, reference.decoder.heads // reference.decoder.kv_heads
    for index, config in enumerate(reference.run.configs):
        for layer in range(reference.decoder.layers):
            for step in range(STEPS):
                sets = reference.kept(layer, config, step)
                held = reference.layer(layer, step)
                attention = reference.attention(layer, step)
                sunk = [True] * (held["sinks"] is not None)  # an entry that stays, without a value
                norms = reference.norms(layer, step)
                for head in range(heads):
                    kept_of_head = sets[head][0]
                    kept, stage1 = (
                        [i in chosen or i >= reference.n for i in range(LENGTH + step + 1)] + sunk
                        for chosen in sets[head]
                    )
                    a, smallest = list(attention[head]), min(norms[head])
                    v = [*norms[head], *(0.0 for _ in sunk)]
                    projection = theory.head_slice(held["w_o"], head, reference.decoder.d_head)
                    nothing = np.zeros((len(sunk), reference.decoder.d_head))
                    values = np.concatenate([held["value"][head // group], nothing])
                    entries = a[: len(a) - len(sunk)]
                    full = theory.head_output(a, values, projection)
                    evicted = theory.evicted_output(a, kept, values, projection)
                    alone = evicted
                    if config.quantised or config.in_cache:
                        evicted = stored_output(reference, layer, head, config, held, kept) @ projection
                    if config.corrected:
                        evicted = corrected_output(reference, layer, head, config, held, kept) @ projection
                    changed = "perturbation_change" in sample.arrays
                    expected = {
                        **({"perturbation_eviction": theory.l1(full - alone)} if changed else {}),
                        **({"perturbation_change": theory.l1(evicted - alone)} if changed else {}),
                        "perturbation_isolated": theory.l1(full - evicted),
                        "perturbation_isolated_l2": theory.l2(full - evicted),
                        "perturbation_isolated_cosine": theory.cosine_distance(full, evicted),
                        "effect_isolated": float(reference.gradient(layer, step) @ (evicted - full)),
                        "theta": theory.theta(a, v, kept),
                        "theta_hat": theory.theta_hat(a, v, kept, stage1),
                        "theta_hat_relax": theory.theta_hat_relax(a, v, kept, stage1, smallest),
                        "retained_mass": theory.mass(a, kept),
                        "sigma_stage1": theory.mass(a, stage1),
                        "sigma_topk": theory.sigma_topk(
                            entries, alpha_of(reference, config, layer, head), len(kept_of_head)
                        )
                        + sum(a[len(entries) :]),
                    }
                    for name, number in expected.items():
                        found = float(sample.arrays[name][index, step, layer, head])
                        least = LEAST.get(name, 1e-12)
                        assert found == pytest.approx(number, rel=RELATIVE, abs=least), (name, index, layer, step, head)


def test_what_every_entry_costs_the_text(case: tuple[SampleTrace, Reference]) -> None:
    """Entry by entry A_i ⟨g, ô_h − 𝒱_i⟩ of what went, over all layers, heads and steps."""
    sample, reference = case
    decoder, arrays = reference.decoder, sample.arrays
    for index, config in enumerate(reference.run.configs):
        found = arrays["entry_effect"][index]
        assert len(found) == LENGTH + STEPS and np.isnan(found[reference.n :]).all()
        if config.quantised or (arrays["evicted"][index] and not config.only_evicts):
            assert np.isnan(found).all()
            continue
        expected = np.zeros(reference.n)
        for layer, step, head in np.ndindex(decoder.layers, STEPS, decoder.heads):
            held, (kept, _) = reference.layer(layer, step), reference.kept(layer, config, step)[head]
            projection = theory.head_slice(held["w_o"], head, decoder.d_head)
            projected = held["value"][head * decoder.kv_heads // decoder.heads] @ projection
            attention, stays = reference.attention(layer, step)[head], {*kept, *range(reference.n, len(projected))}
            mass = 1 - sum(attention[i] for i in range(reference.n) if i not in stays)
            output = sum(attention[i] * projected[i] for i in stays) / mass
            for entry in set(range(reference.n)) - stays:
                costs = attention[entry] * reference.gradient(layer, step) @ (output - projected[entry])
                expected[entry] += costs
        np.testing.assert_allclose(found[: reference.n], expected, rtol=RELATIVE, atol=1e-9)
        assert np.nansum(found) == pytest.approx(arrays["effect_isolated"][index].sum(), rel=1e-10, abs=1e-14)


def test_the_losses_that_move_the_output_most(case: tuple[SampleTrace, Reference]) -> None:
    """Entry by entry: ‖A_i V_i W_O^h‖₁ of step 0, of what went, the largest ten of all."""
    sample, reference = case
    arrays, decoder = sample.arrays, reference.decoder
    for layer in range(decoder.layers):
        held = reference.layer(layer, 0)
        attention = reference.attention(layer, 0)[:, : held["key"].shape[1]]
        norms = reference.norms(layer, 0)
        for head in range(decoder.heads):
            added = [float(a * norm) for a, norm in zip(attention[head], norms[head], strict=True)]
            assert float(arrays["weighted_norm"][layer, head]) == pytest.approx(math.fsum(added), rel=RELATIVE)
            for index, config in enumerate(reference.run.configs):
                kept, _ = reference.kept(layer, config)[head]
                gone = sorted((-added[i], i) for i in range(reference.n) if i not in kept)[:10]
                places = [i for _, i in gone] + [-1] * (10 - len(gone))
                assert arrays["lost_position"][index, layer, head].tolist() == places
                lost = [-number for number, _ in gone] + [math.nan] * (10 - len(gone))
                np.testing.assert_allclose(arrays["lost_output"][index, layer, head], lost, rtol=RELATIVE)


def heads(reference: Reference, step: Step, layer: int) -> list[np.ndarray]:
    """o_h of every head: its contribution to the attention output."""
    w_o, d_head = reference.decoder.w_o(layer), reference.decoder.d_head
    return [vector @ theory.head_slice(w_o, head, d_head) for head, vector in enumerate(step.head_output[layer])]


def same(found: np.generic, expected: float, rounding: float = 1e-30) -> None:
    assert float(found) == pytest.approx(expected, rel=RELATIVE, abs=rounding)


def test_propagated_quantities(case: tuple[SampleTrace, Reference]) -> None:
    sample, reference = case
    arrays = sample.arrays
    for index, config in enumerate(reference.run.configs):
        for step, (full, evicted) in enumerate(zip(reference.full, reference.evicted(config), strict=True)):
            for layer in range(reference.decoder.layers):
                where = (index, step, layer)
                outputs = zip(heads(reference, full, layer), heads(reference, evicted, layer), strict=True)
                for head, (u, v) in enumerate(outputs):
                    effect = float(reference.gradient(layer, step) @ (v - u))
                    same(arrays["effect_propagated"][*where, head], effect, rounding=1e-9)
                    same(arrays["perturbation_propagated"][*where, head], theory.l1(u - v))
                    same(arrays["perturbation_propagated_l2"][*where, head], theory.l2(u - v))
                    same(arrays["perturbation_propagated_cosine"][*where, head], theory.cosine_distance(u, v))
            for layer, (u, v) in enumerate(zip(full.hidden, evicted.hidden, strict=True)):
                where, rounding = (index, step, layer), 1e-30 if (u != v).any() else 1e-9  # before the first eviction
                same(arrays["hidden_drift_l1"][where], theory.l1(u - v), rounding)
                same(arrays["hidden_drift_l2"][where], theory.l2(u - v), rounding)
                same(arrays["hidden_drift_cosine"][where], theory.cosine_distance(u, v), rounding)
            same(arrays["final_drift_l1"][index, step], theory.l1(full.final - evicted.final))
            same(arrays["final_drift_l2"][index, step], theory.l2(full.final - evicted.final))
            same(arrays["final_drift_cosine"][index, step], theory.cosine_distance(full.final, evicted.final))
            assert float(arrays["logit_kl"][index, step]) == pytest.approx(
                theory.kl(full.logits, evicted.logits), rel=1e-4
            )
            alike = int(np.argmax(full.logits)) == int(np.argmax(evicted.logits))
            assert bool(arrays["top1_agreement"][index, step]) == alike
            assert float(arrays["draft_acceptance"][index, step]) == pytest.approx(
                theory.draft_acceptance(full.logits, evicted.logits), rel=RELATIVE
            )


def test_log_p_of_the_text(case: tuple[SampleTrace, Reference]) -> None:
    sample, reference = case
    check_log_p(sample, reference)


def check_log_p(sample: SampleTrace, reference: Reference) -> None:
    """Every step's next token, and in context-only the first, which the question's end gives."""
    arrays, tokens = sample.arrays, reference.tokens
    assert arrays["next_token_id"].tolist() == tokens[1 : STEPS + 1]
    runs = {None: reference.full, **{config: reference.evicted(config) for config in reference.run.configs}}
    found = np.concatenate([arrays["text_logp_full"][None], arrays["text_logp"]])
    for row, steps in enumerate(runs.values()):
        expected = [theory.log_probability(steps[step].logits, tokens[step + 1]) for step in range(STEPS)]
        assert found[row] == pytest.approx(expected, rel=RELATIVE)
    if reference.run.scenario == "regular":
        assert not {"first_logp", "first_logp_full"} & arrays.keys()
        return
    first = [reference.decoded(config)[QUESTION - 1] for config in reference.run.configs]
    expected = [theory.log_probability(step.logits, tokens[0]) for step in (reference.prompt[-1], *first)]
    assert [arrays["first_logp_full"], *arrays["first_logp"]] == pytest.approx(expected, rel=RELATIVE)


def test_what_is_compared_with_and_the_floors(case: tuple[SampleTrace, Reference]) -> None:
    """In float64 a floor is one rounding, or the few that were measured: never 0, and far below what is measured."""
    sample, reference = case
    arrays, epsilon = sample.arrays, 2.0**-52

    def floors(name: str, u: np.ndarray, *where: int) -> None:
        for kind, scale in (("", epsilon * theory.l1(u)), ("_l2", epsilon * theory.l2(u)), ("_cosine", epsilon**2 / 2)):
            found = float(arrays[name + kind][where])
            assert scale * (1 - RELATIVE) <= found < 1e4 * (scale if kind != "_cosine" else 1e4 * scale), name + kind

    for step, full in enumerate(reference.full):
        for layer in range(reference.decoder.layers):
            for head, u in enumerate(heads(reference, full, layer)):
                same(arrays["output_norm"][step, layer, head], theory.l1(u))
                same(arrays["output_norm_l2"][step, layer, head], theory.l2(u))
                floors("noise_floor", u, step, layer, head)
                floors("noise_floor_isolated", u, step, layer, head)
        for layer, u in enumerate(full.hidden):
            same(arrays["hidden_norm"][step, layer], theory.l1(u))
            same(arrays["hidden_norm_l2"][step, layer], theory.l2(u))
            floors("hidden_noise_floor", u, step, layer)
        same(arrays["final_norm"][step], theory.l1(full.final))
        floors("final_noise_floor", full.final, step)
        assert epsilon <= float(arrays["logit_kl_noise_floor"][step]) < 1e-12


def test_saved_outputs(case: tuple[SampleTrace, Reference]) -> None:
    sample, reference = case
    for step, full in enumerate(reference.full):
        for layer in range(reference.decoder.layers):
            attention = reference.attention(layer, step)[:, : LENGTH + step + 1]
            stored = sample.arrays["attention_full"][step, layer]
            np.testing.assert_allclose(stored[:, : LENGTH + step + 1], attention, rtol=1e-5)
            assert np.isnan(stored[:, LENGTH + step + 1 :]).all()
            np.testing.assert_allclose(sample.arrays["head_output_full"][step, layer], full.head_output[layer],
                                       rtol=1e-4, atol=1e-6)  # fmt: skip
        np.testing.assert_allclose(sample.arrays["hidden_full"][step], full.hidden, rtol=1e-4, atol=1e-6)
    for index, config in enumerate(reference.run.configs):
        for step, evicted in enumerate(reference.evicted(config)):
            found = (sample.arrays[name][index, step] for name in ("head_output", "hidden"))
            for stored, expected in zip(found, (evicted.head_output, evicted.hidden), strict=True):
                np.testing.assert_allclose(stored, expected, rtol=1e-5, atol=1e-6)
