"""perturbkv: what KV-cache eviction does to attention outputs, measured per head and per layer.

Public names are loaded when they are first used: importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perturbkv.analyses import stats as stats
    from perturbkv.analyses.ablation.ablation import ablation as ablation
    from perturbkv.analyses.ablation.equal_bytes import equal_bytes as equal_bytes
    from perturbkv.analyses.ablation.methods import methods as methods
    from perturbkv.analyses.ablation.restriction import restriction as restriction
    from perturbkv.analyses.bounds.assumption import assumption as assumption
    from perturbkv.analyses.bounds.bound_tightness import bound_tightness as bound_tightness
    from perturbkv.analyses.budget.cliff import cliff as cliff
    from perturbkv.analyses.budget.safe_budget import safe_budget as safe_budget
    from perturbkv.analyses.correlation.correlation import correlation as correlation
    from perturbkv.analyses.heads.heads import compare_heads as compare_heads
    from perturbkv.analyses.horizon.horizon import horizon as horizon
    from perturbkv.analyses.layers.budget_curves import budget_curves as budget_curves
    from perturbkv.analyses.layers.layers import last_layer as last_layer
    from perturbkv.analyses.layers.layers import layer_drift as layer_drift
    from perturbkv.analyses.needle.needle import needle as needle
    from perturbkv.analyses.quality.divergence import divergence as divergence
    from perturbkv.analyses.quality.perplexity import perplexity as perplexity
    from perturbkv.analyses.quality.quality import quality as quality
    from perturbkv.analyses.tokens.tokens import tokens as tokens
    from perturbkv.api.auditing import audit as audit
    from perturbkv.api.auditing import audit_dump as audit_dump
    from perturbkv.api.inputs import load_model as load_model
    from perturbkv.api.inputs import load_prompts as load_prompts
    from perturbkv.api.measuring import generate as generate
    from perturbkv.api.measuring import measure as measure
    from perturbkv.api.patching import patching as patching
    from perturbkv.api.searching import search_kept_sets as search_kept_sets
    from perturbkv.auditing import write_dump as write_dump
    from perturbkv.cache.compact import CompactCache as CompactCache
    from perturbkv.configs.entry_counts import Budget as Budget
    from perturbkv.configs.eviction import EvictionConfig as EvictionConfig
    from perturbkv.configs.option import option as option
    from perturbkv.configs.patching import PatchingConfig as PatchingConfig
    from perturbkv.configs.resources import Resources as Resources
    from perturbkv.configs.resources import Workers as Workers
    from perturbkv.configs.run import RunConfig as RunConfig
    from perturbkv.configs.run import Settings as Settings
    from perturbkv.configs.run import Shard as Shard
    from perturbkv.datasets.encode import Prompt as Prompt
    from perturbkv.errors import PerturbkvError as PerturbkvError
    from perturbkv.reporting.report import report as report
    from perturbkv.scoring.score import Score as Score
    from perturbkv.selection.grid import grid as grid
    from perturbkv.selection.policies.base import Policy as Policy
    from perturbkv.selection.policies.caches import external as external
    from perturbkv.selection.policies.registry import register_policy as register_policy
    from perturbkv.selection.policies.registry import register_score as register_score
    from perturbkv.storage.answers_file import read_answers as read_answers
    from perturbkv.storage.run.shard_merging import merge as merge
    from perturbkv.storage.run.writer import TraceWriter as TraceWriter
    from perturbkv.storage.trace.trace_file import read_trace as read_trace
    from perturbkv.trace import SampleTrace as SampleTrace
    from perturbkv.trace import Trace as Trace

_PUBLIC = {
    "Budget": "perturbkv.configs.entry_counts",
    "CompactCache": "perturbkv.cache.compact",
    "EvictionConfig": "perturbkv.configs.eviction",
    "PerturbkvError": "perturbkv.errors",
    "Policy": "perturbkv.selection.policies.base",
    "Prompt": "perturbkv.datasets.encode",
    "PatchingConfig": "perturbkv.configs.patching",
    "Resources": "perturbkv.configs.resources",
    "Settings": "perturbkv.configs.run",
    "Shard": "perturbkv.configs.run",
    "Workers": "perturbkv.configs.resources",
    "RunConfig": "perturbkv.configs.run",
    "Score": "perturbkv.scoring.score",
    "SampleTrace": "perturbkv.trace",
    "Trace": "perturbkv.trace",
    "TraceWriter": "perturbkv.storage.run.writer",
    "budget_curves": "perturbkv.analyses.layers.budget_curves",
    "compare_heads": "perturbkv.analyses.heads.heads",
    "last_layer": "perturbkv.analyses.layers.layers",
    "layer_drift": "perturbkv.analyses.layers.layers",
    "ablation": "perturbkv.analyses.ablation.ablation",
    "assumption": "perturbkv.analyses.bounds.assumption",
    "bound_tightness": "perturbkv.analyses.bounds.bound_tightness",
    "audit": "perturbkv.api.auditing",
    "audit_dump": "perturbkv.api.auditing",
    "write_dump": "perturbkv.auditing",
    "cliff": "perturbkv.analyses.budget.cliff",
    "divergence": "perturbkv.analyses.quality.divergence",
    "equal_bytes": "perturbkv.analyses.ablation.equal_bytes",
    "external": "perturbkv.selection.policies.caches",
    "generate": "perturbkv.api.measuring",
    "grid": "perturbkv.selection.grid",
    "horizon": "perturbkv.analyses.horizon.horizon",
    "correlation": "perturbkv.analyses.correlation.correlation",
    "load_model": "perturbkv.api.inputs",
    "load_prompts": "perturbkv.api.inputs",
    "measure": "perturbkv.api.measuring",
    "merge": "perturbkv.storage.run.shard_merging",
    "methods": "perturbkv.analyses.ablation.methods",
    "needle": "perturbkv.analyses.needle.needle",
    "option": "perturbkv.configs.option",
    "patching": "perturbkv.api.patching",
    "perplexity": "perturbkv.analyses.quality.perplexity",
    "quality": "perturbkv.analyses.quality.quality",
    "read_answers": "perturbkv.storage.answers_file",
    "read_trace": "perturbkv.storage.trace.trace_file",
    "tokens": "perturbkv.analyses.tokens.tokens",
    "register_policy": "perturbkv.selection.policies.registry",
    "register_score": "perturbkv.selection.policies.registry",
    "report": "perturbkv.reporting.report",
    "restriction": "perturbkv.analyses.ablation.restriction",
    "safe_budget": "perturbkv.analyses.budget.safe_budget",
    "search_kept_sets": "perturbkv.api.searching",
    "stats": "perturbkv.analyses.stats",
}

__all__ = [*_PUBLIC, "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used (PEP 562).

    Raises MissingPackageError, an ImportError too, where a package is not installed that the module needs.
    """
    if name not in _PUBLIC:
        raise AttributeError(f"module 'perturbkv' has no attribute '{name}'")
    with warnings.catch_warnings():  # tqdm, which the hub imports, complains in a notebook that has no ipywidgets
        warnings.filterwarnings("ignore", message="IProgress not found")
        try:
            module = importlib.import_module(_PUBLIC[name])
            return module if name == "stats" else getattr(module, name)
        except ModuleNotFoundError as error:
            from perturbkv.errors import MissingPackageError

            raise MissingPackageError.from_error(error) from error


def __dir__() -> list[str]:
    return sorted(__all__)
