"""Which cache another one of no more bytes beats: by hand, of one head and of two, told bytes and untold ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses.ablation.equal_bytes import DOMINATED, EqualBytes, equal_bytes
from perturbkv.analyses.verdicts import UNDECIDED
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.trace import Trace
from tests.support.measured import config, hand_made

NAN = float("nan")
EVICTED, MORE, ROUNDED, BOTH = (
    config("attention", budget, granularity="kv", precision=precision)
    for budget, precision in ((0.2, "full"), (0.4, "full"), (1.0, "quantise(bits=4)"), (0.4, "quantise(bits=4)"))
)
NOISY = np.array([0.1, 10, 0.2, 5, 0.3, 3])
"""Of six samples: what it multiplies is on neither side of 1, as far as they tell."""


def made(
    losses: Mapping[EvictionConfig, Any], packed: Sequence[float], resident: Sequence[float] = (), samples: int = 6,
    **more: Any,
) -> Trace:  # fmt: skip
    """One head, ‖o_h‖ = 10; sample i loses i + 1 times as much as the first: what is given, a number or one of each."""
    each = np.stack([(1.0 + np.arange(samples)) * one for one in losses.values()], axis=-1)
    count = len(losses)
    arrays = {
        "perturbation_propagated": each[:, :, None, None],
        "noise_floor": np.full((samples, 1, 1), 1e-6),
        "evicted": np.tile([one.budget.value != 1 for one in losses], (samples, 1)),
        "held_bytes": np.tile(1000 * np.array(packed), (samples, 1)),
        "resident_bytes": np.tile(1000 * np.array(resident or packed), (samples, 1)),
        "full_bytes": np.full(samples, 1000.0),
        "held_share": np.full((samples, count), 0.5),
        **more,
    }
    return hand_made(list(losses), arrays)


def verdicts(result: EqualBytes, curve: str = "packed") -> dict[EvictionConfig, str]:
    return {one.config: one.standing(curve).verdict for one in result.points}


def test_who_takes_no_more_bytes_and_loses_less_dominates() -> None:
    losses, packed = {EVICTED: 4.0, MORE: 2.0, ROUNDED: 3.0, BOTH: 1.0}, [0.2, 0.4, 0.3, 0.2]
    result = equal_bytes(made(losses, packed))
    assert verdicts(result) == {EVICTED: DOMINATED, MORE: DOMINATED, ROUNDED: DOMINATED, BOTH: "curve"}
    first = next(one for one in result.points if one.config == EVICTED)
    assert (first.packed.rival, first.packed.ratio) == (BOTH, pytest.approx(0.25))
    assert first.packed.ratio_interval is not None and first.packed.ratio_interval.high == pytest.approx(0.25)
    assert [one.kind for one in result.points] == ["evicted", "both", "rounded", "evicted"], "by bytes, then by loss"
    assert first.relative == pytest.approx(4 * 21 / (6 * 10)), "Σ L1 / Σ ‖o_h‖"
    assert [one.config for one in result.least_losses("packed")] == [BOTH]


def test_more_bytes_dominate_nothing() -> None:
    result = equal_bytes(made({EVICTED: 4.0, MORE: 2.0, ROUNDED: 1.0}, [0.2, 0.4, 0.5]))
    assert set(verdicts(result).values()) == {"curve"}
    assert [one.config for one in result.least_losses("packed")] == [EVICTED, MORE, ROUNDED]


def test_what_samples_do_not_decide_stays_undecided() -> None:
    """BOTH loses less on the mean, though not decidedly; intervals that overlap do not keep MORE from being beaten."""
    result = equal_bytes(made({EVICTED: 2.0, BOTH: 2 * NOISY / 4, MORE: 4.0}, [0.3, 0.2, 0.3]))
    found = {one.config: one for one in result.points}
    assert found[EVICTED].packed.verdict == UNDECIDED and found[EVICTED].packed.rival == BOTH
    assert found[MORE].packed.verdict == DOMINATED and found[MORE].packed.rival == EVICTED
    ends = [found[one].relative_interval for one in (EVICTED, MORE)]
    assert ends[0] and ends[1] and ends[0].high > ends[1].low


def test_few_samples_decide_nothing() -> None:
    result = equal_bytes(made({EVICTED: 4.0, BOTH: 1.0, MORE: 0.5}, [0.2, 0.2, 0.4], samples=3))
    assert verdicts(result) == {EVICTED: UNDECIDED, BOTH: UNDECIDED, MORE: UNDECIDED}
    assert result.conclusion().startswith("Too few samples to decide whether evicting alone is dominated")


def test_rounding_is_a_tie_and_dominates_nothing() -> None:
    result = equal_bytes(made({EVICTED: 1.0, BOTH: 1.0 - 1e-7, ROUNDED: 1.0}, [0.2, 0.1, 0.2]))
    assert set(verdicts(result).values()) == {"curve"}


def test_what_loses_nothing_is_beaten_by_nobody() -> None:
    result = equal_bytes(made({EVICTED: 1.0, ROUNDED: 0.0, MORE: 1.0}, [0.2, 0.4, 0.4]))
    assert verdicts(result) == {EVICTED: "curve", ROUNDED: "curve", MORE: DOMINATED}
    for width in (84, 174):
        result.plot(width)


def test_packed_and_resident_bytes_are_two_curves() -> None:
    result = equal_bytes(made({EVICTED: 2.0, ROUNDED: 1.0}, [0.4, 0.3], [0.4, 1.0]))
    assert verdicts(result) == {EVICTED: DOMINATED, ROUNDED: "curve"}
    assert verdicts(result, "resident") == {EVICTED: "curve", ROUNDED: "curve"}


def test_untold_bytes_are_told_as_that() -> None:
    """One sample's cache does not tell: neither is it 0, nor does it dominate."""
    packed = np.tile([200.0, 400.0, 300.0], (6, 1))
    packed[2, 1] = NAN
    own = np.tile(np.array([0, 2, 0], dtype=np.uint8), (6, 1))
    trace = made({EVICTED: 2.0, MORE: 1.0, ROUNDED: 3.0}, [0.2, 0.4, 0.3], held_bytes=packed, own_entries=own)
    result = equal_bytes(trace)
    assert [one.config for one in result.points] == [EVICTED, ROUNDED, MORE], "what is not told comes last"
    last = result.points[-1]
    assert (last.kind, last.packed.verdict, last.packed.rival) == ("own entries", "", None)
    assert verdicts(result)[ROUNDED] == DOMINATED and verdicts(result, "resident")[MORE] == "curve"
    row = result.table().rows[-1]
    assert row[2] == "not told" and row[4] == "0.40"
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert document["points"][-1]["packed"]["share"] is None
    assert "whether a cache of own entries is dominated cannot be said: its bytes are not told" in result.conclusion()


def test_a_trace_in_which_no_bytes_are_told_still_has_its_losses() -> None:
    own = np.ones((6, 2), dtype=np.uint8)
    nothing = np.full((6, 2), NAN)
    trace = made({EVICTED: 2.0, MORE: 1.0}, [0.2, 0.4], held_bytes=nothing, resident_bytes=nothing, own_entries=own)
    result = equal_bytes(trace)
    assert "its bytes are not told" in result.conclusion()
    assert {row[2] for row in result.table().rows} == {"not told"}
    assert [one.relative for one in result.points] == pytest.approx([0.7, 0.35])
    for width in (84, 174):
        result.plot(width)


def test_caches_of_somebody_stand_under_their_name() -> None:
    own = EvictionConfig(0.4, "cache:mine", "given", 0, "kv")
    trace = made({EVICTED: 2.0, own: 1.0}, [0.2, 0.4], own_entries=np.tile(np.array([0, 1], dtype=np.uint8), (6, 1)))
    result = equal_bytes(trace)
    assert "cache:mine" in [line.name for line in result.lines()][1]
    assert {text.get_text() for text in result.plot().legends[0].get_texts()} >= {"snapkv", "cache:mine", "own entries"}


@pytest.mark.parametrize("configs", [(EVICTED,), (EVICTED, config("two-stage", 0.2, granularity="kv"))])
def test_a_trace_of_one_share_of_bytes_is_refused(configs: Sequence[EvictionConfig]) -> None:
    with pytest.raises(TraceError, match="equal-bytes needs configurations of different bytes"):
        equal_bytes(made(dict.fromkeys(configs, 1.0), [0.2] * len(configs)))


def test_a_trace_without_bytes_is_refused_and_one_of_few_bits_is_not() -> None:
    trace = made({EVICTED: 2.0, MORE: 1.0}, [0.2, 0.4])
    without = {name: array for name, array in trace.arrays.items() if not name.endswith("_bytes")}
    with pytest.raises(TraceError, match="held_bytes"):
        equal_bytes(Trace(**{**vars(trace), "arrays": without}))
    rounded = made({EVICTED: 2.0, ROUNDED: 1.0}, [0.2, 0.4])
    without = {name: array for name, array in rounded.arrays.items() if not name.endswith("_bytes")}
    assert {one.packed.verdict for one in equal_bytes(Trace(**{**vars(rounded), "arrays": without})).points} == {""}


def test_samples_are_those_that_were_measured() -> None:
    rows = equal_bytes(made({EVICTED: 2.0, ROUNDED: 1.0}, [0.2, 0.4])).records()
    assert [row["relative"] for row in rows[:6]] == pytest.approx([0.2 * (1 + place) for place in range(6)])
    assert {(row["kind"], row["packed"]) for row in rows} == {("evicted", 0.2), ("rounded", 0.4)}


def test_the_figure_has_the_points_the_line_and_their_numbers() -> None:
    losses, packed = {EVICTED: 4.0, MORE: 2.0, ROUNDED: 3.0, BOTH: 1.0}, [0.2, 0.4, 0.3, 0.1]
    result = pk.equal_bytes(made(losses, packed, [0.2, 0.4, 1.0, 0.4]))
    axes, other = (one for one in result.plot(174).axes if one.axison)
    (line,) = (one for one in axes.lines if one.get_gid() == "least")
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([pytest.approx(10)], [pytest.approx(35)])
    (line,) = (one for one in other.lines if one.get_gid() == "least")
    assert list(line.get_xdata()) == pytest.approx([20, 40])
    drawn = {box.lines[0].get_xdata()[0]: box.lines[0].get_gid() for box in axes.containers}
    assert {round(share): verdict for share, verdict in drawn.items()} == {
        10: "curve", 20: DOMINATED, 30: DOMINATED, 40: DOMINATED,
    }  # fmt: skip
    numbers = {part for text in axes.texts for part in text.get_text().split(", ")}
    assert {"1", "2", "3", "4"} <= numbers
