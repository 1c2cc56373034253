"""The comparison of this checkout with an earlier commit: what is recorded, where, and what differs."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.pins.comparing import compared, line

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "pins"
SCRATCH = Path("/tmp/perturbkv-pins")
"""Where recorders run: traces and figures say where they lie, so every checkout has to have them in one place."""
RECORDERS = (
    "commands-needle", "commands-stored", "commands-distances", "numbers", "commands-alone", "resume", "files", "audit",
    "machine", "names",
)  # fmt: skip
"""Modules of this folder, behind the hyphen a part of one; the longest first. Figures are among the commands' pins."""
BEFORE = "d399544f"
LINKED = ("analyses", "figures", "cli")
"""Folders that an earlier commit gives their places in the package when it is installed."""
SHARED = ("__init__.py", "__main__.py", "comparing.py")
"""Files here that nothing recorded depends on."""
READ = {"audit": ROOT / "tests" / "audit" / "planted.py"}
"""Files elsewhere that a recorder reads."""
SETTINGS = {
    "PYTHONSAFEPATH": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MKL_CBWR": "COMPATIBLE",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    "COLUMNS": "100",
    "TERM": "dumb",
    "NO_COLOR": "1",
    "TZ": "UTC",
    "LC_ALL": "C.UTF-8",
    "CUDA_VISIBLE_DEVICES": "",
}
TIME_LIMIT = 7200


def main() -> int:
    """Record what is asked for before and after, say what differs; returns the exit code."""
    asked = _asked()
    only = asked.only.split(",") if asked.only else list(RECORDERS)
    names = [name for name in RECORDERS if name in only or name.partition("-")[0] in only]
    if unknown := [one for one in only if not any(one in (name, name.partition("-")[0]) for name in RECORDERS)]:
        sys.exit(f"expected of {', '.join(RECORDERS)}, got {', '.join(unknown)}")
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tree = before_tree(asked.before)
        after = asked.after.resolve()
        with ThreadPoolExecutor(asked.jobs) as pool:
            jobs = [pool.submit(_both, name, tree, after, asked) for name in names]
            ended = [job.result() for job in jobs]
    return int(any(ended))


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.pins", description=__doc__)
    parser.add_argument("--before", default=BEFORE, help="the earlier commit [%(default)s]")
    parser.add_argument("--after", type=Path, default=ROOT, help="another tree than this checkout")
    parser.add_argument("--only", default="", help=f"of {', '.join(RECORDERS)}, by commas [all]")
    parser.add_argument("--again", action="store_true", help="record the earlier commit anew")
    parser.add_argument("--jobs", type=int, default=2, help="recorders at a time [%(default)s]")
    return parser.parse_args()


def before_tree(commit: str) -> Path:
    """Check the earlier commit out beside this one, importable from where it lies, without its tests."""
    tree = PLACE / "tree"
    wanted = _git("rev-parse", "--verify", f"{commit}^{{commit}}")
    if tree.exists() and _git("-C", str(tree), "rev-parse", "HEAD") != wanted:
        _git("worktree", "remove", "--force", str(tree))
    if not tree.exists():
        _git("worktree", "prune")
        _git("worktree", "add", "--detach", str(tree), wanted)
    for name in LINKED:
        if (tree / name).is_dir() and not (tree / "perturbkv" / name).exists():
            (tree / "perturbkv" / name).symlink_to(f"../{name}")
    shutil.rmtree(tree / "tests", ignore_errors=True)  # `import tests` finds this checkout's
    return tree


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _both(name: str, tree: Path, after: Path, asked: argparse.Namespace) -> bool:
    """Record one after the other, in the same folder; print what differs. Returns whether anything does."""
    kept = PLACE / "recorded" / f"{name}-{_key(name, asked.before)}.json"
    took = ""
    try:
        if asked.again or not kept.exists():
            recorded, seconds = _recorded(name, tree)
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(recorded, indent=0, ensure_ascii=False))
            took = f"before {seconds:.0f} s, "
        before = json.loads(kept.read_text())
        found, seconds = _recorded(name, after)
        (PLACE / f"{name}-after.json").write_text(json.dumps(found, indent=0, ensure_ascii=False))
    except subprocess.CalledProcessError as error:
        print(f"{name}: not recorded\n{error.stderr[-3000:]}", flush=True)  # noqa: T201
        return True
    print(f"{line(name, before, found)} ({took}after {seconds:.0f} s)", flush=True)  # noqa: T201
    return bool(compared(before, found))


def _key(name: str, commit: str) -> str:
    """What an earlier commit's values depend on beside itself: the recorder, what it shares, and the libraries."""
    here = Path(__file__).parent
    module = name.partition("-")[0]
    others = {f"{one.partition('-')[0]}.py" for one in RECORDERS} - {f"{module}.py"} | set(SHARED)
    own = sorted(path for path in here.glob("*.py") if path.name not in others and not path.name.startswith("test_"))
    libraries = [importlib.metadata.version(one) for one in ("torch", "numpy", "transformers", "matplotlib")]
    own += [READ[module]] if module in READ else []
    told = [path.read_text() for path in own] + [platform.python_version(), *libraries, repr(SETTINGS)]
    return f"{_git('rev-parse', commit)[:12]}-{hashlib.sha256(chr(0).join(told).encode()).hexdigest()[:12]}"


def _recorded(name: str, tree: Path) -> tuple[dict[str, Any], float]:
    """Run one recorder in a process of its own, against the perturbkv of this tree; its values and seconds."""
    folder, out = SCRATCH / name, PLACE / f"{name}.json"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PERTURBKV_", "PYTHON"))}
    home = {"PYTHONPATH": f"{tree}:{ROOT}", "MPLCONFIGDIR": str(PLACE / "matplotlib")}
    SCRATCH.mkdir(exist_ok=True)
    with (SCRATCH / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "tests.pins.recorder", name, str(tree), str(folder), str(out)],
            cwd=folder, env={**kept, **SETTINGS, **home}, check=True, capture_output=True, text=True,
            timeout=TIME_LIMIT,
        )  # fmt: skip
        return json.loads(out.read_text()), time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
