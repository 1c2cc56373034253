"""`perturbkv question alpha`: the gain of a share of stage 1 chosen per layer or per head.

Beside figure and numbers it writes tables of α, and a trace per fold.
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
from perturbkv.cli.session import Analysis, Session, analysis, read_traces
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
_NOTE = "chosen on all of these samples: what it gains on them flatters; `perturbkv question alpha` judges on others"


def fold_file(folder: Path, number: int) -> Path:
    """Return the path of a fold's trace: its samples, measured at the shares α chosen on the other folds."""
    return folder / f"alpha-fold-{number}.h5"


def alpha_files(folder: Path) -> list[OutputFile]:
    """Return the output files of the tables of shares α, and of the existing traces of folds."""
    tables = [json_file(_table_path(folder, by), _KIND, _is_table) for by in BY]
    folds = [OutputFile(path, "a fold's trace", _is_trace) for path in sorted(folder.glob("alpha-fold-*.h5"))]
    return [*tables, *folds]


def save_alpha_files(result: Alpha, session: Session) -> None:
    """Write one JSON table of shares α, chosen on all samples, per level: global, layer and head."""
    folder = session.output.path
    session.output.claim(*alpha_files(folder))
    identity = result.identity
    about = {
        "made_by": _MADE_BY,
        "model": identity.model,
        "dataset": identity.dataset,
        "samples": identity.samples,
        "trace": identity.trace,
        "configuration": result.sweep.configs[result.sweep.paper_index].label(),
        "note": _NOTE,
    }
    for by, table in result.shares.items():
        document = json.dumps({**table.to_document(), "about": about}, indent=1, ensure_ascii=False) + "\n"
        write_atomically(_table_path(folder, by), lambda stream, text=document: stream.write(text.encode()))  # type: ignore[misc]


def _table_path(folder: Path, by: str) -> Path:
    """Return the path of the table of shares α that are chosen at the level `by`: global, layer or head."""
    return folder / f"alpha-{by}.json"


def _is_table(document: Any) -> bool:
    """Return whether a JSON document is a table of shares α that this command wrote."""
    about = document.get("about") if isinstance(document, dict) else None
    return isinstance(about, dict) and about.get("made_by") == _MADE_BY


def _is_trace(path: Path) -> bool:
    """Return whether a file is a trace with samples."""
    from perturbkv.storage.trace.trace_file import read_trace

    try:
        return bool(read_trace(path).sample_ids)
    except PerturbkvError:
        return False


_NAME = "alpha"
_ALPHAS = [tenths / 10 for tenths in range(11)]


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
    planned = None if look.trace else _plan_run(run, folds)
    folder = look.trace.parent if look.trace and run.output is None else run_folder(run, run.output)
    wanted = dataclasses.replace(run, output=folder)

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.questions.alpha.alpha import alpha

        result = alpha(session.trace, folds)
        if kl:
            if planned:
                traces = _measure_folds(wanted, planned, result.folds, session)
            else:
                traces = _read_folds(result.folds, session.trace)
            result = alpha(session.trace, folds, traces) if traces else result
        session.draw(result, _NAME)
        save_alpha_files(result, session)
        return result

    note = "every sample is run once more, at what is chosen on others; --no-kl leaves that out"
    return Analysis(
        _NAME, wanted, lambda: _alpha_configs(run), analyse, command="question alpha", stems=[_NAME],
        outputs=alpha_files, files=planned.files if planned else None, dry_note=note if kl else "",
    )  # fmt: skip


def _plan_run(run: RunOptions, folds: int | None) -> Plan:
    """Return the plan of the run, after checking the number of folds against its samples. Raises PerturbkvErrors."""
    from perturbkv.analyses.questions.alpha.alpha_choice import check_folds

    if run.samples is not None:  # before anything is read
        check_folds(None, run.samples)
    planned = plan(run, _alpha_configs(run))
    check_folds(folds, len(planned.prompts))
    return planned


def _alpha_configs(run: RunOptions) -> tuple[EvictionConfig, ...]:
    """Return the baseline, and the two-stage selection at the user's values of α and at the paper's α."""
    from perturbkv.analyses.questions.alpha.alpha_choice import BASELINE, PAPER, SELECTION

    alphas = sorted({*(run.alpha or _ALPHAS), PAPER})
    baseline = dataclasses.replace(run, alpha=None).configs([BASELINE])
    return tuple(dict.fromkeys([*baseline, *dataclasses.replace(run, alpha=alphas).configs([SELECTION])]))


def _read_folds(folds: Sequence[Fold], trace: Trace) -> list[Trace]:
    """Return the traces of all folds from the folder of a finished trace, or an empty list with a note.

    Return none, with a note, where the trace of a fold is missing or has other samples or shares.
    """
    from perturbkv.storage.trace.trace_file import read_trace

    paths = [fold_file(Path(trace.source).parent, fold.number) for fold in folds]
    traces = [read_trace(path) if path.exists() else None for path in paths]
    fitting = [stored for stored, fold in zip(traces, folds, strict=True) if stored is not None and fold.fits(stored)]
    if len(fitting) == len(folds):
        return fitting
    if any(traces):
        console.note(f"left out: the folds' traces beside {trace.source} are of other folds, or of other choices")
    return []


def _measure_folds(run: RunOptions, planned: Plan, folds: Sequence[Fold], session: Session) -> list[Trace]:
    """Measure the samples of each fold at the shares chosen on the other folds; return the folds' traces."""
    from perturbkv.engines import engine_choice

    plans = [planned.narrow(fold.samples, fold.distinct) for fold in folds]
    paths = [fold_file(session.output.path, fold.number) for fold in folds]
    replacing = dataclasses.replace(run, overwrite=True)  # the claim allowed it
    with engine_choice.open_engine(run.engine_config, plans) as engine:
        for fold_plan, path in zip(plans, paths, strict=True):
            measure(replacing, fold_plan, path, engine, session.output.path)
    return list(read_traces(paths))
