"""One way to evict: METHOD's "a configuration = accumulate, pool, allocate, select", validated where it is made.

Choices inside choices as JSON holds them, and back; what stands in a file is held against its kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from perturbkv.configs import selections
from perturbkv.configs.alpha_table import AlphaTable
from perturbkv.configs.choice import DEEPEST, Choice, as_choice
from perturbkv.configs.entry_counts import Budget, entries, parse_entries
from perturbkv.configs.option import LARGEST, Option, check_number, completed
from perturbkv.configs.precision import CORRECTION_OPTIONS, FULL, NONE, PRECISION_OPTIONS, bits_of, entries_within
from perturbkv.configs.selections import ASKED, GIVEN, GRANULARITY_OPTIONS, L2, SELECTION_OPTIONS, Blocks, most_always
from perturbkv.errors import BudgetError, ConfigError, UnknownNameError


def nested(value: Any) -> Any:
    """An option as JSON holds it: a choice inside another as it is written, with all of its own options.

    A table of α is its name beside what its file holds.
    """
    if isinstance(value, AlphaTable):
        return {"table": value.name, **value.to_document()}
    if not isinstance(value, Choice):
        return value
    return {"choice": str(value), "options": {name: nested(held) for name, held in value.options.items()}}


def unnested(value: Any, depth: int = DEEPEST) -> Any:
    """What `nested` made this of. Raises ConfigError for more than `depth` choices inside each other."""
    if not isinstance(value, dict):
        return value
    if "table" in value:
        named = dict(value)
        return AlphaTable.from_document(named, str(named.pop("table")))
    if not depth:
        msg = f"expected at most {DEEPEST} choices inside each other in a configuration, got more"
        raise ConfigError(msg)
    told = as_choice(value["choice"])
    return holding(told, {name: unnested(held, depth - 1) for name, held in value["options"].items()})


def holding(told: Choice, options: Mapping[str, Any]) -> Choice:
    """A choice with all of its options, those that it shows in the order in which it does: JSON sorts its keys."""
    ordered = {name: options[name] for name in (*told.options, *options)}
    return Choice(told.name, ordered, frozenset(options) - frozenset(told.options))


def check_fields(document: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a configuration's window is whole and its budget and what it protects are numbers."""
    kinds: Mapping[str, Any] = {
        "window": int,
        **dict.fromkeys(("budget", "protect_first", "protect_recent"), int | float),
    }
    for name, kind in kinds.items():
        value = document.get(name, "")
        if name in document and (isinstance(value, bool) or not isinstance(value, kind)):
            msg = f"{name} of a configuration cannot be '{value}'"
            raise ConfigError(msg)


def check_options(owner: str, options: Mapping[str, Any], known: Mapping[str, Option]) -> None:
    """Raise ConfigError unless options are plain values or choices, and the `known` ones within their range."""
    for name, value in options.items():
        if name in known:
            known[name].checked(value, name, owner)
        elif not isinstance(value, bool | int | float | str | Choice | AlphaTable | None):
            msg = f"{name} of {owner} cannot be '{value}'"
            raise ConfigError(msg)


CHOICES = ("policy", "selection", "granularity", "precision", "correction")
"""What is written `name(option=value)`."""
_KNOWN = {
    "selection": SELECTION_OPTIONS,
    "granularity": GRANULARITY_OPTIONS,
    "precision": PRECISION_OPTIONS,
    "correction": CORRECTION_OPTIONS,
}
_PROTECTED = ("protect_first", "protect_recent")


@dataclass(frozen=True, init=False, repr=False)
class EvictionConfig:
    """One way to evict: what every configuration has. Its choices, from the policy to the correction, bring options.

    A choice is a `Choice` or text: `adakv(floor=0.1)`, `two-stage(alpha=0.5)`, `kv(reduce=max)`. All hold all of their
    options but a policy, which holds those that were given, until `registry.resolved` completes it and leaves out what
    makes no difference. `two-stage(alpha=FILE)` reads the file of an `AlphaTable`, once: the configuration holds the
    table.

    Raises ConfigError or BudgetError for a value outside its range, UnknownNameError for an unknown choice.

    Attributes:
        budget: entries kept per head, window included: 128 are entries, 0.05 is a share of the prompt (METHOD: Budget).
        policy: eviction system, a name of `perturbkv.selection.policies.registry`.
        selection: how the kept entries are taken from scores, a key of `SELECTIONS`.
        window: `w`, the last queries of the prompt, whose attention is accumulated and whose entries always stay
            (paper, Algorithm 2: n' = 32); 0 where the kept sets are given.
        granularity: one kept set per `query` head, per `kv` head or per `layer`; of single entries or of whole blocks.
        protect_first: first entries that always stay, in every head: an int is entries, a float a share of b.
        protect_recent: most recent entries that always stay, likewise; never fewer than the window.
        precision: `full`, or `quantise(bits=4)`: what is kept before the window is stored in few bits.
        correction: `none`, or `corrected(mass=stored)`: an entry per query head stands in for those that went.

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
        held = {
            "budget": _budget(budget),
            "policy": as_choice(policy),
            "selection": _chosen("selection", selection, SELECTION_OPTIONS),
            "window": window,
            "granularity": _chosen("granularity", granularity, GRANULARITY_OPTIONS),
            "protect_first": _protected("protect_first", protect_first),
            "protect_recent": _protected("protect_recent", protect_recent),
            "precision": _told(_chosen("precision", precision, PRECISION_OPTIONS), "bits"),
            "correction": _told(_chosen("correction", correction, CORRECTION_OPTIONS), "mass"),
        }
        for name, value in held.items():
            object.__setattr__(self, name, value)
        check_number("window (--window)", self.window)
        if self.window < (not self.given):
            msg = f"the window must hold at least 1 query, got {self.window}"
            raise ConfigError(msg)
        if self.reads:
            selections.page_of(self.policy)
        if isinstance(self.budget.value, int):
            self.check_budget(self.budget.value, f"budget {self.budget}")

    @property
    def given(self) -> bool:
        """Whether its kept sets come from outside."""
        return self.selection.name == GIVEN

    @property
    def alpha(self) -> float | AlphaTable:
        """Share of stage 1; 1 where the kept sets are given, which have no order and so no stages."""
        found: float | AlphaTable = self.selection.options.get("alpha", 1.0)
        return found

    @property
    def alpha_told(self) -> str:
        """The same as a name says it: `0.25`, or `alpha-head.json@1f2e3d4c`."""
        return str(self.alpha) if isinstance(self.alpha, AlphaTable) else f"{self.alpha:g}"

    @property
    def mean_alpha(self) -> float:
        """The same as a number: of a table its mean."""
        return self.alpha.mean if isinstance(self.alpha, AlphaTable) else self.alpha

    def alphas(self, layer: int, kept_heads: int) -> tuple[float, ...]:
        """α of each kept set of a measured layer, counted from 0; of heads that share one kept set their mean."""
        if not isinstance(self.alpha, AlphaTable):
            return (self.alpha,) * kept_heads
        sets = 1 if self.granularity.name == "layer" else kept_heads
        return self.alpha.of(layer, sets) * (kept_heads // sets)

    @property
    def euclidean(self) -> bool:
        """Whether its selection looks at ‖V_i W_O^h‖₂ in place of ‖V_i W_O^h‖₁."""
        return self.selection.options.get("norm") == L2

    @property
    def quantised(self) -> bool:
        """Whether its entries are stored in few bits."""
        return self.precision.name != FULL

    @property
    def bits(self) -> int:
        """Bits of a stored number of what is kept before the window."""
        return bits_of(self.precision)

    @property
    def corrected(self) -> bool:
        """Whether something stands in for the entries that went."""
        return self.correction.name != NONE

    @property
    def reads(self) -> bool:
        """Whether it evicts nothing and reads some pages at every step: then b counts what is read."""
        return selections.reads_pages(self.policy)

    @property
    def lined(self) -> bool:
        """Whether its prompt has a prefill of its own along some lines: then b counts what a query looks at at most."""
        return selections.lined(self.policy)

    @property
    def evicts(self) -> bool:
        """Whether entries go for good; where not, all stay in the cache, whatever is looked at."""
        return not self.reads and not self.lined

    @property
    def evicts_alone(self) -> bool:
        """Whether nothing but eviction changes its outputs, so that the theorems speak of it."""
        return not self.quantised and not self.corrected

    def protected(self, kept: int) -> tuple[int, int]:
        """First and most recent entries that always stay of `kept` ones; the window counts as recent."""
        return entries(self.protect_first, kept), max(self.window, entries(self.protect_recent, kept))

    @property
    def block(self) -> int:
        """Entries of a block, or of a page; 1 where single entries stay and go."""
        if self.reads:
            return selections.page_of(self.policy)
        return int(self.granularity.options.get("block", 1))

    def blocks(self, prompt_tokens: int) -> Blocks:
        """How a prompt's entries fall into blocks."""
        return Blocks.of(prompt_tokens, self.window, self.block)

    def check_budget(self, tokens: int, what: str) -> None:
        """Raise BudgetError unless `tokens` leaves something beside what always stays. `what` names the budget.

        Of blocks it has to leave one, wherever the window begins in its first.
        """
        first, recent = self.protected(tokens)
        always, size = most_always(first, recent, self.block), self.block
        if tokens >= always + size:
            return
        if size > 1:
            kind = "page" if self.reads else "block"
            msg = (
                f"{what} keeps {tokens} entries, too few for a {kind} of {size} beside those that always stay: up to "
                f"{always} lie in {kind}s that hold the first {first} and the last {recent}; raise the budget to "
                f"{always + size}, or lower {kind} or --window"
            )
        elif first + recent == self.window:
            msg = (
                f"{what} keeps {tokens} entries, no more than the window of {self.window} that always stays; "
                f"raise the budget above {self.window} or lower --window"
            )
        else:
            msg = (
                f"{what} keeps {tokens} entries, no more than the {first + recent} that always stay: the first {first} "
                f"and the last {recent}; raise the budget, or lower --protect-first, --protect-recent or --window"
            )
        raise BudgetError(msg)

    def allowed_entries(self, prompt_tokens: int) -> int:
        """Entries per head of a prompt of n tokens that may be kept: min(b, n), and n where n ≤ w, as the window stays.

        Where b counts bytes it is as many as take them at most.

        Raises BudgetError where n > w and b leaves nothing beside what always stays.
        """
        if prompt_tokens <= self.window:
            return prompt_tokens
        tokens = self.budget.tokens(prompt_tokens)
        self.check_budget(tokens, f"budget {self.budget} of {prompt_tokens} tokens")
        return entries_within(self.precision, tokens, self.window, prompt_tokens)

    def kept_entries(self, prompt_tokens: int) -> int:
        """Entries kept per head: those that are allowed, or what whole blocks hold of them. Raises as these."""
        blocks = self.blocks(prompt_tokens)
        return blocks.held(blocks.bought(self.allowed_entries(prompt_tokens)))

    def label(self) -> str:
        """Unique, readable name: the `config` coordinate of a trace."""
        protected = [f"{name.replace('_', '-')}={getattr(self, name)}" for name in _PROTECTED if getattr(self, name)]
        window = f"w={self.window}" if self.window else ""
        parts = [f"{self.policy}:{self.selection}", f"b={self.budget}", window, str(self.granularity)]
        few = str(self.precision) if self.quantised else ""
        correction = str(self.correction) if self.corrected else ""
        return " ".join(filter(None, [*parts, few, correction, *protected]))

    def __repr__(self) -> str:
        return f"<EvictionConfig {self.label()}>"

    def words(self, every: bool = False) -> dict[str, str]:
        """Choice -> how a name says it, policy and selection first.

        Nothing of a less usual choice at its default, unless `every` option is wanted.
        """
        said = {"policy": self.policy.name, "selection": self.selection.name, "budget": f"b={self.budget}"}
        said |= {"alpha": f"a={self.alpha_told}", "window": f"w={self.window}"}
        pool, kernel = (self.policy.options.get(name, "") for name in ("pool", "kernel"))
        said |= {"pool": "unpooled" if pool == "none" else f"{pool}{kernel}"} if pool else {}
        said["granularity"] = self.granularity.name
        said |= {"precision": self.precision.name} if every else {}
        said |= {"correction": self.correction.name} if every or self.corrected else {}
        for choice in (self.policy, self.selection, self.granularity, self.precision, self.correction):
            for name, value in (choice.options if every else choice.told).items():
                said |= {} if name in (*said, "kernel") else {name: f"{name}={value}"}
        protected = {name: getattr(self, name) for name in _PROTECTED}
        told = {name: value for name, value in protected.items() if value or every}
        return said | {name: f"{name.replace('_', '-')}={value}" for name, value in told.items()}

    def flat(self) -> dict[str, Any]:
        """Every choice as a plain value: names, numbers, and each option behind its owner's: `selection_alpha`.

        Single entries are blocks of one, whether or not that was said; who evicts nothing has no blocks.
        """
        found: dict[str, Any] = {} if not self.evicts else {"granularity_block": self.block}
        for name, value in self._choices():
            found[name] = value.name if isinstance(value, Choice) else _plain(value)
            if isinstance(value, Choice):
                found |= {f"{name}_{option}": _shown(held) for option, held in value.options.items()}
        return found

    def to_document(self) -> dict[str, Any]:
        """As JSON holds it: each choice as it is written, and its options behind it.

        Full precision and no correction go unsaid.
        """
        found: dict[str, Any] = {}
        for name, value in self._choices():
            if (name == "precision" and not self.quantised) or (name == "correction" and not self.corrected):
                continue
            found[name] = str(value) if isinstance(value, Choice) else _plain(value)
            if isinstance(value, Choice):
                found[f"{name}_options"] = {option: nested(held) for option, held in value.options.items()}
        return found

    def _choices(self) -> list[tuple[str, Any]]:
        """What was chosen, by field."""
        return [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """What `to_document` made this of. Raises KeyError or TypeError for another document, and as the class does."""
        unsaid: dict[str, Any] = {
            "precision": FULL,
            "precision_options": {},
            "correction": NONE,
            "correction_options": {},
        }
        held = {**unsaid, **document}
        for name in CHOICES:
            options, told = held.pop(f"{name}_options"), as_choice(held[name])
            options = {option: unnested(value) for option, value in options.items()}
            check_options(f"{name} '{told.name}'", options, _KNOWN.get(name, {}).get(told.name, {}))
            held[name] = holding(told, options)
        check_fields(held)
        return cls(**held)


def _budget(given: Budget | float | str) -> Budget:
    if isinstance(given, Budget):
        return given
    return Budget.parse(given) if isinstance(given, str) else Budget(given)


def _chosen(what: str, given: Choice | str, known: Mapping[str, Any]) -> Choice:
    """The choice with all of its options. Raises UnknownNameError, ConfigError."""
    choice = as_choice(given)
    if choice.name not in known:
        raise UnknownNameError(choice.name, what, ASKED if what == "selection" else known)
    return completed(choice, f"{what} '{choice.name}'", known[choice.name])


def _told(choice: Choice, option: str) -> Choice:
    """The same, one option always shown: it is the first thing to know of it."""
    return dataclasses.replace(choice, usual=(choice.usual or frozenset()) - {option})


def _protected(name: str, given: float | str) -> int | float:
    """Entries or a share of b. Raises BudgetError."""
    value = parse_entries(name, given) if isinstance(given, str) else given
    if not (0 <= value <= LARGEST and (isinstance(value, int) or value < 1)):
        msg = f"{name} is a number of entries (4) or a share of b below 1, got {value}"
        raise BudgetError(msg)
    return value


def _shown(value: Any) -> Any:
    """An option as a plain value."""
    return str(value) if isinstance(value, Choice | AlphaTable) else value


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Budget) else value
