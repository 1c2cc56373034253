"""What recorders share: commands in this process, the figures that they draw, tiny models, and values as digests."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pandas
import torch
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from perturbkv.cli.main import main
from tests.pins.comparing import RENAMED

ROOT = Path(__file__).resolve().parents[2]
PASSING = re.compile(
    r"(.*_)?(seconds(_.*)?|digest|version|versions|created|started|finished|date|time|host|platform|python"
    r"|.*_free_mib|.*free_bytes|peak.*|rss.*)"
)
"""Keys of what differs between two runs of the same version: times, dates, free memory, digests of dated files."""
DIGEST = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{12}\b|\b[0-9]{12}\b")
"""A trace file's short digest, which also counts when it was made, where texts name it."""


@dataclass(frozen=True)
class Ran:
    """What a command left: exit code, both streams, and what its figures hold."""

    code: int
    out: str
    err: str
    figures: dict[str, Any]

    def document(self) -> Any:
        """The JSON document on the standard output; the text where it is none."""
        try:
            return json.loads(self.out)
        except json.JSONDecodeError:
            return self.out


def run(*arguments: object) -> Ran:
    """Run the command line in this process; a renamed command by its former name, where its new one is not known."""
    words = [*map(str, arguments)]
    for old, new in RENAMED.items():
        if words[: len(new.split())] == new.split() and not known(new):
            words[: len(new.split())] = old.split()
    return _run(words)


@functools.cache
def known(command: str) -> bool:
    """Whether there is such a command; `budget --savings`: whether the command has the option."""
    words = command.split()
    options = [one for one in words if one.startswith("-")]
    ran = _run([*(one for one in words if one not in options), "--help"])
    listed = re.findall(r"^ +(-.*?)(?:  |$)", ran.out, re.MULTILINE)  # what a text above them names is no option
    return ran.code == 0 and {*options} <= {*re.findall(r"--[\w-]+", " ".join(listed))}


def _run(words: Sequence[str]) -> Ran:
    out, err, drawn = io.StringIO(), io.StringIO(), dict[str, Any]()
    argv = mock.patch.object(sys, "argv", ["perturbkv", *words])
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), argv, watched(drawn):
        warnings.simplefilter("ignore")
        try:
            main()
            code: Any = 0
        except SystemExit as left:
            code = left.code or 0
        except Exception as error:  # such a command has no document
            code = f"{type(error).__name__}: {error}"
    return Ran(code, out.getvalue(), err.getvalue(), drawn)


@contextlib.contextmanager
def watched(drawn: dict[str, Any]) -> Iterator[None]:
    """Note what every figure holds when it is saved, under its file's name."""
    save = Figure.savefig

    def saved(figure: Figure, place: Any, **more: Any) -> None:
        save(figure, place, **more)
        name = ".".join(Path(place).name.split(".")[:2]) if isinstance(place, str | Path) else "shown"
        drawn.update({f"{name}/{what}": value for what, value in held(figure).items()})

    with mock.patch.object(Figure, "savefig", saved), warnings.catch_warnings():
        yield


def held(figure: Figure) -> dict[str, Any]:
    """Everything that a figure shows: numbers as digests, texts as text."""
    found: dict[str, Any] = {"size": figure.get_size_inches().tolist(), "texts": _texts(figure.texts)}
    found["legends"] = [_texts(one.get_texts()) for one in figure.legends]
    for place, axes in enumerate(figure.axes):
        found |= {f"axes {place}/{name}": value for name, value in _of_axes(axes).items()}
    return found


def _of_axes(axes: Axes) -> dict[str, Any]:
    legend = axes.get_legend()
    found: dict[str, Any] = {
        "title": [axes.get_title(loc=where) for where in ("left", "center", "right")],
        "labels": [axes.get_xlabel(), axes.get_ylabel()],
        "scales": [axes.get_xscale(), axes.get_yscale()],
        "limits": digest([*axes.get_xlim(), *axes.get_ylim()]),
        "place": [round(one, 3) for one in axes.get_position().bounds],  # the layout's solver rounds as it likes
        "ticks": digest([*axes.get_xticks(), np.nan, *axes.get_yticks()]),
        "tick labels": [_texts(axes.get_xticklabels()), _texts(axes.get_yticklabels())],
        "texts": _texts(axes.texts),
        "legend": _texts(legend.get_texts()) if legend else None,
    }
    counts: dict[str, int] = {}
    for artist in axes.get_children():
        kind = next((one for one in _DIGESTED if isinstance(artist, one)), None)
        if kind is not None:
            place = counts[kind.__name__] = counts.get(kind.__name__, -1) + 1
            shown = [artist.get_visible(), artist.get_alpha(), artist.get_zorder()]
            found[f"{kind.__name__} {place}"] = digest(*_DIGESTED[kind](artist), repr(shown))
            if called := [str(one) for one in (artist.get_gid(), artist.get_label()) if one]:
                found[f"{kind.__name__} {place} called"] = called
    return found


def _line(one: Line2D) -> list[Any]:
    style = [one.get_color(), one.get_linestyle(), one.get_linewidth(), one.get_marker()]
    return [np.asarray(one.get_xdata(orig=False)), np.asarray(one.get_ydata(orig=False)), repr(style)]


def _collection(one: Collection) -> list[Any]:
    shapes = [part for path in one.get_paths() for part in (path.vertices, path.codes)]
    colours = [one.get_facecolor(), one.get_edgecolor(), one.get_linewidth(), one.get_sizes()] if hasattr(
        one, "get_sizes") else [one.get_facecolor(), one.get_edgecolor(), one.get_linewidth()]  # fmt: skip
    return [np.asarray(one.get_offsets()), one.get_array(), *shapes, *colours]


def _patch(one: Patch) -> list[Any]:
    path = one.get_path()
    moved = one.get_patch_transform().transform(path.vertices)
    return [moved, path.codes, one.get_facecolor(), one.get_edgecolor(), repr(one.get_hatch())]


def _image(one: AxesImage) -> list[Any]:
    return [one.get_array(), one.get_extent(), repr([one.get_clim(), one.get_cmap().name])]


_DIGESTED: dict[type, Any] = {Line2D: _line, Collection: _collection, Patch: _patch, AxesImage: _image}


def _texts(texts: Any) -> list[str]:
    return [DIGEST.sub("DIGEST", one.get_text()) for one in texts if isinstance(one, Text) and one.get_visible()]


def digest(*values: Any) -> str:
    """SHA-256 over type, shape and bytes of arrays, and over texts."""
    made = hashlib.sha256()
    for value in values:
        if isinstance(value, bytes | str):
            made.update(value if isinstance(value, bytes) else value.encode())
            continue
        array = np.ma.filled(np.ma.asarray(value), np.nan) if np.ma.isMaskedArray(value) else np.asarray(value)
        if array.dtype.kind in "OU":
            made.update(repr(array.tolist()).encode())
        else:
            made.update(f"{array.shape}{array.dtype}".encode() + array.tobytes())
    return made.hexdigest()


def leaves(value: Any, name: str, folder: Path) -> dict[str, Any]:
    """Leaves of a JSON document by their path, lists of numbers as one digest, passing values and folders hidden."""
    if isinstance(value, dict):
        parts = {key: one for key, one in value.items() if not PASSING.fullmatch(str(key))}
        keys = {f"{name}/keys": [*map(plain(folder), value)]} if value else {name: "{}"}
        return keys | {
            under: one for key, part in parts.items() for under, one in
            leaves(part, f"{name}/{plain(folder)(key)}", folder).items()
        }  # fmt: skip
    if isinstance(value, list) and (not value or _numbers(value)):
        return {name: digest(repr(value))}
    if isinstance(value, list):
        found = {f"{name}/length": len(value)}
        for place, one in enumerate(value):
            found |= leaves(one, f"{name}/{place}", folder)
        return found
    return {name: plain(folder)(value) if isinstance(value, str) else value}


def _numbers(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_numbers, value))
    return value is None or isinstance(value, int | float)


def plain(folder: Path) -> Any:
    """A function that hides the scratch folder, the tree and digests of traces in a text."""
    tree = str(Path(sys.modules["perturbkv"].__file__ or "").resolve().parents[1])

    def hide(text: Any) -> str:
        told = str(text).replace(str(folder), "FOLDER").replace(tree, "TREE").replace(str(ROOT), "TREE")
        return DIGEST.sub("DIGEST", told)

    return hide


def left(folder: Path, where: Path, skipped: tuple[str, ...] = ()) -> dict[str, Any]:
    """Digests of what lies in a folder: of traces by variable, of JSON by leaf; of pictures and the like the names."""
    found: dict[str, Any] = {}
    for path in sorted(one for one in where.rglob("*") if one.is_file()):
        name = str(path.relative_to(where))
        if path.suffix in skipped:
            found[name] = "there"
        elif path.suffix == ".h5":
            found |= {f"{name}/{variable}": value for variable, value in variables(path, folder).items()}
        elif path.suffix == ".json":
            found |= leaves(json.loads(path.read_text()), name, folder)
        elif path.suffix == ".jsonl":
            rows = [json.loads(row) for row in path.read_text().splitlines()]
            found |= leaves(rows, name, folder)
        elif path.suffix in (".tex", ".md", ".csv"):
            found[name] = digest(plain(folder)(path.read_text()))
        else:
            found[name] = "there"
    return found


def variables(path: Path, folder: Path) -> dict[str, Any]:
    """One digest per variable of a trace, and its attributes."""
    found: dict[str, Any] = {}

    def note(name: str, item: Any) -> None:
        for key, value in item.attrs.items():
            told = value.decode() if isinstance(value, bytes) else value
            if key in _INTERNAL or PASSING.fullmatch(key) or isinstance(told, h5py.Reference | np.ndarray):
                continue
            try:
                document = json.loads(told) if isinstance(told, str) else np.asarray(told).tolist()
            except json.JSONDecodeError:
                document = told
            found.update(leaves(document, f"{name}@{key}", folder))
        if isinstance(item, h5py.Dataset) and not PASSING.fullmatch(name.rpartition("/")[2]):
            values = item[()]
            if h5py.check_string_dtype(item.dtype) or item.dtype.kind == "O":
                text = [one.decode() if isinstance(one, bytes) else repr(one) for one in np.ravel(values)]
                found[name] = digest(repr(values.shape if hasattr(values, "shape") else ()), plain(folder)(repr(text)))
            else:
                found[name] = digest(values)

    with h5py.File(path) as file:
        note("/", file)
        file.visititems(note)
    return found


_INTERNAL = ("DIMENSION_LIST", "REFERENCE_LIST", "_Netcdf4Dimid", "_Netcdf4Coordinates", "_NCProperties")


def table(path: Path) -> str:
    """Digest of a table that was exported, but for its times."""
    return frame(pandas.read_csv(path) if path.suffix == ".csv" else pandas.read_parquet(path))


def frame(found: Any) -> str:
    """Digest of a data frame, column by column, but for its times."""
    kept = [name for name in found.columns if "seconds" not in str(name)]
    return digest(
        repr([(str(name), str(found[name].dtype)) for name in kept]), *(found[name].to_numpy() for name in kept)
    )


POLICIES = [
    "adakv", "defensive", "defensive-layer", "h2o", "headkv", "kvzip", "kvzip-plus", "lava", "pyramidkv", "quest",
    "caote", "dropkv", "expected-attention", "knorm", "obcache-joint", "obcache-key", "obcache-value", "random",
    "scissorhands", "tova", "value-norm",
]  # fmt: skip
"""All but snapkv, and those with a selection or a prefill of their own."""


def below(prefix: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under a name."""
    return {f"{prefix}/{name}": value for name, value in found.items()}


def tiny_model(
    path: Path, family: str = "llama", layers: int = 3, seed: int = 0, spoken: str = "", **more: Any
) -> Path:
    """A model folder with a tokenizer of single bytes, made where it is not there yet.

    Random weights so large that attention is far from uniform, norms, biases and sinks off their defaults. Answers are
    of the characters `spoken`, if any.
    """
    if path.exists():
        return path
    shapes: dict[str, Any] = {
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "hidden_size": 32, "intermediate_size": 48, "vocab_size": 260, "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "initializer_range": 0.25,
        "sliding_window": None, "pad_token_id": None,
    }  # fmt: skip
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    config = AutoConfig.for_model(family, **{**shapes, **more, **({"tie_word_embeddings": False} if spoken else {})})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn(parameter.shape))
            if name.endswith("sinks"):
                parameter.add_(torch.randn(parameter.shape))
        if spoken:
            model.lm_head.weight[[index for index in range(260) if index not in {alphabet[one] for one in spoken}]] = 0
    model.eval().save_pretrained(path)
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def prompts(path: Path, count: int, sentences: int = 4, **more: Any) -> Path:
    """A data set of prompts of some hundred bytes, one sentence longer each, a question behind."""
    text = "The quick brown fox jumps over the lazy dog; {} of them saw it. "
    rows = [
        {"id": f"p{place}", "context": "".join(text.format(place * 7 + one) for one in range(sentences + place % 3)),
         "input": f"How many saw it? {place}", **more}
        for place in range(count)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    return path
