"""The exceptions that users see: one line each, with what was expected, what was found and what to do.

Every error that a user can cause is a `PerturbkvError`; the command line prints its message as one line and exits with
its `exit_code`.
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from perturbkv.escaping import escape_line

MOST_CHARACTERS = 2000
"""Most characters of an error's text; of a longer one the middle is left out."""
_COMPARED = 100
"""Most characters of a name that are compared with the known names."""


class PerturbkvError(Exception):
    r"""An error that a user can cause; `exit_code` is the process's exit status.

    Its text is one line, also where a name or a file in it is not: control characters are escaped, and of a long text
    the middle is left out.

    Example:
        >>> print(PerturbkvError("unknown model 'a\x1b[2Jb'"))
        unknown model 'a\x1b[2Jb'
    """

    exit_code = 2

    def __str__(self) -> str:
        text = escape_line(" ".join(super().__str__().split("\n")))
        half = MOST_CHARACTERS // 2
        return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} … {text[-half:]}"


class ConfigError(PerturbkvError):
    """An invalid option or combination of options."""


class BudgetError(ConfigError):
    """A budget that is not positive, is a fraction above 1, or leaves nothing besides the window."""


class UnknownNameError(PerturbkvError):
    """A name that no registry has; the message lists all known names, nearest first; of more than 12 the nearest 6."""

    _MANY, _SHOWN = 12, 6

    def __init__(self, name: str, kind: str, known: Iterable[str], hint: str = "") -> None:
        self.kind = kind
        self.name = name
        self.known: list[str] = nearest_first(name, known)
        many = len(self.known) > self._MANY
        shown = self.known[: self._SHOWN] if many else self.known
        known_ones = f"nearest of {len(self.known)} known" if many else "known"
        message = f"unknown {kind} '{name}'; {known_ones}: {', '.join(shown)}"
        super().__init__(f"{message}{'; ' + hint if hint else ''}")


class NarrowFigureError(ConfigError):
    """A figure that has no room at its width; `needed_mm` is a width that is large enough."""

    def __init__(self, width_mm: float, needed_mm: int) -> None:
        self.needed_mm = needed_mm
        super().__init__(f"width_mm={width_mm:g} is too small for this figure; it needs {needed_mm} mm or more")


MEASURING = {
    "torch": "torch>=2.11",
    "transformers": "transformers>=5.2,<6",
    "accelerate": "accelerate>=1.0",
    "gguf": "gguf>=0.10",
    "huggingface_hub": "huggingface_hub>=1.0",
    "jaxtyping": "jaxtyping>=0.3",
    "yaml": "pyyaml>=6",
}
"""Modules that only measuring imports -> the requirement that brings each; finished traces are read without them."""
_OF_TRANSFORMERS = ("safetensors", "tokenizers")
"""Modules that transformers brings along."""


class MissingPackageError(PerturbkvError, ModuleNotFoundError):
    """A package that is not installed, such as torch where only finished traces are read; the message installs it."""

    def __init__(self, module: str) -> None:
        package, purpose = module.partition(".")[0], ""
        needed = [package]
        if package in (*MEASURING, *_OF_TRANSFORMERS):
            purpose, needed = " to measure with (finished traces are read without it)", list(MEASURING.values())
        requirements = " ".join(f"'{one}'" if set(one) & set("<>") else one for one in needed)
        message = f"expected the package {package}{purpose}, got none installed; type: pip install {requirements}"
        super().__init__(message, name=module)

    @classmethod
    def from_error(cls, error: ModuleNotFoundError) -> MissingPackageError:
        """Return the error for the missing module of `error`; raise `error` itself where none of another package is."""
        module = error.name or ""
        if module.partition(".")[0] in ("", "perturbkv"):
            raise error
        return cls(module)


def install_extra(name: str) -> str:
    """Return how an extra of this package is installed; the package itself is on no index.

    Example:
        >>> install_extra("ray")
        "pip install '.[ray]' in the checkout"
    """
    return f"pip install '.[{name}]' in the checkout"


class ModelError(PerturbkvError):
    """A model that cannot be loaded, or whose attention cannot be measured correctly."""


class PluginError(PerturbkvError):
    """A plug-in, named in the message, that cannot be loaded, or whose result cannot be used."""


class DatasetError(PerturbkvError):
    """Samples that cannot be read, are empty, or do not fit the model."""


class NoMemoryError(PerturbkvError):
    """Too little memory for a run; the message says how much was needed and what to lower."""


class DeviceError(PerturbkvError):
    """A GPU, or its driver, that fails while it works."""

    exit_code = 1


class TraceError(PerturbkvError):
    """A trace file that cannot be read, is of another run, or lacks what an analysis needs."""


class MissingShardError(TraceError):
    """A merge of shards of which some are not measured yet."""


class TraceUnavailableError(TraceError):
    """A trace file that the system cannot read now, so that its contents are unknown."""

    def __init__(self, path: Path, error: OSError) -> None:
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            got = "one that another program has open for writing; close it there, and try again"
        elif error.errno is None:
            got = (
                "one that is marked as open for writing; close it where it is open, or, where that program was killed, "
                f"take the mark away with HDF5's own 'h5clear -s {path}'"
            )
        else:
            got = f"'{os.strerror(error.errno)}' from the system; nothing is known of the file"
        super().__init__(f"expected a trace file (HDF5) at {path}, got {got}")


class OutputError(PerturbkvError):
    """A path that cannot be written: a folder, a full disk, in use by another run, or another program's file."""


class LockedOutputError(OutputError):
    """An output path that another process is writing now."""


class UnreadableCacheError(PerturbkvError):
    """An external cache whose kept entries cannot be determined; `reason` says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"unreadable cache: {reason}")


class EngineError(PerturbkvError):
    """An inference engine that does not start, or that ends before its cache is read."""


class ActivationError(PerturbkvError):
    """NaN or Inf in a model's activations; the sample is marked failed and the run goes on.

    `where` names the activations: the hidden states of a layer, the final norm's output, or the logits.
    """

    exit_code = 1

    def __init__(self, where: str, sample: str) -> None:
        self.where = where
        self.sample = sample
        super().__init__(f"{where} hold NaN or Inf in sample '{sample}'")


class FailedRunError(PerturbkvError):
    """A run all of whose samples failed; `failures` has the reason of each."""

    exit_code = 1
    _MOST_REASONS = 3

    def __init__(self, trace: str, failures: Mapping[str, str]) -> None:
        self.failures: dict[str, str] = dict(failures)
        reasons = list(dict.fromkeys(self.failures.values()))
        more = f"; and {len(reasons) - self._MOST_REASONS} more" if len(reasons) > self._MOST_REASONS else ""
        super().__init__(
            f"all {len(self.failures)} samples of {trace} failed, nothing is left to look at: "
            f"{'; '.join(reasons[: self._MOST_REASONS])}{more}"
        )


class WorkerError(PerturbkvError):
    """Workers that fail at every task, so that none is left to continue the run."""

    exit_code = 1


class InterruptedRunError(PerturbkvError):
    """An interrupted run (Ctrl-C): `kept` of `total` samples are in the journal beside `path`; the same run resumes."""

    exit_code = 130

    def __init__(self, kept: int, total: int, path: Path, message: str = "") -> None:
        self.kept = kept
        self.total = total
        self.path = path
        super().__init__(
            message
            or f"interrupted: {kept} of {total} samples kept beside {path}; run the same again, with the "
            "same path, to go on"
        )


class BoundError(PerturbkvError):
    """A value above its theorem's upper bound, which shows that the numbers are wrong."""

    exit_code = 1

    def __init__(self, inequality: str, values: str, where: str, count: int) -> None:
        self.inequality = inequality
        self.count = count
        super().__init__(
            f"expected {inequality} everywhere, got {values} in {where}; {count} violations in all: "
            "the trace is wrong, please report it"
        )


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names: those similar to `name` first, then all others in their original order."""
    names = list(known)
    close = difflib.get_close_matches(name[:_COMPARED], names, n=max(1, len(names)), cutoff=0.4)
    return close + [other for other in names if other not in close]
