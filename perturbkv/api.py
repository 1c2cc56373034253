"""The functions that a notebook needs: load, measure, read, generate. `import perturbkv as pk` has them all.

Everything that the command line can do goes through these or what they call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from perturbkv.audit_trace import SITUATIONS
from perturbkv.auditing import run as audits
from perturbkv.auditing.loading import load as load_eviction
from perturbkv.configs.budget import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.prompts import Prompts, gathered, load
from perturbkv.engines.here import Here
from perturbkv.errors import ConfigError, ModelError, UnknownNameError
from perturbkv.judging import run as judges
from perturbkv.judging.command import split
from perturbkv.judging.judgements import Judge
from perturbkv.models import given
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import ModelFiles
from perturbkv.models.loading import load_model as load_by_name
from perturbkv.pipeline.answered import Generation, row
from perturbkv.pipeline.generation import Answers, answer, check_asked, check_memory
from perturbkv.pipeline.grading import metrics_of
from perturbkv.pipeline.plan import Placement, Plan, Settings, plan
from perturbkv.pipeline.progress import bar
from perturbkv.pipeline.provenance import provenance
from perturbkv.pipeline.run import Engine, run_in_memory, run_to_file
from perturbkv.scoring import head_scores, value_norms
from perturbkv.selection import compatibility
from perturbkv.selection.grid import unique
from perturbkv.selection.policies import registry as policies
from perturbkv.storage.answers_file import WrittenAnswers
from perturbkv.storage.trace_file import read_trace
from perturbkv.trace import Trace

if TYPE_CHECKING:
    from perturbkv.analyses.audit import AuditResult
    from perturbkv.analyses.judged import Judged
    from perturbkv.analyses.preferred import Preferences

ENGINES = ("here",)
_CONFIGS = "configurations, as pk.grid makes them"
_Kind = TypeVar("_Kind")
_DEFAULT = Resources()


def load_model(
    model: Any, *, tokenizer: Any = None, dtype: Any = "auto", device: Any = "auto", seed: int = 0
) -> Adapter:
    """A model to measure: by name, or one that is loaded already.

    Args:
        model: an alias (`smollm2-135m-q4_1`), a hub id, a folder, a .gguf file, `random:<alias>`; or a transformers
            model, on any device, which is used where it is and left as it was.
        tokenizer: of a loaded model.
        dtype: of a model that is loaded by name: auto, float32, bfloat16, float16.
        device: of a model that is loaded by name: auto, cpu, cuda, cuda:1, ….
        seed: of random weights.

    Raises ModelError, UnknownNameError or ConfigError, each with what was expected and what to do.

    >>> import perturbkv as pk
    >>> pk.load_model("random:smollm2-135m").heads
    9
    """
    if isinstance(model, str | Path):
        if tokenizer is not None:
            msg = f"model '{model}' brings its own tokenizer; give a tokenizer with a loaded model alone"
            raise ConfigError(msg)
        return load_by_name(str(model), str(dtype).removeprefix("torch."), str(device), seed)
    if isinstance(model, Adapter):
        return model
    if (dtype, device) != ("auto", "auto"):
        msg = "a loaded model stays in its dtype and on its device; leave dtype and device out"
        raise ConfigError(msg)
    return given.adapted(model, tokenizer)


def load_prompts(
    dataset: str,
    model: Adapter,
    *,
    samples: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
    lengths: Sequence[int] = (),
    depths: Sequence[float] = (),
    haystack: str = "prose",
    metric: str = "",
    max_tokens: int | None = None,
    chat_template: bool | None = None,
) -> Prompts:
    """The prompts of a dataset as the model gets them.

    Args:
        dataset: `needle`, one of LongBench's 21 names, or a .jsonl file.
        model: whose tokenizer and chat template count.
        samples: how many; None: 8, or all where there are fewer.
        seed: of everything random.
        data_dir: folder with LongBench's files.
        lengths: of needle's and RULER's prompts, in tokens.
        depths: where needle's fact lies, 0 to 1.
        haystack: needle's, `prose` or `noise`.
        metric: that grades answers: `f1`, `exact-match`, `rouge-l` or `exact-number`; empty: a data set's own, and for
            other prompts with accepted answers f1.
        max_tokens: longer prompts are cut in the middle.
        chat_template: None: where the tokenizer has one and the dataset goes with one.

    Raises UnknownNameError, DatasetError, ConfigError.
    """
    return load(
        dataset, model.tokenizer, samples=samples, seed=seed, data_dir=None if data_dir is None else Path(data_dir),
        lengths=lengths, depths=depths, haystack=haystack, metric=metric, max_tokens=max_tokens,
        chat_template=chat_template, positions=model.positions,
    )  # fmt: skip


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
    settings = Settings(steps, scenario, cache, save, generate, head_scores, text)
    planned = _planned(model, prompts, configs, settings, resources, kept=path is not None)
    with bar("samples", shown=progress) as drawn, given.evaluating(model):
        if path is None:
            return run_in_memory(planned, _engine(engine), drawn.at)
        chosen = _engine(engine)
        made = run_to_file(planned, chosen, Path(path), overwrite=overwrite, wait=wait, progress=drawn.at)
        return read_trace(made)


def generate(
    model: Adapter,
    prompts: Iterable[Prompt],
    configs: Iterable[EvictionConfig],
    *,
    max_new_tokens: int | None = None,
    scenario: str = "regular",
    cache: str = "ragged",
    compress_every: int | None = None,
    divergence: bool = False,
    head_scores: Sequence[Sequence[float]] = (),
    resources: Resources = _DEFAULT,
    progress: bool = True,
) -> Generation:
    """Greedy answers from the full cache and from every evicted one, one `Answers` per prompt.

    They show themselves as text beside what was expected, with a score where the dataset has a metric.

    Args:
        model: from `load_model`.
        prompts: what is answered.
        configs: from `grid`.
        max_new_tokens: tokens of an answer at most, at least 1; None: as many as the dataset says.
        scenario: as in `measure`.
        cache: as in `measure`.
        compress_every: compress to the budget, a number of tokens below this one, again whenever a cache holds more
            entries than this.
        divergence: also read the full cache's answer from every cache, which `divergence` then shows.
        head_scores: as in `measure`.
        resources: as in `measure`.
        progress: whether a bar is shown.

    Raises what `measure` raises, and ConfigError for a configuration that would have to know the next query or cannot
    be compressed again, and where `resources` do not hold all caches at once.
    """
    from perturbkv.analyses.objects import provenance_object

    chosen = _all_of(EvictionConfig, configs, _CONFIGS)
    check_asked(chosen, max_new_tokens, compress_every)
    settings = Settings(scenario=scenario, cache=cache, generate=max_new_tokens, head_scores=head_scores, scored=False)
    planned = _planned(model, prompts, chosen, settings, resources)
    check_memory(planned)
    graded, found = metrics_of(planned.prompts), _answered(planned, model, compress_every, divergence, progress)
    told = zip(planned.prompts, found, strict=True)
    labels, decode = planned.run.labels(), model.tokenizer.decode
    rows = tuple(row(prompt, one, labels, decode, graded) for prompt, one in told)
    about = provenance_object(provenance(planned))
    return Generation(tuple(found), WrittenAnswers(planned.run, rows, compress_every, made_with=about))


def audit(
    model: Adapter,
    prompts: Iterable[Prompt],
    eviction: Any,
    *,
    budget: Budget | float | str | None = None,
    steps: int = 4,
    situations: Sequence[str] = tuple(SITUATIONS),
    losses: bool = True,
    resources: Resources = _DEFAULT,
    progress: bool = True,
) -> AuditResult:
    """Is an eviction that is not ours broken, or only lossy? `.verdict` is `exact`, `differs` or `unreadable`.

    It is held against the plain model with its full cache and a mask of exactly the entries that the eviction keeps.

    Args:
        model: from `load_model`.
        prompts: from `load_prompts`, or any series of `Prompt`.
        eviction: a function `(model, input_ids, attention_mask) -> cache`, a transformers `Cache` class, or text:
            `file.py:name(option=value)` of either, or a `.npz` or `.json` file of kept positions. It may bring a
            `decode(model, cache, token, step) -> logits`. Or a press of kvpress, `kvpress:SnapKVPress(window_size=32)`.
        budget: of a press: entries per head, as in `grid`.
        steps: forward passes after the eviction.
        situations: of `single`, `block` and `batch`, in which it is run.
        losses: whether the loss is measured beside controls that hold as much.
        resources: as in `measure`.
        progress: whether a bar is shown.

    Raises ConfigError, UnknownNameError, DatasetError, ModelError.

    >>> import perturbkv as pk
    >>> from transformers import DynamicCache
    >>> model = pk.load_model("random:smollm2-135m")
    >>> prompt = pk.Prompt.from_text("Paris is in France. " * 3, model)
    >>> pk.audit(model, prompt, DynamicCache, situations=["single"], losses=False, progress=False).verdict
    'exact'
    """
    from perturbkv.analyses.audit import conclude

    settings, given_eviction = (
        audits.Settings(steps, tuple(situations), losses),
        load_eviction(eviction, _as_budget(budget)),
    )
    held = gathered(
        prompts if isinstance(prompts, Prompts) else _all_of(Prompt, prompts, "prompts: pk.Prompt.from_text")
    )
    _check_model(model)
    about = {"dataset": held.dataset, "seed": str(held.seed)}
    with bar("prompts", len(held), shown=progress) as drawn, given.evaluating(model):
        return conclude(audits.audit(model, held, given_eviction, settings, about, resources, drawn.one_more))


def judge(
    answers: WrittenAnswers,
    command: str,
    *,
    pairwise: bool = False,
    seed: int = 0,
    scale: tuple[float, float] | None = None,
    path: str | Path | None = None,
    overwrite: bool = False,
    time_limit: float = judges.LIMIT,
    progress: bool = True,
) -> Judged | Preferences:
    """What a judge of one's own thinks of every answer.

    The command gets a JSON object per line on its standard input, with an `id`, and writes one per line, in any order:
    the `id`, with a `score`, or of a pair a `winner` (`a`, `b` or `tie`), and a `comment` if it likes.

    Args:
        answers: of `read_answers`, or a `generate`'s `.written`.
        command: program and arguments, which no shell reads: `python my_judge.py`.
        pairwise: show the full cache's answer and an evicted one's in a drawn order, instead of one answer.
        seed: of that order.
        scale: least and largest score; None: any number.
        path: where judgements are kept, each as soon as it is there; the same call goes on from there.
        overwrite: replace those of another judge at `path`.
        time_limit: seconds without an answer, at most.
        progress: whether a bar is shown.

    Raises ConfigError for a command or a file that cannot be used, PluginError for a judge that fails.
    """
    from perturbkv.analyses.judged import judged
    from perturbkv.analyses.preferred import preferred

    asked = Judge(tuple(split(command)), pairwise, seed, scale)
    with bar("judgements", shown=progress) as drawn:
        said = judges.ask(
            answers, asked, path=None if path is None else Path(path), overwrite=overwrite, limit=time_limit,
            progress=drawn.at,
        )  # fmt: skip
    return preferred(answers, asked, said) if pairwise else judged(answers, asked, said)


def _as_budget(given: Any) -> Budget | None:
    if given is None or isinstance(given, Budget):
        return given
    return Budget.parse(given) if isinstance(given, str) else Budget(given)


def _check_model(model: Any) -> None:
    """Raise ModelError for what `load_model` did not give."""
    if not isinstance(model, Adapter):
        msg = f"expected a model from pk.load_model, got {type(model).__name__}"
        raise ModelError(msg)


def _answered(
    planned: Plan, model: Adapter, compress_every: int | None, divergence: bool, progress: bool
) -> list[Answers]:
    run, found = planned.run, []
    with bar("samples", shown=progress) as drawn, given.evaluating(model):
        for done, prompt in enumerate(planned.prompts):
            drawn.at(done, len(planned.prompts))
            found.append(
                answer(
                    model, prompt, run.configs, run.generate, scenario=run.scenario, layout=run.cache,
                    head_scores=run.head_scores, compress_every=compress_every, divergence=divergence,
                    resources=planned.resources,
                )
            )  # fmt: skip
    return found


def _planned(
    model: Adapter,
    prompts: Iterable[Prompt],
    configs: Iterable[EvictionConfig],
    settings: Settings,
    resources: Resources,
    kept: bool = False,
) -> Plan:
    """The plan; with `kept` a given model's weights are told apart from all others: its trace may be gone on with."""
    chosen = unique(map(policies.resolved, _all_of(EvictionConfig, configs, _CONFIGS)))
    held = gathered(
        prompts if isinstance(prompts, Prompts) else _all_of(Prompt, prompts, "prompts: pk.Prompt.from_text")
    )
    _check_model(model)
    for config in chosen:
        compatibility.check(config, settings.cache)
    needed = any(policies.info(config.policy.name).needs_scores for config in chosen)
    scores = head_scores.checked(settings.head_scores, len(model.layers), model.heads) if needed else ()
    value_norms.check_kernel(resources.norm_kernel, model.device)
    files = ModelFiles.of(model)
    if kept and files.revision == given.GIVEN:
        files = replace(files, revision=given.fingerprint(model))
    placement = Placement(model.dtype, torch.device(model.device))
    return plan(files, placement, held, chosen, replace(settings, head_scores=scores), resources, model)


def _all_of(kind: type[_Kind], given: Any, what: str) -> tuple[_Kind, ...]:
    """One object, or any series of them, as a tuple. Raises ConfigError for anything else."""
    listed = (given,) if isinstance(given, kind) or not isinstance(given, Iterable) else tuple(given)
    for one in listed:
        if not isinstance(one, kind):
            msg = f"expected {what}; got {type(one).__name__}"
            raise ConfigError(msg)
    return listed


def _engine(name: str) -> Engine:
    if name not in ENGINES:
        raise UnknownNameError(name, "engine", ENGINES)
    return Here()
