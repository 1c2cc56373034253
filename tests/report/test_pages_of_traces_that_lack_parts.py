"""What a trace does not hold is left out of its page, which says the command that records it; the rest is there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perturbkv.errors import TraceError
from perturbkv.reporting.facts import answers_part
from perturbkv.reporting.page_blocks import Payload
from perturbkv.reporting.payload import payload
from perturbkv.schema import MEASURED_LAYERS, TEXT, VARIABLES
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import Trace
from tests.support.decoded import array, bundle, inflated, text, trace_of
from tests.support.paged import configs, paged

GOLDEN = Path(__file__).resolve().parents[1] / "store" / "golden"


def small(**more: Any) -> Trace:
    return paged(more.pop("samples", 5), more.pop("of", configs(2, (0.1, 0.2))), layers=2, heads=3, tokens=203, **more)


def without(trace: Trace, *names: str) -> Trace:
    held = {name: array for name, array in trace.arrays.items() if name not in names}
    return dataclasses.replace(trace, arrays=held)


def having(trace: Trace, **arrays: Any) -> Trace:
    return dataclasses.replace(trace, arrays={**trace.arrays, **arrays})


def with_failures(trace: Trace, *names: str, reason: str = "out of memory") -> Trace:
    """The trace, in which these samples failed: they hold NaN."""
    at = [trace.sample_ids.index(name) for name in names]
    arrays = {}
    for name, held in trace.arrays.items():
        arrays[name] = held.copy()
        if VARIABLES[name].axes[0] == "sample" and held.dtype.kind in "iuf":
            arrays[name][at] = np.nan if held.dtype.kind == "f" else 0
    return dataclasses.replace(trace, arrays=arrays, failures=dict.fromkeys(names, reason))


def everything_decodes(made: Payload) -> dict[str, Any]:
    """Every block is named once and inflates to what the document says of it."""
    told = trace_of(made)
    for name in told["arrays"]:
        assert list(array(made, name).shape) == told["arrays"][name]["shape"]
    for number, prompt in told["prompts"].items():
        if prompt["text"]:
            assert text(made, int(number))["pieces"]
        for flat in prompt["held"]:
            bundle(made, int(number), flat // told["heads"], flat % told["heads"])
    return told


OPTIONAL = [name for name, spec in VARIABLES.items() if spec.optional]


@pytest.mark.parametrize(
    ("part", "names", "said"),
    [
        ("kept", ("kept_code", "kept_offset", "kept_length", "kept_digest"), "perturbkv trace"),
        ("prompt", TEXT, "prompts=True"),
        ("losses", ("lost_position", "lost_output", "weighted_norm"), "perturbkv trace"),
        ("attention", ("attention_full",), "--save outputs"),
        ("answers", ("score_full", "score", "digits_full", "digits"), "perturbkv quality"),
        (
            "distances",
            ("perturbation_propagated_cosine", "perturbation_isolated_cosine", "perturbation_isolated_l2",
             "perturbation_propagated_l2", "output_norm_l2", "noise_floor_l2"),
            "perturbkv trace",
        ),
    ],
)  # fmt: skip
def test_what_lacks_is_told_with_its_command(part: str, names: tuple[str, ...], said: str) -> None:
    told = everything_decodes(payload([without(small(attention=True), *names)]))
    assert said in told["lacks"][part]
    assert set(told["lacks"]) - {part} <= {"steps", "answers_text", "pairs", "ablation"}


def test_a_trace_with_nothing_that_is_optional_is_a_page() -> None:
    bare = without(small(), *(name for name in OPTIONAL if not name.startswith("kept_")))
    told = everything_decodes(payload([bare]))
    assert {"prompt", "losses", "attention", "answers", "distances", "steps"} <= told["lacks"].keys()
    assert {prompt["text"] for prompt in told["prompts"].values()} == {None}
    assert np.isfinite(array(payload([bare]), "drift_floor")[0]).all()
    assert np.isnan(array(payload([bare]), "drift_floor")[1:]).all()


def test_digests_alone_tie_what_is_equal_and_show_no_tokens() -> None:
    trace = small(kept=False)
    equal = trace.arrays["kept_digest"].copy()
    equal[:, 1] = equal[:, 0]
    told = everything_decodes(made := payload([having(trace, kept_digest=equal)]))
    verdict = array(made, "verdict")
    assert not verdict[:, told["pairs"].index([0, 1])].any() and verdict[:, told["pairs"].index([2, 3])].any()
    assert told["held_heads"] == {"of": 0, "held": 0, "why": ""} and "kept" in told["lacks"]


def test_without_kept_sets_at_all_there_are_no_pairs_but_everything_else() -> None:
    told = everything_decodes(payload([without(small(), "kept_code", "kept_offset", "kept_length")]))
    assert told["pairs"] == [] and told["conclusions"] == {} and told["ablation"] is None
    assert "kept positions" in told["lacks"]["pairs"] and "verdict" not in told["arrays"] and "mean" in told["arrays"]
    assert {one["ties"] for one in told["measures"]} == {None}


def test_one_sample_has_no_interval_and_few_have_ranges() -> None:
    told = everything_decodes(made := payload([small(samples=1)]))
    assert told["interval"] == "none" and any("One sample" in one for one in told["warnings"])
    for name in ("pair_sum", "total", "kl", "top1", "drift"):
        assert np.isfinite(array(made, name)[..., 0]).all() and np.isnan(array(made, name)[..., 1:]).all(), name
    few = everything_decodes(payload([small(samples=3)]))
    assert few["interval"] == "range" and any("outside which" in one for one in few["warnings"])
    assert everything_decodes(payload([small()]))["interval"] == "interval"


@pytest.mark.parametrize("of", [configs(1, (0.1,)), configs(1, (0.1, 0.2, 0.4))])
def test_one_side_is_a_page_without_pairs(of: Any) -> None:
    told = everything_decodes(payload([small(of=of)]))
    assert told["pairs"] == [] and told["sides"] == ["attention"] and len(told["configs"]) == len(of)
    assert told["start"]["baseline"] == told["start"]["treatment"] == 0
    assert "--selection" in told["lacks"]["pairs"] and "ablation" in told["lacks"]


def test_failed_samples_are_left_out_and_told() -> None:
    told = everything_decodes(made := payload([with_failures(small(samples=7), "p0", "p4")]))
    assert [one["id"] for one in told["samples"]] == ["p1", "p2", "p3", "p5", "p6"]
    assert told["failed"] == [{"id": "p0", "reason": "out of memory"}, {"id": "p4", "reason": "out of memory"}]
    assert any(one.startswith("2 of 7 ") and "p0" in one for one in told["warnings"])
    trace = small(samples=7)
    assert bundle(made, 3, 1, 2)["kept"][0] == trace.kept(5, 0, 1, 2).tolist()
    with pytest.raises(TraceError, match="at least one complete sample"):
        payload([with_failures(small(), *small().sample_ids)])
    with pytest.raises(TraceError, match="at least one trace"):
        payload([])


def test_steps_are_means_over_the_samples_that_have_them() -> None:
    trace = small(steps=4)
    counts = np.array([4, 2, 4, 1, 3])
    past = np.arange(4) >= counts[:, None]
    arrays = {"steps_measured": counts}
    for name, held in trace.arrays.items():
        dims = VARIABLES[name].axes
        if "step" in dims and held.dtype.kind == "f":
            arrays[name] = held.copy()
            np.moveaxis(arrays[name], dims.index("step"), 1)[past] = np.nan
    told = everything_decodes(made := payload([having(trace, **arrays)]))
    assert told["steps"] == 4 and told["step_samples"] == [5, 4, 3, 2]
    assert [one["steps"] for one in told["samples"]] == counts.tolist() and "steps" not in told["lacks"]
    found = array(made, "step_mean")
    for number, name in enumerate(("perturbation_isolated", "perturbation_propagated", "retained_mass")):
        for step in range(4):
            expected = trace.arrays[name][counts > step][:, :, step].mean(axis=0)
            np.testing.assert_allclose(found[number][:, step], expected, rtol=1e-3)


def test_bounds_without_an_end_stay_infinite_and_json_has_no_nan() -> None:
    trace = small()
    bound = trace.arrays["theta_hat"].copy()
    bound[:, 0, 0, 0, 0] = np.inf
    told = everything_decodes(made := payload([having(trace, theta_hat=bound)]))
    at = [one["key"] for one in told["measures"]].index("theta_hat")
    assert np.isinf(array(made, "mean")[at, 0, 0, 0]) and np.isinf(array(made, "sample")[at, :, 0, 0, 0]).all()
    sums = array(made, "pair_sum")[at]  # no share of what has no end, in either direction
    of_first = [place for place, pair in enumerate(trace_of(made)["pairs"]) if 0 in pair]
    assert of_first and np.isnan(sums[of_first]).all() and np.isfinite(np.delete(sums, of_first, 0)[..., 0]).all()
    assert np.isfinite(array(made, "sample")[at, :, 1:]).all()


def test_where_nothing_went_the_distance_of_what_went_is_not_defined() -> None:
    trace = small()
    mass = trace.arrays["retained_mass"].copy()
    mass[:, 0, 0, 0, 1], mass[2, 0, 0, 1, 1] = 1.0, 1.0
    moved = trace.arrays["evicted"].copy()
    moved[:, 2] = 0
    told = everything_decodes(made := payload([having(trace, retained_mass=mass, evicted=moved)]))
    at = [one["key"] for one in told["measures"]].index("gone_distance")
    mean = array(made, "mean")[at]
    assert np.isnan(mean[0, 0, 1]) and np.isnan(array(made, "sample")[at, 2, 0, 1, 1])
    isolated = trace.arrays["perturbation_isolated"][[0, 1, 3, 4], 0, 0, 1, 1]
    expected = (isolated / (1 - mass[[0, 1, 3, 4], 0, 0, 1, 1])).mean()
    np.testing.assert_allclose(mean[0, 1, 1], expected, rtol=1e-6)
    assert any(trace.run.labels()[2] in one for one in told["warnings"])


def test_layers_have_their_own_names_where_some_were_measured() -> None:
    trace = small()
    of_all = {
        name: np.repeat(array, 9, axis=VARIABLES[name].axes.index("decoder_layer"))
        for name, array in trace.arrays.items()
        if "decoder_layer" in VARIABLES[name].axes
    }
    trace = dataclasses.replace(having(trace, **of_all), attrs={MEASURED_LAYERS: "5 11 of 18"})
    told = everything_decodes(payload([trace]))
    assert told["layers"] == [5, 11] and told["decoder_layers"] == 18
    assert ["Layers", "layers 5 11 of 18 measured"] in told["facts"]


def test_text_from_outside_is_written_out() -> None:
    hostile = "\x1b[31m</script><script>alert(1)</script>\u202e\u2028"
    trace = with_failures(small(samples=6), "p5", reason=hostile)
    texts = np.array([hostile * 30] * 6, dtype=object)
    starts = np.tile(np.minimum(np.arange(203), 202), 6).astype(np.int32)
    trace = having(trace, prompt_text=texts, prompt_start=starts)
    trace = dataclasses.replace(
        trace,
        sample_ids=(f"p0{hostile}", *trace.sample_ids[1:]),
        run=dataclasses.replace(trace.run, model=f"m{hostile}", dataset=f"d{hostile.replace('/', '')}"),
        source=f"/tmp/{hostile.replace('/', '')}.h5",
    )
    made = payload([trace])
    shown = [
        json.dumps(made.document, ensure_ascii=False),
        made.title,
        str(made.headers),
        json.dumps(text(made), ensure_ascii=False),
    ]
    assert not any(sign in part for part in shown for sign in "\x1b\u202e\u2028")
    assert "\\x1b[31m" in made.title and "\\u202e" in text(made)["pieces"][-1]


def test_a_very_long_piece_is_cut_and_says_by_how_much() -> None:
    trace = small()
    texts = np.array(["a" * 203 + "b" * 1_000_000] * 5, dtype=object)
    starts = np.tile(np.minimum(np.arange(203), 202), 5).astype(np.int32)
    found = text(payload([having(trace, prompt_text=texts, prompt_start=starts)]))
    assert found["cut_pieces"] and max(map(len, found["pieces"])) <= 500
    assert found["pieces"][-1] == "a" + "b" * 399 + "… [999,601 more characters]"


def test_a_cut_prompt_says_where() -> None:
    found = text(payload([having(small(), cut_tokens=np.full(5, 77))]))
    assert (found["compressed"], found["cut"], found["cut_tokens"]) == (203, 102, 77)


def test_answers_are_scores_texts_or_both() -> None:
    trace = small()
    scores = {"score_full": np.array([1, 0, 1, 1, np.nan]), "score": np.tile([1.0, 0, 0, 0.5], (5, 1))}
    told = trace_of(payload([having(without(trace, "digits", "digits_full"), **scores)]))["answers"]
    assert told["unit"] == "score" and told["full"]["scores"] == [1, 0, 1, 1, None] and told["full"]["texts"] is None
    assert told["full_mean"][0] == 0.75 and told["configs"][3]["mean"][0] == 0.5
    texts = {
        "answer_full": np.array([f"full {n}\x1b" for n in range(5)], dtype=object),
        "answer": np.array([[f"{config} {n}" for config in range(4)] for n in range(5)], dtype=object),
        "expected_answers": np.array(['["7", "seven"]', "", "[]", '["x"]', '["y"]'], dtype=object),
    }
    both = answers_part(having(without(trace, "digits", "digits_full"), **scores, **texts))
    assert both and both["full"]["texts"][1] == "full 1\\x1b" and both["configs"][2]["texts"][4] == "2 4"
    assert both["expected"][:2] == [["7", "seven"], []]
    alone = answers_part(having(without(trace, "digits", "digits_full", "score", "score_full"), **texts))
    assert alone and alone["full"]["scores"] is None and alone["full"]["texts"] == both["full"]["texts"]


def test_several_traces_have_names_of_their_own_and_share_the_room() -> None:
    first, second = (
        dataclasses.replace(small(), source="/a/news.h5"),
        dataclasses.replace(small(), source="/b/news.h5"),
    )
    made = payload([first, second, small()])
    assert [header.name for header in made.headers] == ["news.h5", "news.h5 (2)", "in memory"]
    assert [trace["name"] for trace in made.document["traces"]] == [header.name for header in made.headers]
    np.testing.assert_array_equal(array(made, "mean", 0), array(made, "mean", 1))
    assert made.title == "made · made" and set(made.blocks) >= {"t0-mean", "t1-mean", "t2-mean"}


def test_samples_are_told_apart_by_what_is_shown_of_them() -> None:
    ids = ("a\nb", "a\\nb", "", " ", "__proto__")
    told = trace_of(payload([dataclasses.replace(small(), sample_ids=ids)]))
    shown = [one["id"] for one in told["samples"]]
    assert shown == ["a\\nb", "a\\nb (2)", "(no id)", "(no id) (2)", "__proto__"]


def test_numbers_that_are_none_are_an_error() -> None:
    with pytest.raises(TraceError, match="NaN in 'theta'"):
        payload([having(small(), theta=np.full_like(small().arrays["theta"], np.nan))])


def test_blocks_that_are_named_are_there_and_no_others() -> None:
    made = payload([small(attention=True)])
    told = trace_of(made)
    named = {one["block"] for one in told["arrays"].values()}
    named |= {one[part] for one in told["prompts"].values() for part in ("text", "share", "attention", "heads")}
    assert named == set(made.blocks) and all(inflated(made, one["block"]) for one in told["arrays"].values())


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.h5")), ids=lambda path: path.stem)
def test_files_that_are_kept_are_pages(path: Path) -> None:
    told = everything_decodes(payload([read_trace(path)]))
    assert told["held_heads"]["held"] == told["held_heads"]["of"] > 0 and told["pairs"]
    whose = [one for one in told["warnings"] if one.endswith("failed and is left out: planted failure")]
    assert len(whose) == len(told["failed"])
