"""`perturbkv alpha`: what a share of stage 1 per layer or head is worth.

What `perturbkv alpha` leaves beside figure and numbers: tables of α, and a trace per fold.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.cli import console
from perturbkv.cli.option_routing import with_options
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.planned_run import measure, plan, run_folder
from perturbkv.cli.saving import free
from perturbkv.cli.session import Study, open_study
from perturbkv.configs.alpha_table import BY
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, PerturbkvError
from perturbkv.storage.atomic_files import write_whole
from perturbkv.user_files import MIB, FileKind

if TYPE_CHECKING:
    from perturbkv.analyses.questions.alpha.alpha import Alpha
    from perturbkv.analyses.questions.alpha.alpha_choice import Fold
    from perturbkv.pipeline.run.plan import Plan
    from perturbkv.trace import Trace


_KIND = FileKind("shares of stage 1 as JSON", ConfigError, 16 * MIB)
_MADE_BY = "perturbkv alpha"
_FLATTERS = "chosen on all of these samples: what it gains on them flatters; `perturbkv alpha` judges on others"


def fold_file(folder: Path, number: int) -> Path:
    """The trace of a fold's samples, at what was chosen on the others."""
    return folder / f"alpha-fold-{number}.h5"


def check_alpha_files_free(folder: Path, overwrite: bool) -> None:
    """Raise ConfigError where a table or a fold's trace would replace a file of somebody else; OutputError."""
    for by in BY:
        path = _table(folder, by)
        free(path, overwrite or _is_table(path))
    for path in sorted(folder.glob("alpha-fold-*.h5")):
        free(path, overwrite or _is_trace(path))


def save_alpha_files(result: Alpha, folder: Path, overwrite: bool) -> None:
    """Write the tables of what was chosen on all samples."""
    check_alpha_files_free(folder, overwrite)
    identity = result.identity
    about = {
        "made_by": _MADE_BY,
        "model": identity.model,
        "dataset": identity.dataset,
        "samples": identity.samples,
        "trace": identity.trace,
        "configuration": result.sweep.configs[result.sweep.paper].label(),
        "note": _FLATTERS,
    }
    for by, table in result.shares.items():
        document = json.dumps({**table.to_document(), "about": about}, indent=1, ensure_ascii=False) + "\n"
        write_whole(_table(folder, by), lambda stream, text=document: stream.write(text.encode()))  # type: ignore[misc]


def _table(folder: Path, by: str) -> Path:
    return folder / f"alpha-{by}.json"


def _is_table(path: Path) -> bool:
    """Whether it is one that this command wrote."""
    if not path.is_file():
        return False
    try:
        found = _KIND.read_json(path)
    except ConfigError:
        return False
    about = found.get("about") if isinstance(found, dict) else None
    return isinstance(about, dict) and about.get("made_by") == _MADE_BY


def _is_trace(path: Path) -> bool:
    from perturbkv.storage.trace.trace_file import read_trace

    try:
        return bool(read_trace(path).sample_ids)
    except PerturbkvError:
        return False


_NAME = "alpha"
_ALPHAS = [place / 10 for place in range(11)]


@with_options
def alpha(
    run: RunOptions,
    look: LookOptions,
    folds: Annotated[
        int | None, Option(metavar="K", help="Parts of the samples", show_default="4; below 8 samples 1 each")
    ] = None,
    kl: Annotated[
        bool, Option("--kl/--no-kl", help="Run each part with what the others chose", show_default="yes")
    ] = True,
) -> None:
    """Choose α for all, per layer, per head; judge it on other samples.

    By isolated perturbation, from --alpha (0, 0.1 … 1, and 0.25), of one policy and budget. Left are alpha-global.json,
    alpha-layer.json and alpha-head.json, chosen on all samples, for two-stage(alpha=FILE).
    """
    planned = None if look.trace else _planned(run, folds)
    folder = look.trace.parent if look.trace and run.output is None else run_folder(run, run.output)
    wanted = dataclasses.replace(run, output=folder)
    if not run.dry_run:
        check_alpha_files_free(folder, run.overwrite)
    files = planned.files if planned else None
    study = open_study(_NAME, wanted, look, lambda: _configs(run), files=files)
    if study is None:
        if kl:
            console.note("every sample is run once more, at what is chosen on others; --no-kl leaves that out")
        return
    from perturbkv.analyses.questions.alpha.alpha import alpha as analyse

    result = analyse(study.trace, folds)
    if kl:
        traces = (
            _finished(study, result.folds, look) if planned is None else _made(wanted, planned, result.folds, study)
        )
        result = analyse(study.trace, folds, traces) if traces else result
    study.save(result.plot(study.width_mm), result.identity, _NAME)
    save_alpha_files(result, study.folder, run.overwrite)
    study.show(result)


def _planned(run: RunOptions, folds: int | None) -> Plan:
    """The run, of which all but the samples' number is looked at again later. Raises PerturbkvErrors."""
    from perturbkv.analyses.questions.alpha.alpha_choice import check_folds

    if run.samples is not None:  # told before anything is read
        check_folds(None, run.samples)
    planned = plan(run, _configs(run))
    check_folds(folds, len(planned.prompts))
    return planned


def _configs(run: RunOptions) -> tuple[EvictionConfig, ...]:
    """The baseline, and two stages at every α, the paper's among them."""
    from perturbkv.analyses.questions.alpha.alpha_choice import BASELINE, PAPER, SELECTION

    alphas = sorted({*(run.alpha or _ALPHAS), PAPER})
    once = dataclasses.replace(run, alpha=None).configs([BASELINE])
    made = [*once, *dataclasses.replace(run, alpha=alphas).configs([SELECTION])]
    return tuple(dict.fromkeys(made))


def _finished(study: Study, parts: Sequence[Fold], look: LookOptions) -> list[Trace]:
    """The folds' traces that lie beside a finished one; none where not all of them do, which is told."""
    from perturbkv.storage.trace.trace_file import read_trace

    assert look.trace is not None
    paths = [fold_file(look.trace.parent, part.number) for part in parts]
    held = [read_trace(path) if path.exists() else None for path in paths]
    found = [one for one, part in zip(held, parts, strict=True) if one is not None and part.is_in(one)]
    if len(found) == len(parts):
        return found
    if any(held):
        console.note(f"left out: the folds' traces beside {look.trace} are of other folds, or of other choices")
    return []


def _made(run: RunOptions, planned: Plan, parts: Sequence[Fold], study: Study) -> list[Trace]:
    """Every fold's samples at what was chosen on the others, by one model."""
    from perturbkv.engines import choosing
    from perturbkv.storage.trace.trace_file import read_trace

    plans = [planned.narrowed(part.samples, part.distinct) for part in parts]
    paths = [fold_file(study.folder, part.number) for part in parts]
    replacing = dataclasses.replace(run, overwrite=True)  # `check_free` knows that they are ours
    with choosing.engine(run.spread, plans) as engine:
        for one, path in zip(plans, paths, strict=True):
            measure(replacing, one, path, engine=engine, folder=study.folder)
    return [read_trace(Path(path)) for path in paths]
