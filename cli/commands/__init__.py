"""The table of commands: their groups in `perturbkv -h`, each command's summary and function; and former commands.

A command is imported when it runs. Those of the shape "open a trace or measure one, analyse, show, save" are functions
in `eviction` and `answers` that return an `Analysis`; the others have a module of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FILE = "FILE"
"""The name of the command that runs where a path stands in place of a command's name."""


@dataclass(frozen=True)
class Command:
    """A row of the table of commands.

    Attributes:
        name: the command's name, as it is typed.
        summary: its line in the help of its group.
        location: `module:function`, a module of this folder; empty for a group that has commands alone.
        commands: the commands of a group.
    """

    name: str
    summary: str
    location: str = ""
    commands: tuple[Command, ...] = ()


LISTS = (
    Command("models", "List the model aliases, and what else is a model", "listings:models"),
    Command("datasets", "List the data sets, or look at one and its prompts", "datasets:datasets"),
    Command("policies", "List policies and selections, or the options of one", "listings:policies"),
    Command(FILE, "Show what a trace, or a file of prompts or answers, holds", "described_files:describe_file"),
)
CHECKS = (Command("selfcheck", "Compare what runs on a GPU with its reference", "doctor:selfcheck"),)
GROUPS: dict[str, tuple[Command, ...]] = {
    "What eviction does": (
        Command("heads", "Compare selections head by head, isolated and propagated", "eviction:heads"),
        Command("layers", "Follow the residual stream's drift from layer to layer", "eviction:layers"),
        Command("assumption", "Check Assumption 1 per head, in three readings of σ", "eviction:assumption"),
        Command("bound-tightness", "Measure how tight the bounds are, and if they rank", "eviction:bound_tightness"),
        Command("ablation", "Measure what each ingredient or restriction brings", "ablation:ablation"),
        Command("horizon", "Follow the perturbation over many decode steps", "eviction:horizon"),
        Command("tokens", "Show the words that a head keeps and evicts", "eviction:tokens"),
        Command("needle", "Ask every cache for a number hidden in a long text", "eviction:needle"),
        Command("patching", "Find the layers and heads that decide the output", "patching:patching"),
    ),
    "What it costs in answers": (
        Command("quality", "Score the answers from the full and the evicted caches", "answers:quality"),
        Command("correlation", "Ask whether perturbation predicts a lost answer", "answers:correlation"),
        Command("budget", "Find safe budgets, and from which on KL stays low", "budget:budget"),
    ),
    "Make a trace, keep it, look at it": (
        Command("trace", "Run a model with full and evicted caches; write a trace", "trace:trace"),
        Command("generate", "Answer from the full and the evicted caches; compare", "generate:generate"),
        Command("merge", "Join the shards of a run, which --shard leaves", "finished_traces:merge"),
        Command("export", "Write traces as tables, CSV or Parquet", "finished_traces:export"),
        Command("report", "Make one page to look at, of a trace or of several", "finished_traces:report"),
    ),
    "Check another eviction": (
        Command("audit", "Test whether an eviction is broken, or only lossy", "audit:audit"),
    ),
    "This machine, and what there is to choose from": (
        Command("list", "List models, datasets, policies; or describe a file", "", LISTS),
        Command("doctor", "Report versions, devices, folders; selfcheck", "doctor:doctor", CHECKS),
    ),
}  # fmt: skip
COMMANDS = tuple(row for rows in GROUPS.values() for row in rows)
PANELS = {row.name: title for title, rows in GROUPS.items() for row in rows}

_CHECKOUT = "(in a checkout)"
_NO_CARD = "leave it out; export writes tables, and a README of yours describes them"
_MEASURING = ("trace", "heads", "layers", "assumption", "bound-tightness", "ablation", "horizon", "tokens", "needle",
              "quality", "correlation", "budget")  # fmt: skip
FORMER: dict[str, str] = {
    "doctor bench": f"type: python -m benchmarks {_CHECKOUT}",
    "question": f"type: perturbkv patching, or python studies/NAME.py {_CHECKOUT}",
    "question alpha": f"type: python studies/alpha.py {_CHECKOUT}",
    "question measures": f"type: python studies/measures.py {_CHECKOUT}",
    "question regret": f"type: python studies/regret.py {_CHECKOUT}",
    "question split": f"type: python studies/split.py {_CHECKOUT}",
    "question stability": f"type: python studies/stability.py {_CHECKOUT}",
    "question patching": "type: perturbkv patching",
    "budget --savings": f"type: python studies/savings.py {_CHECKOUT}",
    "budget --bytes": f"type: python studies/equal_bytes.py {_CHECKOUT}",
    "quality --judge": f"type: python studies/judge.py {_CHECKOUT}",
    "export --card": _NO_CARD,
    "export --license": _NO_CARD,
    **{f"{name} --no-text": "type: --no-prompts" for name in _MEASURING},
}
"""Former command, or command and option, as typed -> what to do instead. Asked only about what is unknown."""


def former_message(context: Sequence[str], words: Sequence[str]) -> str:
    """Return the error message for unknown words that were a command or an option; empty if they never were one.

    `context` are the known words of the command line before them: `["doctor"]` of `perturbkv doctor bench`.
    """
    for count in range(len(words), 0, -1):
        name = " ".join([*context, *words[:count]])
        if name in FORMER:
            kind = "an option" if words[0].startswith("-") else "a command"
            listed = " ".join(["perturbkv", *context, "-h"])
            return f"expected {kind} that `{listed}` lists, got the former one `{name}`; {FORMER[name]}"
    return ""
