"""Presses in the same run: our kept sets where both have a method, what their users would decode, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import perturbkv as pk
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import load_model
from perturbkv.selection.grid import configuration
from perturbkv.selection.policies import kvpress
from perturbkv.storage.trace.trace_file import read_trace
from tests.kvpress.test_kept_sets_equal_kvpress import SYSTEMS, tiny
from tests.support.models import token_ids
from tests.support.resolved import answer, trace_sample

TOKENS, B = 512, 128
PRESSES = {
    "SnapKV": "SnapKVPress",
    "CriticalKV": "CriticalKVPress(SnapKVPress())",
    "AdaKV": "AdaKVPress(SnapKVPress())",
    "CriticalAdaKV": "CriticalAdaKVPress(SnapKVPress())",
    "PyramidKV": "PyramidKVPress",
    "TOVA": "TOVAPress",
    "StreamingLLM": "StreamingLLMPress",
}
PROMPT = Prompt("s", token_ids(TOKENS, seed=5), 0, question_tokens=9)


def measured(adapter: Adapter, configs: tuple[pk.EvictionConfig, ...], **run: Any) -> pk.Trace:
    asked = RunConfig("m", "d", configs, samples=1, **run)
    return pk.Trace.from_samples(asked, [trace_sample(adapter, PROMPT, asked)], {})


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["MHA", "GQA"])
def test_seven_policies_and_their_presses_are_one_in_one_run(heads: tuple[int, int]) -> None:
    adapter = tiny(*heads)
    assert set(PRESSES) == set(SYSTEMS)
    ours = [
        configuration(B, preset="kvpress", policy=policy, selection=selection)
        for _, policy, selection in SYSTEMS.values()
    ]
    theirs = [configuration(B, policy=f"kvpress:{PRESSES[name]}") for name in SYSTEMS]
    trace = measured(adapter, (*ours, *theirs))
    for place, name in enumerate(SYSTEMS):
        assert trace.same_kept(place, place + len(ours)).all(), name
        for quantity in (
            "perturbation_isolated",
            "perturbation_propagated",
            "theta",
            "retained_mass",
            "final_drift_l1",
        ):
            one, other = (trace.arrays[quantity][0, config] for config in (place, place + len(ours)))
            np.testing.assert_allclose(one, other, rtol=2e-3, err_msg=f"{name}: {quantity}")
    assert (trace.arrays["held_share"] == trace.arrays["held_share"][0, 0]).all()


@pytest.mark.parametrize("name", ["SnapKV", "AdaKV"], ids=["removes", "masks"])
def test_what_is_measured_is_what_the_presses_users_decode(name: str) -> None:
    """The residual stream of the next token, from the cache that the press itself left, position n."""
    adapter = tiny(6, 2)
    trace = measured(adapter, (configuration(B, policy=f"kvpress:{PRESSES[name]}"),), save=("outputs",))
    cache, seen = DynamicCache(), []
    press = kvpress.build(trace.run.configs[0].policy)
    press.compression_ratio = 1 - B / TOKENS
    with torch.no_grad():
        with press(adapter.model):
            adapter.model.model(torch.tensor([PROMPT.token_ids]), past_key_values=cache)
        hooks = [layer.register_forward_hook(lambda *args: seen.append(args[-1])) for layer in adapter.layers]
        token = torch.tensor([[int(trace.arrays["token_id"][0, 0])]])
        adapter.model(token, past_key_values=cache, position_ids=torch.tensor([[TOKENS]]))
    for hook in hooks:
        hook.remove()
    for attention in adapter.attentions:
        attention.masked_key_indices = None
        attention._modules.pop("rotary_emb", None)
    for layer, hidden in enumerate(seen):
        ours, full = (trace.arrays[key][0] for key in ("hidden", "hidden_full"))
        theirs = (hidden[0] if isinstance(hidden, tuple) else hidden).squeeze().numpy()
        np.testing.assert_allclose(ours[0, 0, layer], theirs, rtol=1e-3, atol=1e-3 * np.abs(theirs).max())
        assert np.abs(ours[0, 0, layer] - full[0, layer]).max() > 1e-2 * np.abs(theirs).max(), (
            "it is not the full run's"
        )


def test_importing_kvpress_changes_no_number() -> None:
    """In a process of its own: measured before the import, and after."""
    code = """
import sys
import numpy as np
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.selection.grid import grid
from tests.support.models import tiny_adapter, token_ids
from tests.support.resolved import trace_sample
adapter, prompt = tiny_adapter(), Prompt("s", token_ids(90, seed=1), 0, question_tokens=5)
run = RunConfig("m", "d", grid(40, policy=("snapkv", "adakv", "h2o")), steps=2, save=("outputs",), generate=3)
first = trace_sample(adapter, prompt, run).arrays
assert "kvpress" not in sys.modules
import kvpress
second = trace_sample(adapter, prompt, run).arrays
assert all(np.array_equal(first[name], second[name], equal_nan=True) for name in first), "other numbers"
sys.stdout.write("same")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("same"), done.stderr


def test_presses_generate_and_answer_from_what_they_keep() -> None:
    adapter = tiny(6, 2)
    configs = [configuration(B, policy=f"kvpress:{PRESSES[name]}") for name in ("SnapKV", "AdaKV")]
    ours = [configuration(B, preset="kvpress", policy=policy, selection="attention") for policy in ("snapkv", "adakv")]
    found = answer(adapter, PROMPT, [*configs, *ours], 6)
    assert found.evicted[:2] == found.evicted[2:] and found.held[:2] == pytest.approx([B / TOKENS] * 2)
    for scenario in ("regular", "context-only"):
        found = answer(adapter, PROMPT, configs, 3, scenario=scenario)
        n = TOKENS - (9 if scenario == "context-only" else 0)
        assert found.held == pytest.approx([B / n] * 2)


def test_a_press_is_written_in_one_way_and_stored_whole() -> None:
    written = (
        "kvpress:CriticalKVPress(SnapKVPress())",
        "kvpress:CriticalKVPress(press=SnapKVPress)",
        "kvpress:CriticalKVPress(SnapKVPress(window_size=64, kernel_size=5), epsilon=1e-4)",
    )
    configs = pk.grid(B, policy=written, selection=("attention", "two-stage"))
    assert [config.label() for config in configs] == ["kvpress:CriticalKVPress(press=SnapKVPress()):given b=128 kv"]
    (one,) = pk.grid(B, policy="kvpress:CriticalAdaKVPress(CriticalKVPress(SnapKVPress(kernel_size=3)))", window=8)
    run = RunConfig("m", "d", (one, *configs))
    again = RunConfig.from_json(run.to_json())
    assert again == run and again.labels() == run.labels() and again.to_json() == run.to_json()
    options = json.loads(run.to_json())["configs"][0]["policy_options"]
    inner = options.pop("press")
    assert options == {"alpha_safeguard": 0.2, "epsilon": 0.0001, "first_stage_ratio": 0.5}
    assert inner["choice"] == "CriticalKVPress(press=SnapKVPress(kernel_size=3))"
    assert inner["options"]["press"]["options"] == {"kernel_size": 3, "window_size": 64}
    assert again.configs[0].flat()["policy_press"] == "CriticalKVPress(press=SnapKVPress(kernel_size=3))"


@pytest.mark.parametrize(
    ("written", "kind", "said"),
    [
        ("kvpress:SnapPress", UnknownNameError, "unknown press 'SnapPress'; nearest of .* known: SnapKVPress, "),
        ("kvpress:SnapKVPress(0.5)", ConfigError, "compression_ratio of press 'SnapKVPress' is what --budget says"),
        ("kvpress:AdaKVPress(KnormPress(compression_ratio=0.5))", ConfigError, "compression_ratio of press 'Knorm"),
        ("kvpress:SnapKVPress(window=3)", ConfigError, "takes no 'window'; its parameters: window_size, kernel_size"),
        ("kvpress:AdaKVPress", ConfigError, "press 'AdaKVPress' needs press: write kvpress:AdaKVPress\\(press=…\\)"),
        ("kvpress:AdaKVPress(AdaKVPress(KnormPress()))", ConfigError, "cannot be made: AssertionError: AdaKVPress"),
        ("kvpress:AdaKVPress(SnapKVPress(), press=KnormPress())", ConfigError, "gets one parameter twice"),
        ("kvpress:AdaKVPress(StreamPress())", UnknownNameError, "press 'StreamPress'; nearest of .* known: Streaming"),
        ("kvpress:SnapKVPress:two-stage", ConfigError, "by no selection of ours: leave ':two-stage' out"),
        ("kvpres:SnapKVPress", UnknownNameError, "unknown policy 'kvpres"),
    ],
)  # fmt: skip
def test_what_is_no_press_gets_one_line(written: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said) as caught:
        pk.grid(B, selection=written)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("granularity", "query"), ("protect_first", 4), ("protect_recent", 40)])
def test_choices_of_ours_that_a_press_does_not_take_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"keeps what it keeps, per key/value head: expected {field} .*, got {value}"):
        pk.grid(B, policy="kvpress:SnapKVPress", **{field: value})
    with pytest.raises(ConfigError, match="floor has no effect here"):
        pk.grid(B, policy="kvpress:SnapKVPress", floor=0.1)


def test_a_press_that_fails_says_so_in_its_own_words() -> None:
    with pytest.raises(
        ConfigError, match="reading the prompt raises AssertionError: Query length 512 should be greater"
    ):
        measured(tiny(4, 4), (configuration(B, policy="kvpress:SnapKVPress(window_size=600)"),))


PRESS = "kvpress:CriticalKVPress(SnapKVPress(window_size=8))"
Run = Callable[..., Any]


def test_the_command_compares_a_press_and_goes_on(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    side = f"snapkv:attention,{PRESS},kvpress:ChunkKVPress(KnormPress())"
    ran = perturbkv("heads", *tiny, "--granularity", "kv", "--compare", side, "-o", "out")
    assert ran.code == 0, ran.err
    assert "kvpress:CriticalKVPress" in ran.out
    trace = read_trace(tmp_path / "out" / "trace.h5")
    assert trace.attrs["kvpress_version"] == "0.5.5"
    assert [config.policy.name for config in trace.run.configs][1:] == [
        "kvpress:CriticalKVPress",
        "kvpress:ChunkKVPress",
    ]
    held = trace.arrays["held_share"].mean(axis=0)
    n = trace.arrays["prompt_tokens"].astype(float)
    np.testing.assert_allclose(held[:2], (24 / n).mean())
    chunks = [20 * max(1, int(-(-int(tokens) // 20) * 24 / tokens)) / tokens for tokens in n]
    assert held[2] < held[0] and held[2] == pytest.approx(np.mean(chunks), rel=0.25), (
        "whole chunks: what was really kept"
    )
    again = perturbkv("heads", *tiny, "--granularity", "kv", "--compare", side, "-o", "out")
    assert again.code == 0 and "there already" in again.err
    more = perturbkv("trace", *tiny[:-2], "--policy", PRESS, "--granularity", "kv", "-o", "t.h5")
    assert more.code == 0, more.err
    asked = perturbkv("heads", "out/trace.h5", "--compare", f"attention,{PRESS}", "-o", "f", "--json")
    (comparison,) = asked.json()["comparisons"]
    assert comparison["treatment"]["policy"] == "kvpress:CriticalKVPress(press=SnapKVPress(window_size=8))"


def test_the_command_generates_lists_and_plans_presses(perturbkv: Run, tiny: list[object]) -> None:
    made = perturbkv("generate", *tiny[:-2], "--policy", PRESS, "--max-new-tokens", "3", "-o", "g", "--json")
    assert made.code == 0, made.err
    planned = perturbkv("trace", *tiny[:-2], "--policy", PRESS, "--dry-run")
    assert planned.code == 0 and "24 asked for" in planned.out
    listed = perturbkv("list", "policies", "kvpress:SnapKVPress", "--json")
    assert listed.json()["options"] == {
        "window_size": {"default": "64", "about": ""}, "kernel_size": {"default": "5", "about": ""},
    }  # fmt: skip
    again = perturbkv(
        "generate", *tiny[:-2], "--policy", PRESS, "--max-new-tokens", "3", "-o", "h", "--compress-over", "60"
    )
    assert again.code == 2 and "decides itself when its cache is compressed" in again.err


@pytest.mark.parametrize(
    "policy", ["kvpress:SnapPress", "kvpress:FinchPress", "kvpress:SnapKVPress(0.5)", "kvpress:QFilterPress"]
)
def test_the_command_refuses_in_one_line_and_writes_nothing(
    policy: str, perturbkv: Run, tiny: list[object], tmp_path: Path
) -> None:
    ran = perturbkv("trace", *tiny[:-2], "--policy", policy, "-o", "t.h5")
    assert ran.code == 2 and len(ran.err.strip().splitlines()) <= 8 and "Traceback" not in ran.err
    assert not list(tmp_path.iterdir())


def test_python_measures_and_generates(model: Path) -> None:
    loaded = load_model(str(model), device="cpu", dtype="float32")
    prompts = [pk.Prompt.from_text("The quick brown fox jumps over the lazy dog. " * 4, loaded, "Where does it jump?")]
    configs = pk.grid(48, policy=("snapkv", "kvpress:AdaKVPress(SnapKVPress(window_size=16))"), granularity="kv")
    trace = pk.measure(loaded, prompts, configs, progress=False)
    assert [config.is_external for config in trace.run.configs] == [False, True]
    np.testing.assert_allclose(trace.arrays["held_share"][0], trace.arrays["held_share"][0, 0])
    again = pk.measure(loaded, prompts, configs, progress=False)
    np.testing.assert_array_equal(trace.arrays["kept_code"], again.arrays["kept_code"])
    assert len(pk.generate(loaded, prompts, configs, max_new_tokens=2, progress=False)) == 1


@pytest.mark.parametrize(("option", "value"), [("--selection", "two-stage"), ("--window", "8"), ("--alpha", "0.5")])
def test_options_of_ours_beside_presses_alone_are_refused(
    option: str, value: str, perturbkv: Run, tiny: list[object], tmp_path: Path
) -> None:
    asked = [*tiny[:-4], "--budget", 40, "--policy", PRESS, option, value, "-o", "t.h5"]
    ran = perturbkv("trace", *asked)
    assert ran.code == 2 and f"{option} has no effect here" in ran.err and not list(tmp_path.iterdir())
    assert perturbkv("trace", *asked, "--policy", "snapkv", "--dry-run").code == 0
