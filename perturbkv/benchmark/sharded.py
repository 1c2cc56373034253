"""Shards of a run of many samples, which are not measured but written, and the same samples written once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from perturbkv.benchmark.many_workers import kept_sample, planned
from perturbkv.benchmark.subprocesses import Result
from perturbkv.configs.shard import Shard
from perturbkv.errors import PerturbkvError
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.texts import PromptTexts
from perturbkv.storage.run.journal_part import Journal, journal_path
from perturbkv.storage.run.shard_writer import ShardWriter
from perturbkv.storage.run.shards import ShardRecord, beside
from perturbkv.storage.run.writer import TraceWriter

_MERGING = (sys.executable, "-m", "perturbkv.benchmark.merging")


def merging(samples: int, shards: int, model: str, folder: str, once: bool) -> Result:
    """Seconds of merging so many shards, and the bytes of the process that does; of writing their samples, and `once`.

    `journals` is what the shards' journals take, `once` the file of a run that has one, of the same entries.
    """
    run, place = planned(model, samples), Path(folder) / f"merging-{samples}"
    place.mkdir()
    start = time.perf_counter()
    _write_shards(run, shards, place / "merged.h5", folder)
    found: Result = {"journals": time.perf_counter() - start}
    if once:
        found["once"] = _written_once(run, place)
    return found | {"merging": _merged(place / "merged.h5")}


def _write_shards(run: Plan, count: int, path: Path, folder: str) -> None:
    """Journals of all shards, with the text of the prompt, which all samples share."""
    text = PromptTexts(run.prompts, run.files.tokenizer.decode)[run.prompts[0].sample_id]
    sample, texts = kept_sample(folder), dict.fromkeys(run.prompts.ids, text)
    for number in range(1, count + 1):
        record = ShardRecord(Shard(number, count), run.run, tuple(run.prompts.ids), {}, text=True)
        writer = ShardWriter(path, record, texts)
        for name, configs in writer.missing().items():
            writer.append(replace(sample, sample_id=name), configs)
        writer.finish()


def _written_once(run: Plan, place: Path) -> float:
    """Seconds of the file of a run without shards, whose journal has the shards' own files."""
    path = place / "once.h5"
    journal = Journal(journal_path(path))
    journal.begin(run.run)
    for shard in beside(place / "merged.h5"):
        for entry in shard.journal.folder.glob("*.npz"):
            os.link(entry, journal.folder / entry.name)
    writer = TraceWriter(path, run.run, run.prompts.ids, {})
    start = time.perf_counter()
    writer.finish()
    return time.perf_counter() - start


def _merged(path: Path) -> dict[str, Any]:
    """Seconds and bytes of merging. Raises PerturbkvError where its process fails."""
    finished = subprocess.run([*_MERGING, str(path)], capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        lines = finished.stderr.strip().splitlines() or ["no message"]
        msg = f"merging failed: {lines[-1]}"
        raise PerturbkvError(msg)
    told: dict[str, Any] = json.loads(finished.stdout)
    return told
