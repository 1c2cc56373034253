"""Every number of a sweep over all that can be chosen, as one digest per variable, to hold two versions side by side.

    python -m tests.support.golden_sweep before.json --command old/bin/perturbkv
    python -m tests.support.golden_sweep after.json --against before.json

The sweep's files are those of format 1 of a sweep file, so that every later version has to read them too. Digests are
of one machine: other processors round otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import yaml

from tests.support.folders import model_folder

SELECTIONS = ["attention", "attention-unpooled", "two-stage", "two-stage-uniform", "value", "random", "hindsight",
              "hindsight-attention"]  # fmt: skip
VOTING = ["snapkv", "pyramidkv", "adakv", "headkv", "h2o", "scissorhands", "tova", "random"]
GRIDS = [
    {"policy": VOTING, "selection": SELECTIONS, "budget": [24, 0.3], "granularity": ["query", "kv"]},
    {"policy": "streaming-llm", "selection": "position", "positions": ["kept", "in-cache"], "budget": [24, 0.3]},
    {"preset": ["paper-v2", "released-v2"], "policy": ["snapkv", "adakv", "pyramidkv"], "budget": 24,
     "selection": ["attention", "two-stage"]},
    {"policy": "adakv", "floor": [0.0, 0.5], "safeguard": ["mixture", "guaranteed"], "budget": 24},
    {"policy": "pyramidkv", "pyramid-line": ["prefix", "total"], "pyramid-beta": 5, "budget": 24},
    {"policy": "headkv", "head-beta": 1.2, "budget": 24},
    {"policy": ["h2o", "scissorhands"], "recent": 0.25, "history": 30, "budget": 24},
    {"policy": "streaming-llm", "selection": "position", "sinks": 2, "budget": 24},
    {"selection": "two-stage", "alpha": [0, 0.5, 1], "split": ["prefix", "total"], "stage2-score": "pooled",
     "epsilon": 0.001, "budget": 24},
    {"selection": "two-stage", "granularity": "kv", "group-score": ["mean", "max"],
     "group-product": ["product-of-means", "mean-of-products"], "pool": "average", "kernel": 5, "budget": 24},
    {"selection": "attention", "granularity": "kv", "group-score": ["mean", "max"], "pool": "average", "kernel": 5,
     "budget": 24},
    {"selection": ["random", "two-stage"], "protect-first": 4, "protect-recent": 0.5, "budget": 24},
]  # fmt: skip
RUNS = [("llama", "regular"), ("llama", "context-only"), ("qwen3", "regular")]
SENTENCE = "The quick brown fox jumps over the lazy dog; {} of them saw it. "


def rows() -> str:
    """Three prompts of 70 to 210 tokens of one byte, with a question each."""
    made = [
        {"id": f"p{i}", "context": "".join(SENTENCE.format(i * 7 + k) for k in range(i + 1)), "input": f"How many? {i}"}
        for i in range(3)
    ]
    return "\n".join(map(json.dumps, made))


def write_sweep(path: Path, run: dict[str, str]) -> Path:
    """The file of a sweep over all grids, of a model and prompts that `run` names."""
    path.write_text(yaml.safe_dump({**run, "window": 8, "steps": 2, "save": "outputs", "grids": GRIDS}))
    return path


def measure(folder: Path, command: str, family: str, scenario: str) -> dict[str, str]:
    """Digests of the trace that the command makes."""
    model, data, scores = folder / family, folder / "prompts.jsonl", folder / "scores.json"
    model_folder(model, family)
    data.write_text(rows())
    scores.write_text(json.dumps({f"{layer}-{head}": layer + head / 4 for layer in range(2) for head in range(4)}))
    run = {"model": str(model), "dataset": str(data), "scenario": scenario, "head-scores": str(scores)}
    write_sweep(folder / "sweep.yaml", run)
    out = folder / f"{family}-{scenario}"
    subprocess.run([command, "trace", "--config", folder / "sweep.yaml", "-o", out], check=True)
    return digests(next(out.glob("**/*.h5")))


def digests(path: Path) -> dict[str, str]:
    """Name of every variable -> SHA-256 of shape, type and bytes; labels apart, which may be written otherwise."""
    found: dict[str, str] = {}

    def note(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.dtype.kind in "fiub":
            values = item[()]
            found[name] = hashlib.sha256(f"{values.shape}{values.dtype}".encode() + values.tobytes()).hexdigest()

    with h5py.File(path) as file:
        file.visititems(note)
    return found


def main() -> None:
    """Measure, write the digests, and say which differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--command", default=str(Path(sys.executable).parent / "perturbkv"))
    parser.add_argument("--against", type=Path)
    asked = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for family, scenario in RUNS:
            made = measure(Path(folder), asked.command, family, scenario)
            found |= {f"{family} {scenario} {name}": digest for name, digest in made.items()}
    asked.output.write_text(json.dumps(found, indent=1))
    if asked.against:
        before = json.loads(asked.against.read_text())
        other = [name for name in {**before, **found} if before.get(name) != found.get(name)]
        sys.stdout.write(f"{len(found)} variables, {len(other)} differ: {', '.join(other) or 'none'}\n")
        sys.exit(bool(other))


if __name__ == "__main__":
    main()
