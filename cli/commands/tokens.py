"""`perturbkv tokens`: which words of a prompt a head keeps and evicts under two configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from perturbkv.cli import console
from perturbkv.cli.choices import DEFAULT_COMPARE, parse_compare
from perturbkv.cli.options import CompareOption, JsonOption
from perturbkv.configs.entry_counts import Budget
from perturbkv.errors import ConfigError


def tokens(
    trace: Annotated[Path, Argument(help="A finished trace with its prompts' text", show_default=False)],
    sample: Annotated[str | None, Option(metavar="ID", help="Which prompt", show_default="the first")] = None,
    layer: Annotated[int | None, Option(metavar="N", help="Which layer, from 0", show_default="any")] = None,
    head: Annotated[
        int | None, Option(metavar="N", help="Which query head of it", show_default="which changes most")
    ] = None,
    compare: CompareOption = DEFAULT_COMPARE,
    budget: Annotated[
        str | None, Option("--budget", "-b", metavar="B", help="Of both, as in the trace", show_default="its first")
    ] = None,
    everything: Annotated[bool, Option("--all", help="The whole prompt, nothing folded")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the words that a head keeps and evicts.

    Under two configurations, in colours or, without them, in marks; then the ten evicted entries of each that add
    most to the head's output. Without --head the one whose output the treatment changes most is shown, and others are
    named.
    """
    from perturbkv.analyses.tokens.tokens import ANALYSIS
    from perturbkv.analyses.tokens.tokens import tokens as ask
    from perturbkv.storage.trace.trace_file import read_trace

    names = parse_compare(compare)
    if len(names) != 2:
        msg = f"expected a baseline and a treatment in --compare, such as {DEFAULT_COMPARE}; got '{compare}'"
        raise ConfigError(msg)
    of_both = None if budget is None else Budget.parse(budget).value
    finished = read_trace(trace)
    found = ask(
        finished, sample, layer, head, baseline=names[0], treatment=names[1], budget=of_both, everything=everything
    )
    if as_json:
        about = {"analysis": ANALYSIS, "trace": finished.source, "trace_digest": finished.digest}
        console.print_json({**about, **found.to_dict()})
        return
    console.result(found, found.identity.lines()[0])
