"""The connector under examples/ in a vLLM of its own process: its dumps of forward passes are `exact`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perturbkv.auditing.dumps import vllm_audit
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import read_dump
from perturbkv.models.adapter import Adapter

ROOT = Path(__file__).resolve().parents[2]
ENGINE = """
import json, sys, vllm
model, folder, *prompts = json.load(sys.stdin)
told = {"kv_connector": "VllmDumpConnector", "kv_connector_module_path": "vllm_dump_connector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": folder, "layout": "vllm-cpu"}}
llm = vllm.LLM(model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, block_size=32, max_model_len=512,
               num_gpu_blocks_override=64, max_num_batched_tokens=64, kv_transfer_config=told)
sampling = vllm.SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, detokenize=False)
llm.generate([vllm.TokensPrompt(prompt_token_ids=ids) for ids in prompts], sampling, use_tqdm=False)
"""


@pytest.mark.slow
def test_dumps_of_forward_passes_are_exact(adapter: Adapter, text: tuple[int, ...], tmp_path: Path) -> None:
    """Of a prompt that is read in two parts, one that begins as it does, and a short one; then they are decoded."""
    adapter.model.save_pretrained(tmp_path / "model")
    prompts = [list(text[:100]), [*text[:64], *text[200:230]], list(text[300:305])]
    told = [str(tmp_path / "model"), str(tmp_path / "dumps"), *prompts]
    path = os.pathsep.join([str(ROOT / "examples"), *sys.path])
    subprocess.run(
        [sys.executable, "-c", ENGINE], input=json.dumps(told), text=True, check=True, capture_output=True,
        env={**os.environ, **vllm_audit.ENVIRONMENT, "PYTHONPATH": path},
    )  # fmt: skip
    folders = sorted((tmp_path / "dumps").iterdir(), key=lambda folder: int(folder.name))
    seen = []
    for folder in (folders[0], folders[2], folders[-1]):
        audit = audit_dump(adapter, read_dump(folder))
        assert audit.verdict == "exact", audit.summary
        seen.append(sorted(one.tokens for one in audit.requests))
    assert seen[0] == [64] and len(seen[1]) == 3 and max(seen[-1]) > 100
