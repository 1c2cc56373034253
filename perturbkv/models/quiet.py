"""Other libraries' bars and warnings, off while we load a model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as theirs

_lock = threading.Lock()
_inside: list[tuple[int, bool, bool, int]] = []
"""What was before, once for each block that is open: the last one to leave restores the first one's."""


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing of transformers, tqdm or the hub is shown inside the block; behind it all is as it was."""
    of_hub = logging.getLogger("huggingface_hub")
    with _lock:
        now = (theirs.get_verbosity(), theirs.is_progress_bar_enabled(), are_progress_bars_disabled(), of_hub.level)
        _inside.append(_inside[0] if _inside else now)
        theirs.set_verbosity_error()
        theirs.disable_progress_bar()
        disable_progress_bars()
        of_hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        with _lock:
            verbosity, shown, hub, level = _inside.pop()
            if not _inside:
                _restore(verbosity, shown, hub, level)


def _restore(verbosity: int, shown: bool, hub: bool, level: int) -> None:
    theirs.set_verbosity(verbosity)
    logging.getLogger("huggingface_hub").setLevel(level)
    if shown:
        theirs.enable_progress_bar()
    if not hub:
        enable_progress_bars()
