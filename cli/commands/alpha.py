"""`perturbkv question alpha`: the value of a share of stage 1 per layer or head.

Beside figure and numbers it leaves tables of α, and a trace per fold.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from perturbkv.cli import console
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.planned_run import measure, plan, run_folder
from perturbkv.cli.saving import json_file
from perturbkv.cli.session import Analysis, Session, analysis
from perturbkv.configs.alpha_table import BY
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, PerturbkvError
from perturbkv.storage.atomic_files import write_atomically
from perturbkv.storage.output import OutputFile
from perturbkv.user_files import MIB, FileKind

if TYPE_CHECKING:
    from perturbkv.analyses.questions.alpha.alpha import Alpha
    from perturbkv.analyses.questions.alpha.alpha_choice import Fold
    from perturbkv.analyses.result import Result
    from perturbkv.pipeline.run.plan import Plan
    from perturbkv.trace import Trace


_KIND = FileKind("shares of stage 1 as JSON", ConfigError, 16 * MIB)
_MADE_BY = "perturbkv question alpha"
_FLATTERS = (
    "chosen on all of these samples: what it gains on them flatters; `perturbkv question alpha` judges on others"
)


def fold_file(folder: Path, number: int) -> Path:
    """Return the trace of a fold's samples, at what was chosen on the others."""
    return folder / f"alpha-fold-{number}.h5"


def alpha_files(folder: Path) -> list[OutputFile]:
    """Return the tables, and the folds' traces that are there."""
    tables = [json_file(_table(folder, by), _KIND, _is_table) for by in BY]
    folds = [OutputFile(path, "a fold's trace", _is_trace) for path in sorted(folder.glob("alpha-fold-*.h5"))]
    return [*tables, *folds]


def save_alpha_files(result: Alpha, session: Session) -> None:
    """Write the tables of what was chosen on all samples."""
    folder = session.output.path
    session.output.claim(*alpha_files(folder))
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
        write_atomically(_table(folder, by), lambda stream, text=document: stream.write(text.encode()))  # type: ignore[misc]


def _table(folder: Path, by: str) -> Path:
    return folder / f"alpha-{by}.json"


def _is_table(document: Any) -> bool:
    """Return whether a document is a table that this command wrote."""
    about = document.get("about") if isinstance(document, dict) else None
    return isinstance(about, dict) and about.get("made_by") == _MADE_BY


def _is_trace(path: Path) -> bool:
    from perturbkv.storage.trace.trace_file import read_trace

    try:
        return bool(read_trace(path).sample_ids)
    except PerturbkvError:
        return False


_NAME = "alpha"
_ALPHAS = [place / 10 for place in range(11)]


@analysis
def alpha(
    run: RunOptions,
    look: LookOptions,
    folds: Annotated[
        int | None, Option(metavar="K", help="Parts of the samples", show_default="4; below 8 samples 1 each")
    ] = None,
    kl: Annotated[
        bool, Option("--kl/--no-kl", help="Run each part with what the others chose", show_default="yes")
    ] = True,
) -> Analysis:
    """Choose α for all, per layer, per head; judge on other samples.

    By isolated perturbation, from --alpha (0, 0.1 … 1, and 0.25), of one policy and budget. Left are alpha-global.json,
    alpha-layer.json and alpha-head.json, chosen on all samples, for two-stage(alpha=FILE).
    """
    planned = None if look.trace else _planned(run, folds)
    folder = look.trace.parent if look.trace and run.output is None else run_folder(run, run.output)
    wanted = dataclasses.replace(run, output=folder)

    def answer(session: Session) -> Result:
        from perturbkv.analyses.questions.alpha.alpha import alpha as analyse

        result = analyse(session.trace, folds)
        if kl:
            parts = result.folds
            traces = _finished(session, parts, look) if planned is None else _made(wanted, planned, parts, session)
            result = analyse(session.trace, folds, traces) if traces else result
        session.save(result.plot(session.width_mm), result.identity, _NAME)
        save_alpha_files(result, session)
        return result

    note = "every sample is run once more, at what is chosen on others; --no-kl leaves that out"
    return Analysis(
        _NAME, wanted, lambda: _configs(run), answer, command="question alpha", stems=[_NAME], outputs=alpha_files,
        files=planned.files if planned else None, dry_note=note if kl else "",
    )  # fmt: skip


def _planned(run: RunOptions, folds: int | None) -> Plan:
    """Return the plan, for the number of samples and the model. Raises PerturbkvErrors."""
    from perturbkv.analyses.questions.alpha.alpha_choice import check_folds

    if run.samples is not None:  # before anything is read
        check_folds(None, run.samples)
    planned = plan(run, _configs(run))
    check_folds(folds, len(planned.prompts))
    return planned


def _configs(run: RunOptions) -> tuple[EvictionConfig, ...]:
    """Return the baseline, and two stages at every α, the paper's among them."""
    from perturbkv.analyses.questions.alpha.alpha_choice import BASELINE, PAPER, SELECTION

    alphas = sorted({*(run.alpha or _ALPHAS), PAPER})
    once = dataclasses.replace(run, alpha=None).configs([BASELINE])
    made = [*once, *dataclasses.replace(run, alpha=alphas).configs([SELECTION])]
    return tuple(dict.fromkeys(made))


def _finished(session: Session, parts: Sequence[Fold], look: LookOptions) -> list[Trace]:
    """Return the folds' traces beside a finished one; none, with a note, where not all of them are there."""
    from perturbkv.storage.trace.trace_file import read_trace

    assert look.trace is not None
    paths = [fold_file(look.trace.parent, part.number) for part in parts]
    traces = [read_trace(path) if path.exists() else None for path in paths]
    fitting = [one for one, part in zip(traces, parts, strict=True) if one is not None and part.is_in(one)]
    if len(fitting) == len(parts):
        return fitting
    if any(traces):
        console.note(f"left out: the folds' traces beside {look.trace} are of other folds, or of other choices")
    return []


def _made(run: RunOptions, planned: Plan, parts: Sequence[Fold], session: Session) -> list[Trace]:
    """Return the traces of every fold's samples at what was chosen on the others, by one model."""
    from perturbkv.engines import choosing
    from perturbkv.storage.trace.trace_file import read_trace

    plans = [planned.narrowed(part.samples, part.distinct) for part in parts]
    paths = [fold_file(session.output.path, part.number) for part in parts]
    replacing = dataclasses.replace(run, overwrite=True)  # the claim knows that they are ours
    with choosing.engine(run.engine_config, plans) as engine:
        for one, path in zip(plans, paths, strict=True):
            measure(replacing, one, path, engine=engine, folder=session.output.path)
    return [read_trace(Path(path)) for path in paths]
