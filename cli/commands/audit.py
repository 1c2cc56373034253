"""`perturbkv audit`: test whether an external eviction is broken, or only lossy.

Of `vllm:MODEL` an engine runs requests in several situations, and its cache is audited in each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from perturbkv.cli import console, option_refusals
from perturbkv.cli.choices import check_distinct
from perturbkv.cli.command_line import with_options
from perturbkv.cli.data_options import DATA, DataOptions
from perturbkv.cli.options import FigureOptions, JsonOption
from perturbkv.cli.planned_run import encode_prompts, run_folder
from perturbkv.cli.saving import caption_files, content_test, draw_figure, figure_files, write_json
from perturbkv.configs import plugins
from perturbkv.configs.audit_settings import (
    ALLOWED,
    AUTO,
    ENGINE_SITUATIONS,
    KEPT_FILE,
    KEPT_SUFFIXES,
    SITUATIONS,
    AuditSettings,
    is_dump,
)
from perturbkv.configs.choice import parse
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.models.aliases import DEFAULT
from perturbkv.storage.atomic_files import write_atomically
from perturbkv.storage.output import OutputFile, OutputFolder

if TYPE_CHECKING:
    from perturbkv.analyses.audit.audit import Audit
    from perturbkv.analyses.audit.dump_verdict import DumpAudit

_FILE, _STEM = "audit.json", "audit"
_QUICK, _QUICK_LENGTH = ["block", "batch"], ["300"]
"""The situations of --quick, and the tokens of its prompt."""


@dataclass(frozen=True)
class AuditOptions(DataOptions):
    """The options of an audit."""

    samples: Annotated[
        int | None,
        Option(metavar="N", help="Prompts", show_default="2; of positions or --quick 1", rich_help_panel=DATA),
    ] = None
    budget: Annotated[
        str | None, Option("--budget", "-b", metavar="B", help="Of a kvpress press: entries per head, 128 or 0.05")
    ] = None
    situation: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help=f"{', '.join(SITUATIONS)}; of vllm:MODEL {', '.join(ENGINE_SITUATIONS)}",
            show_default="all but fp8",
        ),
    ] = None
    steps: Annotated[
        int | None, Option(metavar="N", help="Forward passes after the eviction", show_default="4; 2 with --quick")
    ] = None
    loss: Annotated[
        bool | None,
        Option("--loss/--no-loss", help="Measure the loss beside controls", show_default="yes; no with --quick"),
    ] = None
    quick: Annotated[bool, Option("--quick", help="For a CI: short, no loss, no plain use")] = False
    allow: Annotated[list[str] | None, Option(metavar="KIND", help=f"Exit with 0 for it: {', '.join(ALLOWED)}")] = None
    positions: Annotated[
        str, Option(metavar="NAME", help="Of keys and new tokens: original, in-cache (0, 1, …), auto")
    ] = AUTO
    expect: Annotated[
        str, Option(metavar="WHAT", help="Sets it should keep: FILE, or snapkv(b=128)", show_default=False)
    ] = ""
    junit: Annotated[Path | None, Option(metavar="FILE", help="Write a JUnit report for a CI")] = None
    dtype: Annotated[str, Option(metavar="NAME", help="auto, float32, bfloat16, float16")] = "auto"
    device: Annotated[str, Option(metavar="NAME", help="auto, cpu, cuda, cuda:1, …")] = "auto"
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="PATH", help="Folder", show_default="runs/<time>-<model>-<dataset>"),
    ] = None
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the results of another audit")] = False
    show_traceback: Annotated[bool, Option("--traceback", help="Print where its exceptions come from")] = False
    as_json: JsonOption = False

    @property
    def situations(self) -> tuple[str, ...]:
        """The situations to test. Raises ConfigError for a repeated situation."""
        default = _QUICK if self.quick else list(SITUATIONS)
        return tuple(check_distinct("--situation", self.situation or default))

    @property
    def settings(self) -> AuditSettings:
        """The settings of the audit. Raises ConfigError or UnknownNameError for invalid ones."""
        losses = not self.quick if self.loss is None else self.loss
        steps = (2 if self.quick else 4) if self.steps is None else self.steps
        allow = tuple(check_distinct("--allow", self.allow or []))
        return AuditSettings(steps, self.situations, losses, allow, self.positions, not self.quick, self.expect)


@with_options
def audit(
    run: AuditOptions,
    look: FigureOptions,
    eviction: Annotated[
        str,
        Argument(
            help="file.py:name(option=…), a .npz or .json file of kept positions, kvpress:Press(…), an engine's dump, "
            "a slot file of llama.cpp, or vllm:MODEL"
        ),
    ],
) -> None:
    """Test whether an eviction is broken, or only lossy.

    Its cache is compared with the plain model, which has the full cache and a mask of exactly the entries that the
    eviction keeps: alone, with a block of tokens after it, and in a left-padded batch. The eviction is a function
    (model, input_ids, attention_mask) -> cache, or a transformers Cache class. A dump of an engine's cache is compared
    entry by entry. Exits with 0: exact; 1: lossy, unknown, differs, did nothing; 2: unreadable, not compared.
    """
    if run.show_traceback:
        logging.basicConfig(format="%(message)s")
        logging.getLogger(plugins.__name__).setLevel(logging.DEBUG)
    if eviction.startswith(_ENGINE):
        raise typer.Exit(_audit_engine(eviction.removeprefix(_ENGINE), run))
    path = Path(eviction)
    measure: Callable[[], Audit | DumpAudit]
    if is_dump(path):
        option_refusals.check_known("audit of a dump", run, str(path), _ON_A_DUMP)
        measure, named = partial(_audit_dump, path, run), replace(run, dataset=eviction)
    else:
        if plugins.refers_to_file(eviction):
            plugins.check_class_file(parse(eviction).name)
        elif path.suffix in KEPT_SUFFIXES:
            KEPT_FILE.check(path)
        measure, named = partial(_audit_eviction, eviction, run), run
    run.check_inputs()
    option_refusals.check_effects("audit", (_STAND_IN,), run)
    folder = run_folder(named, run.output)
    files = [*figure_files(folder, [_STEM], look.formats), OutputFile(folder / _FILE)]
    files += caption_files(folder, [_STEM]) if look.style != "screen" else []
    if run.junit is not None:
        files.append(OutputFile(run.junit, "a JUnit report of an audit", content_test(b'name="perturbkv audit"')))
    with OutputFolder(folder, run.overwrite).claim(*files, writer=folder / _FILE):
        result = measure()
        if run.junit is not None:  # before anything is printed, as the reader of a pipe may close it
            write_atomically(run.junit, lambda stream: stream.write(result.to_junit().encode()))
        _save_and_show(result, folder, run, look)
    raise typer.Exit(result.exit_code)


_STAND_IN = EvictionConfig(128, selection="random")
"""A configuration in place of the audited eviction, for the check of options: an audit draws controls by --seed too."""
_ON_A_DUMP = (
    "eviction", "model", "revision", "dtype", "device", "loss", "junit", "output", "overwrite", "as_json",
    "figure_format", "columns", "style", "explain",
)  # fmt: skip
"""Options that have an effect on the audit of a dump."""
_ENGINE = "vllm:"
_ON_AN_ENGINE = frozenset({"eviction", "situation", "dtype", "device", "seed", "revision", "output", "as_json"})
"""Options that have an effect on the audit of an engine."""
_TYPES = ("float32", "bfloat16", "float16")
"""Types that a model can be loaded in."""


def _audit_dump(path: Path, run: AuditOptions) -> DumpAudit:
    """Return the audit of a cache dump, with the model in the type that the engine computes with."""
    from perturbkv.auditing import audit_dump, open_dump
    from perturbkv.models.loading import load_weights, open_model, pick_device, pick_dtype

    device = pick_device(run.device)
    files = open_model(run.model, run.seed, run.revision or "")
    dump = open_dump(path, files.config)
    dtype = dump.compute if run.dtype == "auto" and dump.compute in _TYPES else run.dtype
    adapter = load_weights(files, pick_dtype(dtype, device), device, run.seed)
    with console.progress("layers", dump.layers) as bar:
        return audit_dump(adapter, dump, losses=run.loss is not False, progress=bar.advance)


def _audit_engine(model: str, run: AuditOptions) -> int:
    """Print the verdict on an engine's cache in each situation, or all as JSON, and return the largest exit code.

    With --output the dumps are kept. Raises ConfigError for an option that has no effect on an engine.
    """
    from perturbkv.auditing import DEFAULT_SITUATIONS, EngineProgress, audit_vllm

    option_refusals.check_known("audit of an engine", run, f"{_ENGINE}{model}", _ON_AN_ENGINE)
    situations = check_distinct("--situation", run.situation or list(DEFAULT_SITUATIONS))
    codes, documents, doing = [], {}, EngineProgress()
    with console.progress("situations", len(situations), status=doing.text) as bar:
        audits = audit_vllm(
            model or DEFAULT, situations, dtype=run.dtype, device=run.device, seed=run.seed,
            revision=run.revision or "", folder=run.output, progress=bar.advance, doing=doing,
        )  # fmt: skip
        for name, result in audits:
            codes.append(result.exit_code)
            documents[name] = result.to_dict()
            if not run.as_json:
                console.say(f"{name}: {result.summary}")
    if run.as_json:
        console.print_json({"situations": documents})
    return max(codes)


def _audit_eviction(eviction: str, run: AuditOptions) -> Audit:
    """Return the audit of an external eviction; options are checked before weights are loaded."""
    from perturbkv.auditing import KeptFile, audit_eviction, load_eviction
    from perturbkv.datasets import dataset_registry as datasets
    from perturbkv.models.loading import load_weights, open_model, pick_device, pick_dtype

    budget = None if run.budget is None else Budget.parse(run.budget)
    settings, external = run.settings, load_eviction(eviction, budget)
    datasets.check_name(run.dataset)
    device = pick_device(run.device)
    files = open_model(run.model, run.seed, run.revision or "")
    samples = run.samples or (1 if run.quick or isinstance(external, KeptFile) else 2)
    length = _QUICK_LENGTH if run.quick and not run.length and run.dataset == "needle" else run.length
    prompts = encode_prompts(
        replace(run, samples=samples, length=length), files.tokenizer, int(files.config.max_position_embeddings)
    )
    adapter = load_weights(files, pick_dtype(run.dtype, device), device, run.seed)
    source = {"dataset": prompts.dataset, "seed": str(prompts.seed)}
    with console.progress("prompts", len(prompts)) as bar:
        return audit_eviction(adapter, prompts, external, settings, source, progress=bar.advance)


def _save_and_show(result: Audit | DumpAudit, folder: Path, run: AuditOptions, look: FigureOptions) -> None:
    """Write the figure and the JSON of an audit that compared or measured something; print its tables or JSON."""
    figures, document = [], result.to_dict()
    if result.has_figure:
        figures = draw_figure(result, folder / _STEM, look, run.overwrite)
        document |= {"figures": figures}
        write_json(folder / _FILE, document)
    if run.as_json:
        console.print_json({"figures": figures, **document})
        return
    console.print_results([result], result.identity.lines()[0], explain=look.explain)
    if figures:
        console.say(f"written to {folder}")
