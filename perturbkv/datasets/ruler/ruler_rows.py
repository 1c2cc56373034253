"""Rows of one RULER task at one length, as lm-eval makes them in a fresh process that does nothing else.

Its files run with stand-ins for what fetches, draws, counts and reports. Random numbers are the run's own, so that no
other task, length or caller moves them, and no global state is touched. Rows are made one after the other, so that the
first of many are those of few.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from perturbkv.datasets.encode import Tokenizer
from perturbkv.datasets.external_code import NoEnd, run_file
from perturbkv.datasets.ruler.data import Data
from perturbkv.datasets.ruler.sentences import sentences
from perturbkv.datasets.ruler.words import Pairs

NUMPY_SEED = 1234
"""lm-eval's default for NumPy, whatever `--seed` gives Python's `random`."""
MOST_TRIES = 100
"""Prompts counted for one row since the last shorter one: some of lm-eval's loops never end where none fits."""
_PACKAGE = "lm_eval.tasks.ruler."
_KEYS = "prepare_niah"


@dataclass(frozen=True)
class Making:
    """What rows are made with.

    Attributes:
        folder: of lm-eval's files.
        tokenizer: that counts, special tokens included, as lm-eval counts.
        seed: of Python's random numbers.
        data: that some tasks read.
    """

    folder: Path
    tokenizer: Tokenizer
    seed: int
    data: Data

    def make(self, maker: tuple[str, str], length: int, tried: int) -> Sequence[Mapping[str, Any]]:
        """The first `tried` rows whose prompt and answer fit `length` tokens, without those that do not.

        Raises NoEnd or ValueError where none does, DatasetError for missing data, and whatever files of another version
        raise.
        """
        file, function = maker
        names = _Files(self, _Counting(self.tokenizer, tried)).names(file)
        made: Sequence[Mapping[str, Any]] = names[function](max_seq_lengths=[length])["test"]
        return made


class _Draws(random.Random):
    """In place of the module `random`."""

    Random = random.Random

    def sample(self, population: Any, k: int, *, counts: Iterable[int] | None = None) -> list[Any]:
        """As ever; raises NoEnd for more than there are, which some of lm-eval's loops would try for ever."""
        if k > len(population):
            raise NoEnd
        return super().sample(population, k, counts=counts)


class _Counting:
    """In place of progress bars and tokenizer: stops behind the last row that is wanted, and where none would come."""

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        self._tokenizer, self._rows = tokenizer, rows
        self._tries, self._shortest = 0, math.inf
        self._in_row = False

    def bar(self, places: Iterable[int], **more: Any) -> Iterator[int]:
        """The places of the rows, as many as are wanted."""
        self._in_row = True
        for place in itertools.islice(places, self._rows):
            self._tries, self._shortest = 0, math.inf
            yield place
        self._in_row = False

    def tokens(self, text: str) -> Any:
        """The text's tokens. Raises NoEnd where a row's prompts have long not become shorter."""
        found = self._tokenizer(text)["input_ids"]
        self._tries = 0 if len(found) < self._shortest else self._tries + 1
        self._shortest = min(self._shortest, len(found))
        if self._in_row and self._tries > MOST_TRIES:  # before the rows, a size is searched for: ever longer prompts
            raise NoEnd
        return SimpleNamespace(input_ids=found)


class _Files:
    """lm-eval's files, each run where another imports it."""

    def __init__(self, making: Making, counting: _Counting) -> None:
        self._folder, self._counting = making.folder, counting
        self._stand_ins = {
            "random": _Draws(making.seed),
            "numpy": SimpleNamespace(**{**vars(np), "random": np.random.RandomState(NUMPY_SEED)}),
            "tqdm": SimpleNamespace(tqdm=counting.bar),
            "logging": SimpleNamespace(getLogger=lambda name: logging.Logger(name, logging.CRITICAL)),
            "datasets": SimpleNamespace(
                Dataset=SimpleNamespace(from_list=lambda rows, split: rows),
                Split=SimpleNamespace(TEST="test"),
                load_dataset=making.data.load_dataset,
            ),
            "requests": SimpleNamespace(get=making.data.get),
            "transformers": SimpleNamespace(AutoTokenizer=None),
            "nltk": SimpleNamespace(data=SimpleNamespace(find=lambda name: None), sent_tokenize=sentences),
        }

    def names(self, file: str) -> dict[str, Any]:
        """What a file defines."""
        keyed = file == _KEYS
        found = run_file(self._folder / f"{file}.py", self._without_words if keyed else self._stand_in)
        more: dict[str, Any] = {"WORDS": _words()} if keyed else {}
        if "get_tokenizer" in found:
            more["get_tokenizer"] = lambda name: self._counting.tokens
        found.update(more)
        return found

    def _stand_in(self, name: str) -> Any:
        if name.startswith(_PACKAGE):
            return SimpleNamespace(**self.names(name.removeprefix(_PACKAGE)))
        return self._stand_ins.get(name)

    def _without_words(self, name: str) -> Any:
        """Of the six million words that a file makes of these (20 s and 900 MB) none is made: `Pairs` holds them."""
        if name == "wonderwords":
            none: dict[str, list[str]] = {"nouns": [], "adjectives": [], "verbs": []}
            return SimpleNamespace(RandomWord=lambda: SimpleNamespace(_categories=none))
        return self._stand_in(name)


@functools.cache
def _words() -> Pairs:
    """The keys of needles: an adjective and a noun."""
    import wonderwords

    words = wonderwords.RandomWord()._categories
    return Pairs(words["adjectives"], words["nouns"])
