"""Which models, granularities, scenarios and configurations a traced sample is held to the oracle in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perturbkv.configs.alpha_table import AlphaTable
from perturbkv.configs.choice import Choice, parse
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.selection.grid import configuration
from tests.support.models import FAMILIES, GATED

WINDOW = 5


def configs(granularity: str) -> tuple[EvictionConfig, ...]:
    base = EvictionConfig(14, "snapkv(kernel=3)", window=WINDOW, granularity=granularity)
    names = ("attention", "two-stage", "hindsight", "value")
    wide = replace(base, budget=Budget(0.6), selection=parse("two-stage(alpha=0.5, score=pooled, epsilon=1e-4)"))
    ends = replace(base, selection=parse("hindsight-attention"), protect_first=3, protect_recent=0.5)
    return (*(replace(base, selection=parse(name)) for name in names), wide, ends)


def pair(granularity: str) -> tuple[EvictionConfig, ...]:
    return configs(granularity)[:2]


def policy_configs(granularity: str) -> tuple[EvictionConfig, ...]:
    fields = {"window": WINDOW, "kernel": 3, "granularity": granularity, "history": 12}
    names = ("pyramidkv", "adakv", "headkv", "h2o", "scissorhands", "tova")
    made = [configuration(14, policy=name, **fields) for name in names]
    adakv = parse("adakv(safeguard=guaranteed, floor=0.7, kernel=3)")
    guaranteed = replace(made[1], policy=adakv, protect_first=2, selection=parse("two-stage(split=total)"))
    return (*made, replace(made[1], selection=parse("attention")), replace(made[3], window=3), guaranteed)


def position_configs(granularity: str) -> tuple[EvictionConfig, ...]:
    """Rows at the prompt's positions and rows at those of their own cache, of several lengths, in one batch."""
    base = EvictionConfig(14, "streaming-llm", "position", WINDOW, granularity=granularity)
    inside = replace(base, policy=parse("streaming-llm(positions=in-cache)"))
    without = parse("streaming-llm(positions=in-cache, sinks=0)")
    some = (inside, replace(inside, budget=Budget(9), policy=without), replace(inside, protect_first=6), base)
    return (
        *some,
        EvictionConfig(Budget(14), window=WINDOW, granularity=granularity),
        replace(inside, budget=Budget(0.7)),
        replace(inside, precision="quantise(bits=4, group=6)"),
        *(
            configuration(14, policy=f"{name}(positions=in-cache, kernel=3)", window=WINDOW, granularity=granularity)
            for name in ("snapkv", "pyramidkv", "adakv")
            if granularity != "layer" or name != "adakv"
        ),
    )


def block_configs(granularity: str) -> tuple[EvictionConfig, ...]:
    """Whole blocks of several sizes beside single entries, in one batch."""
    fields = {"window": WINDOW, "kernel": 3, "granularity": granularity}
    made = [
        configuration(15, block=4, **fields),
        configuration(15, block=4, selection="attention", block_score="max", **fields),
        configuration(22, block=8, alpha=0.5, **fields),
        configuration(21, block=4, protect_first=3, protect_recent=7, **fields),
        configuration(18, block=4, policy="pyramidkv(beta=4)", **fields),
        configuration(18, block=4, policy="h2o", **fields),
        configuration(14, **fields),
        configuration(18, policy="streaming-llm(positions=in-cache)", block=4, window=WINDOW, granularity=granularity),
    ]
    return tuple(made) if granularity == "layer" else (*made, configuration(18, block=4, policy="adakv", **fields))


def precision_configs(granularity: str) -> tuple[EvictionConfig, ...]:
    """Several bits and groups, of few entries, of all of them, and of none before the window, beside 16 bits."""
    fields = {"window": WINDOW, "granularity": granularity, "policy": "snapkv(kernel=3)"}
    made = [
        configuration(14, precision="quantise(bits=4, group=4)", **fields),
        configuration(14, precision="quantise(bits=2, group=3)", selection="attention", **fields),
        configuration(14, **fields),
        configuration(1.0, precision="quantise(bits=8)", **fields),
        configuration(1.0, precision="quantise(bits=2, group=5)", **fields),
        configuration(9, precision="quantise(bits=4, group=4, fill=8)", **fields),
        configuration(14, precision="keys=4-token, values=fp8, group=5; layers 1: keys=fp8", **fields),
        configuration(9, precision="quantise(keys=fp8, values=2-channel, group=4, fill=8)", **fields),
    ]
    adakv = configuration(12, precision="quantise(bits=4, group=4)", **{**fields, "policy": "adakv(kernel=3)"})
    return tuple(made) if granularity == "layer" else (*made, adakv)


_BY_NORM = ("value", "hindsight")


def norm_configs(granularity: str) -> tuple[EvictionConfig, ...]:
    """Every selection that looks at ν, in L2 beside L1, with whole blocks, protected ends and budgets by head."""
    bare: dict[str, Any] = {"window": WINDOW, "granularity": granularity}
    fields = {**bare, "kernel": 3}
    made = [
        configuration(14, selection="two-stage(norm=l2)", **fields),
        configuration(14, selection="two-stage", **fields),
        *(configuration(12, selection=f"{name}(norm={norm})", **bare) for name in _BY_NORM for norm in ("l2", "l1")),
        configuration(15, selection="two-stage(norm=l2, alpha=0.5, score=pooled, epsilon=1e-4)", block=4, **fields),
        configuration(16, selection="two-stage(norm=l2)", protect_first=3, protect_recent=0.5, **fields),
    ]
    adakv = configuration(14, policy="adakv", selection="two-stage(norm=l2)", **fields)
    return tuple(made) if granularity == "layer" else (*made, adakv)


def correction_configs(granularity: str) -> tuple[EvictionConfig, ...]:
    """The three corrections of single entries, of blocks, and of next to nothing, beside none, in one batch."""
    fields = {"window": WINDOW, "granularity": granularity, "policy": "snapkv(kernel=3)"}
    masses = ("corrected", "corrected(mass=linear)", "corrected-oracle")
    made = [configuration(14, correction=one, **fields) for one in masses]
    made += [
        configuration(14, **fields),
        configuration(11, correction="corrected", selection="attention", **fields),
        configuration(15, correction="corrected(mass=linear)", block=4, **fields),
        configuration(0.9, correction="corrected-oracle", **fields),
    ]
    adakv = configuration(12, correction="corrected(mass=linear)", **{**fields, "policy": "adakv(kernel=3)"})
    return tuple(made) if granularity == "layer" else (*made, adakv)


def table_configs(granularity: str) -> tuple[EvictionConfig, ...]:
    """α of a table, per head, per layer and one for all, with every way in which it is a share of something."""
    fields: dict[str, Any] = {"window": WINDOW, "kernel": 3, "granularity": granularity}
    shares = ((0.0, 0.3, 1.0, 0.8), (0.6, 0.1, 0.45, 0.95))
    head, layer = AlphaTable("h.json", "head", shares, (0, 1)), AlphaTable("l.json", "layer", ((0.2,), (0.9,)), (0, 1))
    of_all = AlphaTable("g.json", "global", ((0.7,),))
    made = [
        configuration(14, selection=Choice("two-stage", {"alpha": head}), **fields),
        configuration(14, selection="two-stage", **fields),
        configuration(16, selection=Choice("two-stage", {"alpha": head, "split": "total"}), protect_first=2, **fields),
        configuration(14, selection=Choice("two-stage-uniform", {"alpha": layer}), **fields),
        configuration(15, selection=Choice("two-stage", {"alpha": head}), block=4, **fields),
        configuration(14, selection=Choice("two-stage", {"alpha": of_all}), policy="pyramidkv(beta=4)", **fields),
    ]
    adakv = configuration(14, policy="adakv", selection=Choice("two-stage", {"alpha": head}), **fields)
    return tuple(made) if granularity == "layer" else (*made, adakv)


def page_configs(granularity: str) -> tuple[EvictionConfig, ...]:
    """Every way to choose pages but the drawn one, of several sizes, beside an eviction."""
    fields: dict[str, Any] = {"window": WINDOW, "granularity": granularity}
    group = {"reduce": "max", "product": "mean-of-products"} if granularity == "kv" else {}
    made = [
        *(configuration(17, policy="quest(page=4)", selection=name, **fields)
          for name in ("attention", "two-stage(alpha=0.5)", "value", "hindsight", "hindsight-attention")),
        configuration(19, policy="quest(page=3)", selection="two-stage(alpha=0, norm=l2)", **fields, **group),
        configuration(14, policy="quest(page=1)", selection="two-stage", **fields),
        configuration(0.6, policy="quest(page=4)", selection="attention", **fields),
        configuration(14, kernel=3, **fields),
    ]  # fmt: skip
    return tuple(made)


def template_configs(granularity: str) -> tuple[EvictionConfig, ...]:
    """Windows that ask the text alone beside one that asks the template too, in one batch."""
    fields: dict[str, Any] = {"window": WINDOW, "granularity": granularity}
    made = [
        *(configuration(14, selection=name, kernel=3, window_queries="text", **fields)
          for name in ("attention", "two-stage", "attention-unpooled")),
        configuration(14, selection="two-stage", kernel=3, **fields),
        configuration(14, policy="tova(window_queries=text)", selection="attention", **fields),
        configuration(14, policy="pyramidkv(window_queries=text)", **fields),
        configuration(14, policy="adakv(window_queries=text, kernel=3)", **fields),
    ]  # fmt: skip
    return tuple(made)


def shared_configs(granularity: str) -> tuple[EvictionConfig, ...]:
    """Sets that heads or layers share, with every rule of combining scores, of entries and of blocks, in one batch."""
    fields: dict[str, Any] = {"window": WINDOW, "kernel": 3}
    united = f"{granularity}(reduce=union)"
    table = AlphaTable("h.json", "head", ((0.0, 0.3, 1.0, 0.8), (0.6, 0.1, 0.45, 0.95)), (0, 1))
    made = [
        *(configuration(14, selection=name, granularity=f"{granularity}(reduce={rule})", **fields)
          for name in ("attention", "two-stage") for rule in ("mean", "max", "union")),
        *(configuration(14, selection=name, granularity=granularity, window=WINDOW)
          for name in ("value", "hindsight", "hindsight-attention")),
        configuration(19, granularity=f"{granularity}(reduce=union, block=4)", **fields),
        configuration(19, granularity=f"{granularity}(block=4)", **fields),
        configuration(0.6, granularity=united, protect_first=3, protect_recent=7, **fields),
        configuration(14, granularity=united, selection=Choice("two-stage", {"alpha": table}), **fields),
        configuration(14, policy="h2o", granularity=united, window=WINDOW),
        EvictionConfig(14, "streaming-llm(positions=in-cache)", "position", WINDOW, granularity=granularity),
    ]  # fmt: skip
    return tuple(made)


def gate_configs(granularity: str) -> tuple[EvictionConfig, ...]:
    """Every selection that looks at ν of a model with gates, with them and without, of two windows, in both norms."""
    fields: dict[str, Any] = {"granularity": granularity, "kernel": 3, "window": WINDOW}
    names = ("two-stage", "two-stage(gate=none)", "two-stage(norm=l2)", "attention")
    bare = ("value", "value(gate=none)", "value(norm=l2, gate=none)", "hindsight", "hindsight(norm=l2)")
    made = [
        *(configuration(14, selection=name, **fields) for name in names),
        *(configuration(14, selection=name, window=WINDOW, granularity=granularity) for name in bare),
        configuration(14, selection="two-stage", **{**fields, "window": 8}),
        configuration(14, **fields, precision="quantise(bits=4, group=4)"),
        configuration(14, **fields, correction="corrected"),
    ]
    if granularity == "model":
        return tuple(made)
    pages = {"policy": "quest(page=4)", "selection": "two-stage(alpha=0.5)", "window": WINDOW}
    return (*made, configuration(17, granularity=granularity, **pages), configuration(14, policy="adakv", **fields))


WAYS = (("query", "context-only"), ("kv", "regular"), ("kv", "context-only"))
"""Granularities and scenarios that every family is held to in two configurations, beside the first in five."""
CASES = [
    *((family, "GQA", "query", "regular", "selections") for family in FAMILIES),
    *((family, "GQA", *way, "pair") for family in FAMILIES for way in WAYS),
    ("gpt_oss", "GQA", "kv", "context-only", "selections"),
    ("gpt_oss", "GQA", "kv", "context-only", "policies"),
    ("gemma3_text", "GQA", "kv", "context-only", "positions"),
    ("llama", "MHA", "query", "regular", "selections"),
    ("qwen3", "MQA", "kv", "regular", "selections"),
    ("llama", "GQA", "query", "regular", "policies"),
    ("qwen3", "GQA", "kv", "regular", "policies"),
    ("llama", "GQA", "query", "context-only", "policies"),
    ("llama", "MHA", "query", "regular", "positions"),
    ("phi3", "GQA", "kv", "regular", "positions"),
    ("qwen3", "MQA", "query", "regular", "positions"),
    ("llama", "GQA", "query", "context-only", "positions"),
    ("phi3", "MQA", "kv", "context-only", "positions"),
    ("qwen3", "GQA", "layer", "regular", "selections"),
    ("llama", "GQA", "layer", "regular", "blocks"),
    ("qwen3", "GQA", "kv", "context-only", "blocks"),
    ("llama", "MHA", "layer", "context-only", "blocks"),
    ("phi3", "MQA", "query", "regular", "blocks"),
    ("llama", "GQA", "kv", "context-only", "selections"),
    ("phi3", "GQA", "kv", "regular", "selections"),
    ("llama", "GQA", "kv", "regular", "precisions"),
    ("qwen3", "GQA", "query", "context-only", "precisions"),
    ("gpt_oss", "GQA", "query", "regular", "precisions"),
    ("phi3", "MQA", "kv", "context-only", "precisions"),
    ("llama", "GQA", "layer", "regular", "precisions"),
    ("llama", "GQA", "query", "regular", "norms"),
    ("qwen3", "GQA", "kv", "context-only", "norms"),
    ("gpt_oss", "GQA", "kv", "regular", "norms"),
    ("llama", "MHA", "layer", "regular", "norms"),
    ("phi3", "MQA", "query", "context-only", "norms"),
    ("llama", "GQA", "kv", "regular", "corrections"),
    ("llama", "MHA", "query", "context-only", "corrections"),
    ("qwen3", "GQA", "query", "context-only", "corrections"),
    ("gpt_oss", "GQA", "kv", "regular", "corrections"),
    ("gemma3_text", "GQA", "kv", "context-only", "corrections"),
    ("phi3", "MQA", "query", "regular", "corrections"),
    ("llama", "GQA", "layer", "context-only", "corrections"),
    ("llama", "GQA", "query", "regular", "tables"),
    ("llama", "GQA", "kv", "context-only", "tables"),
    ("phi3", "GQA", "layer", "regular", "tables"),
    ("llama", "GQA", "query", "regular", "pages"),
    ("llama", "MHA", "query", "context-only", "pages"),
    ("qwen3", "GQA", "kv", "context-only", "pages"),
    ("gpt_oss", "GQA", "kv", "regular", "pages"),
    ("phi3", "MQA", "kv", "regular", "pages"),
    ("gemma3_text", "GQA", "query", "context-only", "pages"),
    ("llama", "GQA", "query", "regular", "templates"),
    ("gpt_oss", "GQA", "kv", "regular", "templates"),
    ("qwen3", "MQA", "query", "regular", "templates"),
    ("llama", "GQA", "kv", "regular", "shared"),
    ("phi3", "GQA", "layer", "context-only", "shared"),
    ("llama", "GQA", "head", "regular", "shared"),
    ("qwen3", "MHA", "head", "context-only", "shared"),
    ("llama", "GQA", "model", "regular", "shared"),
    ("gemma3_text", "GQA", "model", "context-only", "shared"),
    ("gpt_oss", "GQA", "head", "regular", "shared"),
    *((GATED, "GQA", granularity, scenario, "gates") for granularity, scenario in (("query", "regular"), *WAYS[1:])),
    (GATED, "GQA", "model", "regular", "gates"),
]
CONFIGS = {
    "pair": pair,
    "selections": configs,
    "policies": policy_configs,
    "positions": position_configs,
    "blocks": block_configs,
    "precisions": precision_configs,
    "norms": norm_configs,
    "corrections": correction_configs,
    "tables": table_configs,
    "pages": page_configs,
    "templates": template_configs,
    "shared": shared_configs,
    "gates": gate_configs,
}
