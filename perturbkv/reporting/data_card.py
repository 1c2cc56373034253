"""The data card of a folder of exported traces: README.md, as dataset hubs show and read it.

Its YAML says licence, size and which file is which configuration of the data set, its Markdown what was measured, with
what, and what every column means. Everything that a user named is escaped, and folders of the machine are left out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from perturbkv.analyses.identity import identity
from perturbkv.analyses.pairing import plural
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.plugins import refers_to_file
from perturbkv.configs.precision import CORRECTION_OPTIONS, PRECISION_OPTIONS
from perturbkv.configs.run import NO_DATASET, RunConfig
from perturbkv.configs.selections import GIVEN, GRANULARITY_OPTIONS, SELECTION_OPTIONS
from perturbkv.configs.task_kinds import LONGBENCH, RULER_PREFIX
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.escaping import escape_line, escape_markdown
from perturbkv.reporting.payload import without_folders
from perturbkv.schema import VARIABLES
from perturbkv.storage.trace import export
from perturbkv.trace import Trace

NAME = "README.md"
UNKNOWN = "unknown"
"""The licence of hubs for data whose licence nobody stated."""
LICENCES = (
    "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-nd-4.0", "cc-by-nc-nd-4.0", "cc0-1.0", "cc",
    "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-sa-3.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-sa-2.0",
    "cc-by-nc-sa-3.0", "cc-by-nc-nd-3.0", "cdla-permissive-2.0", "cdla-permissive-1.0", "cdla-sharing-1.0", "c-uda",
    "odc-by", "odbl", "pddl", "etalab-2.0", "mit", "apache-2.0", "bsd", "bsd-2-clause", "bsd-3-clause",
    "bsd-3-clause-clear", "bsl-1.0", "isc", "zlib", "ncsa", "postgresql", "unlicense", "wtfpl", "afl-3.0",
    "artistic-2.0", "ecl-2.0", "epl-1.0", "epl-2.0", "eupl-1.1", "eupl-1.2", "gfdl", "gpl", "gpl-2.0", "gpl-3.0",
    "lgpl", "lgpl-2.1", "lgpl-3.0", "lgpl-lr", "agpl-3.0", "mpl-2.0", "ms-pl", "osl-3.0", "ofl-1.1", "lppl-1.3c",
    "openrail", "other", UNKNOWN,
)  # fmt: skip
"""Licences of data, as hubs spell them; `other` is named by two more lines of YAML, `license_name` and its link."""
MARK = "# Data card by perturbkv; export --card --overwrite replaces it"
"""The comment by which a card of ours is known."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
"""A revision of a hub; that of a folder or a wheel is a digest of its files, which no option takes."""
_PATTERN_SIGNS = re.compile(r"[*?\[\]{}]")
"""Characters of a file name that hubs take for patterns."""
_SIZES = (("n<1K", 10**3), ("1K<n<10K", 10**4), ("10K<n<100K", 10**5), ("100K<n<1M", 10**6), ("1M<n<10M", 10**7),
          ("10M<n<100M", 10**8), ("100M<n<1B", 10**9), ("1B<n<10B", 10**10))  # fmt: skip
_PLACES = {
    "sample": "id of the prompt",
    "config": "label of the configuration",
    "step": "decode step, from 0",
    "layer": "decoder layer, from 0",
    "head": "query head of the layer, from 0",
}
_TOKEN_COLUMNS = {
    "sample": "id of the prompt",
    "position": "position of the token, from 0",
    "token": "id in the model's vocabulary",
    "text": "its text",
}
_CHOICES = {
    "budget": "entries kept per head, window included: a number of entries, or a share of the prompt",
    "policy": "eviction system",
    "selection": "how the kept entries are selected by their scores",
    "window": "last queries of the prompt, whose attention scores entries, and whose entries always stay",
    "granularity": "what shares a kept set: a query head, a key/value head (of a layer, or of all), a layer, the model",
    "protect_first": "first entries that always stay",
    "protect_recent": "most recent entries that always stay",
    "precision": "how entries before the window are stored",
    "correction": "what stands in for the evicted entries",
}
_OWNED = {
    "selection": SELECTION_OPTIONS,
    "granularity": GRANULARITY_OPTIONS,
    "precision": PRECISION_OPTIONS,
    "correction": CORRECTION_OPTIONS,
}
_OPTIONS = ("dataset", "revision", "samples", "seed", "steps", "scenario", "cache", "dtype", "max_tokens")
"""Fields of a run that `perturbkv trace` takes as options of the same name, beside the model."""
_DEFAULTS = {"revision": "", "seed": 0, "steps": 1, "scenario": "regular", "cache": "ragged", "max_tokens": None}
"""What is left out of a sweep file, which refuses options without effect."""
_DATA_OPTIONS = {"lengths": "length", "depths": "depth", "haystack": "haystack"}


@dataclass(frozen=True)
class Table:
    """An exported trace: the trace, its table and its prompts' tokens, as paths relative to the card's folder.

    Attributes:
        trace: the trace.
        path: its table, a Parquet file.
        rows: number of rows of the table.
        tokens: the table of its prompts' tokens; None where the trace holds no text.
        source: the trace's own file; None where it lies outside the folder.
    """

    trace: Trace
    path: PurePosixPath
    rows: int
    tokens: PurePosixPath | None = None
    source: PurePosixPath | None = None


def licence_id(name: str) -> str:
    """Return a licence as hubs spell it, in lower case. Raises UnknownNameError for one that they do not know."""
    if (licence := name.lower()) not in LICENCES:
        raise UnknownNameError(escape_line(name)[:40], "licence", LICENCES, "other is any that hubs do not list")
    return licence


def is_card(path: Path) -> bool:
    """Return whether the file at a path is a card of ours."""
    with path.open("rb") as stream:
        return stream.read(200).startswith(f"---\n{MARK}\n".encode())


def check_file_name(path: Path) -> None:
    """Raise ConfigError for a file name that hubs would take for a pattern, or that holds invisible characters."""
    if _PATTERN_SIGNS.search(str(path)) or escape_line(str(path)) != str(path):
        raise ConfigError(
            f"expected a file name without * ? [ ] {{ }}, which hubs take for patterns, got {escape_line(str(path))}"
        )


def data_card(tables: Sequence[Table], licence: str = UNKNOWN) -> str:
    """Return the card of exported traces as Markdown with YAML before it.

    Args:
        tables: at least one.
        licence: identifier of the tables' licence, one of `LICENCES`.

    Raises:
        UnknownNameError: for another licence.

    Example:
        >>> from pathlib import PurePosixPath
        >>> card = data_card([Table(trace, PurePosixPath("trace.parquet"), 16)], "cc-by-4.0")
        >>> card.splitlines()[2]
        'license: cc-by-4.0'
    """
    licence = licence_id(licence)
    names = _config_names(tables)
    shown = [without_folders(table.trace) for table in tables]
    title = _title(shown)
    parts = [
        f"---\n{MARK}\n{_front_matter(tables, names, title, licence)}---\n",
        f"# {escape_markdown(title)}\n",
        _INTRODUCTION,
        *(part for table, name, trace in zip(tables, names, shown, strict=True) for part in _run(table, name, trace)),
        "## Columns\n",
        "One row per sample × configuration × step × layer × head; a variable without one of these axes is repeated "
        "along it. Failed samples have no rows. Parquet holds units and meanings in the fields' metadata too.\n",
        _table(("column", "type", "unit", "meaning"), _columns([table.trace for table in tables])),
        *_tokens(tables),
        *_in_traces_alone(tables),
        _loading(tables, names),
        _licence_section(licence, shown),
    ]
    return "\n".join(parts)


_INTRODUCTION = """How far a language model's outputs move when entries of its key/value cache are evicted:
per attention head and layer, against the same model's full cache. Measured by perturbkv, whose quantities are those of
[arXiv 2502.03805](https://arxiv.org/abs/2502.03805).
"""


def _front_matter(tables: Sequence[Table], names: Sequence[str], title: str, licence: str) -> str:
    """Return the card's YAML, without the lines around it."""
    import yaml

    files = [(name, table.path) for name, table in zip(names, tables, strict=True)]
    files += [(f"{name}-tokens", table.tokens) for name, table in zip(names, tables, strict=True) if table.tokens]
    rows = sum(table.rows for table in tables)
    document = {
        "license": licence,
        "pretty_name": title,
        "tags": ["perturbkv", "kv-cache", "kv-cache-eviction"],
        "size_categories": [next((name for name, least in _SIZES if rows < least), "n>1T")],
        "configs": [
            {"config_name": name, "data_files": [{"split": "train", "path": str(path)}]}
            | ({"default": True} if index == 0 else {})
            for index, (name, path) in enumerate(files)
        ],
    }
    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=10**6))


def _config_names(tables: Sequence[Table]) -> list[str]:
    """Return a name per table, each once: its path without suffix, in the characters that hubs allow."""
    names: list[str] = []
    for table in tables:
        name = re.sub(r"[^A-Za-z0-9_.\-]+", "-", str(table.path.with_suffix(""))).strip("-.") or "trace"
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        taken = {*names, *(f"{one}-tokens" for one in names)}
        names.append(next(one for one in (name, *itertools.islice(numbered, len(taken) + 1)) if one not in taken))
    return names


def _title(traces: Sequence[Trace]) -> str:
    """Return the title of the data: models and data sets."""
    models, data = (list(dict.fromkeys(getattr(one.run, name) for one in traces)) for name in ("model", "dataset"))
    return escape_line(f"KV cache eviction: {', '.join(models)} on {', '.join(data)}")


def _run(table: Table, name: str, trace: Trace) -> Iterator[str]:
    """Yield the sections of one trace: its run, its configurations, and how to measure it again."""
    run, attrs, about = trace.run, trace.attrs, identity(trace, trace.run.configs)
    weights = "random: the numbers say nothing of a trained model" if run.random_weights else attrs.get("weights", "")
    facts = {
        "files": ", ".join(str(path) for path in (table.path, table.tokens, table.source) if path),
        "model": run.model,
        "model revision": run.revision or "not recorded",
        "weights": weights,
        "measured layers": about.measured_layers,
        "data set": f"{run.dataset}: {_origin(run.dataset)}",
        "data set fingerprint": str(run.dataset_options.get("file_sha256", "")),
        "samples": plural(about.samples, "sample")
        + (f"; {about.failed} failed, not in the table" if about.failed else ""),
        "rows": f"{table.rows:,}",
        "decode steps": str(run.steps),
        "scenario": run.scenario,
        "chat template": "yes" if run.chat_template else "no",
        "longest prompt": f"{run.max_tokens:,} tokens, longer ones are cut in the middle" if run.max_tokens else "",
        "seed": str(run.seed),
        "dtype": run.dtype,
        "device": attrs.get("device", run.device),
        "measured on": attrs.get("created", ""),
        "made with": ", ".join(
            f"{library.removesuffix('_version')} {attrs[library]}" for library in _VERSIONS if attrs.get(library)
        ),
        "trace digest": trace.digest,
    }
    yield f"## {escape_markdown(name)}\n"
    yield _table(("", ""), [(fact, value) for fact, value in facts.items() if value])
    flat = [config.flat() for config in run.configs]
    fields = list(dict.fromkeys(field for values in flat for field in values))
    varied = [field for field in fields if len({str(values.get(field)) for values in flat}) > 1]
    shared = [(field, _value_text(flat[0][field])) for field in fields if field not in varied and field in flat[0]]
    yield f"### Configurations of {escape_markdown(name)}\n"
    rows = [
        (config.label(), *(_value_text(values.get(field)) for field in varied))
        for config, values in zip(run.configs, flat, strict=True)
    ]
    yield _table(("config", *varied), rows)
    yield f"All have {escape_markdown(', '.join(f'{field} {value}' for field, value in shared))}.\n"
    yield f"### Measuring {escape_markdown(name)} again\n"
    yield _again(run)


_VERSIONS = ("perturbkv_version", "torch_version", "transformers_version", "python_version", "kvpress_version")


def _again(run: RunConfig) -> str:
    """Return how the same run is measured: a command, and the sweep file that it takes."""
    import yaml

    unnamed = [name for name in run.plugins if not refers_to_file(name)]
    if run.dataset == NO_DATASET or unnamed:
        gone = "its prompts came from Python" if run.dataset == NO_DATASET else ""
        uses = f"{' and '.join(unnamed)} came from Python or from an installed package" if unnamed else ""
        reasons = escape_markdown(", and ".join(filter(None, (gone, uses))))
        return f"No sweep file measures this run again: {reasons}. What made it has to be run again.\n"
    sweep = yaml.safe_dump(sweep_document(run), sort_keys=False, width=10**6)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", sweep)), default=0))
    notes = ["With this in a file `sweep.yaml`, which follows from the run that the trace holds:\n"]
    notes.append(f"{fence}yaml\n{sweep}{fence}\n")
    notes.append("```sh\nperturbkv trace --config sweep.yaml -o trace.h5\n```\n")
    if files := list(dict.fromkeys(name.rpartition(":")[0] for name in run.plugins)):
        notes.append(f"It takes {escape_markdown(' and '.join(files))}, which the trace does not hold.\n")
    if run.generate:
        notes.append("The trace holds generated answers too, which `perturbkv quality` or `needle` makes.\n")
    if run.head_scores:
        notes.append("The head scores of `headkv` lie in the trace alone: `--head-scores FILE` gives them.\n")
    return "\n".join(notes)


def sweep_document(run: RunConfig) -> dict[str, Any]:
    """Return a run as a sweep file of `perturbkv trace --config`: options, and the configurations in their order."""
    options: dict[str, Any] = {"model": run.model}
    options |= {name: getattr(run, name) for name in _OPTIONS if getattr(run, name) != _DEFAULTS.get(name)}
    options |= {key: run.dataset_options[name] for name, key in _DATA_OPTIONS.items() if name in run.dataset_options}
    options |= {"chat_template": run.chat_template, **({"save": list(run.save)} if run.save else {})}
    if not _COMMIT.fullmatch(run.revision):
        options.pop("revision", None)
    grids = [_choices(config, run.seed) for config in run.configs]
    shared = {name: text for name, text in grids[0].items() if all(one.get(name) == text for one in grids)}
    own = [{name: text for name, text in one.items() if name not in shared} for one in grids]
    document = {**{name.replace("_", "-"): value for name, value in options.items()}, **shared}
    return {**document, "grids": own} if any(own) else document


def _choices(config: EvictionConfig, seed: int) -> dict[str, Any]:
    """Return a configuration as a mapping of a sweep file, each choice as it is written; `seed` is the run's."""
    own = ("budget", "policy") if config.selection.name == GIVEN else None
    fields = ("budget", "policy", "selection", "window", "granularity", "protect_first", "protect_recent", "precision",
              "correction")  # fmt: skip
    choices = {name: getattr(config, name) for name in own or fields}
    for name, choice in choices.items():
        if isinstance(choice, Choice) and choice.options.get("seed") == seed:  # it is the run's, which is there once
            choices[name] = choice.without(["seed"])
    return {name.replace("_", "-"): str(choice) for name, choice in choices.items()}


def _origin(dataset: str) -> str:
    """Return where the prompts of a data set come from, and what is known of their licence."""
    if dataset == "needle":
        return "made by perturbkv of CPython's documentation (PSF licence), or of filler sentences"
    if dataset.startswith(RULER_PREFIX):
        return "RULER (github.com/NVIDIA/RULER); licence of the texts: see there"
    if any(dataset in names for names in LONGBENCH.values()):
        return "LongBench (zai-org/LongBench); licence of the texts: see there and at its sources"
    return "a file or prompts of the author's; their licence is not in the trace"


def _value_text(value: Any) -> str:
    """Return an option's value as text; empty for an option that the configuration lacks."""
    return "" if value is None else str(value)


def _columns(traces: Sequence[Trace]) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, unit and meaning of every column of the tables, each once."""
    fields = {field.name: field for trace in traces for field in export.schema(trace)}
    for name, field in fields.items():
        meta = {key.decode(): text.decode() for key, text in (field.metadata or {}).items()}
        meaning = meta.get("long_name") or _PLACES.get(name) or _CHOICES.get(name) or _option_meaning(name)
        yield name, str(field.type), meta.get("units", ""), meaning


def _option_meaning(column: str) -> str:
    """Return the meaning of a column that holds an option of a choice, such as `selection_alpha`."""
    owner, _, option = column.partition("_")
    known = next((options[option] for options in _OWNED.get(owner, {}).values() if option in options), None)
    about = f": {known.about}" if known else ""
    return f"option {option} of the {owner}{about}; null where it has none"


def _tokens(tables: Sequence[Table]) -> Iterator[str]:
    """Yield the section on the tables of the prompts' tokens, where there are some."""
    if any(table.tokens for table in tables):
        yield "### Tokens of the prompts\n"
        yield "One row per sample × token. **These tables hold the prompts' whole text.**\n"
        yield _table(("column", "meaning"), _TOKEN_COLUMNS.items())


def _in_traces_alone(tables: Sequence[Table]) -> Iterator[str]:
    """Yield the section on the variables that the traces hold and the tables do not, where the folder has traces."""
    inside = [table.trace for table in tables if table.source]
    held = {name for trace in inside for name in trace.arrays if name not in export.columns(trace)}
    if held:
        yield "### In the trace files alone\n"
        rows = [
            (name, " × ".join(variable.axes), variable.units, variable.long_name)
            for name, variable in VARIABLES.items()
            if name in held
        ]
        yield _table(("variable", "axes", "unit", "meaning"), rows)


def _loading(tables: Sequence[Table], names: Sequence[str]) -> str:
    """Return the section on how to load the tables; names in code are written as Python texts."""
    table, name = str(tables[0].path), names[0]
    lines = [
        "## Loading\n",
        "In a copy of this folder; from a hub with `hf://datasets/OWNER/NAME/` before the file's name, and with "
        "`OWNER/NAME` in place of the dot:\n",
        f"```python\nimport pandas as pd\n\ntable = pd.read_parquet({_code(table)})\n```\n",
        "```python\nfrom datasets import load_dataset\n\n"
        f'rows = load_dataset(".", {_code(name)}, split="train")\n```\n',
    ]
    if source := next((one.source for one in tables if one.source), None):
        lines.append(
            f'```python\nimport xarray as xr\n\ntrace = xr.open_dataset({_code(str(source))}, engine="h5netcdf")\n```\n'
        )
    return "\n".join(lines)


def _licence_section(licence: str, traces: Sequence[Trace]) -> str:
    """Return the section on licences: of the tables, and of prompts and models, which stay as they are."""
    stated = f"The tables: {licence}." if licence != UNKNOWN else "The tables' licence is not stated by who made them."
    text = " Prompts' texts are in the files." if any("prompt_text" in one.arrays for one in traces) else ""
    return f"## Licence\n\n{stated} Model and data set keep their own licences, which the traces do not hold.{text}\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, every cell escaped."""
    lines = [heads, ["---"] * len(heads), *([escape_markdown(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _code(text: str) -> str:
    """Return a text as a Python literal that ends no block of Markdown."""
    return ascii(text).replace("`", "\\x60")
