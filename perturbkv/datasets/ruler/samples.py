"""Samples of RULER's tasks, from rows that lm-eval generates.

A sample has context and question apart, and the answer's beginning in the assistant's turn. lm-eval's files run with
substitutes for downloads, random numbers, token counts and progress bars. Random generators are the run's own, so that
no other task, length or caller changes them, and no global state is touched. Rows are made one after the other, so that
the first of many are those of few. Essays, SQuAD and HotpotQA are read from --data-dir under RULER's own names, or from
the hub. Keys are drawn from six million `adjective-noun` pairs that are never listed.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import logging
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, overload

import numpy as np

from perturbkv.datasets.data_files import hub_file, local_file
from perturbkv.datasets.dataset_registry import DATA_DIR_VARIABLE, DatasetOptions, LoadedDataset
from perturbkv.datasets.encode import Tokenizer
from perturbkv.datasets.external_code import NoEnd, run_file
from perturbkv.datasets.ruler import tasks
from perturbkv.datasets.ruler.tasks import Task
from perturbkv.datasets.sample import Sample
from perturbkv.errors import DatasetError
from perturbkv.user_files import FileKind

MOST_ROWS = 500
"""Number of rows of a task at one length in lm-eval."""
NONE_FITS = "Could not generate any"
"""Text of lm-eval's ValueError where every row was too long."""
_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
"""Lengths to suggest where the requested one is too short for a task."""

Rows = Sequence[Mapping[str, Any]]


def load(name: str, options: DatasetOptions, tokenizer: Tokenizer) -> LoadedDataset:
    """Return a RULER task's samples, which cycle through the lengths; sample i is independent of the number of samples.

    Raises DatasetError where lm-eval, a package or data is missing, and for a length that is too short.
    """
    task, data, lengths = tasks.read(name), TaskData(name, options.data_dir), options.lengths
    row_maker = RowMaker(tasks.folder(), tokenizer, options.seed, data)
    per_length = -(-options.samples // len(lengths))
    rows = [_rows(row_maker, task, length, per_length) for length in lengths]
    turns = [divmod(index, len(lengths)) for index in range(options.samples)]  # row of a length, length of a row
    samples = tuple(
        _sample(index, rows[which][row], task) for index, (row, which) in enumerate(turns) if row < len(rows[which])
    )
    recorded = {
        "lengths": list(lengths),
        "seeds": {"random": options.seed, "numpy": NUMPY_SEED},
        "wording": {name: task.record()},
    }
    return LoadedDataset(samples, recorded | data.record, task.generation_length)


def _rows(row_maker: RowMaker, task: Task, length: int, count: int) -> Rows:
    """Return `count` rows of a task at one length, or at least one if lm-eval has fewer that fit.

    Raises DatasetError for a length that no row fits.
    """
    rows, tried = _try_rows(row_maker, task, length, count), count
    while len(rows) < count and tried < MOST_ROWS:
        tried = min(2 * tried, MOST_ROWS) if rows else MOST_ROWS
        rows = _try_rows(row_maker, task, length, tried)
    if rows:
        return rows
    enough = next((other for other in _LENGTHS if other > length and _try_rows(row_maker, task, other, 1)), None)
    do = f"use --length {enough} or more" if enough else "take another task, or a model of another tokenizer"
    raise DatasetError(
        f"no prompt of '{task.name}' fits {length:,} tokens of this model's tokenizer, answer included; {do}"
    )


def _try_rows(row_maker: RowMaker, task: Task, length: int, tried: int) -> Rows:
    """Return the rows, among lm-eval's first `tried`, that fit the length; none if a row lacks an answer."""
    with tasks.explain_errors(task.name, lambda: row_maker.data.path):
        try:
            rows = row_maker.make(task.maker, length, tried)
        except NoEnd:
            return ()
        except ValueError as error:
            if NONE_FITS not in str(error):
                raise
            return ()
    return rows if all(row["outputs"] for row in rows) else ()


def _sample(index: int, row: Mapping[str, Any], task: Task) -> Sample:
    """Return a row's sample; its question starts with the template's text after the context."""
    text = str(row["input"])
    question_begin = text.rfind(task.question_start)
    return Sample(
        id=f"{index}-{row['max_length']}",
        context=text[:question_begin],
        question=text[question_begin:],
        answers=tuple(row["outputs"]),
        answer_prefix=str(row["gen_prefix"]),
        task=task.name,
        delimiter=task.delimiter,
    )


ESSAYS = "PaulGrahamEssays.json"
NAMES = {"dev-v2.0.json": "squad.json", "hotpot_dev_distractor_v1.json": "hotpotqa.json"}
"""File name in the web address -> RULER's own name; both are accepted."""
FILE = FileKind("a JSON file (UTF-8)", DatasetError)
_ON_HUB = re.compile(r"https://huggingface\.co/datasets/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class TaskData:
    """The data files of one RULER task, in place of downloads by lm-eval's code; each file is read once.

    Attributes:
        task: name of the task, for errors.
        folder: --data-dir, where files are searched first.
        path: path of the file that was read last.
        record: that file's source and SHA-256, for the trace.
    """

    task: str
    folder: Path | None
    path: Path | None = None
    record: dict[str, str] = field(default_factory=dict)
    _read: dict[str, Any] = field(default_factory=dict)

    def load_dataset(self, repo: str, **more: Any) -> dict[str, list[str]]:
        """Return the essays' texts, in place of `datasets.load_dataset`. Raises DatasetError."""
        if repo not in self._read:
            local = local_file(self.folder, "ruler", ESSAYS)
            self._read[repo] = self._read_local_essays(local) if local else self._download_essays(repo)
        return {"text": self._read[repo]}

    def get(self, address: str, **more: Any) -> Any:
        """Return a response with the JSON file at a web address, in place of `requests.get`. Raises DatasetError."""
        if address not in self._read:
            name = address.rpartition("/")[2]
            ruler_name = NAMES.get(name, name)
            local = local_file(self.folder, "ruler", ruler_name) or local_file(self.folder, "ruler", name)
            path = local or self._download(address, ruler_name)
            self._read[address] = FILE.read_json(self._record_source(path, "file" if local else address))
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: self._read[address])

    def _read_local_essays(self, path: Path) -> list[str]:
        """Return all essays as a single text, from a file in the format of RULER's script. Raises DatasetError."""
        document = FILE.read_json(self._record_source(path, "file"))
        text = document.get("text") if isinstance(document, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise FILE.refusal(path, "no object with a text `text`")
        return [text]

    def _download_essays(self, repo: str) -> list[str]:
        """Return every essay's text, from the hub's parquet conversion of a dataset."""
        import pyarrow.parquet as parquet

        path = hub_file(self.task, ESSAYS, repo, "default/train/0000.parquet", "refs/convert/parquet")
        texts = parquet.read_table(self._record_source(path, repo), columns=["text"])["text"].to_pylist()
        return [str(text) for text in texts]

    def _download(self, address: str, local: str) -> Path:
        """Return the path of a hub file, given its web address; `local` is its name in --data-dir.

        Raises DatasetError for an address elsewhere.
        """
        on_hub = _ON_HUB.fullmatch(address)
        if on_hub:
            return hub_file(self.task, local, on_hub["repo"], on_hub["file"], on_hub["revision"])
        raise DatasetError(
            f"dataset '{self.task}' needs {local}, which no hub holds; bring it from {address} with --data-dir DIR "
            f"(or {DATA_DIR_VARIABLE}) holding {local}"
        )

    def _record_source(self, path: Path, source: str) -> Path:
        """Record a file's path, source and checksum as the file last read, and return its path."""
        digest = hashlib.sha256(FILE.read_bytes(path)).hexdigest()
        self.path, self.record = path, {"source": source, "file_sha256": digest}
        return path


class WordPairs(Sequence[str]):
    """The sequence `sorted({f"{first}-{second}" for first in firsts for second in seconds})`, without storing it.

    Pairs of one first word are consecutive, unless another first word continues after its hyphen (`well`, `well-kept`):
    such first words form one group, whose pairs are made and sorted on access.
    """

    def __init__(self, firsts: Iterable[str], seconds: Iterable[str]) -> None:
        self._seconds = sorted(set(seconds))
        self._groups: list[list[str]] = []
        for head in sorted(f"{first}-" for first in set(firsts)):
            if self._groups and head.startswith(self._groups[-1][0]):
                self._groups[-1].append(head)
            else:
                self._groups.append([head])
        sizes = (len(self._seconds) if len(group) == 1 else len(self._sorted(group)) for group in self._groups)
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        group = bisect.bisect_right(self._ends, index)
        within = index - (self._ends[group - 1] if group else 0)
        heads = self._groups[group]
        return heads[0] + self._seconds[within] if len(heads) == 1 else self._sorted(heads)[within]

    def _sorted(self, heads: Sequence[str]) -> list[str]:
        """Return the sorted pairs of the first words `heads`, which end in a hyphen, with all second words."""
        return sorted({head + second for head in heads for second in self._seconds})


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, as `nltk.sent_tokenize` does. Raises DatasetError where nltk lacks its data."""
    import nltk

    try:
        return cast("list[str]", nltk.sent_tokenize(text))
    except LookupError:
        raise DatasetError(
            "RULER's essays are split into sentences by nltk, which lacks its punkt_tab; bring it with "
            "`python -m nltk.downloader punkt_tab`, or name the folder that holds `tokenizers/punkt_tab` in NLTK_DATA"
        ) from None


NUMPY_SEED = 1234
"""lm-eval's default seed for NumPy; `--seed` only seeds Python's `random`."""
MOST_TRIES = 100
"""Prompts counted for one row since the last shorter one: some of lm-eval's loops never end where none fits."""
_PACKAGE = "lm_eval.tasks.ruler."
_KEYS = "prepare_niah"
"""lm-eval's file that lists the keys of needles."""


@dataclass(frozen=True)
class RowMaker:
    """A generator of the rows of one RULER task.

    Attributes:
        folder: folder of lm-eval's files.
        tokenizer: tokenizer for lengths, special tokens included, as lm-eval counts.
        seed: seed of Python's random numbers.
        data: the data files, which some tasks read.
    """

    folder: Path
    tokenizer: Tokenizer
    seed: int
    data: TaskData

    def make(self, maker: tuple[str, str], length: int, tried: int) -> Sequence[Mapping[str, Any]]:
        """Return the rows, among the first `tried`, whose prompt and answer fit `length` tokens.

        `maker` is the file and function of lm-eval that makes the rows. Raises NoEnd or ValueError where none
        fits, DatasetError for missing data, and anything for lm-eval files of an unknown version.
        """
        file, function = maker
        names = _Executor(self, _LoopLimit(self.tokenizer, tried)).execute(file)
        rows: Sequence[Mapping[str, Any]] = names[function](max_seq_lengths=[length])["test"]
        return rows


class _BoundedRandom(random.Random):
    """The substitute for the module `random`: a generator with the module's functions as methods."""

    Random = random.Random

    def sample(self, population: Any, k: int, *, counts: Iterable[int] | None = None) -> list[Any]:
        """Return `random.sample`'s result. Raises NoEnd if `k` is too large, which lm-eval would retry forever."""
        if k > len(population):
            raise NoEnd
        return super().sample(population, k, counts=counts)


class _LoopLimit:
    """The substitute for progress bar and tokenizer, which ends a loop at a limit of rows or of tries.

    `most_rows` is how many rows are tried; of each, prompts are counted since the shortest one so far.
    """

    def __init__(self, tokenizer: Tokenizer, most_rows: int) -> None:
        self._tokenizer, self._most_rows = tokenizer, most_rows
        self._tries, self._shortest = 0, math.inf
        self._in_row = False

    def progress_bar(self, indices: Iterable[int], **more: Any) -> Iterator[int]:
        """Yield the indices of the rows that are tried, in place of `tqdm`."""
        self._in_row = True
        for index in itertools.islice(indices, self._most_rows):
            self._tries, self._shortest = 0, math.inf
            yield index
        self._in_row = False

    def tokenize(self, text: str) -> Any:
        """Return a text's encoding. Raises NoEnd after `MOST_TRIES` tries of one row without a shorter prompt."""
        ids = self._tokenizer(text)["input_ids"]
        self._tries = 0 if len(ids) < self._shortest else self._tries + 1
        self._shortest = min(self._shortest, len(ids))
        if self._in_row and self._tries > MOST_TRIES:  # before the rows, a size is searched for: ever longer prompts
            raise NoEnd
        return SimpleNamespace(input_ids=ids)


class _Executor:
    """An executor of lm-eval's RULER files, with substitutes for their imports."""

    def __init__(self, row_maker: RowMaker, limit: _LoopLimit) -> None:
        self._folder, self._limit = row_maker.folder, limit
        self._substitutes = {
            "random": _BoundedRandom(row_maker.seed),
            "numpy": SimpleNamespace(**{**vars(np), "random": np.random.RandomState(NUMPY_SEED)}),
            "tqdm": SimpleNamespace(tqdm=limit.progress_bar),
            "logging": SimpleNamespace(getLogger=lambda name: logging.Logger(name, logging.CRITICAL)),
            "datasets": SimpleNamespace(
                Dataset=SimpleNamespace(from_list=lambda rows, split: rows),
                Split=SimpleNamespace(TEST="test"),
                load_dataset=row_maker.data.load_dataset,
            ),
            "requests": SimpleNamespace(get=row_maker.data.get),
            "transformers": SimpleNamespace(AutoTokenizer=None),
            "nltk": SimpleNamespace(data=SimpleNamespace(find=lambda name: None), sent_tokenize=split_sentences),
        }

    def execute(self, file: str) -> dict[str, Any]:
        """Execute an lm-eval file and return its global names -> values, with substitutes for words and tokenizer."""
        has_keys = file == _KEYS
        names = run_file(self._folder / f"{file}.py", self._without_words if has_keys else self._substitute)
        if has_keys:
            names["WORDS"] = _needle_keys()
        if "get_tokenizer" in names:
            names["get_tokenizer"] = lambda name: self._limit.tokenize
        return names

    def _substitute(self, name: str) -> Any:
        """Return the substitute for a module; None: the real module is imported."""
        if name.startswith(_PACKAGE):
            return SimpleNamespace(**self.execute(name.removeprefix(_PACKAGE)))
        return self._substitutes.get(name)

    def _without_words(self, name: str) -> Any:
        """Return the substitute for a module, which for `wonderwords` is a module without words.

        lm-eval would list all pairs of its words, six million (20 s and 900 MB), which `WordPairs` replaces.
        """
        if name == "wonderwords":
            no_words: dict[str, list[str]] = {"nouns": [], "adjectives": [], "verbs": []}
            return SimpleNamespace(RandomWord=lambda: SimpleNamespace(_categories=no_words))
        return self._substitute(name)


@functools.cache
def _needle_keys() -> WordPairs:
    """Return the keys of RULER's needles, such as `quick-fox`: all combinations of an adjective and a noun."""
    import wonderwords

    words = wonderwords.RandomWord()._categories
    return WordPairs(words["adjectives"], words["nouns"])
