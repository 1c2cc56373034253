"""`name(option=value, …)` is read and printed by one grammar, and means what the options of the same name mean."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturbkv.configs.choice import UNNAMED, Choice, parse, split_outside_brackets
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.selections import PRESETS
from perturbkv.errors import ConfigError
from perturbkv.selection.grid import grid
from perturbkv.selection.policies import registry

NAMES = st.from_regex(r"[a-z][a-z0-9_:./-]{0,8}", fullmatch=True).filter(lambda name: name not in ("nan", "inf"))
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**6),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text("ab (),=:1.", max_size=6),
)
CHOICES = st.recursive(
    st.builds(Choice, NAMES),
    lambda inner: st.builds(
        Choice,
        NAMES,
        st.tuples(
            st.lists(st.one_of(inner, PLAIN), max_size=1), st.dictionaries(NAMES, st.one_of(inner, PLAIN), max_size=3)
        ).map(lambda made: {**({UNNAMED: made[0][0]} if made[0] else {}), **made[1]}),
    ),
    max_leaves=6,
)


@pytest.mark.slow
@given(CHOICES)
def test_what_is_printed_is_read_again(choice: Choice) -> None:
    assert parse(str(choice)) == choice


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("snapkv", Choice("snapkv")),
        ("adakv( floor = 0.1,safeguard=guaranteed )", Choice("adakv", {"floor": 0.1, "safeguard": "guaranteed"})),
        ("kvpress:Critical(Snap(window_size=64), e=1e-4)",
         Choice("kvpress:Critical", {UNNAMED: Choice("Snap", {"window_size": 64}), "e": 1e-4})),
        ("f.py:S(a=true, b=none, c=\"x, y\", d='(', e=2)",
         Choice("f.py:S", {"a": True, "b": None, "c": "x, y", "d": "(", "e": 2})),
    ],
)  # fmt: skip
def test_calls_are_read(text: str, expected: Choice) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("", 1, "a name"),
        ("adakv(floor=0.1", 16, "',' or ')'"),
        ("adakv floor", 7, "nothing more"),
        ("adakv(floor=)", 13, "a value"),
        ("adakv(floor=0.1, floor=0.2)", 17, "floor once"),
        ("a(b=1, 2)", 8, "option=value"),
        ("a(b=1))", 7, "nothing more"),
    ],
)
def test_a_mistake_is_told_with_its_character(text: str, place: int, expected: str) -> None:
    with pytest.raises(ConfigError) as found:
        parse(text)
    assert f"at character {place}: expected {expected}" in str(found.value)


def test_separators_inside_brackets_and_quotes_separate_nothing() -> None:
    assert split_outside_brackets("a(x=b:c):d(':'):e", ":") == ["a(x=b:c)", "d(':')", "e"]


@pytest.mark.parametrize(
    ("written", "fields"),
    [
        ({"policy": "adakv(floor=0.1)"}, {"policy": "adakv", "floor": 0.1}),
        ({"policy": "adakv(floor=0, safeguard=guaranteed)"},
         {"policy": "adakv", "floor": 0.0, "safeguard": "guaranteed"}),
        ({"policy": "pyramidkv(beta=5, line=total)"},
         {"policy": "pyramidkv", "beta": 5.0, "line": "total"}),
        ({"selection": "two-stage(alpha=0.5, split=total, score=pooled, epsilon=1e-4)"},
         {"alpha": 0.5, "split": "total", "score": "pooled", "epsilon": 1e-4}),
        ({"selection": "headkv(beta=1.2):two-stage(alpha=1)"},
         {"policy": "headkv", "beta": 1.2, "alpha": 1.0}),
        ({"selection": "streaming-llm(sinks=2, positions=in-cache)"},
         {"policy": "streaming-llm", "selection": "position", "sinks": 2, "positions": "in-cache"}),
        ({"selection": "random(seed=7)"}, {"selection": "random", "seed": 7}),
    ],
)  # fmt: skip
def test_a_call_is_the_configuration_of_its_fields(written: dict[str, Any], fields: dict[str, Any]) -> None:
    (found,) = grid(128, **written)
    (expected,) = grid(128, **fields)
    assert found == expected
    assert found.label() == expected.label()


@pytest.mark.parametrize(("name", "value"), [("line", "prefix"), ("beta", 5)])
def test_what_is_given_comes_before_a_presets_option(name: str, value: object) -> None:
    assert "line" in PRESETS["kvpress"], "the preset sets the option itself"
    (found,) = grid(128, preset="kvpress", policy="pyramidkv", **{name: value})
    assert found.policy.options[name] == value


def test_each_policy_has_its_own_parameters() -> None:
    """A list of floors for two policies would measure SnapKV twice; here it is there once."""
    found: tuple[EvictionConfig, ...] = grid(128, policy=("snapkv", "adakv(floor=0.1)", "adakv(floor=0.3)"))
    assert [str(config.policy) for config in found] == ["snapkv", "adakv(floor=0.1)", "adakv(floor=0.3)"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"policy": "adakv(flor=1)"}, "no option 'flor'; its options: floor, safeguard"),
        ({"policy": "snapkv(floor=1)"}, "its options: pool, kernel"),
        ({"selection": "two-stage(0.5)"}, "no option '0.5'"),
        ({"policy": "adakv(floor=abc)"}, "floor of policy 'adakv' is a number, got 'abc'"),
        ({"selection": "random(seed=1.5)"}, "seed of selection 'random' is a whole number"),
        ({"policy": "adakv(floor=true)"}, "floor of policy 'adakv' is a number"),
        ({"policy": "adakv(floor=2)"}, "floor of policy 'adakv' must lie in"),
        ({"policy": "adakv(floor=0.1)", "floor": 0.2}, "give it once"),
    ],
)
def test_a_parameter_that_is_not_the_owners_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as found:
        grid(128, **asked)
    assert said in str(found.value)


def test_an_option_may_be_true_or_false() -> None:
    off, on = grid(128, policy="expected-attention", selection="attention", use_vnorm=[False, True])
    assert str(off.policy) == "expected-attention(use_vnorm=false)"
    assert str(on.policy) == "expected-attention"
    assert grid(128, policy=str(off.policy), selection="attention") == (off,)
    document = json.loads(json.dumps(off.to_document()))
    assert EvictionConfig.from_document(document) == off
    assert registry.policy_class("expected-attention").options()["use_vnorm"].default_text == "true"


@pytest.mark.parametrize("value", ["1", "0.5", "yes", "none"])
def test_what_is_neither_true_nor_false_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"use_vnorm of .* is true or false, got '{value}'".replace("none", "None")):
        grid(128, policy=f"expected-attention(use_vnorm={value})")


def test_a_number_is_not_true_or_false() -> None:
    with pytest.raises(ConfigError, match="sinks of .* is a whole number, got 'True'"):
        grid(128, policy="expected-attention(sinks=true)")
