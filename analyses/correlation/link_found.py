"""What is found of a link: its settings, each of them and all together, as one object that others tell and draw."""

from __future__ import annotations

from dataclasses import dataclass

from perturbkv.analyses.correlation.correlation_settings import Setting
from perturbkv.analyses.correlation.link_budgets import AcrossBudgets
from perturbkv.analyses.correlation.link_data import Part
from perturbkv.analyses.correlation.link_prompts import Contrast, Strength
from perturbkv.analyses.correlation.lost_answers import Rule
from perturbkv.analyses.correlation.method_identity import Beyond
from perturbkv.analyses.identity import RunIdentity


@dataclass(frozen=True)
class Overall:
    """Each prompt's mean over settings, in every one of which its configurations were compared.

    Attributes:
        dataset: whose prompts; empty for those of all data sets.
        strengths: one per measure.
        contrasts: every two measures on the same prompts.
        names: what of the link the methods' names make, one per measure.
    """

    dataset: str
    strengths: tuple[Strength, ...]
    contrasts: tuple[Contrast, ...]
    names: tuple[Beyond, ...]

    def strength(self, measure: str) -> Strength:
        """Of one measure."""
        return next(one for one in self.strengths if one.measure == measure)

    def named(self, measure: str) -> Beyond:
        """What the methods' names make of one measure's link."""
        return next(one for one in self.names if one.measure == measure)

    def contrast(self, first: str, second: str) -> Contrast:
        """Of two measures."""
        return next(one for one in self.contrasts if (one.first, one.second) == (first, second))


@dataclass(frozen=True, repr=False)
class Linked:
    """The link between the first step's perturbation and the score of the answer.

    Attributes:
        identity: which run this is; of several traces all of their data sets.
        parts: the traces: data set, samples, how many of them the full cache answers.
        rule: when the full cache is right, and when an answer is lost.
        settings: one per budget, granularity and protection of three configurations or more; `too_few`: the others'
            names.
        overall: all settings together, one at a time: of all prompts first, then, where there are several, of each
            data set.
        across: over the budgets of one method, for many reasons; empty where no method has three.
        everything: whether all tables are shown, or those that one reads first.
        prompts: (prompt,) the trace's place in `parts` and the sample's name, of the arrays in `settings`.
    """

    identity: RunIdentity
    parts: tuple[Part, ...]
    rule: Rule
    settings: tuple[Setting, ...]
    too_few: tuple[str, ...]
    overall: tuple[Overall, ...]
    across: tuple[AcrossBudgets, ...]
    everything: bool
    prompts: tuple[tuple[int, str], ...]
