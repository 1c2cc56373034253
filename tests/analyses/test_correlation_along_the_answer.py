"""Perturbation along the accepted answer and the score of the free one: what may foretell it, and what is circular."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses.correlation.correlation import correlation
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.schema import TEXT, VARIABLES
from perturbkv.trace import SampleTrace, Trace
from tests.support.linked import answered, methods
from tests.support.traces import sample_trace, trace

STEPS, CONFIGS, LAYERS, HEADS = 3, 4, 2, 2
EFFECTS = ("effect_isolated", "effect_propagated", "effect_noise_floor", "effect_noise_floor_isolated", "entry_effect")
"""Variables of `--save effect`, the signed ones first."""
PREDICTORS = {"isolated", "isolated_first", "theta", "theta_hat", "lost"}
CIRCULAR = {"propagated", "kl", "drift", "text_loss"}


def along_answer(scores: Any, *, effect: Any = None, ends: int = STEPS, save: bool = True, seed: int = 0) -> Trace:
    """Random numbers along answers of `STEPS` tokens and one more; the first sample's text ends after `ends` steps.

    `scores` (sample, config); the full cache answers all. `effect` (sample, config): the loss of log p to first order,
    all steps and heads summed; `save`: whether effects are stored. Past a text's end there are no numbers.
    """
    samples, draw = [], np.random.default_rng(seed)
    for place, row in enumerate(np.asarray(scores, dtype=float)):
        made = sample_trace(f"{seed}-{place}", configs=len(row), steps=STEPS, seed=100 * seed + place, optional=True)
        left_out = {*TEXT, "first_logp", "first_logp_full", *(() if save else EFFECTS)}
        arrays: dict[str, Any] = {name: array for name, array in made.arrays.items() if name not in left_out}
        for size in ("retained_mass", "sigma_stage1"):
            arrays[size] = draw.uniform(0.42, 1, arrays[size].shape)
        arrays |= {name: -made.arrays[name] for name in ("text_logp", "text_logp_full")}
        for signed in EFFECTS[:2] if save else ():
            arrays[signed] = draw.standard_normal(arrays[signed].shape)
        if effect is not None:
            noise = arrays["effect_isolated"]
            share = np.asarray(effect)[place] / noise[0].size
            arrays["effect_isolated"] = noise - noise.mean(axis=(1, 2, 3), keepdims=True) - share[:, None, None, None]
        arrays |= {"next_token_id": np.arange(STEPS) + 5, "score": row, "score_full": np.float64(1)}
        if place == 0 and ends < STEPS:
            end_text(arrays, ends)
        samples.append(SampleTrace(f"{seed}-{place}", arrays))
    configs = tuple(methods(np.shape(scores)[1]))
    return trace(*samples, steps=STEPS, text="answer", generate=8, configs=configs, seed=seed)


def end_text(arrays: dict[str, Any], ends: int) -> None:
    """Let the text end with the token that step `ends` − 1 reads: later numbers are NaN, and there is no next token."""
    arrays["steps_measured"], arrays["next_token_id"] = np.asarray(ends), np.array([5, -1, -1])
    for name, array in arrays.items():
        dims = VARIABLES[name].dims
        if "step" in dims and array.dtype.kind == "f":
            beyond = [slice(None)] * array.ndim
            beyond[dims.index("step")] = slice(ends - 1 if name.startswith("text_logp") else ends, None)
            arrays[name] = array.copy()
            arrays[name][tuple(beyond)] = np.nan


def by_hand(found: Trace, sample: int, config: int, steps: int, tokens: int) -> dict[str, float]:
    """Every measure but θ̂ of one sample, whose text has so many measured steps and predicted tokens."""
    at = {name: array[sample] for name, array in found.arrays.items() if "step" in VARIABLES[name].dims}
    heads = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    each = [(step, *head) for step in range(steps) for head in heads]
    norm = sum(float(at["output_norm"][place]) for place in each)
    first_norm = sum(float(at["output_norm"][(0, *head)]) for head in heads)
    total = {name: [float(at[name][(config, *place)]) for place in each] for name in at if name in SUMMED}
    drift = sum(float(at["hidden_drift_l1"][config, step, -1]) for step in range(steps))
    return {
        "isolated": sum(total["perturbation_isolated"]) / norm,
        "isolated_first": sum(float(at["perturbation_isolated"][(config, 0, *head)]) for head in heads) / first_norm,
        "effect": -sum(total["effect_isolated"]),
        "effect_size": sum(map(abs, total["effect_isolated"])),
        "theta": sum(total["theta"]) / norm,
        "lost": 1 - sum(total["retained_mass"]) / len(each),
        "propagated": sum(total["perturbation_propagated"]) / norm,
        "effect_propagated": -sum(total["effect_propagated"]),
        "kl": sum(float(at["logit_kl"][config, step]) for step in range(steps)) / steps,
        "drift": drift / sum(float(at["hidden_norm"][step, -1]) for step in range(steps)),
        "text_loss": sum(float(at["text_logp_full"][t]) - float(at["text_logp"][config, t]) for t in range(tokens)),
    }


SUMMED = ("perturbation_isolated", "perturbation_propagated", "theta", "retained_mass", *EFFECTS[:2])


def theta_hat_by_hand(found: Trace, sample: int, config: int, steps: int) -> float:
    """θ̂ over the norms of the heads with σ > ½ at every step under every configuration."""
    sigma, bound, norm = (found.arrays[name][sample] for name in ("sigma_stage1", "theta_hat", "output_norm"))
    total = weight = 0.0
    for layer, head in np.ndindex(LAYERS, HEADS):
        if all(sigma[c, step, layer, head] > 0.5 for c in range(CONFIGS) for step in range(steps)):
            total += sum(float(bound[config, step, layer, head]) for step in range(steps))
            weight += sum(float(norm[step, layer, head]) for step in range(steps))
    return total / weight if weight else float("nan")


SCORES = np.array([[1, 0, 0.5, 0], [0, 1, 1, 0.5], [0.2, 0.1, 1, 1], [1, 0, 1, 0.7]])


def test_measures_are_those_of_loops_over_the_steps_that_each_text_has() -> None:
    found = along_answer(SCORES, ends=2)
    measured = correlation(found).settings[0].measured
    assert set(measured) == {*PREDICTORS, "effect", "effect_size", *CIRCULAR, "effect_propagated"}
    hats = []
    for sample, (steps, tokens) in enumerate([(2, 1), *[(STEPS, STEPS)] * (len(SCORES) - 1)]):
        for config in range(CONFIGS):
            for name, expected in by_hand(found, sample, config, steps, tokens).items():
                assert measured[name][sample, config] == pytest.approx(expected, rel=1e-12), name
            hats.append(theta_hat_by_hand(found, sample, config, steps))
    np.testing.assert_allclose(measured["theta_hat"].ravel(), hats, rtol=1e-12)
    assert 0 < np.isnan(hats).mean() < 1


def test_in_context_only_the_loss_of_log_p_begins_with_the_first_token() -> None:
    plain = along_answer(SCORES)
    first = {"first_logp": -np.arange(16.0).reshape(4, 4), "first_logp_full": np.full(4, -0.5)}
    found = dataclasses.replace(plain, arrays={**plain.arrays, **first})
    before, after = (correlation(one).settings[0].measured["text_loss"] for one in (plain, found))
    np.testing.assert_allclose(after - before, np.arange(16.0).reshape(4, 4) - 0.5)


def test_where_effects_alone_are_linked_they_are_found_and_nothing_else_is() -> None:
    """An answer's score is the rank of its method's loss of log p to first order; all else is drawn apart."""
    effect = np.random.default_rng(1).standard_normal((24, 5))
    found = correlation(along_answer(ranks(effect), effect=effect))
    (setting,) = found.settings
    assert setting.strength("effect").rho.value == pytest.approx(-1)
    assert setting.strength("effect").auc.value == pytest.approx(1)
    significant = {one.measure for one in setting.baselines if one.rho.significant or one.auc.significant}
    assert significant == {"effect"}
    for name in {*setting.measures.names} - {"effect"}:
        interval = setting.strength(name).rho.interval
        assert interval is not None and interval.low < 0 < interval.high, name
    assert "lowest ρ, by looking: −Δ log p, isolated, −1.00" in str(found.details())


def ranks(effect: Any) -> Any:
    """Scores from 0 to 1, the lower the larger the effect."""
    return 1 - effect.argsort(axis=1).argsort(axis=1) / (effect.shape[1] - 1)


@pytest.mark.parametrize("save", [False, True])
def test_what_is_circular_never_stands_among_what_may_foretell(save: bool) -> None:
    """They are made of the scores alone, a perfect correlation that is no link."""
    found = along_answer(SCORES.repeat(3, axis=0), save=save)
    for name in ("perturbation_propagated", "logit_kl", "effect_propagated", "hidden_drift_l1"):
        if name in found.arrays:
            shape = found.arrays[name].shape
            moved = 2 - found.arrays["score"].reshape(12, CONFIGS, *[1] * (len(shape) - 2))
            found.arrays[name] = np.broadcast_to(moved, shape)  # type: ignore[index]
    result = correlation(found)
    (setting,) = result.settings
    predictors = PREDICTORS | ({"effect", "effect_size"} if save else set())
    circular = CIRCULAR | ({"effect_propagated"} if save else set())
    assert set(setting.measures.predictors) == predictors and set(setting.measures.circular) == circular
    assert setting.strength("kl").rho.value == pytest.approx(-1)
    assert {name for one in setting.contrasts for name in (one.first, one.second)} == predictors
    assert not any(one.rho.significant or one.auc.significant for one in setting.baselines if one.measure in circular)
    names = {setting.measures.names[one] for one in circular}
    tables = [part for part in result.details() if isinstance(part, Table)]
    (apart,) = [one for one in tables if one.title.startswith("circular")]
    assert apart.title == "circular: of the right answer's own tokens these nearly are the score"
    assert {row[1] for row in apart.rows} == names
    others = [cell for one in tables if one is not apart for row in one.rows for cell in row]
    assert names.isdisjoint([*others, *(line.name for line in result.lines())])


def test_the_headline_is_isolated_perturbation_and_the_first_line_says_along_what() -> None:
    result = correlation(along_answer(SCORES, ends=2))
    said = result.conclusion()
    assert "have the larger isolated perturbation along its accepted answer" in said and "first step" not in said
    assert f"ρ = {result.overall[0].strength('isolated').rho.value:.2f}".replace("-", "−") in said
    assert "(mean over up to 3 steps of an accepted answer; " in said
    assert (result.to_dict()["text"], result.measures.headline) == ("answer", "isolated")
    titles = [part.title for part in result.details() if isinstance(part, Table)]
    assert "how often an answer is lost, by isolated L1 over the outputs' norm" in titles
    json.dumps(result.to_dict(), allow_nan=False)


@pytest.mark.parametrize("width", [84, 174])
def test_the_figure_has_a_row_per_measure(width: float) -> None:
    result = correlation(along_answer(SCORES))
    figure = result.plot(width)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(labels) == len(result.measures.names) == 12
    assert [axes.get_title(loc="left") for axes in figure.axes[2:4]] == [
        "Lost by isolated L1, all prompts", "Lost by 1 − S, all prompts"
    ]  # fmt: skip


def test_traces_along_the_answer_are_pooled() -> None:
    both = correlation([along_answer(SCORES), along_answer(SCORES, ends=2, seed=1)])
    alone = [correlation(along_answer(SCORES, ends=ends, seed=seed)).settings[0] for seed, ends in ((0, 3), (1, 2))]
    for name, measured in both.settings[0].measured.items():
        np.testing.assert_array_equal(measured, np.concatenate([one.measured[name] for one in alone]))
    assert (
        both.identity.steps == "mean over 3 steps of an accepted answer, mean over up to 3 steps of an accepted answer"
    )


def given() -> Trace:
    found = along_answer(SCORES)
    return dataclasses.replace(found, run=dataclasses.replace(found.run, text="given"))


def averaged(found: Trace) -> Trace:
    """The trace as if effects had been measured by the mean of both runs' gradients."""
    return dataclasses.replace(found, run=dataclasses.replace(found.run, save=("effect",), effect_gradient="mean"))


def shorter(found: Trace) -> Trace:
    """The trace as if two steps had been asked for."""
    return dataclasses.replace(found, run=dataclasses.replace(found.run, steps=2))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a given text": (
        lambda: correlation(given()),
        "correlation asks what perturbation tells of answers, and made.h5 was measured along another text (--text "
        "given); measure along --text answer or own",
    ),
    "own and answer": (
        lambda: correlation([along_answer(SCORES), answered(methods(4), SCORES, np.ones(4), {"propagated": SCORES})]),
        "got --text answer --steps 3 --save effect in made.h5 and --text own --steps 1 in made.h5; give them singly",
    ),
    "effects in one": (
        lambda: correlation([along_answer(SCORES), along_answer(SCORES, save=False, seed=1)]),
        "expected traces of one text and equal measures, got --text answer --steps 3 --save effect in made.h5 and",
    ),
    "other steps": (
        lambda: correlation([along_answer(SCORES, save=False), shorter(along_answer(SCORES, save=False, seed=1))]),
        "got --text answer --steps 3 in made.h5 and --text answer --steps 2 in made.h5; give them singly",
    ),
    "other gradients": (
        lambda: correlation([along_answer(SCORES), averaged(along_answer(SCORES, seed=1))]),
        "got --text answer --steps 3 --save effect in made.h5 and --text answer --steps 3 --save effect "
        "--effect-gradient mean in made.h5; give them singly",
    ),
    "needle": (
        lambda: pk.needle(needles()),
        "needle ranks methods by the first step of the model's own text, and made.h5 was measured along another "
        "(--text answer); measure along --text own, or ask perturbkv correlation",
    ),
}


def needles() -> Trace:
    """As if the prompts were needles, with digits that are all found."""
    found = along_answer(np.ones((4, 4)))
    options = {"lengths": [300, 400], "depths": [0.0, 1.0], "haystack": "noise"}
    run = dataclasses.replace(found.run, dataset="needle", dataset_options=options)
    digits = {"digits": np.ones((4, 4)), "digits_full": np.ones(4)}
    return dataclasses.replace(found, run=run, arrays={**found.arrays, **digits})


@pytest.mark.parametrize(("ask", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_material_is_refused_in_one_line(ask: Callable[[], Any], said: str) -> None:
    with pytest.raises(TraceError) as error:
        ask()
    assert said in str(error.value)
    assert "\n" not in str(error.value)
