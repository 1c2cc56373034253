"""What every command says, with its exit code, and what the figures that it draws hold.

Three finished traces are made first, so that each analysis has one that holds what it asks for; every analysis is then
asked of each of them, also where the trace lacks something, which pins the refusal. Commands that measure for
themselves are run on tiny models.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import perturbkv as pk
from tests.pins.running import POLICIES, below, digest, leaves, left, plain, prompts, run, table, tiny_model

SAFE = "--max-kl 200 --max-drop 99 --min-top1 0.01"
ANALYSES = (
    "heads --compare attention,two-stage,random", "heads --distance cosine --step 1", "layers --per-sample --budgets",
    "layers --distance l2 --compare attention,random", "assumption", "bound-tightness", "ablation",
    "ablation --methods all", "ablation --restrictions", "ablation --bytes", "needle", "horizon", "budget --cliff",
    f"budget {SAFE} --for-length 2000 --for-batch 3", "budget --max-kl 200",
    "quality", "correlation", "list", "tokens --all", "tokens --layer 1 --head 2",
)  # fmt: skip
"""Every question about a finished trace, once or more."""
CHOSEN = {("stored", "layers --per-sample --budgets"): "--compare attention,random"}
"""Trace and question -> what else it has to be asked there."""
LOOKS = ("list", "tokens")
"""Commands without figures."""
ALONE = (
    "heads", "layers", "assumption", "bound-tightness", "ablation", "ablation --restrictions", "ablation --bytes",
    "horizon", "budget --cliff", "quality", "correlation", f"budget {SAFE}", "needle",
)  # fmt: skip
"""Questions that make a trace where none is given."""
COMMANDS = (
    "heads", "layers", "assumption", "bound-tightness", "ablation", "horizon", "tokens", "needle", "patching",
    "quality", "correlation", "budget", "trace", "generate", "merge", "export", "report", "audit", "list",
    "list models", "list datasets", "list policies", "doctor", "doctor selfcheck",
)  # fmt: skip
REFUSED = (
    "heads nothing.h5", "heads --polcy snapkv", "trace --policy snapvk", "list policies nothing",
    "trace --selection two-stge", "trace --policy snapkv(kernl=3)", "trace --budget -3", "trace --policy streaming-llm",
    "trace --model nothing", "trace --dataset nothing", "trace --steps 0", "trace --granularity kv(block=0)",
    "trace --shard 3/2", "trace --policy vertical-slash --steps 2", "budget nothing.h5", "merge nothing",
    "trace --budget 8 --window 32", "patching trace.h5", "heds", "xyzzy",
    "trace --config bad.yaml", "trace --precision quantise(bits=3)", "audit nothing.py:f",
)  # fmt: skip


def record(folder: Path, part: str) -> dict[str, Any]:
    """Make the trace of this name and ask every analysis of it; `alone`: the other commands."""
    if part == "alone":
        return _alone(folder)
    TRACES[part](folder)
    trace = folder / "trace.h5"
    found: dict[str, Any] = {}
    for name in ANALYSES:
        words = [*name.split(), *CHOSEN.get((part, name), "").split()]
        drawn = [] if words[0] in LOOKS else ["--format", "svg", "-o", folder / name]
        ran = run(*words, trace, "--json", *drawn)
        found |= _told(name, ran, folder)
        found |= below(f"{name}/figure", ran.figures)
        found |= below(f"{name}/files", left(folder, folder / name, (".h5", ".svg", ".json")))
    found |= _told("report", run("report", trace, "--json", "-o", folder / "page.html"), folder)
    if (folder / "page.html").exists():
        found |= below("report", page(folder / "page.html", folder))
    for kind in ("csv", "parquet"):
        found |= _told(f"export {kind}", run("export", trace, "--json", "-o", folder / f"table.{kind}"), folder)
        for path in sorted(folder.glob(f"table*.{kind}")):
            found[f"export {kind}/{path.name}"] = table(path)
    return found


def _told(name: str, ran: Any, folder: Path) -> dict[str, Any]:
    """A command's exit code and its document, leaf by leaf."""
    document = ran.document()
    if isinstance(document, str):
        return {f"{name}/code": ran.code, f"{name}/said": plain(folder)(document)}
    return {f"{name}/code": ran.code, **leaves(document, name, folder)}


def page(path: Path, folder: Path) -> dict[str, Any]:
    """The document and the blocks inside a page, and the words of its markup."""
    html = path.read_text()
    found: dict[str, Any] = {}
    for attributes, content in re.findall(r"<script([^>]*)>(.*?)</script>", html, re.DOTALL):
        told = re.search(r'id="([^"]+)"', attributes)
        name = told[1] if told else ""
        if "application/json" in attributes:
            found |= leaves(json.loads(content), f"document {name}", folder)
        elif name and re.fullmatch(r"[A-Za-z0-9+/=\s]+", content):
            found[f"block {name}"] = digest(zlib.decompress(base64.b64decode(content), -15))
        else:
            found.setdefault("scripts", []).append(digest(content))
    markup = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", html, flags=re.DOTALL)
    words = plain(folder)(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", markup)))
    found["words"] = digest(_WITHOUT_TIMES.sub("TIME", words))
    return found


_WITHOUT_TIMES = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?\S*|[0-9a-f]{12,64}|\b\d+(\.\d+)? (s|ms|min)\b")


def _needle(folder: Path) -> None:
    """Numbers hidden in texts, asked of a trained model at five budgets; answers are graded."""
    model = pk.load_model("smollm2-135m-q4_1")
    asked = pk.load_prompts("needle", model, samples=6, lengths=[150, 200], depths=[0.2, 0.5, 0.8])
    selections = ["attention", "two-stage", "random"]
    configs = pk.grid([0.1, 0.2, 0.4, 0.6, 0.8], selection=selections, window=8)
    settings = pk.Settings(steps=2, generate=10)
    pk.measure(model, asked, configs, settings=settings, path=folder / "trace.h5", progress=False)


def _stored(folder: Path) -> None:
    """One kept set per key/value head, in few bits, in blocks and corrected; shares of stage 1; answers."""
    model = pk.load_model(str(tiny_model(folder / "model")))
    data = prompts(folder / "prompts.jsonl", 9, answers=["seven", "the fox"])
    both = ["attention", "two-stage"]
    kinds = ["full", "quantise(bits=8, fill=8)", "quantise(bits=4, fill=8)", "quantise(bits=2, fill=8)"]
    alphas = [f"two-stage(alpha={one})" for one in (0, 0.25, 0.5, 1)]
    unpooled = ["attention", "two-stage", "attention-unpooled", "two-stage-uniform", "random"]
    plain_grids: tuple[tuple[Any, dict[str, Any]], ...] = (
        ([0.1, 0.4], {"selection": both, "granularity": "kv", "precision": kinds}),
        (1.0, {"granularity": "kv", "precision": "quantise(bits=8)"}),
        (0.3, {"precision": "quantise(bits=4)"}),
        (0.3, {"selection": both, "granularity": ["kv", "kv(block=16)", "kv(block=32)", "layer", "query"]}),
        (0.3, {"selection": [*unpooled, *alphas]}),
        (0.3, {"selection": both, "correction": ["corrected", "corrected(mass=linear)", "corrected-oracle"]}),
    )
    configs = [one for budget, choices in plain_grids for one in pk.grid(budget, window=8, **choices)]
    path = folder / "trace.h5"
    asked = pk.load_prompts(str(data), model)
    settings = pk.Settings(generate=6)
    pk.measure(model, asked, dict.fromkeys(configs), settings=settings, path=path, progress=False)


def _distances(folder: Path) -> None:
    """Every policy and every selection over three steps, from the context alone, with what the heads put out."""
    model = pk.load_model(str(tiny_model(folder / "model", "qwen3", seed=1)))
    data = prompts(folder / "prompts.jsonl", 8)
    most = ["attention", "two-stage", "attention-unpooled", "two-stage-uniform", "value", "random", "hindsight",
            "hindsight-attention", "two-stage(norm=l2)", "hindsight(norm=l2)"]  # fmt: skip
    configs = [
        *pk.grid(40, selection=most, window=8),
        *pk.grid(40, selection=most[:7], window=8, granularity="kv"),
        *pk.grid([0.1, 0.2, 0.3, 0.6, 0.8], selection=["attention", "two-stage", "random"], window=8),
        *pk.grid(40, policy=POLICIES, selection=["attention", "random"], window=8),
        *pk.grid(40, policy="streaming-llm", selection="position", window=8),
    ]
    scores = [[1.0 + head for head in range(model.heads)]] * len(model.layers)
    settings = pk.Settings(steps=3, scenario="context-only", save=("outputs",), head_scores=scores)
    asked, path = pk.load_prompts(str(data), model), folder / "trace.h5"
    pk.measure(model, asked, dict.fromkeys(configs), settings=settings, path=path, progress=False)


TRACES: dict[str, Callable[[Path], None]] = {"needle": _needle, "stored": _stored, "distances": _distances}


def _alone(folder: Path) -> dict[str, Any]:
    """Commands without a finished trace: what measures for itself, lists, and this machine."""
    model = tiny_model(folder / "model")
    data = prompts(folder / "prompts.jsonl", 6, answers=["seven", "the fox"])
    tiny: list[Any] = ["--model", model, "--dataset", data]
    evicted = [*tiny, "--budget", 32, "--window", 8]
    found: dict[str, Any] = {}

    def ask(name: str, *arguments: Any, out: str = "", skipped: Sequence[str] = (".svg", ".parquet")) -> None:
        ran = run(*arguments, "--json", *(["-o", folder / out] if out else []))
        found.update(_told(name, ran, folder))
        found.update(below(f"{name}/figure", ran.figures))
        if out and (folder / out).is_dir():
            found.update(below(f"{name}/files", left(folder, folder / out, tuple(skipped))))
        elif out and (folder / out).exists():
            found.update(leaves(json.loads((folder / out).read_text()), f"{name}/file", folder))

    drawn = ["--format", "svg"]
    for command in COMMANDS:
        options = re.findall(r"(?<![\w-])--?[a-z][a-z-]*(?![\w-])", run(*command.split(), "--help").out)
        found[f"help/{command}"] = [f"{command} {option}" for option in sorted(set(options))]
    for command in ALONE:
        own = ["--model", model, "--lengths", "300"] if command == "needle" else tiny
        own = [*own, "--budget", 0.1, "--budget", 0.2, "--budget", 0.4] if command == "budget --cliff" else own
        ask(f"dry run/{command}", *command.split(), *own, "--dry-run", out=f"dry run {command}")
    ask("heads", "heads", *evicted, "--samples", 2, *drawn, out="heads")
    ask("layers", "layers", *evicted, "--samples", 2, "--budgets", "--per-sample", *drawn, out="layers")
    ask("patching", "patching", *evicted, "--samples", 3, "--treatment-in", 0, "--baseline-in", "1-2", *drawn,
        out="patching")  # fmt: skip
    ask("patching of heads", "patching", *evicted, "--samples", 2, "--by", "heads", "--layers", 1, "--outcome", "kl",
        "--permutations", 8, "--greedy", 2, *drawn, out="patching of heads")  # fmt: skip
    ask("patching of answers", "patching", *evicted, "--samples", 2, "--outcome", "score", "--answers",
        "--max-new-tokens", 4, *drawn, out="patching of answers")  # fmt: skip
    two = ["--selection", "attention", "--selection", "two-stage"]
    ask("trace", "trace", *evicted, "--samples", 3, "--steps", 2, "--save", "outputs", *two, out="trace")
    ask("trace of a seed", "trace", *evicted, "--samples", 3, "--steps", 2, "--seed", 5, *two, "--selection", "random",
        out="trace of a seed")  # fmt: skip
    traces = [next((folder / name).glob("*.h5"), folder / name) for name in ("trace", "trace of a seed")]
    ask("report of two", "report", *traces, "-o", folder / "two.html")
    if (folder / "two.html").exists():
        found.update(below("report of two", page(folder / "two.html", folder)))
    ask("generate", "generate", *evicted, *two, "--max-new-tokens", 8, "--divergence", out="generate")
    ask("generate compressed", "generate", *evicted, *two, "--max-new-tokens", 12, "--compress-over", 36,
        "--granularity", "kv", out="compressed")  # fmt: skip
    answers = folder / "generate" / "generation.jsonl"
    ask("quality --divergence", "quality", "--divergence", answers, *drawn, out="divergence")
    embedded = ["--model", "smollm2-135m-q4_1", "--samples"]
    ask("trace --head-scores", "trace", *embedded, 2, "--length", 200, "--head-scores", folder / "heads.json")
    found.update(leaves(json.loads((folder / "heads.json").read_text()), "trace --head-scores/file", folder))
    ask("heads of headkv", "heads", *embedded, 1, "--length", 150, "--policy", "headkv", "--budget", 32, "--window", 8,
        "--head-scores", folder / "heads.json", *drawn, out="headkv")  # fmt: skip
    for name in ("models", "datasets", "policies"):
        ask(f"list {name}", "list", name)
    for name in _owners(found):
        ask(f"list policies {name}", "list", "policies", name)
    ask("list datasets needle", "list", "datasets", "needle", "--show", "--model", model, "--length", 300)
    ask("list datasets of one's own", "list", "datasets", data, "--show", "--model", model, "--sample", 1,
        "--tokens", 20)  # fmt: skip
    for line in REFUSED:
        ask(f"refused/{line}", *line.split())
    return found


def _owners(found: dict[str, Any]) -> list[str]:
    """Policies, selections and the rest whose options `list policies` tells."""
    return sorted({str(value) for name, value in found.items() if re.fullmatch(r"list policies/.*/name", name)})
