"""Other libraries' bars and warnings, off while we load a model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as theirs


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing of transformers, tqdm or the hub is shown inside the block; behind it all is as it was."""
    verbosity, shown, hub = theirs.get_verbosity(), theirs.is_progress_bar_enabled(), are_progress_bars_disabled()
    of_hub = logging.getLogger("huggingface_hub")
    level = of_hub.level
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    disable_progress_bars()
    of_hub.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(verbosity)
        of_hub.setLevel(level)
        if shown:
            theirs.enable_progress_bar()
        if not hub:
            enable_progress_bars()
