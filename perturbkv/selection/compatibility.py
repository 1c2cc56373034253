"""Checks that the choices of a configuration combine, with each other and with cache, prompt length and generation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from perturbkv.configs.cache_contents import WITHOUT_EVICTION
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.plugins import commands_for_signed
from perturbkv.configs.precision import needs_plain_logits
from perturbkv.configs.selections import (
    GATE,
    GIVEN,
    GRANULARITIES,
    PROMPT,
    SELECTIONS,
    TEXT_QUERIES,
    UNION,
    reduction,
    shares_layers,
)
from perturbkv.display import plural
from perturbkv.errors import BudgetError, ConfigError, ModelError
from perturbkv.selection.policies import checked
from perturbkv.selection.policies.registry import all_policies, build, has_own_code, names, policy_class
from perturbkv.selection.resolved_config import ResolvedConfig, ResolvedRun, resolve

if TYPE_CHECKING:
    from perturbkv.selection.policies.base import Policy


def compatible_choices() -> list[tuple[str, str, str]]:
    """Return table rows (policies, selections, caches) of compatible choices, as `perturbkv list policies` prints."""

    def selections_and_caches(policy: type[Policy]) -> tuple[Any, ...]:
        return policy.selections, policy.caches()

    policies = sorted(all_policies(), key=selections_and_caches)
    return [
        (", ".join(policy.name for policy in group), _describe_selections(selections), " or ".join(caches))
        for (selections, caches), group in groupby(policies, key=selections_and_caches)
    ]


def _describe_selections(selections: tuple[str, ...]) -> str:
    """Return the names of a policy's selections as text, abbreviated where only `position` and `given` are missing."""
    every_other = SELECTIONS.keys() - {"position", GIVEN}
    return "every selection but position" if set(selections) == every_other else ", ".join(selections)


def check(config: EvictionConfig, cache: str = "ragged") -> None:
    """Raise ConfigError for incompatible choices of policy, selection, granularity, correction and cache layout."""
    policy = policy_class(config.policy.name)
    if config.selection.name not in policy.selections:
        raise ConfigError(
            f"policy '{policy.name}' does not combine with selection '{config.selection.name}'; "
            f"{describe_compatible_choices()}"
        )
    if not can_share(policy, config.granularity):
        suitable = ", ".join(name for name in GRANULARITIES if can_share(policy, Choice(name)))
        raise ConfigError(
            f"policy '{policy.name}' shares budgets out {policy.budgets}, and granularity '{config.granularity.name}' "
            f"is {GRANULARITIES[config.granularity.name].partition(',')[0]}; choose {suitable}, or another policy"
        )
    resolved = resolve(config)
    if resolved.system.competes and reduction(config.granularity) == UNION:
        raise ConfigError(
            f"policy '{policy.name}' compares the scores of kept sets, and reduce=union has ranks alone; choose "
            "reduce=mean or reduce=max, or another policy"
        )
    if resolved.first_stage is not None and config.block > 1:
        raise ConfigError(
            f"policy '{policy.name}' chooses single entries in a stage 1 of its own; leave block of the granularity out"
        )
    if cache not in policy.caches():
        raise ConfigError(
            f"policy '{policy.name}' shares budgets out {policy.budgets}, which a {cache} cache cannot hold; "
            f"{describe_compatible_choices()}"
        )
    _check_sign(resolved)
    _check_correction(resolved)


def can_share(policy: type[Policy], granularity: Choice) -> bool:
    """Return whether a policy's budgets are equal wherever a granularity shares a kept set."""
    if policy.budgets == "uniform":
        return True
    return not shares_layers(granularity) if policy.budgets == "by layer" else granularity.name in ("query", "kv")


def _check_correction(config: ResolvedConfig) -> None:
    """Raise ConfigError for a correction that is incompatible with the configuration's precision or positions."""
    if not config.corrected:
        return
    if config.quantised:
        raise ConfigError(
            f"correction '{config.correction}' stands in for entries of full precision; leave precision "
            f"'{config.precision}' or the correction out"
        )
    if config.in_cache:
        raise ConfigError(
            f"correction '{config.correction}' predicts by queries at the prompt's positions, and positions=in-cache "
            "moves them; use positions=kept, or leave the correction out"
        )


def check_ends(config: ResolvedConfig, prompt_tokens: int) -> None:
    """Raise BudgetError for a budget that leaves nothing beyond what the policy always keeps at a prompt's two ends.

    Policies that rank by position, and prompts that fit the budget, are not checked.
    """
    kept = config.kept_entries(prompt_tokens)
    if kept >= prompt_tokens or config.is_external or config.selection.name == "position":
        return
    policy = config.system
    first = checked.count(policy, "first_entries", config, kept)
    recent = max(config.window, checked.count(policy, "recent_entries", config, kept))
    if kept <= first + recent:
        raise BudgetError(
            f"budget {config.budget} keeps {plural(kept, 'entry', 'entries')} of {prompt_tokens}, no more than policy "
            f"'{policy.name}' always keeps: the first {first} and the last {recent}; raise the budget, or lower its "
            "own options"
        )


def only_text_votes(config: EvictionConfig) -> bool:
    """Return whether the chat template's queries in the window do not vote."""
    return resolve(config).score.window_queries == TEXT_QUERIES


def check_window_queries(config: ResolvedConfig, sample: str, prompt_tokens: int, template: range) -> None:
    """Raise ConfigError where the text's queries alone shall vote, and are all queries of the window or none of them.

    `template` are the positions of the chat template's tokens behind the last message of the sample.
    """
    if not only_text_votes(config):
        return
    window = range(max(0, prompt_tokens - config.window), prompt_tokens)
    count = sum(position in template for position in window)
    where = f"the last {len(window)} compressed tokens of sample '{sample}'"
    if not count:
        msg = (
            f"window_queries=text leaves out the chat template's tokens at a prompt's end, and {where} hold none; "
            "leave it out, or use the chat template"
        )
    elif count == len(window):
        needed = prompt_tokens - template.start + 1
        msg = f"window_queries=text leaves no query: {where} are the chat template's; use --window {needed} or more"
    else:
        return
    raise ConfigError(msg)


def scores_with_norms_counted_twice(configs: Iterable[ResolvedConfig]) -> list[str]:
    """Return the names of scores that include value norms, in configurations whose selection multiplies by ν again."""
    multiplied = [config.score for config in configs if config.selection.name == "two-stage"]
    return list(dict.fromkeys(score.display_name for score in multiplied if score.holds_norms))


def check_gates(configs: Iterable[ResolvedConfig], has_gates: bool, model: str) -> None:
    """Raise ConfigError for a configuration that cannot take a model's gates into account, or names one it has not."""
    for config in configs:
        if not has_gates and GATE in config.selection.options:
            raise ConfigError(
                f"selection '{config.selection}' says what ν takes of a gate between attention and projection, and "
                f"model '{model}' has none; leave gate out"
            )
        reasons = {
            f"policy '{config.policy.name}', whose prefill is sparse": config.has_sparse_prefill,
            "pages chosen with hindsight": config.reads_pages and config.selection.name == "hindsight",
            f"score '{config.score.display_name}'": config.score.replay is not None and config.score.holds_norms,
        }
        if has_gates and (wrong := next((reason for reason, applies in reasons.items() if applies), "")):
            raise ConfigError(
                f"model '{model}' has a gate between attention and projection, of each query another; {wrong} is not "
                "measured with it; choose another one or another model"
            )


def _check_sign(config: ResolvedConfig) -> None:
    """Raise ConfigError for a signed score that would be multiplied or mixed (METHOD: Scores of later methods)."""
    policy = config.system
    selection = f"selection '{config.selection.name}'" if config.selection.name == "two-stage" else ""
    multiplier = f"policy '{policy.name}'" if policy.mixes else selection
    if config.score.signed and multiplier:
        advice = commands_for_signed(type(config.score))
        raise ConfigError(
            f"{multiplier} multiplies or mixes scores, and '{config.score.display_name}' gives some below 0; {advice}"
        )


def check_soft_cap(configs: Iterable[ResolvedConfig], cap: float | None, model: str) -> None:
    """Raise ModelError for a configuration whose formula fails where the model caps logits; None: it does not."""
    if cap is None:
        return
    reasons = (reason for config in configs for reason in _needs_of_plain_logits(config))
    if (reason := next(reasons, "")) != "":
        raise ModelError(f"{reason}, and model '{model}' soft-caps its logits at {cap:g}; leave it out")


def _needs_of_plain_logits(config: ResolvedConfig) -> Iterator[str]:
    """Yield what in a configuration needs logits without a soft cap, and why."""
    for score in (config.score, config.first_stage):
        if score is not None and score.plain_logits:
            yield f"score '{score.display_name}' needs plain logits: {score.plain_logits}"
    if needs_plain_logits(config.correction):
        yield f"correction '{config.correction}' needs plain logits: it takes a log-mass for linear in the query"


def check_compressions(run: ResolvedRun, measured: bool) -> None:
    """Raise ConfigError for a run whose caches cannot be compressed again while they are decoded from.

    `measured` says whether its kept sets are measured.
    """
    if run.compress_every and run.compress_over:
        raise ConfigError("compress_every and compress_over (--compress-every, --compress-over) exclude each other")
    if run.isolated_every > 1 and not run.compresses:
        raise ConfigError(
            "isolated_every (--isolated-every) chooses steps where caches are compressed again: add --compress-every "
            "or --compress-over, or leave it out"
        )
    if run.compresses and "effect" in run.save:
        raise ConfigError("effects (--save effect) are of one kept set, and caches that are compressed again have many")
    if run.compresses and all(has_own_code(config.policy.name) for config in run.configs):
        raise ConfigError(
            f"policy '{run.configs[0].policy.name}' decides itself when its cache is compressed: leave "
            "--compress-every and --compress-over out, or add a policy of ours"
        )
    for config in run.configs:
        if not run.compresses:
            if config.system.keep == PROMPT:
                raise ConfigError(
                    f"policy '{config.policy}' evicts among decoded tokens alone; compress caches again by "
                    "--compress-every or --compress-over, or leave keep out"
                )
        elif not has_own_code(config.policy.name):
            check_compressible(config)
            check_generation(config)
            if measured and not config.only_evicts:
                raise ConfigError(
                    f"'{config.label()}' stores other entries than the prompt's, whose isolated loss is known for one "
                    "kept set; caches that are compressed again are measured with precision full and positions=kept"
                )
            budget = config.budget.value
            if run.compress_over and not (isinstance(budget, int) and budget < run.compress_over):
                raise ConfigError(
                    f"compress_over (--compress-over) {run.compress_over} needs a budget in tokens below it, got "
                    f"budget {config.budget}"
                )


def check_protected_prompts(config: ResolvedConfig, lengths: Mapping[str, int]) -> None:
    """Raise BudgetError where a prompt that stays (`keep=prompt`) leaves a configuration's budget nothing to keep.

    `lengths` are numbers of compressed tokens by sample.
    """
    for sample, tokens in lengths.items() if config.system.keep == PROMPT else ():
        budget = config.budget.tokens(tokens)
        recent = config.protected_counts(budget)[1]
        if budget <= tokens + recent:
            raise BudgetError(
                f"budget {config.budget} is no more than what keep=prompt protects: the {tokens} entries of sample "
                f"'{sample}' and the last {recent}; raise the budget above {tokens + recent}"
            )


def check_compressible(config: EvictionConfig) -> None:
    """Raise ConfigError for a configuration that cannot compress a cache again during decoding."""
    if config.is_external:
        raise ConfigError(
            f"policy '{config.policy.name}' is asked once, for the prompt; policies of ours compress again"
        )
    if not config.evicts:
        raise ConfigError(
            f"policy '{config.policy.name}' evicts nothing, so that nothing is compressed again: leave it out"
        )
    resolved = resolve(config)
    if config.quantised and resolved.in_cache:
        raise ConfigError(
            "positions=in-cache turns keys at each compression, and those in few bits would be rounded again; "
            "use precision full or positions=kept"
        )
    if config.corrected:
        raise ConfigError(
            f"correction '{config.correction}' is stored once, for the prompt; caches are compressed again "
            "with correction none"
        )
    if only_text_votes(config):
        raise ConfigError(
            "window_queries=text leaves out tokens of the prompt's end, and compressing again goes on from there; "
            "leave one of them out"
        )
    if not _can_compress_again(resolved.system):
        suitable = ", ".join(name for name in names() if _can_compress_again(build(Choice(name))))
        raise ConfigError(
            f"policy '{config.policy.name}' looks at what decoding forgets, or at all layers at once, or has a stage 1 "
            f"of its own; caches are compressed again by {suitable}"
        )
    if resolved.score.whole_layer and resolved.system.budgets == "by head":
        raise ConfigError(
            f"policy '{config.policy}' compares all heads of a layer, whose entries differ once its budgets are by "
            "head; caches are compressed again with it where budgets are alike, such as of snapkv"
        )


def check_searchable(config: EvictionConfig) -> None:
    """Raise ConfigError for a configuration whose kept sets are not searched head by head for the best ones."""
    kind = policy_class(config.policy.name)
    reasons = {
        "policies with kept sets from outside": config.is_external,
        f"policy {config.policy.name}, which evicts nothing": not config.evicts,
        f"granularity {config.granularity}": config.granularity.name != "query" or config.block > 1,
        f"policy {config.policy.name}, whose budgets are {kind.budgets}": kind.budgets != "uniform",
        f"precision {config.precision}": config.quantised,
        "window_queries=text, and a prefix has no chat template's tokens": only_text_votes(config),
        f"correction {config.correction}, which changes the output of a set": config.corrected,
    }
    if wrong := next((reason for reason, applies in reasons.items() if applies), ""):
        raise ConfigError(
            f"the best set of a head is searched among sets of one size, a set per query head; got {wrong}"
        )


def _can_compress_again(policy: Policy) -> bool:
    """Return whether a policy evicts by its score alone, without prefill data and the other layers' scores."""
    needs_more = policy.score.needs_prompt or policy.whole_model or policy.first_stage is not None
    return not needs_more and policy.name not in WITHOUT_EVICTION


def needs_all_layers(config: ResolvedConfig) -> bool:
    """Return whether eviction has to wait until all layers are computed."""
    return config.system.whole_model or config.score.replay is not None or config.shares_layers


def check_generation(config: EvictionConfig) -> None:
    """Raise ConfigError for a selection that needs the next query, which is unknown in generation.

    Pages are selected once the query is known, so that configurations that read pages pass.
    """
    if config.selection.name in ("hindsight", "hindsight-attention") and not config.reads_pages:
        raise ConfigError(
            f"selection '{config.selection.name}' looks at the next query, which generation does not have; choose "
            "another selection"
        )


def describe_compatible_choices() -> str:
    """Return the compatible policies, selections and caches as one line, for error messages."""
    rows = [
        f"{policies} with {selections} in a {caches} cache" for policies, selections, caches in compatible_choices()
    ]
    return f"what works (perturbkv list policies): {'; '.join(rows)}"
