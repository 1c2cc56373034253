"""`perturbkv quality`: how good the answers from evicted caches are, by data set (paper, tables 1 to 6)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.cli.choices import parse_methods
from perturbkv.cli.commands.joined import open_joined
from perturbkv.cli.option_routing import showing, with_options
from perturbkv.cli.options import MetricOption, RunOptions, TracesOptions
from perturbkv.cli.saving import free_text
from perturbkv.errors import ConfigError
from perturbkv.storage.atomic_files import write_whole

if TYPE_CHECKING:
    from perturbkv.analyses.quality.quality import Quality

_METHODS = ",".join(
    [*(f"{policy}:{own}" for policy in ("snapkv", "adakv") for own in ("attention", "two-stage")), "random"]
)
_BUDGETS = ("0.1", "0.2", "0.4")
_NAME = "quality"


@showing(budget=" ".join(_BUDGETS))
@with_options
def quality(
    run: RunOptions,
    look: TracesOptions,
    compare: Annotated[
        str,
        Option(
            metavar="NAMES",
            help="Methods, separated by commas: policy:selection",
            show_default="attention and two-stage of snapkv and adakv, random",
        ),
    ] = _METHODS,
    max_new_tokens: Annotated[
        int | None, Option(metavar="N", help="Tokens of an answer at most", show_default="the data set's own")
    ] = None,
    metric: MetricOption = "",
) -> None:
    """Score the answers from the full and the evicted caches.

    --dataset takes several, separated by commas; each has a trace in a folder of its name. The tables are left as
    quality.tex, .md and .csv. --trace takes finished traces instead.
    """
    if max_new_tokens is not None and max_new_tokens < 1:
        msg = f"--max-new-tokens must be at least 1, got {max_new_tokens}"
        raise ConfigError(msg)
    wanted = run.with_budgets(_BUDGETS)
    study = open_joined(
        _NAME, wanted, look, lambda: wanted.configs(parse_methods(compare)),
        lambda folder: _check(folder, run.overwrite), not run.budget, max_new_tokens, metric,
    )  # fmt: skip
    if study is None:
        return
    from perturbkv.analyses.quality.quality import quality as analyse

    result = analyse(study.usable)
    study.save(result.plot(study.width_mm), result.identity, _NAME)
    study.show(result, {**result.to_dict(), "tables": _save(result, study.folder, run.overwrite)})


def _check(folder: Path, overwrite: bool) -> None:
    """Raise ConfigError where a table would replace a file of somebody else."""
    from perturbkv.analyses.quality.quality_latex import COMMENT
    from perturbkv.analyses.quality.quality_text import CSV, MARKDOWN

    quoted = ",".join(f'"{name}"' for name in CSV)
    for suffix, begins in (("tex", COMMENT), ("md", MARKDOWN), ("csv", quoted)):
        free_text(folder / f"{_NAME}.{suffix}", begins, overwrite)


def _save(result: Quality, folder: Path, overwrite: bool) -> list[str]:
    """Write the tables; returns their paths."""
    _check(folder, overwrite)
    paths = []
    for suffix, text in (("tex", result.to_latex()), ("md", result.to_markdown()), ("csv", result.to_csv())):
        path = folder / f"{_NAME}.{suffix}"
        write_whole(path, lambda stream, text=text: stream.write(text.encode()))  # type: ignore[misc]
        paths.append(str(path))
    return paths
