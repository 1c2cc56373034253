"""`perturbkv generate`: what a model writes from its full cache and from evicted ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from perturbkv.analyses import numbers
from perturbkv.analyses.naming import counted
from perturbkv.analyses.objects import provenance_object, run_object
from perturbkv.cli import answers, console, effects
from perturbkv.cli.options import RunOptions
from perturbkv.cli.planning import plan
from perturbkv.cli.spreading import with_options
from perturbkv.cli.tracing import run_folder
from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError
from perturbkv.storage.files import clear_leftovers, write_whole

if TYPE_CHECKING:
    from perturbkv.configs.eviction import EvictionConfig
    from perturbkv.datasets.metrics import Metric
    from perturbkv.pipeline.plan import Plan

_FILE = "generation.jsonl"


@with_options
def generate(
    run: RunOptions,
    selection: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="How entries are selected", show_default="attention, two-stage"),
    ] = None,
    max_new_tokens: Annotated[
        int | None, Option(metavar="N", help="Tokens of an answer at most", show_default="the dataset's, else 64")
    ] = None,
    compress_every: Annotated[
        int | None,
        Option(metavar="N", help="Compress again whenever a cache holds more than this"),
    ] = None,
) -> None:
    """Answer from the full and the evicted caches; compare.

    Greedily, all caches in one batch, beside the accepted answers and with the data set's own metric, 0 to 1.
    generation.jsonl holds the run, then one line per sample: token ids, text and score of every answer, what its cache
    held, and with --compress-every the perturbation of each compression. A killed run goes on with the next sample.
    """
    from perturbkv.pipeline.answered import metrics_of
    from perturbkv.pipeline.generation import check_asked, check_memory

    configs = run.configs(selection or ["attention", "two-stage"])
    effects.check("generate", run, configs)
    check_asked(configs, max_new_tokens, compress_every)
    planned = plan(run, configs, generate=max_new_tokens)
    check_memory(planned)
    if run.dry_run:
        from perturbkv.cli import dry_run

        dry_run.show(planned, run.as_json)
        return
    metrics = metrics_of(planned.prompts)
    path = run_folder(run, run.output) / _FILE
    header = {"run": json.loads(planned.run.to_json()), "compress_every": compress_every}
    rows = _answered(planned, path, header, metrics, run.overwrite)
    if run.as_json:
        console.print_json({**header, "run": run_object(planned.run), "file": str(path), "samples": rows})
    else:
        _show(rows, planned.run.configs, path)


def _answered(
    planned: Plan, path: Path, header: dict[str, Any], metrics: dict[str, Metric], overwrite: bool
) -> list[dict[str, Any]]:
    """Every sample's answers, those of an earlier run of the same kind first."""
    from perturbkv.pipeline.provenance import provenance

    done = _open(path, header, provenance_object(provenance(planned)), overwrite)
    return [*done, *_generate(planned, path, done, header["compress_every"], metrics)]


def _show(rows: list[dict[str, Any]], configs: tuple[EvictionConfig, ...], path: Path) -> None:
    for row in rows:
        answers.show(row, configs)
    console.say(numbers.ABOUT_HELD)
    console.say(f"written to {path}, every answer whole")


def _open(path: Path, header: dict[str, Any], about: dict[str, Any], overwrite: bool) -> list[dict[str, Any]]:
    """The samples that the same run has finished already; a new file where there is none.

    Raises ConfigError where the file is of another run.
    """
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() and not overwrite else []
    found = [document for document in map(_parsed, lines) if document is not None]
    if found and _asked(found[0]) != header:
        msg = f"{path} is of another run; give --overwrite or another --output"
        raise ConfigError(msg)
    if len(found) > 1:
        console.note(f"{counted(len(found) - 1, 'sample')} of {header['run']['samples']} there already; going on")
    _write_whole(path, found or [{**header, "made_with": about}])
    return found[1:]


def _asked(document: dict[str, Any]) -> dict[str, Any]:
    """A file's first line as this version says it: choices that an older one did not know have their defaults."""
    try:
        run = RunConfig.from_json(json.dumps(document.get("run", {})))
    except ConfigError:
        return {}
    if any("policy_options" not in entry for entry in document["run"]["configs"]):
        return {}  # of a version that named configurations otherwise, and its answers with them
    return {"run": json.loads(run.to_json()), "compress_every": document.get("compress_every")}


def _write_whole(path: Path, documents: list[dict[str, Any]]) -> None:
    """The file with these lines alone: what a killed run left unfinished is gone."""
    text = "".join(_line(document) for document in documents)
    clear_leftovers(path)
    write_whole(path, lambda stream: stream.write(text.encode()))


def _line(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False) + "\n"


def _parsed(line: str) -> dict[str, Any] | None:
    """A line's object; None for one that a killed run left unfinished."""
    try:
        document = json.loads(line)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _generate(
    planned: Plan,
    path: Path,
    done: list[dict[str, Any]],
    compress_every: int | None,
    metrics: dict[str, Metric],
) -> list[dict[str, Any]]:
    """Answer the prompts that are missing, one line each as soon as it is there."""
    from perturbkv.pipeline.answered import row
    from perturbkv.pipeline.generation import answer

    names = {line["sample"] for line in done}
    todo = [prompt for prompt in planned.prompts if prompt.sample_id not in names]
    if not todo:
        return []
    adapter, rows = planned.model(), []
    labels, config = planned.run.labels(), planned.run
    with console.progress("samples", len(todo) + len(done), len(done)) as bar, path.open("a", encoding="utf-8") as file:
        for prompt in todo:
            made = answer(
                adapter, prompt, config.configs, config.generate, scenario=config.scenario, layout=config.cache,
                head_scores=config.head_scores, compress_every=compress_every, resources=planned.resources,
            )  # fmt: skip
            rows.append(row(prompt, made, labels, adapter.tokenizer.decode, metrics))
            file.write(_line(rows[-1]))
            file.flush()
            os.fsync(file.fileno())
            bar.one_more()
    return rows
