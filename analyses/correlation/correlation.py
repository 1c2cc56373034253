"""Does the first step's perturbation tell what an answer will be worth? (METHOD: the protocol, 7. No paper tested it.).

Between the configurations of one prompt that share budget, granularity and protection; the unit is the prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.correlation import correlation_tables, link_more, link_told
from perturbkv.analyses.correlation.calibration import BINS, check_bins
from perturbkv.analyses.correlation.correlation_settings import Setting, marked, setting
from perturbkv.analyses.correlation.link_budgets import across_budgets
from perturbkv.analyses.correlation.link_data import ANALYSIS, Pooled, pooled
from perturbkv.analyses.correlation.link_found import Linked, Overall
from perturbkv.analyses.correlation.link_prompts import NAMES, contrasts, joined, of_prompts, strengths
from perturbkv.analyses.correlation.lost_answers import LOST, Rule
from perturbkv.analyses.correlation.method_identity import beyond, standing
from perturbkv.analyses.identity import RunIdentity, identity, together
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.multi_trace import as_traces
from perturbkv.analyses.pairing import matches
from perturbkv.analyses.ranked_together import LEAST_CONFIGS, ranked_together
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.trace import Trace


class Link(Linked, Result):
    """The link between the first step's perturbation and the score of the answer; it shows itself, as any result."""

    def conclusion(self) -> str:
        """Whether more perturbed configurations score less, or lose answers, by more than the methods' names tell."""
        return link_told.conclusion(self)

    def tables(self) -> list[Table | str]:
        """Measures, and budgets; of `everything` also data sets, what else could make a link, contrasts, and curves."""
        return correlation_tables.tables(self) + (link_more.more(self) if self.everything else [])

    def notes(self) -> str:
        """What rows and columns mean."""
        return link_told.notes(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers; what single prompts say is in `records`."""
        left_out = ("within", "measured", "full", "evicted", "lost", "tables")
        settings = [
            {**{name: value for name, value in vars(one).items() if name not in left_out},
             "answers": int(one.lost.size), "lost": int(one.lost.sum()), "silence": one.silence()}
            for one in self.settings
        ]  # fmt: skip
        shown = {name: getattr(self, name) for name in ("parts", "rule", "too_few", "overall", "across")}
        found: dict[str, Any] = plain({**shown, "settings": settings})
        return found

    def records(self) -> list[dict[str, Any]]:
        """A row per answered prompt and configuration: its measures, both scores in [0, 1], and whether it is lost.

        A measure that a prompt lacks is None.
        """
        return [
            {
                **columns_of(config),
                "setting": one.name,
                "dataset": self.parts[part].dataset,
                "sample": sample,
                "score_full": float(one.full[place]),
                "score": float(one.evicted[place, column]),
                "lost_answer": int(one.lost[place, column]),
                **{name: plain(float(array[place, column])) for name, array in one.measured.items()},
            }
            for one in self.settings
            for place, (part, sample) in enumerate(self.prompts)
            for column, config in enumerate(one.configs)
        ]


def link(
    traces: Trace | Sequence[Trace], *, only: Sequence[str] = (), right: float = 0.0, lost: float = LOST,
    bins: int = BINS, everything: bool = False,
) -> Link:  # fmt: skip
    """Does the first step's perturbation tell what an answer will be worth?.

    Within each prompt that the full cache answers, between its configurations of one budget, granularity and
    protection (METHOD: the protocol, 7): Spearman's ρ and Kendall's τ-b between each measure and the score, and the
    share of pairs of a lost and a kept answer in which the lost one is more perturbed. Beside each stands what scores
    dealt out anew within the prompts show, what a method's name alone tells, and the same between prompts.

    Args:
        traces: with graded answers; several are pooled, and their data sets told apart.
        only: policies, selections or `policy:selection`, where not all that the traces hold are to be ranked.
        right: a prompt counts where the full cache's score is above this.
        lost: an answer is lost where its score is below this share of the full cache's.
        bins: of the calibration curves.
        everything: show all tables; by default those that one reads first. What is found is the same.

    Raises TraceError for traces without graded answers, that do not belong together, or without three configurations
    of one setting; ConfigError for a rule or bins that make no sense.

    Example, of a `trace` of answers under three methods and more of one budget:
        >>> import perturbkv as pk
        >>> [one.measure for one in pk.link(trace).settings[0].strengths][:2]
        ['isolated', 'propagated']
    """
    rule, bins = Rule(right, lost), check_bins(bins)
    held = [_of_methods(trace, only) for trace in as_traces(traces)]
    found = pooled(held, rule)
    groups = ranked_together(found.configs)
    settings = marked(
        [setting(found, name, places, rule, bins) for name, places in groups.items() if len(places) >= LEAST_CONFIGS]
    )
    if not settings:
        told = ", ".join(f"{len(places)} of b={name}" for name, places in groups.items())
        msg = f"{ANALYSIS} needs at least {LEAST_CONFIGS} methods of one budget to rank, got {told}; measure more"
        raise TraceError(msg)
    return Link(
        identity=_identity(held, settings),
        parts=found.parts,
        rule=rule,
        settings=settings,
        too_few=tuple(name for name, places in groups.items() if len(places) < LEAST_CONFIGS),
        overall=_overall(found, settings),
        across=across_budgets(found),
        everything=everything,
        prompts=tuple(zip(found.part.tolist(), found.names, strict=True)),
    )


def _of_methods(trace: Trace, only: Sequence[str]) -> Trace:
    """The part of a trace that some methods measured. Raises TraceError for a method that it does not hold."""
    if not only:
        return trace
    for name in only:
        if not any(matches(config, name) for config in trace.run.configs):
            known = ", ".join(dict.fromkeys(f"{one.policy.name}:{one.selection.name}" for one in trace.run.configs))
            msg = f"expected {name} among the trace's methods, got a trace of {known}"
            raise TraceError(msg)
    part = trace.sel(where=lambda config: any(matches(config, name) for name in only))
    return dataclasses.replace(part, source=trace.source, digest=trace.digest)


def _overall(found: Pooled, settings: Sequence[Setting]) -> tuple[Overall, ...]:
    """Of all prompts, and of each data set where there are several."""
    datasets = list(dict.fromkeys(part.dataset for part in found.parts))
    names = np.array([found.parts[part].dataset for part in found.part], dtype=str)
    rows = {"": np.ones(len(names), dtype=bool)}
    if len(datasets) > 1:
        rows |= {name: names == name for name in datasets}
    return tuple(_of_prompts(found, settings, name, places) for name, places in rows.items())


def _of_prompts(found: Pooled, settings: Sequence[Setting], dataset: str, rows: NDArray[np.bool_]) -> Overall:
    """Each prompt's mean over the settings, of some prompts; what stands is said of all prompts alone."""
    each = of_prompts({name: joined([one.within[name] for one in settings]) for name in NAMES}, rows)
    tables = [{name: table.of(rows) for name, table in one.tables.items()} for one in settings]
    names, own = beyond(tables, found.alike[np.ix_(rows, rows)]), strengths(each)
    return Overall(dataset, own, contrasts(each), names if dataset else standing([names], [own])[0])


def _identity(traces: Sequence[Trace], settings: Sequence[Setting]) -> RunIdentity:
    """The first trace's, with the data sets, digests and samples of all."""
    configs = [config for one in settings for config in one.configs]
    return together([identity(trace, configs) for trace in traces])
