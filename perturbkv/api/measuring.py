"""One trace of a model's full cache and of every evicted one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from perturbkv.api.planning import planned
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.engines.here import Here
from perturbkv.errors import UnknownNameError
from perturbkv.models import given
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.plan import Settings
from perturbkv.pipeline.progress import bar
from perturbkv.pipeline.run import Engine, run_in_memory, run_to_file
from perturbkv.storage.trace_file import read_trace
from perturbkv.trace import Trace

ENGINES = ("here",)
_DEFAULT = Resources()


def measure(
    model: Adapter,
    prompts: Iterable[Prompt],
    configs: Iterable[EvictionConfig],
    *,
    steps: int = 1,
    scenario: str = "regular",
    path: str | Path | None = None,
    engine: str = "here",
    save_outputs: bool = False,
    text: bool = True,
    kept: bool = True,
    cache: str = "ragged",
    generate: int | None = 0,
    head_scores: Sequence[Sequence[float]] = (),
    overwrite: bool = False,
    wait: bool = False,
    resources: Resources = _DEFAULT,
    progress: bool = True,
) -> Trace:
    """Run the model once with its full cache and once with each evicted one, and say what was lost.

    Args:
        model: from `load_model`.
        prompts: from `load_prompts`, or any series of `Prompt`.
        configs: from `grid`, or any series of `EvictionConfig`; all of them share a prompt's one prefill.
        steps: decode steps, teacher-forced on the full run.
        scenario: `regular`, or `context-only`, which compresses the context before the question is known.
        path: where the trace goes. A run that was killed goes on, and one that asks for more prompts or
            configurations measures those alone. None: everything stays in memory.
        engine: where samples are measured: `here`.
        save_outputs: keep head outputs, hidden states and attention too.
        text: keep each prompt's tokens and text too, which `tokens` shows. No number depends on it: a run that goes on
            adds it to the samples that are there, or takes it out of them.
        kept: keep the positions that every head keeps, which `tokens` and `Trace.kept` show; their counts, and what
            compares equal sets, stay without. A run that goes on takes them out of the samples that are there, and
            cannot add them.
        cache: layout of evicted caches, `ragged` or `rectangular`.
        generate: tokens generated from every cache and graded, which takes prompts with accepted answers; None: as many
            as the dataset says.
        head_scores: one row per layer, for the policy `headkv`.
        overwrite: replace a trace of another run at `path`, which stays until the new one is whole.
        wait: where another process writes `path`, wait until it is done, then go on from there.
        resources: memory and kernels.
        progress: whether a bar is shown.

    Raises BudgetError, ConfigError, DatasetError, ModelError, OutputError, TraceError; InterruptedRunError on Ctrl-C
    with a path.
    """
    save = ("outputs",) if save_outputs else ()
    settings = Settings(steps, scenario, cache, save, generate, head_scores, text, kept)
    ready = planned(model, prompts, configs, settings, resources, kept=path is not None)
    with bar("samples", shown=progress) as drawn, given.evaluating(model):
        if path is None:
            return run_in_memory(ready, _engine(engine), drawn.at)
        chosen = _engine(engine)
        made = run_to_file(ready, chosen, Path(path), overwrite=overwrite, wait=wait, progress=drawn.at)
        return read_trace(made)


def _engine(name: str) -> Engine:
    if name not in ENGINES:
        raise UnknownNameError(name, "engine", ENGINES)
    return Here()
