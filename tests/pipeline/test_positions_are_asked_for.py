"""Who may ask for positions in the cache, and what is refused by name before a model runs."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from perturbkv.cache import entries
from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError, ModelError, UnknownNameError
from perturbkv.selection.grid import grid
from perturbkv.selection.policies import registry
from tests.pipeline.test_positions_inside_the_cache import INSIDE, KEPT, PROMPT, SINKS, SNAPKV
from tests.support.models import tiny_adapter
from tests.support.resolved import answer, every, trace_sample

CHANGING = {
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "longrope": ("phi3", {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 256,
    }),
}  # fmt: skip


@pytest.mark.parametrize("rope", CHANGING)
def test_rotations_that_do_not_compose_are_refused_before_anything_runs(
    rope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, asked = CHANGING[rope]
    more = {"original_max_position_embeddings": 256} if rope == "longrope" else {}
    adapter = tiny_adapter(family, rope_parameters=asked, **more)
    trace_sample(adapter, PROMPT, RunConfig("m", "d", (KEPT,)))
    monkeypatch.setattr(adapter.model, "forward", lambda *given, **more: pytest.fail("the model ran"))
    for ask in (
        lambda: trace_sample(adapter, PROMPT, RunConfig("m", "d", (KEPT, INSIDE))),
        lambda: answer(adapter, PROMPT, (INSIDE,), 3),
    ):
        with pytest.raises(ModelError, match=rf"got '{rope}' of model 'tiny-{family}'.*use positions=kept$"):
            ask()


def test_every_known_type_of_frequencies_is_taken_or_refused() -> None:
    config = AutoConfig.for_model("llama")
    for kind in ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional"):
        config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4}
        entries.check_positions(every((KEPT, SNAPKV)), config, "m")
        if kind in entries.COMPOSING_ROPE_TYPES:
            entries.check_positions(every((INSIDE,)), config, "m")
        else:
            with pytest.raises(ModelError, match=kind):
                entries.check_positions(every((INSIDE,)), config, "m")


@pytest.mark.parametrize("name", [info.name for info in registry.known() if not info.needs_scores])
def test_every_policy_that_evicts_places_keys_inside_the_cache_and_others_say_why_not(name: str) -> None:
    info = registry.info(name)
    asked = {"policy": [f"{name}(positions={where})" for where in ("kept", "in-cache")], "window": 5}
    if name in {"quest", "vertical-slash"}:
        with pytest.raises(ConfigError, match=rf"policy '{name}' has no option 'positions'; its options: "):
            grid(64, **asked)
        return
    kept, inside = grid(20, selection=info.selections[0], **asked)
    assert (kept.positions, inside.positions) == ("kept", "in-cache")
    assert "positions" not in kept.policy.options, "a choice at the default is the choice without it"


def test_a_label_names_the_positions() -> None:
    assert INSIDE.label() == KEPT.label().replace(f"sinks={SINKS}", f"sinks={SINKS}, positions=in-cache")
    run = RunConfig("m", "d", (KEPT, INSIDE))
    assert RunConfig.from_json(run.to_json()) == run
    with pytest.raises(UnknownNameError, match="unknown positions 'inside'; known: "):
        grid(12, policy="streaming-llm(positions=inside)", selection="position", window=5)
