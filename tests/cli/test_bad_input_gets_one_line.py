"""Each mistake: exit code 2, one line that says expected, got and what to do, and nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perturbkv.storage.trace.trace_file import read_trace
from tests.support.asked import instead, refused
from tests.support.folders import model_folder

Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "smolm2"], ["unknown model 'smolm2'; known: smollm2-135m", "smollm2-135m-q4_1", "folder"]),
        (["--model", "random:smolm2"], ["unknown model", "random:smollm2-135m"]),
        (["--dataset", "nedle"], ["unknown dataset 'nedle'; known: needle", ".jsonl"]),
        (["--policy", "snapvk"], ["unknown policy 'snapvk'; known: snapkv"]),
        (["--preset", "papr"], ["unknown preset 'papr'; known: paper"]),
        (["--compare", "attention,twostage"], ["unknown selection 'twostage'; known: two-stage"]),
        (["--compare", "attention"], ["two or more selections"]),
        (["--compare", "attention,attention"], ["different values for --compare, got attention twice"]),
        (["--policy", "streaming-llm"], ["streaming-llm", "selection 'attention'", "streaming-llm with position"]),
        (["--policy", "headkv"], ["'headkv' needs scores", "--head-scores FILE", "snapkv, h2o, pyramidkv"]),
        (["--policy", "headkv", "--head-scores", "none.json"], ["head scores as JSON at none.json, got nothing"]),
        (["--policy", "adakv", "--cache", "rectangular"], ["rectangular cache cannot hold", "snapkv"]),
        (["--cache", "padded"], ["unknown cache 'padded'", "ragged"]),
        (["--scenario", "context"], ["unknown scenario 'context'; known: context-only"]),
        (["--scenario", "context-only"], ["no question of its own", "--scenario regular"]),
        (["--policy", "streaming-llm(positions=inside)"], ["unknown positions 'inside'; known: ", "in-cache", "kept"]),
        (["--policy", "snapkv(positions=in-cache)"], ["policy 'snapkv' has no option 'positions'; its options: pool"]),
        (["--positions", "in-cache"], ["No such option: --positions; it belongs to policy streaming-llm: write"]),
        (["--score", "pooled"], ["belongs to selection two-stage", "write two-stage(score=…)"]),
        (["--pyramid-beta", "5"], ["No such option: --pyramid-beta", "--help lists what there is"]),
        (["--policy", "adakv(floor=2)"], ["floor of policy 'adakv' must lie in [0, 1], got 2"]),
        (["--policy", "h2o(recent=-1)"], ["recent of policy 'h2o' must lie in [0, 1]"]),
        (["--policy", "pyramidkv(beta=0)"], ["beta of policy 'pyramidkv' must be at least 1"]),
        (["--policy", "pyramidkv(beta=inf)"], ["beta of policy 'pyramidkv' must be at least 1 and finite, got inf"]),
        (["--compare", "attention,two-stage(epsilon=inf)"], ["epsilon of selection 'two-stage' must be at least 0"]),
        (["--policy", "scissorhands(history=0)"], ["history of policy 'scissorhands' must be at least 1"]),
        (["--policy", "adakv(floor=0.1"], ["'adakv(floor=0.1' at character 16: expected ',' or ')', got its end"]),
        (["--granularity", "kv(reduce=sum)"], ["unknown reduce 'sum'; known: "]),
        (["--dataset", "needle", "--length", "many"], ["--length takes numbers", "'many'"]),
        (["--dataset", "needle", "--length", "200.5"], ["whole numbers", "200.5"]),
        (["--dataset", "needle", "--depth", "deep"], ["--depth takes numbers", "'deep'"]),
        (["--budget", "8"], ["window of 8", "raise the budget above 8"]),
        (["--budget", "0.01"], ["window of 8"]),
        (["--budget", "0"], ["must be positive, got 0"]),
        (["--budget", "-3"], ["must be positive, got -3"]),
        (["--budget", "1.5"], ["at most 1, got 1.5"]),
        (["--budget", "nan"], ["must be positive"]),
        (["--budget", "1e400"], ["must be finite, got inf; give tokens"]),
        (["--budget", "many"], ["got 'many'"]),
        (["--alpha", "1.5"], ["must lie in [0, 1], got 1.5"]),
        (["--alpha", "nan"], ["must lie in [0, 1], got nan"]),
        (["--policy", "snapkv(kernel=6)"], ["kernel of policy 'snapkv' must be odd, got 6; try 7"]),
        (["--window", "0"], ["at least 1 query"]),
        (["--policy", "snapkv(pool=min)"], ["unknown pool 'min'"]),
        (["--granularity", "head"], ["unknown granularity"]),
        (["--samples", "0"], ["at least 1 sample, got 0"]),
        (["--samples", "99"], ["has 6 samples, fewer than --samples 99"]),
        (["--steps", "0"], ["at least 1 decode step"]),
        (["--max-tokens", "1"], ["--max-tokens must be at least 2"]),
        (["--max-tokens", "0"], ["--max-tokens must be at least 2, got 0"]),
        (["--steps", "99999999999"], ["model's 512 positions; decode at most 330"]),
        (["--dtype", "int8"], ["unknown dtype 'int8'"]),
        (["--device", "cuda:7"], ["cuda:7", "--device cpu"]),
        (["--device", "tpu9"], ["got 'tpu9'"]),
        (["--save", "everything"], ["unknown save 'everything'"]),
        (["--chat-template"], ["chat template"]),
        (["--step", "3"], ["a step from 0 to 0, got 3"]),
        (["--format", "gif"], ["unknown format 'gif'"]),
        (["--chunk-mib", "0"], ["--chunk-mib"]),
        (["--dataset", "needle", "--length", "5"], ["at least 128 tokens"]),
        (["--dataset", "needle", "--depth", "2"], ["depth must lie in [0, 1]"]),
        (["--dataset", "needle", "--length", "5000"], ["512 positions", "--max-tokens"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_options(perturbkv: Run, tiny: list[object], options: list[str], words: list[str]) -> None:
    refused(perturbkv("heads", *instead(tiny, *options), "-o", "out"), *words)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["heads", "--no-json"], ["No such option: --no-json", "perturbkv heads --help"]),
        (["trace", "--sampels", "3"], ["No such option: --sampels", "--samples"]),
        (["trace", "--samples"], ["'--samples' requires an argument"]),
        (["trace", "--samples", "many"], ["'--samples'", "valid integer", "perturbkv trace --help"]),
        (["haeds"], ["No such command 'haeds'", "Did you mean 'heads'? perturbkv --help"]),
        (["export"], ["Missing argument", "perturbkv export --help"]),
        (["list", "models", "smollm2"], ["expected no argument, got 'smollm2'; perturbkv list models --help"]),
        (["heads", "a", "b"], ["expected no argument but TRACE, got 'b' too; perturbkv heads --help"]),
        (["correlation", "a", "b"], ["expected a trace", "got nothing"]),
        (["quality", "a"], ["expected a trace", "got nothing"]),
        (
            ["question", "patching", "a"],
            ["expected no argument, got 'a'; it measures for itself and takes no finished trace; perturbkv"],
        ),
        (
            ["question", "regret", "a"],
            ["got 'a'; it measures for itself and takes no finished trace; perturbkv question regret --help"],
        ),
        (["doctor", "bench", "compare", "--tolerance"], ["'--tolerance' requires an argument"]),
        (["doctor", "bench", "--nothing"], ["No such option: --nothing", "perturbkv doctor bench --help"]),
    ],
    ids=lambda value: " ".join(value) if value[0].islower() else "",
)
def test_command_lines_that_cannot_be_read(perturbkv: Run, command: list[str], words: list[str]) -> None:
    ran = perturbkv(*command)
    refused(ran, *words)
    assert ran.out == ""


def test_help_is_no_error(perturbkv: Run) -> None:
    for command in (["--help"], ["heads", "--help"], ["question"], ["list"]):
        ran = perturbkv(*command)
        assert (ran.code, ran.err) == (0, "")
        assert "Usage: " in ran.out


def lines(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_data_files(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    def heads(path: object) -> Any:
        return perturbkv("heads", *instead(tiny, "--dataset", path))

    refused(heads(lines(tmp_path / "a.jsonl", {"prompt": "x"}, "{broken")), "a.jsonl, line 2", "no JSON")
    refused(heads(lines(tmp_path / "b.jsonl", {"prompt": " "})), "b.jsonl, line 1", "empty prompt")
    refused(heads("missing.jsonl"), "missing.jsonl", "got nothing")
    long = {"prompt": "word " * 300}
    refused(heads(lines(tmp_path / "c.jsonl", long, long)), "512 positions", "--max-tokens 511")


def test_a_hub_that_is_not_there(perturbkv: Run, data: Path) -> None:
    ran = perturbkv("heads", "--model", "mistral-7b", "--dataset", data)
    refused(ran, "mistralai/Mistral-7B-Instruct-v0.3", "safetensors", "--model PATH", "HF_HOME")
    refused(perturbkv("heads", "--model", "nobody/nothing", "--dataset", data), "nobody/nothing", "--model PATH")


def test_models_that_would_be_misread(perturbkv: Run, data: Path, tmp_path: Path) -> None:
    def heads(path: object) -> Any:
        return perturbkv("heads", "--model", path, "--dataset", data, "--samples", 1)

    refused(heads("./nowhere"), "./nowhere", "neither")
    refused(heads(lines(tmp_path / "m.gguf", "no model")), "m.gguf")
    (tmp_path / "empty").mkdir()
    refused(heads(tmp_path / "empty"), "cannot be loaded")
    sliding = model_folder(tmp_path / "sliding", "mistral", sliding_window=64)
    refused(heads(sliding), "sliding window of 64 entries", "--max-tokens 63")
    gemma = tmp_path / "gemma"
    gemma.mkdir()
    lines(gemma / "config.json", {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]})
    refused(heads(gemma), "family 'gemma2'", "Llama, Mistral, Qwen2, Qwen3, Phi-3")


def test_traces(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    perturbkv("trace", *tiny, "-o", "t.h5")
    content = (tmp_path / "t.h5").read_bytes()
    refused(perturbkv("heads", lines(tmp_path / "text.h5", "no trace")), "no HDF5")
    (tmp_path / "half.h5").write_bytes(content[: len(content) // 2])
    refused(perturbkv("list", "half.h5"), "truncated")
    refused(perturbkv("list", "none.h5"), "got nothing")
    refused(perturbkv("heads", "t.h5", "--compare", "attention,value"), "snapkv:attention, snapkv:two-stage")
    refused(perturbkv("trace", *tiny, "--max-tokens", 99, "-o", "t.h5"), "max_tokens", "--overwrite")
    assert (tmp_path / "t.h5").read_bytes() == content
    assert perturbkv("trace", *tiny, "--max-tokens", 99, "-o", "t.h5", "--overwrite").code == 0
    assert read_trace(tmp_path / "t.h5").run.max_tokens == 99


def test_positions_that_a_models_rotations_cannot_take(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    asked = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = model_folder(tmp_path / "changing", rope_parameters=asked)
    inside = ["--policy", "streaming-llm(positions=in-cache)", "--selection", "position"]
    for more in ([], ["--dry-run"]):
        ran = perturbkv("trace", *instead(tiny, "--model", model, *inside, "-o", "out"), *more)
        refused(
            ran, "expects rotary frequencies of the type default, linear, llama3, yarn", "got 'dynamic'", "changing"
        )
        assert not Path("out").exists()


@pytest.mark.parametrize(("switch", "taken"), [(2, True), (500, True), (64, False)])
def test_a_text_whose_rotations_change_on_its_way(
    perturbkv: Run, tiny: list[object], tmp_path: Path, switch: int, taken: bool
) -> None:
    """LongRoPE: read below the switch and decoded above it; a text on one side of it is measured."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
    asked = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": switch, **factors}
    more = {"original_max_position_embeddings": switch}
    model = model_folder(tmp_path / "changing", "phi3", rope_parameters=asked, eos_token_id=None, **more)
    limit = ["--max-tokens", 64, "-o", "out", "--dry-run"]
    ran = perturbkv("trace", *instead(tiny, "--model", model), *limit)
    if taken:
        assert ran.code == 0, ran.err
    else:
        refused(ran, "rotates otherwise above 64 (LongRoPE); use --max-tokens 63 or less", "changing")


def test_nothing_is_left_behind(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    perturbkv("heads", *tiny, "--alpha", 7, "-o", "out")
    perturbkv("heads", *instead(tiny, "--dataset", "missing.jsonl"))
    assert list(tmp_path.iterdir()) == []


def test_nan_fails_the_sample_and_the_run_exits_1(
    perturbkv: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from perturbkv.pipeline.sample import one_sample

    measure = one_sample.trace_sample

    def poisoned(adapter, prompt, *more):  # type: ignore[no-untyped-def]
        norm = adapter.model.model.layers[1].input_layernorm.weight
        kept = norm.detach().clone()
        if prompt.sample_id == "p0":
            norm.data.fill_(float("nan"))
        try:
            return measure(adapter, prompt, *more)
        finally:
            norm.data.copy_(kept)

    monkeypatch.setattr(one_sample, "trace_sample", poisoned)
    ran = perturbkv("heads", *tiny, "-o", "out")
    assert ran.code == 1
    assert "failed: the hidden states of layer 1 hold NaN or Inf in sample 'p0'" in ran.err
    assert "1 sample\n" in ran.out
    assert dict(read_trace(Path("out/trace.h5")).failures).keys() == {"p0"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["generate", "--max-new-tokens", "0"], ["(--max-new-tokens) must be at least 1, got 0"]),
        (["generate", "--selection", "hindsight"], ["'hindsight' looks at the next query"]),
        (["generate", "--compress-every", "24"], ["(--compress-every) 24 needs a budget in tokens below it"]),
        (["generate", "--compress-every", "90", "--budget", "0.5"], ["needs a budget in tokens", "0.5"]),
        (["generate", "--compress-every", "90", "--policy", "h2o"], ["'h2o'", "works with snapkv"]),
        (["needle"], ["leave --dataset out"]),
        (["needle", "--dataset", "needle", "--samples", "3"], ["3 lengths × 6 depths need 18 samples"]),
        (["needle", "--dataset", "needle", "--samples", "18", "--max-new-tokens", "0"], ["--max-new-tokens"]),
        (["needle", "--dataset", "needle", "--samples", "18", "--compare", ","], ["--compare takes methods"]),
        (["horizon", "--compare", "attention"], ["two or more selections"]),
        (["horizon", "--steps", "2"], ["at least 3 decode steps, got --steps 2"]),
        (["horizon", "--steps", "0"], ["at least 3 decode steps, got --steps 0"]),
        (
            ["needle", "--dataset", "needle", "--lengths", "300", "--samples", "6", "--steps", "0"],
            ["at least 1 decode step"],
        ),
    ],
    ids=lambda value: " ".join(value) if value[0] in ("generate", "needle", "horizon") else "",
)
def test_commands_that_decode(perturbkv: Run, tiny: list[object], command: list[str], words: list[str]) -> None:
    refused(perturbkv(command[0], *instead(tiny, *command[1:]), "-o", "out"), *words)
    assert not Path("out").exists()


def test_head_scores_of_another_model(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    scores = tmp_path / "scores.json"
    scores.write_text(json.dumps({f"{layer}-{head}": 1.0 for layer in range(3) for head in range(4)}))
    ran = perturbkv("heads", *tiny, "--policy", "headkv", "--head-scores", scores, "-o", "out")
    refused(
        ran,
        "expected scores of 2 layers × 4 heads",
        "'2-0', which the model lacks",
        "perturbkv trace --head-scores",
        "what works",
    )
    ran = perturbkv("trace", "--head-scores", "s.json", "--model", tiny[1], "--length", 5000)
    refused(ran, "512 positions")
    ran = perturbkv("trace", "--head-scores", "new/folder/s.json", "--model", tiny[1], "--length", 5000)
    refused(ran, "512 positions")
    refused(
        perturbkv("trace", "--head-scores", "/proc/nowhere/s.json", "--model", tiny[1]),
        "choose another place",
    )
    assert list(tmp_path.iterdir()) == [scores]
