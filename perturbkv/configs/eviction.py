"""One way to evict: METHOD's "a configuration = accumulate, pool, allocate, select", validated where it is made."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from perturbkv.configs.budget import Budget, entries
from perturbkv.errors import BudgetError, ConfigError, UnknownNameError

SELECTIONS = {
    "attention": "Top-k of the pooled window attention (the baseline)",
    "attention-unpooled": "Top-k of the unpooled window attention (control)",
    "two-stage": "⌊α(b−w)⌋ by attention, the rest by attention × projected value norm (the paper's)",
    "two-stage-uniform": "two-stage with ν ≡ 1: what un-pooling the second stage alone brings (control)",
    "value": "Top-k of the projected value norm alone (control)",
    "random": "a seeded random set (control)",
    "hindsight": "Top-k of the realised A·ν of the decoding query: what knowing the query would bring (control)",
    "hindsight-attention": "Top-k of the realised A of the decoding query: without ν, the query known (control)",
    "position": "by position, as the policy says (streaming-llm only)",
}
IN_CACHE = "in-cache"
_CHOICES = {
    "selection": tuple(SELECTIONS),
    "split": ("prefix", "total"),
    "stage2_score": ("accumulated", "pooled"),
    "pool": ("max", "average", "none"),
    "granularity": ("query", "kv"),
    "group_score": ("mean", "max"),
    "group_product": ("product-of-means", "mean-of-products"),
    "pyramid_line": ("prefix", "total"),
    "safeguard": ("mixture", "guaranteed"),
    "positions": ("kept", IN_CACHE),
}
_SHORT = {"stage2_score": "s2", "epsilon": "eps", "group_score": "group", "group_product": "product"}
"""How a configuration's name says its less usual choices."""


@dataclass(frozen=True)
class EvictionConfig:
    """One way to evict: policy, selection, budget and every choice of METHOD that changes which entries stay.

    Raises ConfigError or BudgetError for a value outside its range, UnknownNameError for an unknown choice.

    Attributes:
        policy: eviction system, a name of `perturbkv.selection.policies.registry`.
        selection: how the kept entries are taken from scores, a key of `SELECTIONS`.
        budget: entries kept per head, window included (METHOD: Budget).
        window: `w`, the last queries of the prompt, whose attention is accumulated and whose entries always stay
            (paper, Algorithm 2: n' = 32).
        alpha: share of the prefix budget that stage 1 takes (paper, section 4.2: 0.25).
        split: what α is a share of. `prefix`: stage 1 takes ⌊α(b−w)⌋ prefix entries. `total`: the window counts as
            part of stage 1, which takes max(0, ⌊αb⌋−w) prefix entries (presets `released-v2` and `kvpress`). Where
            αb < w kvpress lets those window entries that stage 1 has no room for compete by (1 + max Ā' + ε) ν and may
            drop one whose ν is tiny; here the window always stays.
        stage2_score: S₂ of METHOD. `accumulated`: unpooled Ā (paper, Algorithm 2, line 9); `pooled`: Ā'.
        epsilon: added to S₂ before it is multiplied by ν (released code: 1e-4).
        pool, kernel: pooling of Ā over positions and its odd width (paper: max, 7).
        granularity: one kept set per `query` head or per `kv` head.
        group_score: how scores are reduced over a key/value head's group (`kv` only); Ā is reduced before pooling.
        group_product: `kv` only: mean(Ā)·mean(ν), or the mean of Ā_h·ν_h.
        sinks: first entries that streaming-llm keeps (StreamingLLM, section 3.2: 4).
        seed: of the `random` selection and policy.
        pyramid_beta: pyramidkv: the last layer gets (b − w) / β prefix entries (PyramidKV: 20).
        pyramid_line: pyramidkv: what lies on the line between the first layer and the last. `prefix`: b − w, so that
            every layer has the window beside its share. `total`: b, the window inside, each layer rounded by itself;
            budgets are equal where the last layer would get fewer entries than the window (preset `kvpress`).
        floor: adakv: share that every head keeps, of b − w or, where it is `guaranteed`, of b (AdaKV: 0.2).
        safeguard: adakv: how. `mixture`: a head gets `floor` of the uniform share and 1 − `floor` of its count among
            the layer's largest scores (FFY0/AdaKV). `guaranteed`: every head's own ⌊floor · b⌋ best, the window
            inside, come first, then the layer's largest (presets `released-v2` and `kvpress`).
        head_beta: headkv: one β-th of b − w goes into the pool that head scores share out (KVCache-Factory: 1.01).
        recent: h2o: share of b that is most recent entries (H2O: half).
        history: scissorhands: last queries whose votes count (Scissorhands, section 5: 400).
        protect_first: first entries that always stay, in every head: an int is entries, a float a share of b.
        protect_recent: most recent entries that always stay, likewise; never fewer than the window.
        positions: where decoding sees the kept keys. `kept`: at their own positions of the prompt, the next token at n.
            `in-cache`: at 0 … b − 1, the next token at b (streaming-llm only; StreamingLLM, section 3.2). It changes
            what is propagated; isolated quantities and bounds are those of the kept set at the prompt's positions.
    """

    budget: Budget
    policy: str = "snapkv"
    selection: str = "two-stage"
    window: int = 32
    alpha: float = 0.25
    split: str = "prefix"
    stage2_score: str = "accumulated"
    epsilon: float = 0.0
    pool: str = "max"
    kernel: int = 7
    granularity: str = "query"
    group_score: str = "mean"
    group_product: str = "product-of-means"
    sinks: int = 4
    seed: int = 0
    pyramid_beta: float = 20.0
    pyramid_line: str = "prefix"
    floor: float = 0.2
    safeguard: str = "mixture"
    head_beta: float = 1.01
    recent: float = 0.5
    history: int = 400
    protect_first: int | float = 0
    protect_recent: int | float = 0
    positions: str = "kept"

    def __post_init__(self) -> None:
        for field, known in _CHOICES.items():
            if getattr(self, field) not in known:
                raise UnknownNameError(getattr(self, field), field.replace("_", "-"), known)
        self._check_ranges()
        if isinstance(self.budget.value, int):
            self.check_budget(self.budget.value, f"budget {self.budget}")

    def _check_ranges(self) -> None:
        if self.window < 1:
            msg = f"the window must hold at least 1 query, got {self.window}"
            raise ConfigError(msg)
        if not 0 <= self.alpha <= 1:
            msg = f"alpha must lie in [0, 1], got {self.alpha}"
            raise ConfigError(msg)
        if self.kernel < 1 or self.kernel % 2 == 0:
            msg = f"the pooling kernel must be odd and positive, got {self.kernel}; try {self.kernel + 1}"
            raise ConfigError(msg)
        if not 0 <= self.epsilon < math.inf:
            msg = f"epsilon must be at least 0 and finite, got {self.epsilon}"
            raise ConfigError(msg)
        if self.sinks < 0:
            msg = f"sinks must be at least 0, got {self.sinks}"
            raise ConfigError(msg)
        for name in ("floor", "recent"):
            if not 0 <= getattr(self, name) <= 1:
                msg = f"{name} must lie in [0, 1], got {getattr(self, name)}"
                raise ConfigError(msg)
        for name in ("protect_first", "protect_recent"):
            value = getattr(self, name)
            if not (0 <= value and (isinstance(value, int) or value < 1)):
                msg = f"--{name.replace('_', '-')} is a number of entries (4) or a share of b below 1, got {value}"
                raise BudgetError(msg)
        for name in ("pyramid_beta", "head_beta", "history"):
            if not 1 <= getattr(self, name) < math.inf:
                msg = f"{name.replace('_', '-')} must be at least 1 and finite, got {getattr(self, name)}"
                raise ConfigError(msg)

    def protected(self, kept: int) -> tuple[int, int]:
        """First and most recent entries that always stay of `kept` ones; the window counts as recent."""
        return entries(self.protect_first, kept), max(self.window, entries(self.protect_recent, kept))

    def check_budget(self, tokens: int, what: str) -> None:
        """Raise BudgetError unless `tokens` leaves something beside what always stays. `what` names the budget."""
        first, recent = self.protected(tokens)
        if tokens > first + recent:
            return
        if first + recent == self.window:
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

    def kept_entries(self, prompt_tokens: int) -> int:
        """Entries kept per head of a prompt of n tokens: min(b, n), and n where n ≤ w, as the window always stays.

        Raises BudgetError where n > w and b leaves nothing beside what always stays.
        """
        if prompt_tokens <= self.window:
            return prompt_tokens
        tokens = self.budget.tokens(prompt_tokens)
        self.check_budget(tokens, f"budget {self.budget} of {prompt_tokens} tokens")
        return min(tokens, prompt_tokens)

    def label(self) -> str:
        """Unique, readable name: the `config` coordinate of a trace."""
        policy, selection, *others = self.words().values()
        return " ".join([f"{policy}:{selection}", *others])

    def words(self) -> dict[str, str]:
        """Choice -> how a name says it, policy and selection first; nothing of a less usual choice at its default."""
        said = {"policy": self.policy, "selection": self.selection}
        said |= {"budget": f"b={self.budget}", "alpha": f"a={self.alpha:g}", "window": f"w={self.window}"}
        said["pool"] = "unpooled" if self.pool == "none" else f"{self.pool}{self.kernel}"
        said["granularity"] = self.granularity
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in (*said, "kernel") and value != field.default:
                said[field.name] = f"{_SHORT.get(field.name, field.name.replace('_', '-'))}={value}"
        return said


_RELEASED = {
    "alpha": 0.5,
    "split": "total",
    "stage2_score": "pooled",
    "epsilon": 1e-4,
    "pool": "average",
    "kernel": 5,
    "granularity": "kv",
    "safeguard": "guaranteed",
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "paper-v2": {"alpha": 0.5, "stage2_score": "pooled", "epsilon": 1e-4, "granularity": "kv"},
    "released-v2": _RELEASED,
    "kvpress": {**_RELEASED, "window": 64, "pyramid_line": "total"},
}
"""METHOD's table of presets, as differences from `EvictionConfig`'s defaults, which are `paper`."""


def from_preset(preset: str, budget: Budget, **overrides: Any) -> EvictionConfig:
    """The preset's configuration at `budget`, each override that is not None replacing the preset's choice."""
    if preset not in PRESETS:
        raise UnknownNameError(preset, "preset", PRESETS)
    chosen = {name: value for name, value in overrides.items() if value is not None}
    return EvictionConfig(budget=budget, **{**PRESETS[preset], **chosen})
