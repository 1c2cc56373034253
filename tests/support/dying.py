"""A function that kills its process in the midst of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


def dying(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The function, whose call of this number, from 1, is the process's last."""
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return counted
