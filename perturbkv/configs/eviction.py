"""The eviction configuration, METHOD's "accumulate, pool, allocate, select", validated at construction.

`to_document` and `from_document` convert it to JSON and back, with choices nested in choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, cast

from perturbkv.configs import selections
from perturbkv.configs.alpha_table import AlphaTable
from perturbkv.configs.cache_contents import PAGES_READ, SPARSE_PREFILL, CacheContents, contents_of
from perturbkv.configs.choice import DEEPEST, Choice, as_choice
from perturbkv.configs.entry_counts import Budget, as_budget, entry_count, parse_entries
from perturbkv.configs.option import LARGEST, check_number, check_whole, complete_choice
from perturbkv.configs.precision import (
    CORRECTION_OPTIONS,
    FULL,
    NONE,
    all_formats,
    bits_text,
    complete_precision,
    entries_in_bytes,
    general_codes,
)
from perturbkv.configs.selections import (
    GIVEN,
    GRANULARITY_OPTIONS,
    L2,
    SELECTABLE,
    SELECTION_OPTIONS,
    Blocks,
    max_protected_entries,
)
from perturbkv.display import plural
from perturbkv.errors import BudgetError, ConfigError, UnknownNameError


def option_to_json(value: Any) -> Any:
    """Return an option's value for JSON; a nested choice becomes an object of its text and all its options.

    A table of α becomes an object with its name and its file's content.
    """
    if isinstance(value, AlphaTable):
        return {"table": value.name, **value.to_document()}
    if not isinstance(value, Choice):
        return value
    return {"choice": str(value), "options": {name: option_to_json(option) for name, option in value.options.items()}}


def option_from_json(value: Any, depth: int = DEEPEST) -> Any:
    """Return the value encoded by `option_to_json`. Raises ConfigError for more than `depth` nested choices."""
    if not isinstance(value, dict):
        return value
    if "table" in value:
        document = dict(value)
        return AlphaTable.from_document(document, str(document.pop("table")))
    if not depth:
        raise ConfigError(f"expected at most {DEEPEST} choices inside each other in a configuration, got more")
    choice = as_choice(value["choice"])
    return with_all_options(
        choice, {name: option_from_json(option, depth - 1) for name, option in value["options"].items()}
    )


def with_all_options(choice: Choice, options: Mapping[str, Any]) -> Choice:
    """Return a choice parsed from text, completed with `options`; options in the text are shown and come first."""
    ordered = {name: options[name] for name in (*choice.options, *options)}
    return Choice(choice.name, ordered, frozenset(options) - frozenset(choice.options))


CHOICES = ("policy", "selection", "granularity", "precision", "correction")
"""Fields that are written `name(option=value)`."""
_PROTECTED_FIELDS = ("protect_first", "protect_recent")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class EvictionConfig:
    """A configuration of eviction. Its choices, from the policy to the correction, have options of their own.

    A choice is a `Choice` or text: `adakv(floor=0.1)`, `two-stage(alpha=0.5)`, `kv(reduce=max)`. Every choice holds all
    of its options, except the policy, which holds those that were given until `registry.resolved` completes it and
    removes those without effect. `two-stage(alpha=FILE)` reads the file of an `AlphaTable` once; the configuration
    holds the table.

    Raises ConfigError or BudgetError for a value outside its range, UnknownNameError for an unknown choice.

    Attributes:
        budget: entries kept per head, window included: 128 is entries, 0.05 a share of the prompt (METHOD: Budget).
        policy: eviction system, a name of `perturbkv.selection.policies.registry`.
        selection: how the kept entries are selected by scores, a key of `SELECTIONS`.
        window: `w`, the last queries of the prompt, whose attention is accumulated and whose entries always stay
            (paper, Algorithm 2: n' = 32); 0 where the kept sets come from outside.
        granularity: one kept set per `query` head, per `kv` head or per `layer`, or one for all layers, per key/value
            `head` or of the `model`; of single entries or of whole blocks.
        protect_first: first entries that always stay, in every head: an int is entries, a float a share of b.
        protect_recent: most recent entries that always stay, in the same units; never fewer than the window.
        precision: `full`, or entries before the window in few bits: `quantise(bits=4)`, `quantise(keys=4, values=2)`,
            `quantise(bits=fp8, by_layer='0, 29: 16')`; rules, `keys=4, values=2; layers 0, 29: 16`, or the name of a
            file of rules, which is read once: the configuration holds what it says.
        correction: `none`, or `corrected(mass=stored)`: one entry per query head stands in for the evicted ones.

    >>> from perturbkv import EvictionConfig
    >>> EvictionConfig(128, "adakv(floor=0.1)").label()
    'adakv(floor=0.1):two-stage b=128 w=32 query'
    """

    budget: Budget
    policy: Choice
    selection: Choice
    window: int
    granularity: Choice
    protect_first: int | float
    protect_recent: int | float
    precision: Choice
    correction: Choice

    def __init__(
        self,
        budget: Budget | float | str,
        policy: Choice | str = "snapkv",
        selection: Choice | str = "two-stage",
        window: int = 32,
        granularity: Choice | str = "query",
        protect_first: float | str = 0,
        protect_recent: float | str = 0,
        precision: Choice | str = FULL,
        correction: Choice | str = NONE,
    ) -> None:
        fields = {
            "budget": as_budget(budget),
            "policy": as_choice(policy),
            "selection": _resolve_choice("selection", selection, SELECTION_OPTIONS),
            "window": window,
            "granularity": _resolve_choice("granularity", granularity, GRANULARITY_OPTIONS),
            "protect_first": _parse_protected("protect_first", protect_first),
            "protect_recent": _parse_protected("protect_recent", protect_recent),
            "precision": complete_precision(precision),
            "correction": _show_always(_resolve_choice("correction", correction, CORRECTION_OPTIONS), "mass"),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        check_whole("window (--window)", self.window)
        check_number("window (--window)", self.window)
        if self.window < (0 if self.is_external else 1):
            raise ConfigError(f"the window must hold at least 1 query, got {self.window}")
        self.cache_contents.unit_size(self.policy, self.granularity)
        if isinstance(self.budget.value, int):
            self.check_budget(self.budget.value, f"budget {self.budget}")

    @property
    def is_external(self) -> bool:
        """True if the kept sets are external."""
        return self.selection.name == GIVEN

    @property
    def alpha(self) -> float | AlphaTable:
        """Share of stage 1; 1 for external kept sets, which have no stages."""
        return cast("float | AlphaTable", self.selection.options.get("alpha", 1.0))

    @property
    def alpha_text(self) -> str:
        """α as text: `0.25`, or `alpha-head.json@1f2e3d4c`."""
        return str(self.alpha) if isinstance(self.alpha, AlphaTable) else f"{self.alpha:g}"

    @property
    def mean_alpha(self) -> float:
        """α as a single number; for a table, the mean of its shares."""
        return self.alpha.mean if isinstance(self.alpha, AlphaTable) else self.alpha

    def alphas(self, layer: int, kept_heads: int) -> tuple[float, ...]:
        """Return α per kept set of a measured layer, counted from 0; the mean over heads that share a kept set."""
        if not isinstance(self.alpha, AlphaTable):
            return (self.alpha,) * kept_heads
        sets = 1 if selections.shares_heads(self.granularity) else kept_heads
        shared = selections.shares_layers(self.granularity)
        return self.alpha.kept_set_shares(None if shared else layer, sets) * (kept_heads // sets)

    @property
    def euclidean(self) -> bool:
        """True if the selection uses ‖V_i W_O^h‖₂ instead of ‖V_i W_O^h‖₁."""
        return self.selection.options.get("norm") == L2

    @property
    def gate_window(self) -> int:
        """The number of last queries whose gates ν takes, in a model that has gates: their mean size; 0: none.

        With hindsight it is `FIRST_STEP`: ν takes the gate of the first decode step.
        """
        if self.selection.name == "hindsight":
            return selections.FIRST_STEP
        return 0 if self.selection.options.get(selections.GATE) == "none" else self.window

    @property
    def quantised(self) -> bool:
        """True if the entries before the window are quantised."""
        return self.precision.name != FULL

    @property
    def bits(self) -> int | None:
        """Bits of the code of every number before the window; None where keys, values or layers differ in them."""
        bits = {each.bits for each in all_formats(self.precision)}
        return bits.pop() if len(bits) == 1 else None

    @property
    def bits_text(self) -> str:
        """Bits of a number's code, before the window: `4`, `4/2` of keys and values, `4/2, by layer`."""
        return bits_text(self.precision)

    @property
    def corrected(self) -> bool:
        """True if the outputs are corrected for the evicted entries."""
        return self.correction.name != NONE

    @property
    def cache_contents(self) -> CacheContents:
        """The contents of the configuration's cache."""
        return contents_of(self.policy)

    @property
    def reads_pages(self) -> bool:
        """True if the policy reads some pages per step instead of evicting, so that b counts the entries read."""
        return self.cache_contents is PAGES_READ

    @property
    def has_sparse_prefill(self) -> bool:
        """True if the prefill is sparse, so that b is the maximum number of entries that a query attends to."""
        return self.cache_contents is SPARSE_PREFILL

    @property
    def evicts(self) -> bool:
        """True if entries are removed for good; otherwise all stay in the cache."""
        return self.cache_contents.evicts

    @property
    def is_staged(self) -> bool:
        """True if the selection fills a share α of the budget first; σ, θ̂ and Assumption 1 are of such selections."""
        return self.selection.name in selections.STAGED

    @property
    def positions(self) -> str:
        """Positions where decoding sees a head's b kept keys: `kept`, as in the prompt, or `in-cache`, 0 … b − 1."""
        return str(self.policy.options.get("positions", "kept"))

    @property
    def in_cache(self) -> bool:
        """True if decoding sees kept keys at other positions than in the prompt."""
        return self.positions == "in-cache"

    @property
    def in_16_bits(self) -> bool:
        """True if the cache stores entries of 16 bits alone, so that bytes tell no more than entries."""
        return not self.quantised and not self.corrected

    @property
    def only_evicts(self) -> bool:
        """True if eviction alone changes the outputs, so that the theorems apply."""
        return self.in_16_bits and not self.in_cache

    def protected_counts(self, kept: int) -> tuple[int, int]:
        """Return the numbers of first and of most recent always-kept entries, the window included.

        Protected shares are of `kept` entries.
        """
        return entry_count(self.protect_first, kept), max(self.window, entry_count(self.protect_recent, kept))

    @property
    def block(self) -> int:
        """Entries per block or page; 1 for single entries."""
        return self.cache_contents.unit_size(self.policy, self.granularity)

    def blocks(self, prompt_tokens: int) -> Blocks:
        """Return the division of a prompt's entries into blocks."""
        return Blocks.divide(prompt_tokens, self.window, self.block)

    def check_budget(self, tokens: int, what: str) -> None:
        """Raise BudgetError if a budget of `tokens` entries, called `what`, does not exceed the always-kept entries.

        With blocks at least one more block must fit, wherever the window begins within a block.
        """
        first, recent = self.protected_counts(tokens)
        always, size = max_protected_entries(first, recent, self.block), self.block
        if tokens >= always + size:
            return
        kept = f"{what} keeps {plural(tokens, 'entry', 'entries')}"
        if size > 1:
            kind = self.cache_contents.unit
            msg = (
                f"{kept}, too few for a {kind} of {size} beside those that always stay: up to "
                f"{always} lie in {kind}s that hold the first {first} and the last {recent}; raise the budget to "
                f"{always + size}, or lower {kind} or --window"
            )
        elif first + recent == self.window:
            msg = (
                f"{kept}, no more than the window of {self.window} that always stays; "
                f"raise the budget above {self.window} or lower --window"
            )
        else:
            msg = (
                f"{kept}, no more than the {first + recent} that always stay: the first {first} "
                f"and the last {recent}; raise the budget, or lower --protect-first, --protect-recent or --window"
            )
        raise BudgetError(msg)

    def allowed_entries(self, prompt_tokens: int) -> int:
        """Return the largest number of entries that a head may keep of the n of a prompt: min(b, n), or n where n ≤ w.

        Where b counts bytes, it is the number of entries that fit into them.

        Raises BudgetError where n > w and b leaves nothing beyond what always stays.
        """
        if prompt_tokens <= self.window:
            return prompt_tokens
        tokens = self.budget.tokens(prompt_tokens)
        self.check_budget(tokens, f"budget {self.budget} of {prompt_tokens} tokens")
        return entries_in_bytes(self.precision, tokens, self.window, prompt_tokens)

    def kept_entries(self, prompt_tokens: int) -> int:
        """Return the number of kept entries per head: `allowed_entries`, rounded down to whole blocks.

        Raises BudgetError likewise.
        """
        blocks = self.blocks(prompt_tokens)
        return blocks.kept_entries(blocks.affordable_blocks(self.allowed_entries(prompt_tokens)))

    def label(self) -> str:
        """Return the unique, readable name of the configuration, the `config` coordinate of a trace."""
        return self._label

    @cached_property
    def _label(self) -> str:
        """The name, made once."""
        protected = [
            f"{name.replace('_', '-')}={getattr(self, name)}" for name in _PROTECTED_FIELDS if getattr(self, name)
        ]
        window = f"w={self.window}" if self.window else ""
        parts = [f"{self.policy}:{self.selection}", f"b={self.budget}", window, str(self.granularity)]
        precision = str(self.precision) if self.quantised else ""
        correction = str(self.correction) if self.corrected else ""
        return " ".join(filter(None, [*parts, precision, correction, *protected]))

    def __eq__(self, other: object) -> bool:
        return self._fields() == other._fields() if isinstance(other, EvictionConfig) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._fields()))

    def __repr__(self) -> str:
        return f"<EvictionConfig {self.label()}>"

    def label_parts(self, every: bool = False) -> dict[str, str]:
        """Return field or option -> its text, the parts of a short name for the configuration, policy first.

        Less common choices and options at their default are omitted, unless `every` is set.
        """
        return dict(self._every_part if every else self._usual_parts)

    @cached_property
    def _every_part(self) -> Mapping[str, str]:
        """The parts of a label, defaults included."""
        return self._label_parts(every=True)

    @cached_property
    def _usual_parts(self) -> Mapping[str, str]:
        """The parts of a label, without defaults."""
        return self._label_parts(every=False)

    def _label_parts(self, every: bool) -> Mapping[str, str]:
        """Compute what `label_parts` returns."""
        texts = {"policy": self.policy.name, "selection": self.selection.name, "budget": f"b={self.budget}"}
        texts |= {"alpha": f"a={self.alpha_text}", "window": f"w={self.window}"}
        pool, kernel = (self.policy.options.get(name, "") for name in ("pool", "kernel"))
        texts |= {"pool": "unpooled" if pool == "none" else f"{pool}{kernel}"} if pool else {}
        texts["granularity"] = self.granularity.name
        texts |= {"precision": self.precision.name} if every else {}
        texts |= {"correction": self.correction.name} if every or self.corrected else {}
        for choice in (self.policy, self.selection, self.granularity, self.precision, self.correction):
            for name, value in (choice.options if every else choice.shown_options).items():
                if name not in (*texts, "kernel"):  # the width is said with the pooling
                    texts[name] = f"{name}={value}"
        protected = {name: getattr(self, name) for name in _PROTECTED_FIELDS}
        shown = {name: value for name, value in protected.items() if value or every}
        return texts | {name: f"{name.replace('_', '-')}={value}" for name, value in shown.items()}

    def flat(self) -> dict[str, Any]:
        """Return all fields and options as a flat dict of plain values, with option names such as `selection_alpha`.

        Single entries are blocks of one, whether written or not; a configuration that evicts nothing has no blocks. The
        bits of keys and of values are told where they are alike, too, and rules of layers where there are none: two
        precisions differ in a choice that both have.
        """
        values: dict[str, Any] = {} if not self.evicts else {"granularity_block": self.block}
        if self.quantised:
            values |= {"precision_by_layer": "none"}
            values |= {f"precision_{kind}": code for kind, code in general_codes(self.precision).items()}
        for name, value in self._fields():
            if not isinstance(value, Choice):
                values[name] = _field_value(value)
                continue
            values[name] = value.name
            for option, inner in value.options.items():
                values[f"{name}_{option}"] = str(inner) if isinstance(inner, Choice | AlphaTable) else inner
        return values

    def to_document(self) -> dict[str, Any]:
        """Return the configuration as a JSON object: per choice its text, then its options.

        Full precision and no correction are omitted.
        """
        document: dict[str, Any] = {}
        for name, value in self._fields():
            if (name == "precision" and not self.quantised) or (name == "correction" and not self.corrected):
                continue
            document[name] = str(value) if isinstance(value, Choice) else _field_value(value)
            if isinstance(value, Choice):
                document[f"{name}_options"] = {option: option_to_json(inner) for option, inner in value.options.items()}
        return document

    def _fields(self) -> list[tuple[str, Any]]:
        """Return a (name, value) pair per field."""
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(EvictionConfig)]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Return the configuration written by `to_document`. Raises KeyError or TypeError for another document.

        Invalid values raise as in the constructor.
        """
        omitted: dict[str, Any] = {
            "precision": FULL,
            "precision_options": {},
            "correction": NONE,
            "correction_options": {},
        }
        fields = {**omitted, **document}
        for name in CHOICES:
            options, choice = fields.pop(f"{name}_options"), as_choice(fields[name])
            options = {option: option_from_json(value) for option, value in options.items()}
            fields[name] = with_all_options(choice, options)
        return cls(**fields)


def _resolve_choice(what: str, text: Choice | str, known: Mapping[str, Any]) -> Choice:
    """Return the choice of the field `what` with all its options; `known` maps choice names to their options.

    Raises UnknownNameError for an unknown name, ConfigError for a wrong option.
    """
    choice = as_choice(text)
    if choice.name not in known:
        raise UnknownNameError(choice.name, what, SELECTABLE if what == "selection" else known)
    return complete_choice(choice, f"{what} '{choice.name}'", known[choice.name])


def _show_always(choice: Choice, option: str) -> Choice:
    """Return the choice with the named option always shown, even at its default."""
    return dataclasses.replace(choice, defaults=(choice.defaults or frozenset()) - {option})


def _parse_protected(name: str, protected: float | str) -> int | float:
    """Return a number of protected entries, or a share of the budget b. Raises BudgetError for an invalid value."""
    value = parse_entries(name, protected) if isinstance(protected, str) else protected
    if not (0 <= value <= LARGEST and (isinstance(value, int) or value < 1)):
        raise BudgetError(f"{name} is a number of entries (4) or a share of b below 1, got {value}")
    return value


def _field_value(value: Any) -> Any:
    """Return a field's value as a plain value; a budget becomes its number."""
    return value.value if isinstance(value, Budget) else value
