"""Every number that runs of tiny models write, as one digest per variable, to hold two versions side by side.

The runs cover every policy with each of its options, every selection, granularity, precision and correction, several
families of models, both scenarios, several decode steps, graded answers and caches that are compressed again.

Nothing here depends on where a module of perturbkv lies: only public names and the command line are used. Digests are
of one machine and one set of libraries: other processors round otherwise.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

import perturbkv as pk
from tests.pins.running import digest, run, tiny_model, variables

SELECTIONS = ["attention", "attention-unpooled", "two-stage", "two-stage-uniform", "value", "random", "hindsight",
              "hindsight-attention"]  # fmt: skip
VOTING = ["snapkv", "pyramidkv", "adakv", "headkv", "h2o", "scissorhands", "tova", "random"]
POOLED = "snapkv(pool=average, kernel=5)"
FIRST = "two-stage(score=pooled, epsilon=0.001, alpha={}, split={})"
GROUPED = "kv(reduce={}, product={})"
SWEEP: list[dict[str, Any]] = [
    {"policy": VOTING, "selection": SELECTIONS, "budget": [24, 0.3], "granularity": ["query", "kv"]},
    {"policy": ["streaming-llm(positions=kept)", "streaming-llm(positions=in-cache)"], "selection": "position",
     "budget": [24, 0.3]},
    {"preset": ["paper-v2", "released-v2"], "policy": ["snapkv", "adakv", "pyramidkv"], "budget": 24,
     "selection": ["attention", "two-stage"]},
    {"policy": [f"adakv(floor={floor}, safeguard={kind})"
                for floor, kind in itertools.product((0.0, 0.5), ("mixture", "guaranteed"))], "budget": 24},
    {"policy": ["pyramidkv(line=prefix, beta=5)", "pyramidkv(line=total, beta=5)"], "budget": 24},
    {"policy": "headkv(beta=1.2)", "budget": 24},
    {"policy": ["h2o(recent=0.25)", "scissorhands(history=30)"], "budget": 24},
    {"policy": "streaming-llm(sinks=2)", "selection": "position", "budget": 24},
    {"selection": [FIRST.format(alpha, split) for alpha in (0, 0.5, 1) for split in ("prefix", "total")], "budget": 24},
    {"policy": POOLED, "selection": "two-stage", "budget": 24,
     "granularity": [GROUPED.format(*one) for one in
                     itertools.product(("mean", "max"), ("product-of-means", "mean-of-products"))]},
    {"policy": POOLED, "selection": "attention", "granularity": ["kv(reduce=mean)", "kv(reduce=max)"], "budget": 24},
    {"selection": ["random", "two-stage"], "protect-first": 4, "protect-recent": 0.5, "budget": 24},
]  # fmt: skip
"""The grids of the sweep file that versions have been held against from the first format of sweep files on."""
SWEPT = [("llama", "regular"), ("llama", "context-only"), ("qwen3", "regular")]

FAMILIES = ("llama", "qwen3", "gemma3_text", "qwen3_moe", "gpt_oss")
SCENARIOS = ("regular", "context-only")
ASKED = [("llama", "regular"), ("llama", "context-only"), ("qwen3", "regular"), ("gemma3_text", "regular"),
         ("gemma3_text", "context-only"), ("qwen3_moe", "regular"), ("gpt_oss", "regular"),
         ("gpt_oss", "context-only")]  # fmt: skip
"""Families and scenarios of the runs that take longest: answers, and pages of `quest`."""
POLICIES = [
    "snapkv", POOLED, "adakv", "adakv(floor=0.5, safeguard=guaranteed)", "adakv(caote)", "adakv(by=tova)",
    "defensive", "defensive(mass=0.3, pool=max, kernel=3)", "defensive-layer", "defensive-layer(mass=0.3, pool=none)",
    "h2o", "h2o(recent=0.25, pool=max)", "headkv", "headkv(beta=1.5, by=dropkv)", "kvzip", "kvzip(chunk=30, sinks=2)",
    "kvzip(wording=kvpress, across=layer)", "kvzip(across=head)", "kvzip-plus", "kvzip-plus(chunk=30, sinks=2)",
    "kvzip-plus(wording=kvpress, across=layer)", "kvzip-plus(across=head)", "lava", "lava(floor=0.5, floor_of=layer)",
    "lava(by=value-norm)", "pyramidkv", "pyramidkv(beta=4, line=total)", "pyramidkv(by=obcache-joint)",
    "quest(page=4)", "caote", "caote(pool=max)", "dropkv", "dropkv(pool=none)", "expected-attention",
    "expected-attention(n_future=20, sinks=2, use_covariance=false, epsilon=0.02)",
    "expected-attention(use_vnorm=false, pool=average, kernel=3)", "knorm", "obcache-joint", "obcache-key",
    "obcache-value", "obcache-joint(pool=average)", "random", "random(seed=3)", "scissorhands",
    "scissorhands(history=30, pool=max)", "tova", "tova(pool=max, kernel=3)", "value-norm(sinks=0)",
    "value-norm(sinks=5)",
]  # fmt: skip
"""Every policy but those with a selection or a prefill of their own, and each of their options at least once."""
BY_LAYER = ["snapkv", "pyramidkv(beta=4)", "h2o", "caote", "dropkv", "expected-attention"]
BY_HEAD = ["adakv", "headkv", "lava", "kvzip(chunk=50)", "kvzip-plus(chunk=50)", "adakv(safeguard=guaranteed)"]
"""Policies whose budgets are alike for a layer's heads, and others."""
COMPRESSED = ["snapkv", "adakv", "pyramidkv(beta=4)", "caote", "value-norm(sinks=2)", "tova"]
ANSWERING = ["h2o", "kvzip(chunk=50)", "quest(page=4)", "defensive-layer"]
"""Policies whose caches are compressed once."""
GRANULARITIES = [
    "query", "kv", "kv(reduce=max)", "query(block=4)", "kv(block=5)", "kv(block=4, block_score=max, reduce=max)",
    "layer", "layer(block=4, reduce=max, product=mean-of-products)",
]  # fmt: skip
GROUPINGS = [("llama", 2, "regular"), ("llama", 4, "context-only"), ("llama", 1, "regular"), ("gpt_oss", 2, "regular"),
             ("gemma3_text", 2, "context-only")]  # fmt: skip
"""Family, key/value heads of four query heads, scenario."""
SELECTING = ["snapkv", "adakv", "expected-attention"]
SELECTED = [*SELECTIONS, "two-stage(norm=l2)", "value(norm=l2)", "hindsight(norm=l2)", "random(seed=5)",
            "two-stage(alpha=0.5, split=total, score=pooled)", "two-stage-uniform(score=pooled)"]  # fmt: skip
"""Every selection, and each of their options."""
PAGED = ["attention", "two-stage(alpha=0)", "value", "random", "hindsight", "hindsight-attention"]
LINED = ["vertical-slash", "vertical-slash(vertical=0.25, last=16, first=2, seed=3)", "vertical-slash(sums=free)"]
OWN_CODE = """
from dataclasses import dataclass
from typing import ClassVar

import perturbkv as pk


@dataclass(frozen=True)
class Peak(pk.Score):
    needs = ("attention",)
    tau: float = pk.option(1.0, "exponent on the attention")

    def score(self, layer):
        return layer.attention[..., : layer.prefix].amax(dim=1) ** self.tau


@dataclass(frozen=True)
class RecentHalf(pk.Policy):
    name: ClassVar[str] = "recent-half"
    summary: ClassVar[str] = "a share of the budget is the most recent entries"
    share: float = pk.option(0.5, "share of b that is most recent entries", high=1)

    def recent_entries(self, config, kept):
        return max(super().recent_entries(config, kept), int(self.share * kept))
"""
"""A score and a policy of one's own."""

LAYERS = 2
ALL_AT_ONCE = pk.Resources()
SPOKEN = "ab17Ġ"
"""Characters of answers: so few that some answers have words of the accepted ones; the last stands for a space."""
SENTENCE = "The quick brown fox jumps over the lazy dog; {} of them saw it. "
SLIDING = 12
"""Entries that a sliding layer of a family that mixes them looks at."""


def record(folder: Path) -> dict[str, Any]:
    """Measure and answer with tiny models: name of the run and of the variable -> digest."""
    torch.set_num_threads(1)
    _write_prompts(folder)
    found: dict[str, Any] = {}
    for runs in RUNS:
        for name, digests in runs(folder):
            found |= {f"{name} {variable}": value for variable, value in digests.items()}
    return found


def _sweeps(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The sweep file, by the command line."""
    scores = folder / "scores.json"
    scores.write_text(json.dumps({f"{layer}-{head}": layer + head / 4 for layer in range(2) for head in range(4)}))
    for family, scenario in SWEPT:
        file, out = folder / "sweep.yaml", folder / f"sweep-{family}-{scenario}"
        of = {"model": str(_model(folder, family)), "dataset": str(folder / "prompts.jsonl"), "scenario": scenario}
        asked = {**of, "head-scores": str(scores), "window": 8, "steps": 2, "save": "outputs", "grids": SWEEP}
        file.write_text(yaml.safe_dump(asked))
        _command("trace", "--config", file, "-o", out)
        yield f"sweep {family} {scenario}", _trace_digests(out / "trace.h5")


def _policies(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Every policy with each of its options, in every family and both scenarios."""
    scored = pk.grid(32, policy=POLICIES, selection="attention", window=8)
    for family, scenario in itertools.product(FAMILIES, SCENARIOS):
        configs = [*scored, *_streaming(family, 32)]
        name = f"policies {family} {scenario}"
        yield _measured(name, folder, family, configs, scenario=scenario, steps=2, generate=4)


def _granularities(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """What heads keep together, entry by entry and in blocks, with heads grouped in every way."""
    shared: dict[str, Any] = {"selection": ["attention", "two-stage"], "window": 8}
    configs = [
        *pk.grid(32, policy=BY_LAYER, granularity=GRANULARITIES, **shared),
        *pk.grid(32, policy=BY_HEAD, granularity=GRANULARITIES[:-2], **shared),
    ]
    for family, kv_heads, scenario in GROUPINGS:
        name = f"granularities {family} {kv_heads} {scenario}"
        yield _measured(name, folder, family, configs, kv_heads=kv_heads, scenario=scenario, steps=2)


def _selections(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Every selection with its options, of scores that carry norms and of those that do not, and of the presets."""
    for family, scenario in (("llama", "regular"), ("gpt_oss", "context-only"), ("gemma3_text", "regular")):
        table, layers = folder / f"alpha-{family}.json", [0, 1] if family == "llama" else [1, 3]
        shares = {"by": "head", "alpha": [[0.25, 0, 1, 0.5], [0.5, 0.5, 0.1, 0.9]], "layers": layers}
        table.write_text(json.dumps(shares))
        chosen = [*SELECTED, f"two-stage(alpha={table})", f"two-stage-uniform(alpha={table})"]
        configs = [
            *pk.grid(32, policy=SELECTING, selection=chosen, granularity=["query", "kv"], window=8),
            *pk.grid(0.6, policy="snapkv", selection=SELECTIONS, protect_first=3, protect_recent=12, window=8),
            *pk.grid(0.8, policy=["snapkv", "adakv"], selection=["attention", "two-stage"],
                     preset=["paper", "paper-v2", "released-v2", "kvpress"], alpha=[None, 0.7], window=16),
        ]  # fmt: skip
        yield _measured(f"selections {family} {scenario}", folder, family, configs, scenario=scenario, steps=3)


def _stored(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """What is kept in few bits, and what stands in for entries that went."""
    quantised = [f"quantise(bits={bits})" for bits in (8, 4, 2)] + ["quantise(bits=4, group=5)", "quantise(fill=8)"]
    corrected = ["corrected", "corrected(mass=linear)", "corrected-oracle"]
    policies, selection = ["snapkv", "adakv", "kvzip(chunk=50)"], ["attention", "two-stage"]
    shared: dict[str, Any] = {
        "policy": policies,
        "selection": selection,
        "granularity": ["query", "kv(block=4)"],
        "window": 8,
    }
    configs = [
        *pk.grid(30, precision=quantised, **shared),
        *pk.grid(30, correction=corrected, **shared),
        *pk.grid(24, policy="snapkv", granularity="layer", precision=["full", *quantised[:2]], window=8),
        *pk.grid(24, policy="snapkv", granularity="layer", correction=corrected, window=8),
    ]
    for family, scenario in itertools.product(("llama", "qwen3", "gemma3_text", "gpt_oss"), SCENARIOS):
        name = f"stored {family} {scenario}"
        streaming = _streaming(family, 24, precision="quantise(bits=2)")
        yield _measured(name, folder, family, [*configs, *streaming], scenario=scenario, steps=2, generate=3)


def _lines(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Prefills of their own, which look along some lines alone, and pages that are read at every step."""
    lined = pk.grid(32, policy=LINED, selection=["attention", "two-stage(alpha=0)", "random"], window=8)
    for family, scenario in (("llama", "regular"), ("llama", "context-only"), ("qwen3_moe", "regular")):
        yield _measured(f"lines {family} {scenario}", folder, family, lined, scenario=scenario)
    paged = pk.grid([32, 0.6], policy=["quest(page=4)", "quest(page=7)"], selection=PAGED, window=8)
    for family, scenario in ASKED:
        yield _measured(f"pages {family} {scenario}", folder, family, paged, scenario=scenario, steps=3, generate=4)


def _layouts(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """How caches lie, what a trace leaves out, how much is done at once, in parts and in goes."""
    shared: dict[str, Any] = {"selection": ["attention", "two-stage"], "granularity": ["query", "kv"], "window": 8}
    regular = pk.grid([24, 0.5], policy=["snapkv", "pyramidkv", "caote"], **shared)
    by_head = pk.grid(24, policy=["adakv", "lava", "kvzip(chunk=50)"], **shared)
    both = [*regular, *by_head]
    without = {"prompts" if hasattr(pk.Settings, "prompts") else "text": False}  # its name in each version
    small, answered = pk.Resources(chunk_bytes=2**14, max_bytes=2**17), pk.Settings(generate=3)
    for family in ("llama", "gemma3_text"):
        for scenario in SCENARIOS:
            options: dict[str, Any] = {"scenario": scenario, "steps": 2}
            name = f"{family} {scenario}"
            yield _measured(f"rectangular {name}", folder, family, regular, cache="rectangular", generate=3, **options)
            yield _measured(f"small {name}", folder, family, both, resources=small, save=("outputs",), **options)
            yield _measured(f"bare {name}", folder, family, both, kept=False, **without, **options)
        path, model = folder / f"goes-{family}.h5", _spoken(folder, family)
        prompts = pk.load_prompts(str(folder / "asked.jsonl"), model)
        for some, of in ((prompts[:1], regular), (prompts, both)):
            pk.measure(model, some, of, settings=answered, path=path, progress=False)
        yield f"goes {family}", _trace_digests(path)
        for by in ("samples", "configs"):
            path = folder / f"shards-{by}-{family}.h5"
            for part in (pk.Shard.parse(one, by) for one in ("1/2", "2/2")):
                pk.measure(model, prompts, both, settings=answered, path=path, shard=part, progress=False)
            yield f"shards by {by} {family}", _trace_digests(path)
    yield _measured("bfloat16", folder, "llama", both, dtype="bfloat16", steps=2, generate=3)


def _own_code(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A score and a policy from a file."""
    path = folder / "own.py"
    path.write_text(OWN_CODE)
    policies = [f"{path}:Peak(tau=2)", f"{path}:Peak(pool=max)", f"adakv({path}:Peak)", f"{path}:RecentHalf(share=0.7)"]
    configs = pk.grid([24, 0.5], policy=policies, selection=["attention", "two-stage"], window=8)
    for scenario in SCENARIOS:
        yield _measured(f"own code {scenario}", folder, "llama", configs, scenario=scenario, steps=2, generate=3)


def _answers(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Answers files of `generate`: compressed once, and again and again, with and without what divergence reads."""
    for family, scenario in ASKED:
        name = f"answers {family} {scenario}"
        asked = ["--model", _model(folder, family, speaks=True), "--dataset", folder / "asked.jsonl", "--window", 8]
        asked += ["--scenario", scenario, "--max-new-tokens", 24, "--budget", 24]
        again = ["--compress-over", 30, "--divergence", *_each("--policy", COMPRESSED)]
        again += _each("--selection", ["attention", "two-stage", "knorm:attention", "streaming-llm"])
        once = [*_each("--policy", ANSWERING), "--metric", "rouge-l"]
        for what, more in (("again", again), ("once", once)):
            out = folder / f"{name} {what}".replace(" ", "-")
            _command("generate", *asked, *more, "-o", out)
            yield f"{name} {what}", _line_digests(out / "generation.jsonl")
        out = folder / f"{name} layouts".replace(" ", "-")
        fewer = ["--compress-over", 40, "--granularity", "kv(block=4)", "--granularity", "layer", "--budget", 30]
        _command("generate", *asked[:-2], *fewer, "--precision", "quantise(bits=4)", "--divergence", "-o", out)
        yield f"{name} layouts", _line_digests(out / "generation.jsonl")


def _others(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Hidden facts at several depths, and swapped layers and heads."""
    model = _model(folder, "llama", speaks=True)
    for scenario in SCENARIOS:
        out = folder / f"needle-{scenario}"
        asked = ["--model", model, "--dataset", "needle", "--lengths", "700,800", "--depths", "0,0.6", "--samples", 2]
        _command("quality", *asked, "--scenario", scenario, "-b", 64, "--max-new-tokens", 8, "-o", out)
        yield f"needle {scenario}", _trace_digests(next(out.glob("**/*.h5")))
    adapter = _spoken(folder, "llama")
    prompts = pk.load_prompts(str(folder / "asked.jsonl"), adapter)
    for by in ("layers", "heads"):
        path = folder / f"patching-{by}.h5"
        sides = pk.grid(24, selection=("attention", "two-stage"), window=8)
        asked = {"question": pk.PatchingConfig(by=by), "settings": pk.Settings(steps=2, generate=3)}
        pk.patching(adapter, prompts, *sides, **asked, path=path, progress=False)
        yield f"patching {by}", _line_digests(path)


def _measured(
    name: str,
    folder: Path,
    family: str,
    configs: Iterable[pk.EvictionConfig],
    kv_heads: int = 2,
    dtype: str = "auto",
    resources: pk.Resources = ALL_AT_ONCE,
    **options: Any,
) -> tuple[str, dict[str, str]]:
    """The name, and the digests of a trace of these configurations."""
    model, path = _spoken(folder, family, kv_heads, dtype), folder / f"{name.replace(' ', '-')}.h5"
    prompts = pk.load_prompts(str(folder / "asked.jsonl"), model)
    scores = [[1.0 + head for head in range(model.heads)]] * len(model.layers)
    settings = pk.Settings(head_scores=scores, **options)
    pk.measure(model, prompts, configs, settings=settings, path=path, resources=resources, progress=False)
    return name, _trace_digests(path)


def _spoken(folder: Path, family: str, kv_heads: int = 2, dtype: str = "auto") -> Any:
    """A loaded model whose answers are of few characters."""
    return pk.load_model(str(_model(folder, family, kv_heads, speaks=True)), dtype=dtype)


def _streaming(family: str, budget: float, **choices: Any) -> tuple[pk.EvictionConfig, ...]:
    """By position; entries move in a cache of a family only whose sliding layers, if any, rotate by themselves."""
    policies = ["streaming-llm(sinks=2)", *["streaming-llm(positions=in-cache)"] * (family != "gpt_oss")]
    return pk.grid(budget, policy=policies, selection="position", window=8, **choices)


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (option, value)]


def _command(*arguments: object) -> None:
    """Run a command of perturbkv; raise RuntimeError, with what it said, where it fails."""
    ran = run(*arguments)
    if ran.code:
        raise RuntimeError(f"perturbkv {' '.join(map(str, arguments))} ended with {ran.code}: {ran.out}{ran.err}")


def _trace_digests(path: Path) -> dict[str, str]:
    """Name of every variable -> its digest."""
    return {name: value for name, value in variables(path, path.parent).items() if "@" not in name}


def _line_digests(path: Path) -> dict[str, str]:
    """What each line says of a sample, of a file whose first line holds the run and when it was made."""
    rows = enumerate(map(json.loads, path.read_text().splitlines()[1:]))
    told = {f"{i} {row['sample']} {key}": value for i, row in rows for key, value in row.items()}
    return {name: digest(json.dumps(value, sort_keys=True)) for name, value in told.items()}


def _write_prompts(folder: Path) -> None:
    """Three prompts of 70 to 210 tokens of one byte, with a question each, and two of them with accepted answers."""
    made = [
        {"id": f"p{i}", "context": "".join(SENTENCE.format(i * 7 + k) for k in range(i + 1)), "input": f"How many? {i}"}
        for i in range(3)
    ]
    graded = [
        {**made[0], "answers": ["a 1 7 b 17 ab", "ba 71"]},
        {**made[2], "answers": ["17"], "metric": "exact-number"},
    ]
    for name, rows in (("prompts", made), ("asked", graded)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _model(folder: Path, family: str, kv_heads: int = 2, *, speaks: bool = False) -> Path:
    """A tiny model; one that speaks answers in few characters."""
    path = folder / f"{family}-{kv_heads}{'-speaks' * speaks}"
    more = {"num_key_value_heads": kv_heads, **_special(family)}
    return tiny_model(path, family, LAYERS, spoken=SPOKEN * speaks, **more)


def _special(family: str) -> dict[str, Any]:
    """What a family's configuration has beside the shapes of all."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    mixed: dict[str, Any] = {
        "num_hidden_layers": 2 * LAYERS,
        "layer_types": ["sliding_attention", "full_attention"] * LAYERS,
        "sliding_window": SLIDING,
    }
    each = {"full_attention": plain, "sliding_attention": {**plain, "rope_theta": 1e3}}
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return {
        "gemma3_text": {**mixed, "rope_parameters": each, "query_pre_attn_scalar": 12},
        "qwen3_moe": {**experts, "norm_topk_prob": True, "mlp_only_layers": [0]},
        "gpt_oss": {**mixed, **experts},
    }.get(family, {})


RUNS = (_sweeps, _policies, _granularities, _selections, _stored, _lines, _layouts, _own_code, _answers, _others)
