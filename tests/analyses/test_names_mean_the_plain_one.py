"""A name that several configurations match means the plain one; where none is, the refusal's names can be typed."""

from __future__ import annotations

import re

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses.pairing import matches
from perturbkv.analyses.questions.stability.head_profiles import resolve, resolve_one
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError
from tests.support.measured import config, hand_made

PLAIN = config("two-stage")
EUCLIDEAN = config("two-stage(norm=l2)")
HALF = config("two-stage(alpha=0.5)")
STORED, LINEAR = (config("two-stage", correction=f"corrected(mass={one})") for one in ("stored", "linear"))
FEW = config("two-stage", precision="quantise(bits=4)")
UNPOOLED = config("two-stage", policy="snapkv(pool=none)")
BLOCKS = config("two-stage", granularity="kv(block=16)")
PER_GROUP = config("two-stage", granularity="kv")
ADA = config("two-stage", policy="adakv")


@pytest.mark.parametrize(
    ("held", "side", "wanted"),
    [
        ([EUCLIDEAN, PLAIN], "two-stage", PLAIN),
        ([STORED, PLAIN, LINEAR], "two-stage", PLAIN),
        ([FEW, PLAIN], "snapkv:two-stage", PLAIN),
        ([UNPOOLED, PLAIN], "snapkv", PLAIN),
        ([UNPOOLED, PLAIN], "snapkv(pool=none)", UNPOOLED),
        ([BLOCKS, PER_GROUP], "two-stage", PER_GROUP),
        ([EUCLIDEAN, PLAIN, STORED], "two-stage(norm=l2)", EUCLIDEAN),
        ([EUCLIDEAN, PLAIN], "two-stage(norm=l1)", PLAIN),
        ([STORED], "two-stage", STORED),  # nothing else matches
        ([STORED, LINEAR], "two-stage", None),
        ([EUCLIDEAN, HALF], "two-stage", None),
        ([PLAIN, ADA], "two-stage", None),
        ([PLAIN, PER_GROUP], "two-stage", None),
    ],
)
def test_what_a_name_means(held: list[EvictionConfig], side: str, wanted: EvictionConfig | None) -> None:
    assert resolve([one for one in held if matches(one, side)], side) == wanted


@pytest.mark.parametrize("held", [[EUCLIDEAN, HALF], [PLAIN, ADA, STORED], [UNPOOLED, FEW, HALF]])
def test_names_that_a_refusal_gives_can_be_typed(held: list[EvictionConfig]) -> None:
    with pytest.raises(ConfigError, match="say which") as told:
        resolve_one(held, "two-stage")
    names = re.findall("'([^']+)'", str(told.value).split("say which")[1])
    assert names
    for name in names:
        assert resolve_one([one for one in held if matches(one, name)], name) in held


def test_what_no_name_tells_apart_is_said_to_be_so() -> None:
    with pytest.raises(ConfigError, match=r"2 configurations that no name tells apart, such as .*mass=stored.*linear"):
        resolve_one([STORED, LINEAR], "two-stage")


def test_stability_takes_what_split_and_measures_leave() -> None:
    """Corrected configurations and other norms beside the plain ones: the plain ones are looked at, gain and all."""
    attention = config("attention")
    configs = (attention, config("attention", correction="corrected"), PLAIN, EUCLIDEAN, STORED)
    suffered = np.random.default_rng(1).lognormal(size=(5, len(configs), 2, 2))
    arrays = {"perturbation_isolated": suffered, "perturbation_propagated": suffered}
    found = pk.stability(hand_made(configs, arrays, layers=2, heads=2))
    assert (found.traces[0].config, found.baseline) == (PLAIN, attention)
    alone = hand_made((attention, PLAIN), {name: one[:, [0, 2]] for name, one in arrays.items()}, layers=2, heads=2)
    assert pk.stability(alone).traces[0].gain == found.traces[0].gain
    itself = pk.stability(hand_made(configs, arrays, layers=2, heads=2), selection="attention")
    assert itself.baseline is None  # not what is corrected of it
