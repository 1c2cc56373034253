"""`perturbkv audit vllm:MODEL`: an engine runs requests in several situations, and its cache is audited in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perturbkv.cli import console, option_refusals
from perturbkv.cli.choices import check_distinct
from perturbkv.models.aliases import DEFAULT

_ENGINE = "vllm:"
_USED = frozenset({"eviction", "situation", "dtype", "device", "seed", "revision", "output", "as_json"})


def is_engine(eviction: str) -> bool:
    """Return whether an audit's argument is an engine with a model, such as `vllm:MODEL`."""
    return eviction.startswith(_ENGINE)


def audit_engine(eviction: str, run: Any) -> int:
    """Print the verdict on an engine's cache in each situation, or all as JSON, and return the largest exit code.

    `run` has the options of `perturbkv audit`, of which `--situation`, `--dtype`, `--device`, `--seed`, `--revision`,
    `--json` and, to keep the dumps, `--output` are used. Raises ConfigError for any other.
    """
    from perturbkv.auditing import DEFAULT_SITUATIONS, audit_vllm

    option_refusals.check_file("audit of an engine", run, Path(eviction), _USED)
    situations = check_distinct("--situation", run.situation or list(DEFAULT_SITUATIONS))
    folder = None if run.output is None else Path(run.output)
    codes, documents = [], {}
    with console.progress("situations", len(situations)) as bar:
        audits = audit_vllm(
            eviction.removeprefix(_ENGINE) or DEFAULT, situations, dtype=run.dtype, device=run.device, seed=run.seed,
            revision=run.revision or "", folder=folder, progress=bar.advance,
        )  # fmt: skip
        for name, result in audits:
            codes.append(result.exit_code)
            documents[name] = result.to_dict()
            if not run.as_json:
                console.say(f"{name}: {result.summary}")
    if run.as_json:
        console.print_json({"situations": documents})
    return max(codes)
