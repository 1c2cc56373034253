"""Whether dumps of a right engine raise a false alarm: python docs/scripts/clean_dumps.py vllm COUNT.

Prompts begin at random places of a text, in one to three requests that begin and end at different times; every other
time they share a prefix. Prints a line per alarm, then how many dumps are exact and the largest distance in floors.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from perturbkv.analyses.audit.dump_verdict import DumpAudit, conclude
from perturbkv.auditing.dumps import vllm_audit
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import read_dump
from perturbkv.auditing.dumps.vllm_engine import EngineRequest, dump_vllm
from perturbkv.datasets.needle import sentences
from perturbkv.models.aliases import EMBEDDED
from perturbkv.models.loading import load_model, open_model


def draw(text: list[int], seed: int) -> list[EngineRequest]:
    """Return one to three requests of 33 to 200 tokens, and of 2 to 20 decoded ones."""
    rng = random.Random(seed)
    prefix = text[: rng.choice((64, 96))] if seed % 2 else []
    requests = []
    for index in range(rng.randint(1, 3)):
        first = rng.randrange(len(text) - 200)
        tokens = prefix + text[first : first + rng.randint(33, 200 - len(prefix))]
        more = rng.randint(2, 20)
        requests.append(EngineRequest("abc"[index], tuple(tokens), more, 2 * index, prompt_logprobs=not index))
    return requests


def vllm_dumps(count: int, folder: Path) -> Any:
    """Yield the dumps of an engine of vLLM, in this process."""
    os.environ.update({name: os.environ.get(name, value) for name, value in vllm_audit.ENVIRONMENT.items()})
    files = open_model(EMBEDDED)
    assert files.source is not None
    llm = vllm_audit.start_engine(files.source.location, "float32", "plain")
    text = files.tokenizer(" ".join(sentences()[:400]))["input_ids"]
    for seed in range(count):
        yield dump_vllm(llm, folder / str(seed), draw(text, seed)).path


def main(engine: str, count: int) -> None:
    """Audit that many dumps."""
    adapter, audits = load_model(EMBEDDED, "float32", "cpu"), list[DumpAudit]()
    with tempfile.TemporaryDirectory() as folder:
        for path in {"vllm": vllm_dumps}[engine](count, Path(folder)):
            audits.append(conclude(audit_dump(adapter, read_dump(path), losses=False)))
            if audits[-1].verdict != "exact":
                print(f"{path.name}: {audits[-1].summary}")
    floors = max(float((one.distance / audit.trace.floors).max()) for audit in audits
                 for one in audit.trace.requests if one.compared)  # fmt: skip
    exact = sum(audit.verdict == "exact" for audit in audits)
    compared = sum(request.compared for audit in audits for request in audit.requests)
    print(f"{exact} of {len(audits)} exact, {compared:,} entries compared, at most {floors:.2g} floors")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
