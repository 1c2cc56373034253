"""The gap between each method and the best kept set, and whether the criterion or the unknown query makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from perturbkv.analyses import text
from perturbkv.analyses.columns import Line, Record, column, record, table
from perturbkv.analyses.identity import RunIdentity, run_identity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.pairing import common, plural
from perturbkv.analyses.questions.regret.optimality_gap import OptimalityGap, SearchedPart, searched_parts
from perturbkv.analyses.result import Result
from perturbkv.analyses.text import factor, sample_note, sentence
from perturbkv.display import Part
from perturbkv.optimum.search import PROMPT, SearchResults

ANALYSIS = "regret"
_RATIOS = ("sum_ratio", "median_ratio", "half")


@record
class SearchSettings(Record):
    """The settings of the searches."""

    SECTION: ClassVar[str] = "searches"

    heads: int = column("of each prompt, by swaps")
    proven: int = column("of each prompt's prefix, by integer programs")
    seconds: float = column("at most for each head and search", unit="s")
    prefix: int = column("tokens of a prefix")
    budget: int = column("entries that the sets of a prefix keep, the window in it")
    window: int = column("of the sets of a prefix")
    seed: int = column("of the draws")


@record
class Regret(Result):
    """The optimality gaps of methods, on whole prompts and on prefixes.

    Attributes:
        identity: of the run.
    """

    SECTION: ClassVar[str] = "question regret"
    DOCUMENT: ClassVar[str] = "of measurements"
    SHOWN: ClassVar[tuple[str, ...]] = ("factor", "form", "query", "criterion")
    FIRST: ClassVar[str] = "method"

    identity: RunIdentity
    samples: tuple[str, ...] = column("ids")
    parts: tuple[SearchedPart, ...] = column("whole prompts by budget, then the prefixes")
    searches: SearchSettings = column("how heads were searched")

    def conclusion(self) -> str:
        """Return each method's loss over the best known set's, and the part due to not knowing the query."""
        part = self.parts[0] if self.parts else None
        methods = [] if part is None else [part.methods[index] for index in part.principal() if part.methods]
        if part is None or not methods:
            return "No head loses more than rounding under every kept set of its size."
        names = [part.names[index] for index in part.principal()]
        verbs = [" perturbs", *[""] * (len(methods) - 1)]
        missed = ", ".join(
            f"{name}{verb} {factor(method.factor.value, method.factor.interval)}"
            for name, verb, method in zip(names, verbs, methods, strict=True)
        )
        clause = (
            f"{missed} what the best known set of the same size does{_decomposition_clause(names[-1], methods[-1])}"
        )
        return sentence(f"{clause} (isolated, geometric means; {sample_note(self.identity.samples)})", *names)

    def title(self) -> str:
        """Return the ratio that the table shows, and what all methods share."""
        configs = [config for part in self.parts for config in part.configs]
        return f"isolated L1 over that of the best known set: {common(configs)}"

    def lines(self) -> Sequence[Line]:
        """Return, per part (prompts of one budget, or prefixes), a heading and a line per method."""
        return [
            line
            for part in self.parts
            for line in _method_lines(part.name, part, range(len(part.methods)), part.methods)
        ]

    def interval_note(self) -> str:
        """Return the line on n and intervals."""
        return text.intervals_note(self.identity.samples, medians=True)

    def caveats(self) -> Sequence[str]:
        """Return in how many heads the best known set is proven to be the best."""
        closed, heads = (sum(getattr(part, name) for part in self.parts) for name in ("closed", "heads"))
        return [f"The best set is proven in {closed:,} of {heads:,} heads, elsewhere the best known one."]

    def explain(self) -> list[Part]:
        """Return the meaning of every column and the further tables; empty where no head loses anything."""
        return super().explain() if any(part.methods for part in self.parts) else []

    def details(self) -> Sequence[Part]:
        """Return tables of ratios of sums and medians and of layers, and how heads were searched."""
        return [
            *(detail for part in self.parts for detail in self._part_details(part)),
            "Mean factor = pooling, stages × query unknown × criterion. Pooling, stages: over Top-k of the window's "
            "unpooled mean A, of two-stage A ν; query unknown: that over Top-k of the realised one; criterion: that "
            "over the best set, which knows the query. The window stays, and what all protect. Swaps exchange entries "
            "of the best given set until none helps; integer programs (HiGHS in Dinkelbach's iteration) prove a bound. "
            "Heads are drawn anew for each prompt; a row without ends rests on one prompt's. A prefix: the prompt's "
            f"first token and {self.searches.prefix - 1} of its middle.",
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per sample, part, head and method: isolated L1, the best known set's, and its lower bound."""
        return [
            {
                **config_columns(config), "sample": sample, "part": part.part,
                "layer": self.identity.layer(row["layer"]), "head": row["head"],
                "perturbation": row["perturbation"][index],
                **{name: row[name] for name in ("kept", "improved", "best", "lower", "closed", "settled")},
            }
            for part in self.parts
            for sample, rows in zip(self.samples, part.rows, strict=True)
            for row in rows
            for index, config in enumerate(part.configs)
        ]  # fmt: skip

    def _part_details(self, part: SearchedPart) -> list[Part]:
        """Return a part's tables of ratios and of layers, and how its heads were searched."""
        lines = _method_lines(part.name, part, range(len(part.methods)), part.methods)
        ratios = [table("isolated L1 over the best known set's", lines, _RATIOS, self.FIRST)] if lines else []
        return [*ratios, *self._layer_table(part), part.summary()]

    def _layer_table(self, part: SearchedPart) -> list[Part]:
        """Return the table of the first layer's heads and of other layers' heads; empty unless both were searched."""
        if part.part != PROMPT or not (part.first_layer and part.other_layers):
            return []
        layer = self.identity.layer(0)
        chosen = [index for index in part.principal() if part.methods[index].decomposed]
        lines = [
            line
            for name, methods in ((f"layer {layer}", part.first_layer), ("other layers", part.other_layers))
            for line in _method_lines(name, part, chosen, methods)
        ]
        return [table(f"{part.name}: by layer", lines, self.SHOWN, self.FIRST)] if chosen else []


def regret_of(sets: SearchResults) -> Regret:
    """Return the optimality gap of every method (METHOD: the quantities): isolated L1 over the best known set's."""
    return Regret(
        identity=run_identity(sets.run, sets.made_with, len(sets.rows), "sets", sets.digest),
        samples=tuple(str(row["sample"]) for row in sets.rows),
        parts=searched_parts(sets),
        searches=SearchSettings(**sets.settings),
    )


def _method_lines(name: str, part: SearchedPart, chosen: Sequence[int], methods: Sequence[OptimalityGap]) -> list[Line]:
    """Return a heading with the number of heads, then a line per chosen method; no heading without methods."""
    heads = [Line(f"{name}: {plural(methods[0].heads, 'head')}", ())] if methods else []
    return [*heads, *(Line(part.names[index], (methods[index],)) for index in chosen)]


def _decomposition_clause(name: str, method: OptimalityGap) -> str:
    """Return the clause on the three parts of a method's factor; empty if unknown."""
    if not method.decomposed:
        return ""
    parts = (method.form, method.query, method.criterion)
    form, query, criterion = (factor(part.value, part.interval) for part in parts)
    return f"; of {name}'s, {form} is pooling and stages, {query} not knowing the query and {criterion} the criterion"
