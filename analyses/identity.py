"""Identities of runs: what a reader needs to find a run again, as the foot of figures and tables shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.measurements import Measurements, measured_steps, resolve_step
from perturbkv.analyses.names import SIDE, common_choices, common_text, distinct_choices, distinct_names
from perturbkv.configs import layer_types
from perturbkv.configs.cache_contents import WITHOUT_EVICTION
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import ANSWER, FULL
from perturbkv.display import Table, plural
from perturbkv.escaping import escape_line
from perturbkv.schema import MEASURED_LAYERS
from perturbkv.storage.answers_file import WrittenAnswers
from perturbkv.trace import Trace

_TEXTS = {ANSWER: "an accepted answer", "given": "the given text"}
"""Text of a run whose steps do not read the full run's own -> its name."""
MOST_NAMED = 12
"""Largest number of configurations that a figure's foot names; its metadata names all."""


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run: model, data, configurations, digest and versions.

    Attributes:
        model, dataset: as the user named them.
        samples, failed: numbers of complete and of failed samples.
        configs: the configurations shown.
        trace: short digest of the trace file, or of the file of answers.
        random_weights: whether the weights are random, so that the numbers say nothing of a trained model.
        made_with: versions.
        scenario: part of the prompt that was compressed; shown where it is not `regular`.
        weights: type of quantised weights in the file and in the run; empty for others.
        ended: number of complete samples left out because their text ends before the step shown.
        source: what has the digest: `trace`, `answers`, or another file of a run.
        unit: what a sample is.
        measured_layers: layers and their total, such as `5 11 17 of 18`; empty where all were measured.
        byte_shares: bytes of each configuration over those of the full cache in 16 bits, mean over samples; empty where
            none is quantised or corrected, or where they are unknown.
        steps: the decode steps shown, in words, with the text they read; empty for one of the full run's own text.
        first_step: the conclusion at the first step alone, where the numbers are means over several; else empty.
        effect_gradient: gradient by which effects on the text are measured.
        unevicted: budgets, or configurations, that leave the cache whole in some samples, with the number of these.
        compressed_again: when caches are compressed again while they are decoded from, as text; empty for never.
        isolated_steps: at which steps, and how many, isolated quantities were measured, as text; empty for all.
    """

    model: str
    dataset: str
    samples: int
    failed: int
    configs: tuple[EvictionConfig, ...]
    trace: str
    random_weights: bool
    made_with: str
    scenario: str = "regular"
    weights: str = ""
    ended: int = 0
    source: str = "trace"
    unit: str = "sample"
    measured_layers: str = ""
    byte_shares: tuple[float, ...] = ()
    steps: str = ""
    first_step: str = ""
    effect_gradient: str = FULL
    unevicted: tuple[tuple[str, int], ...] = ()
    compressed_again: str = ""
    isolated_steps: str = ""

    @cached_property
    def names(self) -> list[str]:
        """The distinct name of each configuration."""
        return distinct_names(self.configs)

    @cached_property
    def shared(self) -> str:
        """The choices that all configurations share, as text."""
        return common_text(self.configs)

    def name_of(self, config: EvictionConfig) -> str:
        """Return the name of one of the configurations."""
        return self.names[self.configs.index(config)]

    def layer(self, index: int) -> int:
        """Return the number of the decoder layer at an index of the measured layers."""
        return layer_types.parse_measured(self.measured_layers)[0][index] if self.measured_layers else index

    def bytes_table(self) -> list[Table]:
        """Return the table of cache bytes by configuration, as a list; empty without `byte_shares`."""
        if not self.byte_shares:
            return []
        rows = [[name, config.bits_text, f"{share:.2f}"]
                for name, config, share in zip(self.names, self.configs, self.byte_shares, strict=True)]  # fmt: skip
        return [
            Table(
                "what is stored: bytes over those of the full cache in 16 bits", ("", "#bits", "#bytes /\nfull"), rows
            )
        ]

    def no_eviction_note(self) -> str:
        """Return notes on budgets that leave the cache whole, and on policies that evict nothing; empty for none."""
        return " ".join(filter(None, [self.whole_caches_note(), self.cache_share_note()]))

    def whole_caches_note(self) -> str:
        """Return the note on budgets that leave the cache of some samples whole; empty for none."""
        whole = (f"{name} in {count} of {plural(self.samples, self.unit)}" for name, count in self.unevicted)
        return f"Nothing is evicted at {', '.join(whole)}." if self.unevicted else ""

    def cache_share_note(self) -> str:
        """Return the notes on cache shares of policies that evict nothing, and of caches that are compressed again."""
        named = {
            contents.note: dict.fromkeys(
                config.policy.name for config in self.configs if config.cache_contents == contents
            )
            for contents in WITHOUT_EVICTION.values()
        }
        notes = [f"{', '.join(names)}: {note}" for note, names in named.items() if names]
        if self.compressed_again:
            notes.append(f"Cache shares are those at the start; caches are compressed again {self.compressed_again}.")
        if self.isolated_steps:
            notes.append(f"Isolated numbers are measured at {self.isolated_steps}.")
        return " ".join(notes)

    def lines(self) -> list[str]:
        """Return the lines of a figure's foot: run, configurations, and `no_eviction_note`."""
        parts = self._distinct_parts(lambda _, word: word)
        configurations = " · ".join(filter(None, (self.shared, *(" | ".join(filter(None, part)) for part in parts))))
        return [self.run_line(), configurations, *filter(None, [self.no_eviction_note()])]

    def run_line(self) -> str:
        """Return the run in one line: model, data, samples, digest and version."""
        words = [
            "RANDOM WEIGHTS" if self.random_weights else "",
            self.model,
            f"weights {self.weights}" if self.weights else "",
            layer_types.describe_measured(self.measured_layers),
            self.dataset,
            self.scenario if self.scenario != "regular" else "",
            self.steps,
            f"compressed again {self.compressed_again}" if self.compressed_again else "",
            plural(self.samples, self.unit),
            f"{self.ended} ended before" if self.ended else "",
            f"{self.failed} failed" if self.failed else "",
            f"{self.source} {self.trace or 'in memory'}",
            self.made_with,
        ]
        return " · ".join(map(escape_line, filter(None, words)))

    def caption_lines(self, sides: bool = True) -> list[str]:
        """Return the sentences of a figure's caption: configurations in words, model and data, `no_eviction_note`.

        Args:
            sides: whether policies and selections that differ are named, as where nothing else names them.
        """
        run = [
            f"model {self.model}{f' (weights {self.weights})' if self.weights else ''}",
            "RANDOM WEIGHTS" if self.random_weights else "",
            layer_types.describe_measured(self.measured_layers),
            self.dataset,
            self.scenario if self.scenario != "regular" else "",
            self.steps,
            f"compressed again {self.compressed_again}" if self.compressed_again else "",
            plural(self.samples, "sample") if self.samples < 2 else "",
            f"{self.ended} samples ended before" if self.ended else "",
            f"{self.failed} samples failed" if self.failed else "",
        ]
        note = self.no_eviction_note()
        shared = [_choice_in_words(choice, word) for choice, word in common_choices(self.configs).items()]
        parts = self._distinct_parts(_choice_in_words)
        if len(parts) > 1 and not sides:
            parts = parts[1:]  # the settings alone
        named = [part for part in (list(filter(None, part)) for part in parts) if part]
        texts = [text.join_names(part) if all(" " not in name for name in part) else ", ".join(part) for part in named]
        budgets = [_choice_in_words("budget", f"b={config.budget}") for config in self.configs]
        if named and named[-1] == list(dict.fromkeys(budgets)) and len(named[-1]) > 1:  # the settings are budgets
            texts[-1] = "budgets " + text.join_names([name.removeprefix("budget ") for name in named[-1]])
        configurations = "; ".join(filter(None, (", ".join(shared), *texts)))
        return [configurations, escape_line(", ".join(filter(None, run))), *([note] if note else [])]

    def provenance(self) -> str:
        """Return the digest of what was drawn, and the version: 'trace 0123456789ab, perturbkv 0.1.0'."""
        return f"{self.source} {self.trace or 'in memory'}, {self.made_with}"

    def _distinct_parts(self, write: Callable[[str, str], str]) -> list[list[str]]:
        """Return the distinct sides and the distinct settings, or whole names where not each side has every setting.

        One text with the number of configurations where there are more than `MOST_NAMED` names. `write` makes text of
        a setting's choice and its word in a label; sides stay as they are in labels.
        """
        distinct = [
            {choice: word if choice in SIDE else write(choice, word) for choice, word in words.items()}
            for words in distinct_choices(self.configs)
        ]
        parts = [
            list(
                dict.fromkeys(
                    " ".join(w for choice, w in words.items() if (choice in SIDE) == side) for words in distinct
                )
            )
            for side in (True, False)
        ]
        if len(parts[0]) * len(parts[1]) != len(self.configs):
            parts = [[" ".join(words.values()) for words in distinct]]
        if sum(bool(name) for part in parts for name in part) > MOST_NAMED:
            parts = [[f"{len(self.configs)} configurations"]]
        return parts


_WORDS = {"policy": "policy ", "selection": "selection ", "budget": "budget ", "alpha": "α ", "window": "window "}
_SETS = {"query": "query head", "kv": "key-value head", "layer": "layer", "head": "head of all layers"}


def _choice_in_words(choice: str, word: str) -> str:
    """Return a choice's word of a label in words: 'budget 128', 'max-pooling of 7', 'per query head'."""
    value = word.partition("=")[2] or word
    if choice == "granularity":
        return f"per {_SETS.get(word, word)}"
    if choice == "pool":
        pool = word.rstrip("0123456789")
        return "no pooling" if word == "unpooled" else f"{pool}-pooling of {word[len(pool) :]}"
    return f"{_WORDS[choice]}{value}" if choice in _WORDS else word.replace("=", " ")


def identity_at(trace: Trace, configs: Sequence[EvictionConfig], step: int | None) -> RunIdentity:
    """Return the identity of a run whose numbers are those of one decode step, or, for None, means over all."""
    found = identity(trace, configs, step or 0)
    isolated = found.isolated_steps if step is None else ""
    return replace(found, steps=_steps_in_words(trace, step), isolated_steps=isolated)


def identity(trace: Trace, configs: Sequence[EvictionConfig], step: int = 0) -> RunIdentity:
    """Return the identity of a trace's run, for the configurations shown and the samples that have a decode step."""
    samples = int((measured_steps(trace) > step).sum())
    evicted = trace.arrays["evicted"][trace.ok][measured_steps(trace) > step]
    groups: dict[str, dict[str, int]] = {}
    for config in configs:
        whole = int((evicted[:, trace.config_index(config.label())] == 0).sum())
        # 0 keeps a budget with a configuration that never evicts from standing for all
        groups.setdefault(f"b={config.budget}", {})[config.label()] = whole if config.evicts else 0
    named = (
        [(budget, min(counts.values()))] if min(counts.values()) else list(counts.items())
        for budget, counts in groups.items()
    )
    return RunIdentity(
        model=trace.run.model,
        dataset=trace.run.dataset,
        samples=samples,
        failed=len(trace.failures),
        configs=tuple(configs),
        trace=trace.digest,
        random_weights=trace.run.random_weights,
        made_with=f"perturbkv {trace.attrs.get('perturbkv_version', '')}".strip(),
        scenario=trace.run.scenario,
        weights=trace.attrs.get("weights", "") if trace.attrs.get("quantised_weights") == "true" else "",
        ended=int(trace.ok.sum()) - samples,
        measured_layers=trace.attrs.get(MEASURED_LAYERS, ""),
        byte_shares=_trace_byte_shares(trace, configs),
        effect_gradient=trace.run.effect_gradient,
        unevicted=tuple((name, count) for group in named for name, count in group if count),
        compressed_again=trace.run.compressed_again,
        isolated_steps=_isolated_steps(trace),
    )


def _isolated_steps(trace: Trace) -> str:
    """Return at which steps isolated quantities were measured, and how many of a sample's steps; empty for all."""
    if trace.run.isolated_every == 1:
        return ""
    known = ~np.isnan(trace.arrays["perturbation_isolated"][trace.ok][..., 0, 0])  # (sample, config, step)
    counts = known.sum(axis=2)[:, known.any(axis=(0, 2))]
    if not counts.size:
        return ""
    ends = ({int(numbers.min()), int(numbers.max())} for numbers in (counts, measured_steps(trace)))
    told = " of ".join("–".join(map(str, sorted(each))) for each in ends)
    return f"compressions, every {trace.run.isolated_every} steps and at the last: {told} steps"


def _steps_in_words(trace: Trace, step: int | None) -> str:
    """Return the decode steps shown in words, with the text where it is not the full run's own.

    Empty where the trace has one step of that. None: the mean over those of a sample.
    """
    step, counts, words = resolve_step(trace, step), measured_steps(trace), ""
    if step is None:
        words = f"mean over {'up to ' if counts.min() < counts.max() else ''}{counts.max()} steps"
    elif trace.run.steps > 1:
        words = f"step {step} alone" if step else "first step alone"
    if trace.run.text not in _TEXTS:
        return words
    return f"{words or 'first step'} of {_TEXTS[trace.run.text]}"


def joint_identity(runs: Sequence[RunIdentity]) -> RunIdentity:
    """Return the joint identity of several runs: the first's, with all models, data sets, digests, steps, samples."""
    return replace(
        runs[0],
        model=", ".join(dict.fromkeys(run.model for run in runs)),
        dataset=", ".join(dict.fromkeys(run.dataset for run in runs)),
        trace=", ".join(run.trace for run in runs),
        steps=", ".join(dict.fromkeys(run.steps for run in runs)),
        samples=sum(run.samples for run in runs),
        failed=sum(run.failed for run in runs),
        ended=sum(run.ended for run in runs),
    )


def _trace_byte_shares(trace: Trace, configs: Sequence[EvictionConfig]) -> tuple[float, ...]:
    """Return the byte share of each configuration; empty where unknown, or where none is quantised or corrected."""
    if not trace.ok.any() or all(config.in_16_bits for config in configs):
        return ()
    shares = Measurements(trace, "identity").byte_shares
    known = not np.isnan(shares).any()
    return tuple(float(shares[trace.run.configs.index(config)]) for config in configs) if known else ()


def answers_identity(answers: WrittenAnswers) -> RunIdentity:
    """Return the identity of a file of answers that `perturbkv generate` wrote, with all its configurations.

    Byte shares are means over answers, none where one is unknown.
    """
    run, made = answers.run, answers.made_with
    each = [[row["evicted"][label].get("bytes_share") for row in answers.rows] for label in run.labels()]
    known = all(None not in shares for shares in each)
    return RunIdentity(
        model=run.model,
        dataset=run.dataset,
        samples=len(answers.rows),
        failed=0,
        configs=run.configs,
        trace=answers.digest,
        random_weights=run.random_weights,
        made_with=f"perturbkv {made.get('perturbkv_version', '')}".strip(),
        scenario=run.scenario,
        weights=str(made.get("weights", "")) if made.get("quantised_weights") is True else "",
        source="answers",
        measured_layers=str(made.get(MEASURED_LAYERS, "")),
        byte_shares=tuple(float(np.mean(shares)) for shares in each) if known else (),
        compressed_again=run.compressed_again,
    )
