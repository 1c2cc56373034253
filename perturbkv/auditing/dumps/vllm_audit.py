"""The audit of vLLM on a model: an engine runs requests in several situations, and each situation's dump is audited.

The engine runs in a process of its own, whose messages go to a file, where `EngineProgress` finds the newest; it has
ended when the plain model is loaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import read_dump
from perturbkv.auditing.dumps.vllm_engine import EngineRequest, dump_vllm
from perturbkv.configs.audit_settings import ENGINE_SITUATIONS
from perturbkv.datasets.needle import sentences
from perturbkv.devices import dtype_name
from perturbkv.errors import EngineError, MissingPackageError, PerturbkvError, UnknownNameError
from perturbkv.escaping import escape_line
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import ModelFiles, download_weights, load_weights, open_model, pick_device, pick_dtype

_PACKAGE = "vllm"
_BEGIN = "from perturbkv.auditing.dumps.vllm_audit import main; main()"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the scheduler is in the process that steps it
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # so that OMP_NUM_THREADS counts
    "VLLM_LOGGING_LEVEL": "INFO",  # so that its messages say what it does
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Variable -> its value where it is not set, before vLLM is imported."""
_LOG_PREFIX = re.compile(r"^(\(\S+ pid=\d+\) )?[A-Z]+ [\d-]+ [\d:]+ \[\S+\] ")
"""What vLLM writes before a message: its process, level, date, time and line of code."""
_WIDTH = 90
"""Most characters of what an engine does, of which a terminal shows those that fit beside the bar."""
_TOKENS = 420
"""Length of the text that requests take their tokens from."""
_SENTENCES = 200
"""Sentences that have at least as many tokens with any tokenizer."""
_MANY_BLOCKS: Mapping[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 512}
_FEW_BLOCKS: Mapping[str, Any] = {
    "num_gpu_blocks_override": 8, "max_model_len": 224, "max_num_batched_tokens": 64, "max_num_seqs": 4,
}  # fmt: skip


@dataclass(frozen=True)
class EngineSituation:
    """Requests and engine that bring a situation about.

    Attributes:
        requests: its requests, with places in a text instead of tokens.
        engine: arguments of vLLM's engine besides those of all situations.
        evidence: field of `EngineDump` that is above 0 where the situation has occurred; empty: always.
        dump_at_end_of: id of the request at whose end the dump is made; empty: the first to end.
    """

    requests: tuple[EngineRequest, ...]
    engine: Mapping[str, Any]
    evidence: str = ""
    dump_at_end_of: str = ""


_PLAIN = (EngineRequest("a", tuple(range(0, 200)), 24),)
VLLM_SITUATIONS: Mapping[str, EngineSituation] = {
    "plain": EngineSituation(_PLAIN, _MANY_BLOCKS),
    "prefix": EngineSituation(
        (
            EngineRequest("a", tuple(range(0, 160)), 30),
            EngineRequest("b", (*range(0, 128), *range(300, 340)), 20, 1, prompt_logprobs=False),
        ),
        _MANY_BLOCKS, "cached_tokens",
    ),
    "interleaved": EngineSituation(
        (
            EngineRequest("a", tuple(range(0, 70)), 30),
            EngineRequest("b", tuple(range(200, 290)), 40, 2),
            EngineRequest("c", tuple(range(340, 390)), 5),
        ),
        _MANY_BLOCKS, "shared_steps", "a",
    ),
    "chunked": EngineSituation((EngineRequest("a", tuple(range(0, 190)), 20),), _FEW_BLOCKS, "partial_prefills"),
    "preempted": EngineSituation(
        (
            EngineRequest("a", tuple(range(0, 60)), 15),
            EngineRequest("b", tuple(range(100, 160)), 40),
            EngineRequest("c", tuple(range(200, 260)), 25),
        ),
        _FEW_BLOCKS, "preemptions", "c",
    ),
    "fp8": EngineSituation(_PLAIN, {**_MANY_BLOCKS, "kv_cache_dtype": "fp8"}),
}  # fmt: skip
"""A key of `ENGINE_SITUATIONS` -> its requests and its engine."""
DEFAULT_SITUATIONS = tuple(name for name in VLLM_SITUATIONS if name != "fp8")
"""Those that every build of vLLM can run."""


@dataclass
class EngineProgress:
    """Part of an engine's audit that is under way, since when, and the file with the engine's messages.

    Example:
        >>> EngineProgress("plain model", began=time.monotonic() - 7).text()
        'plain model, 7 s'
    """

    doing: str = "weights"
    messages: Path | None = None
    began: float = field(default_factory=time.monotonic)

    def begin(self, doing: str, messages: Path | None = None) -> None:
        """Begin another part of the audit."""
        self.doing, self.messages, self.began = doing, messages, time.monotonic()

    def text(self) -> str:
        """Return what is done, for how long, and the engine's newest message, on one line."""
        lines = _read_lines(self.messages) if self.messages else []
        newest = f": {_LOG_PREFIX.sub('', lines[-1])}" if lines else ""
        line = escape_line(f"{self.doing}, {time.monotonic() - self.began:.0f} s{newest}")
        return textwrap.shorten(line, _WIDTH, placeholder=" …")


def _read_lines(path: Path) -> list[str]:
    """Return a file's lines that are not blank, without spaces around them; none where it is not there."""
    content = path.read_bytes() if path.is_file() else b""
    return [line.strip() for line in content.decode(errors="replace").splitlines() if line.strip()]


def audit_vllm(
    model: str,
    situations: Sequence[str] = DEFAULT_SITUATIONS,
    *,
    dtype: str = "auto",
    device: str = "auto",
    seed: int = 0,
    revision: str = "",
    folder: Path | None = None,
    progress: Callable[[], object] = lambda: None,
    doing: EngineProgress | None = None,
) -> Iterator[tuple[str, DumpAudit]]:
    """Yield, per situation, the comparison of vLLM's cache with the plain model's in the same environment.

    Args:
        model: as for `load_model`.
        situations: names in `VLLM_SITUATIONS`.
        dtype: of the plain model; vLLM computes with the same type.
        device: of the plain model; vLLM computes on the one that it was built for.
        seed: of random weights.
        revision: of a hub's model.
        folder: where the dumps stay, one folder per situation; None: they are deleted.
        progress: called per situation.
        doing: is told what is done.

    Raises UnknownNameError for an unknown situation, MissingPackageError without vLLM, EngineError where it does not
    start or ends early, UnreadableCacheError for a cache that is not read, and what `load_model` raises.
    """
    for name in situations:
        if name not in VLLM_SITUATIONS:
            raise UnknownNameError(name, "situation", VLLM_SITUATIONS)
    if importlib.util.find_spec(_PACKAGE) is None:
        raise MissingPackageError(_PACKAGE)
    doing = doing or EngineProgress()
    chosen = pick_device(device)
    kind = pick_dtype(dtype, chosen)
    files = open_model(model, seed, revision)
    text = files.tokenizer(" ".join(sentences()[:_SENTENCES]))["input_ids"][:_TOKENS]
    destination = tempfile.TemporaryDirectory(prefix="perturbkv-vllm-") if folder is None else nullcontext(folder)
    with destination as dump_folder, tempfile.TemporaryDirectory(prefix="perturbkv-model-") as scratch:
        dumps = Path(dump_folder)
        weights = _weights_folder(files, Path(scratch), seed)
        by_engine: dict[str, list[str]] = {}
        for name in situations:
            by_engine.setdefault(json.dumps(dict(VLLM_SITUATIONS[name].engine)), []).append(name)
        for names in by_engine.values():
            messages = Path(scratch) / f"{names[0]}.txt"
            doing.begin("vLLM", messages)
            _run_engine(weights, dumps, names, text, dtype_name(kind), messages)
        doing.begin("plain model")
        adapter: Adapter = load_weights(files, kind, chosen, seed)
        for name in situations:
            yield name, audit_dump(adapter, read_dump(dumps / name), losses=False)
            progress()


def _weights_folder(files: ModelFiles, scratch: Path, seed: int) -> Path:
    """Return a folder of the model's safetensors: its own, or `scratch` after saving them there in float32."""
    if files.source is not None and files.source.gguf_file is None:
        download_weights(files.source)
        return files.source.path
    load_weights(files, torch.float32, torch.device("cpu"), seed).model.save_pretrained(scratch)
    return scratch


def _run_engine(
    weights: Path, dumps: Path, names: Sequence[str], text: Sequence[int], dtype: str, messages: Path
) -> None:
    """Run situations in a process with vLLM's engine, which writes their dumps.

    `weights` is the model's folder, `dumps` the one for the dumps, `names` are situations of one engine, `text` are the
    tokens that requests take theirs from, and `messages` is the file for what the process prints. Raises EngineError
    where the process ends otherwise than with success.
    """
    plan = {"model": str(weights), "dumps": str(dumps), "names": list(names), "text": list(text), "dtype": dtype}
    path = os.pathsep.join(str(Path(one).resolve()) for one in sys.path)
    with messages.open("wb") as stream:
        done = subprocess.run(
            [sys.executable, "-c", _BEGIN], input=json.dumps(plan).encode(), stdout=stream, stderr=stream,
            env={**ENVIRONMENT, **os.environ, "PYTHONPATH": path}, check=False,
        )  # fmt: skip
    if done.returncode == 0:
        return
    last = [*_read_lines(messages)[-1:], "no message"][0]
    if done.returncode == PerturbkvError.exit_code:
        raise EngineError(last)
    how = f"status {done.returncode}"
    if done.returncode < 0:
        how = signal.Signals(-done.returncode).name
    raise EngineError(f"vLLM ended with {how} while it ran {', '.join(names)}: {last}")


def main() -> None:
    """Run the situations that standard input names, as JSON, in an engine; the last message is the error's line."""
    plan = json.load(sys.stdin)
    try:
        dump_situations(start_engine(plan["model"], plan["dtype"], plan["names"][0]), plan)
    except PerturbkvError as error:
        _exit_with(str(error), error.exit_code)
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises is told in one line
        traceback.print_exc()
        _exit_with(f"{type(error).__name__}: {' '.join(str(error).split())}", 1)


def _exit_with(message: str, code: int) -> None:
    """End this process at once with an exit code, so that the message is its last."""
    sys.stdout.flush()
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
    os._exit(code)


def start_engine(model: str, dtype: str, name: str) -> Any:
    """Return vLLM's engine of the situation `name`, for the model in a folder of safetensors."""
    from vllm import LLM

    return LLM(
        **{
            "model": model, "dtype": dtype, "enforce_eager": True, "block_size": 32, "seed": 0,
            "disable_log_stats": True, "skip_tokenizer_init": True, "async_scheduling": False,
            **VLLM_SITUATIONS[name].engine,
        }
    )  # fmt: skip


def dump_situations(llm: Any, plan: Mapping[str, Any]) -> None:
    """Run each situation of a plan in vLLM, and dump its caches into a folder of its own.

    `plan`: `names` of situations, the folder `dumps`, and `text`, token ids that requests index by place. Raises
    EngineError where a situation did not occur.
    """
    for name in plan["names"]:
        situation = VLLM_SITUATIONS[name]
        llm.reset_prefix_cache()
        requests = [
            replace(request, token_ids=tuple(plan["text"][place] for place in request.token_ids))
            for request in situation.requests
        ]
        dump = dump_vllm(llm, Path(plan["dumps"]) / name, requests, situation.dump_at_end_of)
        if situation.evidence and not getattr(dump, situation.evidence):
            raise EngineError(
                f"nothing was compared: the situation {name} did not occur in vLLM ({ENGINE_SITUATIONS[name]})"
            )
