"""What `import perturbkv as pk` gives: the command line's numbers, without a file where none is asked for."""

from __future__ import annotations

import doctest
import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import perturbkv as pk
from perturbkv.cli.main import app
from perturbkv.datasets.prompts import collect
from perturbkv.display import Table
from perturbkv.engines import engine_choice
from perturbkv.errors import ActivationError, DatasetError, ModelError
from perturbkv.models.adapter import Adapter
from perturbkv.models.user_model import fingerprint
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.trace import FailedSample, Trace
from tests.support.models import tiny_adapter
from tests.support.notebook import CONFIGS, prompt
from tests.support.traces import run_config, sample_trace


def assert_equal(found: Trace, expected: Trace) -> None:
    assert found.run == expected.run
    assert found.sample_ids == expected.sample_ids
    assert dict(found.failures) == dict(expected.failures)
    assert set(found.arrays) == set(expected.arrays)
    for name, array in expected.arrays.items():
        assert found.arrays[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)


@pytest.mark.slow
def test_memory_file_and_command_line_give_the_same_numbers(
    model: Adapter, folder: Path, data: Path, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    prompts = pk.load_prompts(str(data), model, samples=2)
    held = pk.measure(model, prompts, CONFIGS, progress=False)
    assert_equal(pk.measure(model, prompts, CONFIGS, path=tmp_path / "t.h5", progress=False), held)
    command = ["trace", "--model", str(folder), "--dataset", str(data), "--samples", "2", "--budget", "24"]
    ran = CliRunner().invoke(app, [*command, "--window", "8", "-o", str(tmp_path / "cli.h5")])
    assert ran.exit_code == 0, ran.output
    by_command = pk.read_trace(tmp_path / "cli.h5")
    for name, array in held.arrays.items():
        np.testing.assert_array_equal(by_command.arrays[name], array, err_msg=name)


def test_a_trace_in_memory_is_the_one_that_a_file_would_hold(tmp_path: Path) -> None:
    samples = [
        sample_trace("s0", seed=0, keys=30, optional=True),
        FailedSample("s1", "NaN"),
        sample_trace("s2", seed=2, keys=40, optional=True),
    ]
    run = run_config(3)
    writer = TraceWriter(tmp_path / "t.h5", run, ["s0", "s1", "s2"], {"model": "m"})
    for sample in samples:
        writer.append(sample)
    assert_equal(Trace.from_samples(run, samples, {"model": "m"}), pk.read_trace(writer.finish()))


@pytest.mark.slow
def test_a_run_with_a_path_measures_what_is_missing(
    model: Adapter, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, int]] = []
    original = engine_choice.LocalEngine.measure

    def noted(self: Any, planned: Any, missing: Any, finished: Any) -> None:
        asked.append({name: len(configs) for name, configs in missing.items()})
        original(self, planned, missing, finished)

    monkeypatch.setattr(engine_choice.LocalEngine, "measure", noted)
    prompts = pk.load_prompts(str(data), model, samples=3)
    whole = pk.measure(model, prompts, CONFIGS, progress=False)
    path = tmp_path / "t.h5"
    pk.measure(model, prompts[:2], CONFIGS[:1], path=path, progress=False)
    grown = pk.measure(model, prompts, CONFIGS, path=path, progress=False)
    assert asked == [{"p0": 2, "p1": 2, "p2": 2}, {"p0": 1, "p1": 1}, {"p0": 1, "p1": 1, "p2": 2}]
    np.testing.assert_allclose(
        grown.arrays["perturbation_propagated"], whole.arrays["perturbation_propagated"], rtol=1e-5
    )
    assert pk.measure(model, prompts, CONFIGS, path=path, progress=False).run == grown.run
    assert len(asked) == 3, "nothing was missing"


@pytest.mark.slow
def test_a_run_that_fails_midway_has_not_touched_the_trace_that_it_was_to_replace(
    model: Adapter, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, path = pk.load_prompts(str(data), model, samples=3), tmp_path / "t.h5"
    pk.measure(model, prompts, CONFIGS, path=path, progress=False)
    content, original = path.read_bytes(), engine_choice.LocalEngine.measure

    def failing(self: Any, planned: Any, missing: Any, finished: Any) -> None:
        def first_alone(sample: Any, configs: Any) -> None:
            finished(sample, configs)
            where = "the logits"
            raise ActivationError(where, "p0")

        original(self, planned, missing, first_alone)

    with monkeypatch.context() as patched, pytest.raises(ActivationError, match="the logits"):
        patched.setattr(engine_choice.LocalEngine, "measure", failing)
        pk.measure(model, prompts, CONFIGS, settings=pk.Settings(steps=2), path=path, overwrite=True, progress=False)
    assert path.read_bytes() == content
    assert (
        pk.measure(
            model, prompts, CONFIGS, settings=pk.Settings(steps=2), path=path, overwrite=True, progress=False
        ).run.steps
        == 2
    )


@pytest.fixture(scope="module")
def held(model: Adapter) -> Trace:
    text = "The quick brown fox jumps over the lazy dog. "
    mine = [pk.Prompt.from_text(text * (2 + place), model, id=f"p{place}") for place in range(3)]
    configs = pk.grid((20, 24), selection=("attention", "two-stage"), window=8)
    return pk.measure(model, mine, configs, settings=pk.Settings(steps=2, save=("outputs",)), progress=False)


@pytest.mark.slow
def test_a_trace_that_is_saved_and_read_is_the_same(held: Trace, tmp_path: Path) -> None:
    found = pk.read_trace(held.save(tmp_path / "t.h5"))
    assert_equal(found, held)
    assert found.attrs["model_type"] == "llama"
    assert_equal(pk.read_trace(found.save(tmp_path / "again.h5")), held)


def test_a_dataset_is_what_xarray_reads_from_the_file(held: Trace, tmp_path: Path) -> None:
    import xarray as xr

    with xr.open_dataset(held.save(tmp_path / "t.h5"), engine="h5netcdf") as stored:
        made = held.to_xarray()
        assert made.sizes["config"] == 4
        for name in held.arrays:
            assert made[name].dims == stored[name].dims, name
            assert made[name].attrs["units"] == stored[name].attrs["units"]
            np.testing.assert_array_equal(made[name].values, stored[name].values, err_msg=name)
        assert list(made["config"].values) == list(stored["config"].values)


def test_a_frame_has_a_row_per_head(held: Trace) -> None:
    frame = held.to_frame()
    assert len(frame) == 3 * 4 * 2 * 2 * 4
    row = frame[(frame["sample"] == "p1") & (frame["step"] == 1) & (frame["layer"] == 1) & (frame["head"] == 2)]
    np.testing.assert_array_equal(
        row["perturbation_propagated"].to_numpy(), held.arrays["perturbation_propagated"][1, :, 1, 1, 2]
    )


def test_a_selected_part_holds_its_own_numbers(held: Trace) -> None:
    part = held.sel(sample=["p2", "p0"], selection="two-stage", budget=24)
    assert part.sample_ids == ("p2", "p0")
    assert part.run.configs == (held.run.configs[3],)
    for name in ("perturbation_isolated", "hidden_drift_l1", "head_output"):
        np.testing.assert_array_equal(part.arrays[name], held.arrays[name][[2, 0]][:, [3]], err_msg=name)
    np.testing.assert_array_equal(part.arrays["noise_floor"], held.arrays["noise_floor"][[2, 0]])
    for layer in range(2):
        for head in range(4):
            np.testing.assert_array_equal(part.kept(0, 0, layer, head), held.kept(2, 3, layer, head))
    assert held.sel(where=lambda config: config.budget.value > 20).run.configs == held.run.configs[2:]


@pytest.mark.parametrize(
    "asked", [{"sample": "p9"}, {"policy": "adakv"}, {"polciy": "snapkv"}, {"sample": []}, {"budget": 64}]
)
def test_a_part_that_is_not_there_is_an_error(held: Trace, asked: dict[str, Any]) -> None:
    with pytest.raises(pk.PerturbkvError, match="expected") as found:
        held.sel(**asked)
    assert "\n" not in str(found.value)


def test_a_trace_shows_itself(held: Trace) -> None:
    assert repr(held).splitlines()[0].endswith("3 of 3 samples complete")
    assert len(repr(held).splitlines()) == 5
    page = held._repr_html_()
    in_rows = {"kept_code", "prompt_token", "prompt_start"}
    assert page.count("<tr>") == 1 + len([name for name in held.arrays if name not in in_rows]) - 5
    assert "perturbation_isolated" in page


def test_a_prompt_and_a_model_show_themselves_in_one_line(folder: Path, model: Adapter) -> None:
    text, question = "The quick brown fox jumps over\nthe lazy dog. " * 3, "Who was it?"
    cut = repr(pk.Prompt.from_text(text, model, question, id="p7", max_tokens=100))
    assert cut.startswith("Prompt 'p7': 100 tokens (48 cut): ") and cut.endswith(f" … over the lazy dog. {question}")
    assert repr(pk.Prompt.from_text(question, model)) == f"Prompt: 11 tokens: {question}"
    assert repr(pk.Prompt.from_text("語" * 70, model)).endswith(f": {'語' * 30} … {'語' * 30}")
    assert repr(pk.Prompt("s", (1, 2), 0)) == "Prompt 's': 2 tokens: (text not known)"
    assert repr(model) == f"{folder}: 2 layers × 4 heads, float32 on cpu"


def test_what_a_prompt_shows_is_nothing_that_a_number_depends_on() -> None:
    """Traces of before there was an excerpt are gone on with."""
    prompt = pk.Prompt("a", (1, 2, 3), 4, 1, ("x",), "task", ("c",), 5, excerpt="first … last")
    assert prompt == pk.Prompt("a", (1, 2, 3), 4, 1, ("x",), "task", ("c",), 5)
    before = "('a', (1, 2, 3), 4, 1, ('x',), 'task', ('c',), 5)"
    digest = hashlib.sha256(before.encode()).hexdigest()[:16]
    assert collect([prompt]).options["prompt_digests"] == {"a": digest}


def test_a_table_reads_nothing_as_markup() -> None:
    shown = Table("a <b>", ("x", "#y"), [("[red]z", "<i>")])
    assert "&lt;i&gt;" in shown.as_html()
    assert "<b>" not in shown.as_html()


def test_a_loaded_model_is_left_as_it_was(folder: Path, model: Adapter, data: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded.train()
    loaded.model.layers[0].eval()
    modes = [module.training for module in loaded.modules()]
    ids = torch.arange(20).unsqueeze(0)
    before = loaded(ids).logits
    given = pk.load_model(loaded, tokenizer=tokenizer)
    found = pk.measure(given, pk.load_prompts(str(data), given, samples=1), CONFIGS, progress=False)
    assert torch.equal(loaded(ids).logits, before)
    assert [module.training for module in loaded.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loaded.modules())
    by_name = pk.measure(model, pk.load_prompts(str(data), model, samples=1), CONFIGS, progress=False)
    for name, array in by_name.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)


@pytest.mark.parametrize("change", ["a weight", "two rows", "the scale", "a buffer"])
def test_other_weights_have_another_fingerprint(folder: Path, change: str) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    given = pk.load_model(loaded, tokenizer=AutoTokenizer.from_pretrained(folder))
    first = fingerprint(given)
    assert fingerprint(given) == first
    with torch.no_grad():
        down = loaded.model.layers[1].mlp.down_proj.weight
        if change == "a weight":
            down[0, 0] += 1e-3
        elif change == "two rows":
            down.copy_(down.flip(0))
        elif change == "the scale":
            loaded.model.layers[0].self_attn.scaling *= 2
        else:
            loaded.model.rotary_emb.inv_freq *= 0.3
    assert fingerprint(given) != first


def test_the_scale_of_a_layer_that_is_not_measured_counts_too() -> None:
    given = tiny_adapter("gemma3_text")
    first = fingerprint(given)
    given.model.model.layers[0].self_attn.scaling *= 2
    assert given.layer_indices == (1, 3) and fingerprint(given) != first


def test_a_projection_that_is_no_matrix_is_refused(folder: Path) -> None:
    class Wrapped(torch.nn.Linear):
        """`weight` is not all that it does."""

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows).relu()

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    loaded.model.layers[1].self_attn.o_proj = Wrapped(32, 32, bias=False)
    with pytest.raises(ModelError, match="layer 1 of model .* 'o_proj'"):
        pk.load_model(loaded, tokenizer=AutoTokenizer.from_pretrained(folder))


@pytest.mark.slow
def test_prompts_are_known_again_by_all_that_a_number_depends_on(model: Adapter, tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 3
    path = tmp_path / "t.h5"

    def own(name: str, said: str = text, answers: Sequence[str] = ()) -> pk.Prompt:
        return pk.Prompt.from_text(said, model, id=name, answers=answers)

    pk.measure(model, own("a"), CONFIGS[0], path=path, progress=False)
    grown = pk.measure(model, [own("a"), own("b", text * 2)], CONFIGS, path=path, progress=False)
    assert grown.arrays["prompt_tokens"].tolist() == [135, 270]
    for other in (own("a", text + "!"), own("a", answers=["4711"])):
        with pytest.raises(pk.PerturbkvError, match="dataset_options"):
            pk.measure(model, [other, own("b", text * 2)], CONFIGS, path=path, progress=False)


def test_prompts_of_another_seed_are_another_run(model: Adapter, tmp_path: Path) -> None:
    made = [pk.load_prompts("needle", model, samples=1, seed=seed, lengths=[200], haystack="noise") for seed in (0, 5)]
    first = pk.measure(model, made[0], CONFIGS, path=tmp_path / "t.h5", progress=False)
    assert first.run.seed == 0
    with pytest.raises(pk.PerturbkvError, match="seed"):
        pk.measure(model, made[1], CONFIGS, path=tmp_path / "t.h5", progress=False)
    assert pk.measure(model, made[1], CONFIGS, progress=False).run.seed == 5


def test_a_part_says_nothing_of_caches_that_all_configurations_shared(held: Trace) -> None:
    assert "cache_bytes" in held.arrays
    assert "cache_bytes" not in held.sel(selection="two-stage").arrays
    assert "cache_bytes" in held.sel(sample="p1").arrays


def test_prompts_of_ones_own(model: Adapter) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 3
    mine = [pk.Prompt.from_text(text, model, "Who?", id=str(place)) for place in range(2)]
    assert model.tokenizer.decode(mine[0].token_ids) == f"{text}\n\nWho?"
    assert mine[0].question_tokens == len("\n\nWho?")
    found = pk.measure(model, mine, CONFIGS, settings=pk.Settings(scenario="context-only"), progress=False)
    assert found.arrays["question_tokens"].tolist() == [6, 6]
    assert found.run.dataset == "prompts"
    answers = pk.generate(model, mine, CONFIGS, max_new_tokens=3, progress=False)
    assert [len(one.evicted) for one in answers] == [2, 2]


def test_prompts_without_an_id_are_numbered(model: Adapter) -> None:
    mine = [pk.Prompt.from_text("The quick brown fox jumps. " * 6, model, id=name) for name in ("", "0", "")]
    assert pk.measure(model, mine, CONFIGS[:1], progress=False).sample_ids == ("1", "0", "2")
    with pytest.raises(DatasetError, match="got '0' twice"):  # before the model is looked at
        pk.measure("no model", [*mine, mine[1]], CONFIGS)  # type: ignore[arg-type]


def test_one_configuration_and_one_prompt_are_answered_as_a_series_of_each(model: Adapter) -> None:
    (one,) = pk.generate(model, prompt(model), CONFIGS[0], max_new_tokens=3, progress=False)
    assert one == pk.generate(model, [prompt(model)], CONFIGS[:1], max_new_tokens=3, progress=False)[0]


def test_answers_take_head_scores_as_they_were_checked(model: Adapter) -> None:
    """A list of scores counts as its mean, and an array as its rows."""
    rows = [[1.0, 2.0, 3.0, 4.0], [4.0, 1.0, 1.0, 2.0]]
    spread = [[[score - 0.5, score + 0.5] for score in row] for row in rows]
    configs = pk.grid(24, policy="headkv", window=8)
    plain, spread_out, array = (
        pk.generate(model, prompt(model), configs, max_new_tokens=6, head_scores=given, progress=False)
        for given in (rows, spread, np.array(rows))
    )
    assert plain == spread_out == array


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "perturbkv.api.inputs",
        "perturbkv.api.auditing",
        "perturbkv.api.patching",
        "perturbkv.api.searching",
        "perturbkv.datasets.encode",
    ],
)
def test_the_examples_in_docstrings_run(module: str) -> None:
    ran = doctest.testmod(importlib.import_module(module))
    assert ran.attempted > 0
    assert ran.failed == 0
