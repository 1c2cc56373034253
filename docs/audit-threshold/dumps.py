"""How far the entries of right engines lie from the plain model's.

`python docs/audit-threshold/dumps.py vllm float32 80` measures so many dumps of an engine.
Prompts begin at random places of a text, in one to three requests that begin and end at different times; every other
time they share a prefix. Rows go to docs/audit-threshold/engines.csv: the largest distance of a key, of a value and of
a log-probability, in noise floors. Even seeds choose the threshold of a type, odd ones judge it. The rule: the smallest
whole number that is at least twice the largest distance of the chosen dumps. `report` prints both halves.
`exact vllm float32 80`, `exact llamacpp f16 40` and `exact transformers float32 40` print how many dumps are called
exact; llama.cpp's have Q4_1 weights, and keys and values of that type.
"""

from __future__ import annotations

import csv
import math
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache

from perturbkv.analyses.audit import dump_verdict
from perturbkv.analyses.audit.dump_verdict import DUMP_FLOORS
from perturbkv.auditing.dumps import vllm_audit
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import Dump, read_dump, write_dump
from perturbkv.auditing.dumps.vllm_engine import EngineRequest, dump_vllm
from perturbkv.datasets.needle import sentences
from perturbkv.models.aliases import EMBEDDED
from perturbkv.models.forward import run_with_cache
from perturbkv.models.loading import load_model, open_model

FILE = Path(__file__).resolve().parent / "engines.csv"
FIELDS = ("engine", "dtype", "seed", "requests", "entries", "keys", "values", "logprobs")


def draw(text: list[int], seed: int) -> list[EngineRequest]:
    """Return one to three requests of 33 to 200 tokens, and of 2 to 20 decoded ones."""
    rng = random.Random(seed)
    prefix = text[: rng.choice((64, 96))] if rng.random() < 0.5 else []
    requests = []
    for index in range(rng.randint(1, 3)):
        first = rng.randrange(len(text) - 200)
        tokens = prefix + text[first : first + rng.randint(33, 200 - len(prefix))]
        more = rng.randint(2, 20)
        requests.append(EngineRequest("abc"[index], tuple(tokens), more, 2 * index, prompt_logprobs=not index))
    return requests


def vllm_dumps(count: int, dtype: str, folder: Path) -> Iterator[Dump]:
    """Yield the dumps of an engine of vLLM, in this process."""
    os.environ.update({name: os.environ.get(name, value) for name, value in vllm_audit.ENVIRONMENT.items()})
    files = open_model(EMBEDDED)
    model = folder / "model"
    load_model(EMBEDDED, "float32", "cpu").model.save_pretrained(model)
    llm = vllm_audit.start_engine(str(model), dtype, "plain")
    text = files.tokenizer(" ".join(sentences()[:400]))["input_ids"]
    for seed in range(count):
        yield read_dump(dump_vllm(llm, folder / str(seed), draw(text, seed)).path)


def llamacpp_dumps(count: int, kind: str, folder: Path) -> Iterator[Dump]:
    """Yield slots of llama.cpp's server, in this process, of the first request of each draw."""
    from perturbkv.auditing.dumps.llamacpp import read_slot
    from tests.llamacpp.conftest import complete, embedded_file, save, start

    files = open_model(EMBEDDED)
    text = files.tokenizer(" ".join(sentences()[:400]))["input_ids"]
    server = start(embedded_file(), kind, kind, True, folder)
    for seed in range(count):
        request = draw(text, seed)[0]
        complete(server, request.token_ids, request.new_tokens)
        save(server, "slot.bin")
        yield read_slot(folder / "slot.bin", files.config)


def transformers_dumps(count: int, dtype: str, folder: Path) -> Iterator[Dump]:
    """Yield rows of transformers' own cache, of the first request of each draw: the prompt at once, then one by one."""
    adapter = load_model(EMBEDDED, dtype, "cpu")
    text = adapter.tokenizer(" ".join(sentences()[:400]))["input_ids"]
    for seed in range(count):
        request, cache = draw(text, seed)[0], DynamicCache()
        ids, new = list(request.token_ids), list(request.token_ids)
        with torch.inference_mode():
            for _ in range(request.new_tokens + 20):  # more than a block of 16
                logits = run_with_cache(adapter.model, torch.tensor([new]), cache).logits
                new = [int(logits[0, -1].argmax())]
                ids += new
        rows = [{"keys.a": layer.keys[0].clone(), "values.a": layer.values[0].clone()} for layer in cache.layers]
        made = {"kv_heads": adapter.kv_heads, "head_size": adapter.d_key, "compute": dtype}
        yield read_dump(write_dump(folder / str(seed), [{"id": "a", "token_ids": ids[:-1]}], rows, **made))


DUMPS = {"vllm": vllm_dumps, "llamacpp": llamacpp_dumps, "transformers": transformers_dumps}


def measure(engine: str, dtype: str, count: int) -> None:
    """Append a row per dump to the file."""
    adapter = load_model(EMBEDDED, dtype, "cpu")
    with tempfile.TemporaryDirectory() as folder, FILE.open("a") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        if not stream.tell():
            rows.writerow(FIELDS)
        for dump in DUMPS[engine](count, dtype, Path(folder)):
            result = audit_dump(adapter, dump, losses=False)
            compared = result.requests
            keys, values = np.nanmax([request.distances / result.floors for request in compared], axis=(0, 1))
            logprobs = np.nanmax([request.logprobs / request.logprobs_floor for request in compared])
            entries = sum(request.compared for request in compared)
            found = (f"{number:.3g}" for number in (keys, values, logprobs))
            rows.writerow([engine, dtype, dump.path.name, len(compared), entries, *found])
            stream.flush()


def count_exact(engine: str, kind: str, count: int) -> None:
    """Print how many dumps of an engine are exact, and the verdicts on the others."""
    adapter = load_model(EMBEDDED, "float32" if engine == "llamacpp" else kind, "cpu")
    exact = entries = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed, dump in enumerate(DUMPS[engine](count, kind, Path(folder))):
            result = audit_dump(adapter, dump, losses=False)
            exact += result.verdict == "exact"
            entries += sum(one.compared for one in result.requests)
            if result.verdict != "exact":
                sys.stdout.write(f"{seed}: {result.summary}\n")
    sys.stdout.write(f"{engine} {kind}: {exact} of {count} exact, {entries:,} entries\n")


def report() -> None:
    """Print, per engine and type, the dumps of each half, their largest distance, and the threshold by the rule."""
    rows = list(csv.DictReader(FILE.read_text().splitlines()))
    for engine, dtype in dict.fromkeys((row["engine"], row["dtype"]) for row in rows):
        halves: tuple[list[float], list[float]] = ([], [])
        own = [row for row in rows if (row["engine"], row["dtype"]) == (engine, dtype)]
        for row in own:
            halves[int(row["seed"]) % 2].append(max(float(row[name]) for name in FIELDS[5:]))
        entries = sum(int(row["entries"]) for row in own)
        chosen, judged = map(max, halves)
        sys.stdout.write(
            f"{engine} {dtype}: {len(halves[0])} chosen, largest {chosen}, threshold {math.ceil(2 * chosen)}; "
            f"{len(halves[1])} judged, largest {judged}; {entries:,} entries\n"
        )


if __name__ == "__main__":
    if sys.argv[1] == "report":
        report()
    elif sys.argv[1] == "exact":
        count_exact(*sys.argv[2:4], int(sys.argv[4]))
    else:
        # nothing differs, so that all distances are told
        vars(dump_verdict)["DUMP_FLOORS"] = dict.fromkeys(DUMP_FLOORS, sys.maxsize)
        measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))
