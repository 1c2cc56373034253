"""How far the entries of right engines lie from the plain model's, and what the audit says of them.

`python docs/audit-threshold/dumps.py threshold float32 80` measures so many dumps of vLLM, of requests of 33 to 200
tokens. Their rows in docs/audit-threshold/engines.csv are those without a verdict: the largest distance of a key, of a
value and of a log-probability, in noise floors. Even seeds choose the threshold of a type, odd ones judge it. The rule:
the smallest whole number that is at least twice the largest distance of the chosen dumps.

`clean` audits right dumps with all limits, a row with its verdict each: requests of 1 to 700 tokens, in caches of
several types and block sizes (`CASES`). Dumps that have a row are left out, and cases whose engine is not installed.
`clean CASE …` audits those cases alone. `report` prints both halves, and counts verdicts.

Prompts begin at random places of a text; every other time the requests of a dump share a prefix.
"""

from __future__ import annotations

import csv
import math
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from perturbkv.analyses.audit import dump_verdict
from perturbkv.analyses.audit.dump_verdict import DUMP_FLOORS
from perturbkv.auditing.dumps import vllm_audit
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import Dump, read_dump, write_dump
from perturbkv.auditing.dumps.vllm_engine import EngineRequest, dump_vllm
from perturbkv.datasets.needle import sentences
from perturbkv.errors import UnreadableCacheError
from perturbkv.models.adapter import Adapter
from perturbkv.models.aliases import EMBEDDED
from perturbkv.models.forward import run_with_cache
from perturbkv.models.loading import load_model, open_model
from perturbkv.models.stored_weights import WeightStorage

FILE = Path(__file__).resolve().parent / "engines.csv"
FIELDS = (
    "engine", "dtype", "seed", "requests", "entries", "keys", "values", "logprobs", "compute", "store", "block",
    "tokens", "verdict",
)  # fmt: skip
LONGEST = 700
PACKAGES = {"vllm": "vllm", "llamacpp": "xllamacpp"}
QWEN = "qwen2.5-coder-0.5b-q4_k_m"


@dataclass(frozen=True)
class Case:
    """Right dumps of one engine.

    Attributes:
        engine: `vllm`, `llamacpp` with the type of its weights, or `plain`: the plain model in other ways.
        compute: type that the engine and the plain model compute with.
        store: type of its cache.
        block: tokens of a block; 0: drawn, or none.
        count: how many dumps.
        model: the model.
    """

    engine: str
    compute: str
    store: str
    block: int
    count: int
    model: str = EMBEDDED

    def owns(self, row: dict[str, str]) -> bool:
        """Return whether a row is of this case."""
        own = {"engine": self.engine, "dtype": self.compute, "compute": self.compute, "store": self.store}
        same = all(row[name] == text for name, text in own.items())
        return same and bool(row["verdict"]) and (not self.block or row["block"] == str(self.block))


CASES = {
    "vllm-32": Case("vllm", "float32", "float32", 32, 25),
    "vllm-96": Case("vllm", "float32", "float32", 96, 20),
    "vllm-bf16": Case("vllm", "bfloat16", "bfloat16", 64, 25),
    "vllm-f16": Case("vllm", "float16", "float16", 32, 10),
    "llamacpp-f32": Case("llamacpp q4_1", "float32", "f32", 0, 10),
    "llamacpp-f16": Case("llamacpp q4_1", "float32", "f16", 0, 15),
    "llamacpp-bf16": Case("llamacpp q4_1", "float32", "bf16", 0, 10),
    "llamacpp-q8": Case("llamacpp q4_1", "float32", "q8_0", 0, 10),
    "llamacpp-exact-f32": Case("llamacpp f32", "float32", "f32", 0, 10),
    "llamacpp-exact-f16": Case("llamacpp f32", "float32", "f16", 0, 10),
    "llamacpp-exact-bf16": Case("llamacpp f32", "float32", "bf16", 0, 10),
    "plain-f32": Case("plain", "float32", "float32", 0, 20),
    "plain-bf16": Case("plain", "float32", "bfloat16", 0, 20),
    "plain-f16": Case("plain", "float32", "float16", 0, 15),
    "plain-e4m3": Case("plain", "float32", "float8_e4m3fn", 0, 25),
    "plain-e5m2": Case("plain", "float32", "float8_e5m2", 0, 10),
    "plain-in-bf16": Case("plain", "bfloat16", "bfloat16", 0, 25),
    "plain-in-bf16-e4m3": Case("plain", "bfloat16", "float8_e4m3fn", 0, 10),
    "plain-in-f16": Case("plain", "float16", "float16", 0, 5),
    "qwen-f32": Case("plain qwen", "float32", "float32", 0, 5, model=QWEN),
    "qwen-bf16": Case("plain qwen", "float32", "bfloat16", 0, 5, model=QWEN),
    "qwen-e4m3": Case("plain qwen", "float32", "float8_e4m3fn", 0, 5, model=QWEN),
}


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


def draw_lengths(text: list[int], seed: int) -> list[EngineRequest]:
    """Return one to three requests of 1 to 700 tokens, as many of 1 to 10 as of 70 to 700, and 1 to 20 decoded ones."""
    rng = random.Random(f"clean {seed}")
    prefix = text[: rng.choice((16, 40, 128))] if rng.random() < 0.5 else []
    requests = []
    for index in range(rng.choice((1, 1, 1, 2, 3))):
        more, first = rng.randint(1, 20), rng.randrange(len(text) - LONGEST)
        length = min(round(math.exp(rng.uniform(0, math.log(LONGEST)))), LONGEST - more)
        tokens = (prefix + text[first : first + length])[: max(length, 1)]
        requests.append(EngineRequest("abc"[index], tuple(tokens), more, 2 * index, prompt_logprobs=rng.random() < 0.5))
    return requests


def start_vllm(dtype: str, folder: Path, **changed: Any) -> Any:
    """Return an engine of vLLM in this process, on the embedded model."""
    os.environ.update({name: os.environ.get(name, value) for name, value in vllm_audit.ENVIRONMENT.items()})
    load_model(EMBEDDED, "float32", "cpu").model.save_pretrained(folder / "model")
    vars(vllm_audit)["VLLM_SITUATIONS"] = {
        name: replace(situation, engine={**situation.engine, **changed})
        for name, situation in vllm_audit.VLLM_SITUATIONS.items()
    }
    return vllm_audit.start_engine(str(folder / "model"), dtype, "plain")


def vllm_dumps(case: Case, seeds: Sequence[int], folder: Path, text: list[int]) -> Iterator[Dump]:
    """Yield dumps of an engine of vLLM, which reads prompts in parts of at most 256 tokens."""
    llm = start_vllm(
        case.compute, folder, block_size=case.block, max_model_len=768, max_num_batched_tokens=256, max_num_seqs=4,
        num_gpu_blocks_override=4 * 768 // case.block,
    )  # fmt: skip
    for seed in seeds:
        yield read_dump(dump_vllm(llm, folder / str(seed), draw_lengths(text, seed)).path)


def llamacpp_dumps(case: Case, seeds: Sequence[int], folder: Path, text: list[int]) -> Iterator[Dump]:
    """Yield slots of llama.cpp's server; every third one goes on from what the slot holds of an earlier prompt."""
    from perturbkv.auditing.dumps.llamacpp import read_slot

    sys.path.append(str(FILE.parents[2]))
    from tests.llamacpp.conftest import complete, embedded_file, save, start, write_in_float32

    file = embedded_file()
    if case.engine.endswith("f32"):
        file = write_in_float32(file, folder / "float32.gguf")
    server = start(file, case.store, case.store, case.store != "f32", folder, context=LONGEST + 100)
    for seed in seeds:
        request = draw_lengths(text, seed)[0]
        if seed % 3 == 0:
            complete(server, [*request.token_ids[: len(request.token_ids) // 2], *text[:20]], 3)
        complete(server, request.token_ids, request.new_tokens)
        save(server, "slot.bin")
        yield read_slot(folder / "slot.bin", open_model(EMBEDDED).config)


class StoringCache(DynamicCache):  # type: ignore[misc]
    """A cache in another type, of which attention reads what is stored, or what was computed.

    Attributes:
        store: the type.
        scales: of keys and of values (kv_head, 1, 1), per layer.
        read: whether attention reads the stored numbers.
    """

    def __init__(self, store: torch.dtype, scales: list[tuple[Tensor, Tensor]], read: bool) -> None:
        super().__init__()
        self.store, self.scales, self.read = store, scales, read
        self.kept: list[list[Tensor]] = [[] for _ in scales]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store new entries, and return all."""
        both = key_states, value_states
        stored = [(new / scale).to(self.store) for new, scale in zip(both, self.scales[layer_idx], strict=True)]
        old = self.kept[layer_idx]
        self.kept[layer_idx] = [
            torch.cat([before, new], dim=2)
            for before, new in zip(old or [one[:, :, :0] for one in stored], stored, strict=True)
        ]
        read = [
            one.to(new.dtype) * scale if self.read else new
            for one, new, scale in zip(stored, both, self.scales[layer_idx], strict=True)
        ]
        return super().update(read[0].to(key_states.dtype), read[1].to(key_states.dtype), layer_idx, *args, **kwargs)


def plain_dumps(case: Case, seeds: Sequence[int], folder: Path, text: list[int]) -> Iterator[Dump]:
    """Yield dumps of the plain model: other kernels, parts and types, in blocks of several sizes, or in rows."""
    adapter, store = loaded(case.model, case.compute, "engine"), getattr(torch, case.store)
    layouts = ("kv block token head dim", "block kv head token dim", "block token head (kv dim)",
               "block head dim token | block token head dim", "vllm-cpu")  # fmt: skip
    for seed in seeds:
        rng = random.Random(f"plain {case.store} {seed}")
        adapter.model.set_attn_implementation(rng.choice(("sdpa", "eager")))
        block, layout = rng.choice((1, 8, 16, 16, 32, 64, 256, 0)), rng.choice(layouts)
        made = {}
        for request in draw_lengths(text, seed):
            made[request.id] = compute(adapter, request, store, rng)
        yield read_dump(write_blocks(adapter, case, made, block, layout, folder / str(seed), rng))


Computed = tuple[list[int], list[float | None], StoringCache]


def compute(adapter: Adapter, request: EngineRequest, store: torch.dtype, rng: random.Random) -> Computed:
    """Return the tokens in the cache, their log-probabilities and the cache of a request that the plain model reads.

    Scales are those of the prompt's entries; twice as large until entries of decoded tokens fit, too: none may be the
    type's largest number, as torch cuts off at it without a word in e4m3.
    """
    ids, whole = list(request.token_ids), DynamicCache()
    run_with_cache(adapter.base, torch.tensor([ids]), whole)
    how = rng.choice(("one", "tensor", "head")) if store.itemsize == 1 else "one"
    read, size = rng.random() < 0.7, rng.choice((1 if len(ids) < 64 else 33, 7, 64, 256, len(ids), len(ids)))
    room = 1.3
    while True:
        cache = StoringCache(store, scales_of(adapter, whole, store, how, room), read)
        computed = read_and_decode(adapter, request, cache, size)
        if all(bool((part.float().abs() < torch.finfo(store).max).all()) for both in cache.kept for part in both):
            return computed
        room *= 2


def scales_of(
    adapter: Adapter, whole: DynamicCache, store: torch.dtype, how: str, room: float
) -> list[tuple[Tensor, Tensor]]:
    """Return scales of keys and of values, per layer, with which numbers `room` times as large as a cache's fit."""
    ones, coarse = torch.ones(adapter.kv_heads, 1, 1), store.itemsize == 1
    scales = []
    for layer in whole.layers:
        both = []
        for part in (layer.keys, layer.values):
            most = room * part[0].float().abs().amax(dim=(1, 2)).view(-1, 1, 1) / torch.finfo(store).max
            fits = how == "one" and (not coarse or float(most.max()) < 1)
            both.append(ones if fits else most if how == "head" else ones * most.max())
        scales.append((both[0], both[1]))
    return scales


def read_and_decode(adapter: Adapter, request: EngineRequest, cache: StoringCache, size: int) -> Computed:
    """Read a request in parts of `size` tokens through a cache, and decode greedily."""
    ids, logits = list(request.token_ids), []
    for first in range(0, len(ids), size):
        logits.append(run_with_cache(adapter.model, torch.tensor([ids[first : first + size]]), cache).logits[0].float())
    while len(ids) < len(request.token_ids) + request.new_tokens - 1:
        ids.append(int(logits[-1][-1].argmax()))
        logits.append(run_with_cache(adapter.model, torch.tensor([ids[-1:]]), cache).logits[0].float())
    known = torch.cat(logits)[:-1].log_softmax(dim=-1)
    logprobs = [None, *(float(row[token]) for row, token in zip(known, ids[1:], strict=True))]
    return ids, logprobs if request.prompt_logprobs else [], cache


def write_blocks(
    adapter: Adapter, case: Case, made: dict[str, Computed], block: int, layout: str, folder: Path, rng: random.Random
) -> Path:
    """Write caches in blocks in random order, beside others with random numbers; in rows where `block` is 0."""
    store, (heads, size) = getattr(torch, case.store), (adapter.kv_heads, adapter.d_key)
    requests: list[dict[str, Any]] = [{"id": name, "token_ids": ids} for name, (ids, _, _) in made.items()]
    for request in requests:
        if made[request["id"]][1]:
            request["logprobs"] = made[request["id"]][1]
    if store.itemsize == 1:  # the scales are one request's
        requests = requests[:1]
    about = {"kv_heads": heads, "head_size": size, "compute": case.compute, "engine": "the plain model"}
    if not block and store.itemsize > 1:
        rows = (
            {
                f"{kind}.{one['id']}": made[one["id"]][2].kept[index][place][0]
                for one in requests
                for place, kind in enumerate(("keys", "values"))
            }
            for index in range(len(adapter.layers))
        )
        return write_dump(folder, requests, rows, **about)
    block = block or 16  # rows have no scales
    if block == 1:
        layout = rng.choice(("block head dim | block head dim", "block kv head dim"))
    total = sum(-(-len(one["token_ids"]) // block) for one in requests)
    order = rng.sample(range(total + 3), total)
    for one in requests:
        count = -(-len(one["token_ids"]) // block)
        one["blocks"], order = order[:count], order[count:]

    def layers() -> Iterator[dict[str, Tensor]]:
        """Yield the blocks of each layer."""
        noise = torch.Generator().manual_seed(0)
        for index in range(len(adapter.layers)):
            both = []
            for kind in range(2):
                blocks = torch.randn(total + 3, block, heads, size, generator=noise).to(store)
                for one in requests:
                    kept = made[one["id"]][2].kept[index][kind][0].transpose(0, 1)
                    for place, target in enumerate(one["blocks"]):
                        part = kept[place * block : (place + 1) * block]
                        blocks[target, : len(part)] = part
                both.append(blocks)
            scales = scale_tensors(made[requests[0]["id"]][2].scales[index]) if store.itemsize == 1 else {}
            yield {**arrange(both[0], both[1], layout), **scales}

    told = "" if rng.random() < 0.3 and case.model == EMBEDDED else layout
    return write_dump(folder, requests, layers(), block_size=block, layout=told, **about)


def arrange(keys: Tensor, values: Tensor, layout: str) -> dict[str, Tensor]:
    """Return blocks (block, token, head, dim) in one tensor or in two, in a layout."""
    match layout:
        case "block kv head token dim":
            return {"cache": torch.stack([keys, values], dim=1).transpose(2, 3)}
        case "kv block token head dim":
            return {"cache": torch.stack([keys, values])}
        case "block token head (kv dim)":
            return {"cache": torch.cat([keys, values], dim=-1)}
        case "block head dim token | block token head dim":
            return {"keys": keys.permute(0, 2, 3, 1), "values": values}
        case "vllm-cpu":
            both = (keys.permute(0, 2, 3, 1), values.permute(0, 2, 1, 3))
            return {"cache": torch.stack([part.flatten(2) for part in both], dim=2).flatten()}
        case "block head dim | block head dim":
            return {"keys": keys.squeeze(1), "values": values.squeeze(1)}
    return {"cache": torch.stack([keys, values], dim=1).squeeze(2)}  # block kv head dim


def scale_tensors(scales: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the scales of keys and of values as a dump has them."""
    return {name: scale.flatten() for name, scale in zip(("key_scale", "value_scale"), scales, strict=True)}


def audited_row(adapter: Adapter, dump: Dump) -> list[str | int]:
    """Return requests, entries compared, the largest distances of a key, a value and a log-probability, and verdict."""
    result = audit_dump(adapter, dump, losses=False)
    compared = result.requests
    keys, values = np.nanmax(
        [np.fmax(one.distances, one.differing_distances) / result.floors for one in compared], axis=(0, 1)
    )
    known = [one.logprobs / one.logprobs_floor for one in compared if not math.isnan(one.logprobs)]
    found = [f"{number:.3g}" for number in (keys, values, max(known, default=math.nan))]
    if result.verdict != "exact":
        sys.stdout.write(f"{dump.path.name}: {result.summary}\n")
    return [len(compared), sum(one.compared for one in compared), *found, result.verdict]


def rows_of_file() -> list[dict[str, str]]:
    """Return the file's rows."""
    with FILE.open(newline="") as stream:
        return list(csv.DictReader(stream))


def append(row: Sequence[str | int]) -> None:
    """Append a row to the file."""
    with FILE.open("a", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerow(row)


def prompt_text(model: str = EMBEDDED) -> list[int]:
    """Return the tokens of the text that prompts are parts of."""
    return list(open_model(model).tokenizer(" ".join(sentences()[:400]))["input_ids"])


def measure(dtype: str, count: int) -> None:
    """Append a row per dump of vLLM, without a verdict."""
    adapter, text = load_model(EMBEDDED, dtype, "cpu"), prompt_text()
    # nothing differs, so that all distances are told
    vars(dump_verdict)["DUMP_FLOORS"] = dict.fromkeys(DUMP_FLOORS, sys.maxsize)
    with tempfile.TemporaryDirectory() as folder:
        llm = start_vllm(dtype, Path(folder))
        for seed in range(count):
            dump = read_dump(dump_vllm(llm, Path(folder) / str(seed), draw(text, seed)).path)
            requests, entries, *found, _ = audited_row(adapter, dump)
            append(["vllm", dtype, seed, requests, entries, *found, dtype, dtype, dump.block_size, "", ""])


def clean(name: str) -> None:
    """Audit the dumps of a case that are not in the file, a row each, those of fewest tokens first."""
    case, text = CASES[name], prompt_text(CASES[name].model)
    done = {int(row["seed"]) for row in rows_of_file() if case.owns(row)}
    lengths = {
        seed: sum(len(request.token_ids) + request.new_tokens for request in draw_lengths(text, seed))
        for seed in range(case.count)
        if seed not in done
    }
    if not (seeds := sorted(lengths, key=lengths.__getitem__)):
        return
    adapter = loaded(case.model, case.compute, "plain model")
    if case.engine == "llamacpp f32":
        adapter = replace(adapter, stored=WeightStorage("float32"))
    made = {"vllm": vllm_dumps, "llamacpp": llamacpp_dumps, "plain": plain_dumps}[case.engine.split()[0]]
    with tempfile.TemporaryDirectory() as folder:
        for seed, dump in zip(seeds, made(case, seeds, Path(folder), text), strict=True):
            tokens = max(len(request.token_ids) for request in dump.requests)
            try:
                *found, verdict = audited_row(adapter, dump)
            except UnreadableCacheError as error:
                sys.stdout.write(f"{name} {seed}: {error}\n")
                found, verdict = [len(dump.requests), 0, "", "", ""], "unreadable"
            about = [case.compute, case.store, dump.block_size, tokens, verdict]
            append([case.engine, case.compute, seed, *found, *about])


def report() -> None:
    """Print, per type, the dumps of each half, their largest distance and the threshold; then verdicts by case."""
    rows = rows_of_file()
    of_threshold = [row for row in rows if not row["verdict"]]
    for dtype in dict.fromkeys(row["dtype"] for row in of_threshold):
        halves: tuple[list[float], list[float]] = ([], [])
        own = [row for row in of_threshold if row["dtype"] == dtype]
        for row in own:
            halves[int(row["seed"]) % 2].append(max(float(row[name]) for name in FIELDS[5:8]))
        entries = sum(int(row["entries"]) for row in own)
        chosen, judged = map(max, halves)
        sys.stdout.write(
            f"vllm {dtype}: {len(halves[0])} chosen, largest {chosen}, threshold {math.ceil(2 * chosen)}; "
            f"{len(halves[1])} judged, largest {judged}; {entries:,} entries\n"
        )
    for name, case in CASES.items():
        own = [row for row in rows if case.owns(row)]
        verdicts = Counter(row["verdict"] for row in own)
        floors = max((float(row[field] or 0) for row in own for field in FIELDS[5:7]), default=math.nan)
        entries, longest = sum(int(row["entries"]) for row in own), max((int(row["tokens"]) for row in own), default=0)
        sys.stdout.write(f"{name}: {dict(verdicts)}, {entries:,} entries, to {longest} tokens, {floors:.3g} floors\n")
    sys.stdout.write(f"{sum(bool(row['verdict']) for row in rows)} with a verdict\n")


@cache
def loaded(model: str, dtype: str, what: str) -> Adapter:
    """Return a model that is loaded once for what it does: kernels of the engine are changed."""
    return load_model(model, dtype, "cpu")


def is_installed(case: Case) -> bool:
    """Return whether a case's engine is installed."""
    package = PACKAGES.get(case.engine.split()[0])
    return package is None or find_spec(package) is not None


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["report"]:
            report()
        case ["threshold", dtype, count]:
            measure(dtype, int(count))
        case ["clean", *names]:
            names = names or [name for name, case in CASES.items() if is_installed(case)]
            engines = [name for name in names if CASES[name].engine.split()[0] in PACKAGES]
            for name in engines if len(names) > 1 else []:  # a process each
                subprocess.run([sys.executable, __file__, "clean", name], check=True)
            with torch.inference_mode():
                for name in names if len(names) == 1 else [name for name in names if name not in engines]:
                    clean(name)
