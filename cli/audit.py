"""`perturbkv audit`: an eviction that is not ours, broken or only lossy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from perturbkv.audit_trace import SITUATIONS
from perturbkv.cli import console, effects
from perturbkv.cli.choices import apart
from perturbkv.cli.options import JsonOption, LookOptions, RunOptions
from perturbkv.cli.planning import encode_prompts
from perturbkv.cli.saving import free, free_figures, save_figure
from perturbkv.cli.spreading import typed
from perturbkv.cli.tracing import run_folder
from perturbkv.configs.budget import Budget
from perturbkv.models.aliases import DEFAULT
from perturbkv.storage.files import write_whole
from perturbkv.storage.lock import WAIT_ALONE, Lock

if TYPE_CHECKING:
    from perturbkv.analyses.audit import AuditResult
    from perturbkv.datasets.prompts import Prompts

_FILE, _STEM = "audit.json", "audit"


def audit(
    context: typer.Context,
    eviction: Annotated[
        str, Argument(help="file.py:name(option=…), a .npz or .json file of kept positions, kvpress:Press(…)")
    ],
    model: Annotated[str, Option("--model", "-m", metavar="NAME", help="As for the other commands")] = DEFAULT,
    dataset: Annotated[
        str, Option("--dataset", "-d", metavar="NAME", help="needle, a LongBench name, a .jsonl file")
    ] = "needle",
    samples: Annotated[int | None, Option(metavar="N", help="Prompts", show_default="2; 1 for positions")] = None,
    seed: Annotated[int, Option(metavar="N", help="Of data, random weights and the random control")] = 0,
    data_dir: Annotated[
        Path | None,
        Option(metavar="PATH", help="LongBench's jsonl files; also PERTURBKV_DATA_DIR", envvar="PERTURBKV_DATA_DIR"),
    ] = None,
    length: Annotated[
        list[str] | None, Option("--length", "--lengths", metavar="N", help="needle: tokens of a prompt")
    ] = None,
    depth: Annotated[
        list[str] | None, Option("--depth", "--depths", metavar="X", help="needle: where the fact lies")
    ] = None,
    haystack: Annotated[str, Option(metavar="NAME", help="needle: prose or noise")] = "prose",
    max_tokens: Annotated[int | None, Option(metavar="N", help="Cut longer prompts in the middle")] = None,
    chat_template: Annotated[
        bool | None,
        Option("--chat-template/--no-chat-template", help="Use the model's template", show_default="as in a run"),
    ] = None,
    dtype: Annotated[str, Option(metavar="NAME", help="auto, float32, bfloat16, float16")] = "auto",
    device: Annotated[str, Option(metavar="NAME", help="auto, cpu, cuda, cuda:1, …")] = "auto",
    budget: Annotated[
        str | None, Option("--budget", "-b", metavar="B", help="Of a kvpress press: entries per head, 128 or 0.05")
    ] = None,
    steps: Annotated[int, Option(metavar="N", help="Forward passes after the eviction")] = 4,
    situation: Annotated[
        list[str] | None, Option(metavar="NAME", help=", ".join(SITUATIONS), show_default="all of them")
    ] = None,
    loss: Annotated[
        bool, Option("--loss/--no-loss", help="Measure the loss beside controls", show_default="yes")
    ] = True,
    figure_format: Annotated[
        list[str] | None, Option("--format", metavar="NAME", help="png, svg, pdf", show_default="png, svg")
    ] = None,
    columns: Annotated[int, Option(metavar="N", help="Figure's width: 1 (84 mm) or 2 (174 mm) columns")] = 2,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="PATH", help="Folder", show_default="runs/<time>-<model>-<dataset>"),
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the results of another audit")] = False,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Tell whether an eviction is broken, or only lossy.

    One that is not ours is held against the plain model with the full cache and a mask of exactly the entries that it
    keeps: alone, with a block of tokens after it, and in a left-padded batch. It is a function (model, input_ids,
    attention_mask) -> cache, or a transformers Cache class. Exits with 0: exact, only lossy; 1: differs, the first
    difference named; 2: unreadable.
    """
    look = LookOptions(figure_format=figure_format, columns=columns)
    run = RunOptions(
        model=model, dataset=dataset, samples=samples, seed=seed, data_dir=data_dir, length=length, depth=depth,
        haystack=haystack, max_tokens=max_tokens, chat_template=chat_template, dtype=dtype, device=device, steps=steps,
        output=output, overwrite=overwrite, as_json=as_json, typed=typed(context),
    )  # fmt: skip
    effects.check("audit", run, run.configs(["random"]))
    folder = run_folder(run)
    free_figures(folder, [_STEM], look.formats, overwrite)
    with Lock(free(folder / _FILE, overwrite), advice=WAIT_ALONE):
        result = _audited(eviction, budget, run, tuple(apart("--situation", situation or list(SITUATIONS))), loss)
        _leave(result, folder, run, look)
    raise typer.Exit(result.exit_code)


def _audited(
    eviction: str, budget: str | None, run: RunOptions, situations: tuple[str, ...], loss: bool
) -> AuditResult:
    """Everything that can be wrong with the request is found before the weights are loaded."""
    import dataclasses

    from perturbkv.analyses.audit import conclude
    from perturbkv.auditing.loading import load
    from perturbkv.auditing.positions_file import KeptFile
    from perturbkv.auditing.run import Settings
    from perturbkv.auditing.run import audit as measure
    from perturbkv.datasets import registry as datasets
    from perturbkv.models.loading import load_weights, open_model, pick_device, pick_dtype

    asked = None if budget is None else Budget.parse(budget)
    settings, given = Settings(run.step_count, situations, loss), load(eviction, asked)
    datasets.check_name(run.dataset)
    place = pick_device(run.device)
    files = open_model(run.model, run.seed)
    usual = 1 if isinstance(given, KeptFile) else 2
    prompts = encode_prompts(dataclasses.replace(run, samples=run.samples or usual), files.tokenizer)
    adapter = load_weights(files, pick_dtype(run.dtype, place), place, run.seed)
    with console.progress("prompts", len(prompts)) as bar:
        return conclude(measure(adapter, prompts, given, settings, _about(prompts), run.resources, bar.one_more))


def _about(prompts: Prompts) -> dict[str, str]:
    return {"dataset": prompts.dataset, "seed": str(prompts.seed)}


def _leave(result: AuditResult, folder: Path, run: RunOptions, look: LookOptions) -> None:
    """The document and the figure as files, where there is something to draw; the numbers on stdout."""
    from perturbkv.figures import style

    figures, document = [], result.to_dict()
    if result.compared or any(one.entries is not None for one in result.trace.runs):
        width = style.COLUMN_MM if look.columns == 1 else style.WIDE_MM
        figures = save_figure(result.plot(width), result.identity, folder / _STEM, look.formats, run.overwrite)
        document |= {"figures": figures}
        write_whole(folder / _FILE, lambda stream: stream.write(console.as_json(document).encode()))
    if run.as_json:
        console.print_json({"figures": figures, **document})
        return
    console.say(result.conclusion())
    console.say("")
    console.say(result.title(), bold=True)
    for part in result.tables():
        console.part(part)
    console.say(result.notes())
    if figures:
        console.say(f"written to {folder}")
