"""What the user's cache gives back is what transformers reads from the GGUF file, bit for bit, or it is made anew."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from perturbkv.errors import ModelError
from perturbkv.models import gguf as gguf_cache
from perturbkv.models import user_cache
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import load_model
from tests.support.gguf_files import gguf_file

ROOT = Path(__file__).resolve().parents[2]
TEXT = "the thin man in  there\n\tother <|im_end|> naïve Straße 你好 привет 12345 ☃"
SHAPES = [(1, 1), (1, 40), (3, 1), (2, 7)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERTURBKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return gguf_file(tmp_path / "models" / "tiny.gguf")


def direct(gguf: Path, **more: Any) -> tuple[Any, Any]:
    """Model and tokenizer as transformers reads the file itself."""
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, attn_implementation="sdpa", **more)
    return model.eval(), AutoTokenizer.from_pretrained(**where)


def assert_same(adapter: Adapter, gguf: Path) -> None:
    model, tokenizer = direct(gguf, dtype=adapter.dtype)
    ours, theirs = adapter.model.state_dict(), model.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for rows, tokens in SHAPES:
        ids = torch.arange(rows * tokens).view(rows, tokens) % 200
        with torch.inference_mode():
            assert torch.equal(adapter.model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert settings(adapter.config) == settings(model.config)
    assert adapter.model.generation_config.to_dict() == model.generation_config.to_dict()
    assert adapter.tokenizer(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert adapter.tokenizer.decode(range(265)) == tokenizer.decode(range(265))
    assert adapter.tokenizer.eos_token_id == tokenizer.eos_token_id == 2
    assert adapter.tokenizer.special_tokens_map == tokenizer.special_tokens_map
    message = [{"role": "user", "content": TEXT}]
    assert adapter.tokenizer.apply_chat_template(message) == tokenizer.apply_chat_template(message)


def settings(config: Any) -> dict[str, Any]:
    """A configuration without what says where the model came from."""
    return {
        name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "quantization_config")
    }


def weights(cache: Path) -> Path:
    (found,) = cache.glob("gguf-*/model.safetensors")
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_converted_file_is_the_file(tiny: Path, dtype: str) -> None:
    for _ in ("converted now", "read from the cache"):
        assert_same(load_model(str(tiny), dtype, "cpu"), tiny)


def test_the_second_time_nothing_is_converted(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_model(str(tiny), device="cpu")
    monkeypatch.setattr(gguf_cache, "_convert", lambda *arguments: pytest.fail("converted again"))
    assert load_model(str(tiny), device="cpu").revision == first.revision


def test_a_converted_model_is_named_like_its_file(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = load_model(str(tiny), device="cpu")
    monkeypatch.setattr(gguf_cache, "LARGEST", 0)
    read = load_model(str(tiny), device="cpu")
    assert (kept.name, kept.revision) == (read.name, read.revision) == (str(tiny), kept.revision)
    assert kept.revision.startswith("sha256:")


def test_other_weights_are_another_entry(tiny: Path, cache: Path) -> None:
    one = load_model(str(tiny), device="cpu")
    two = load_model(str(gguf_file(tiny, seed=1)), device="cpu")
    assert one.revision != two.revision
    assert len(list(cache.glob("gguf-*"))) == 2
    assert_same(two, tiny)


def test_an_entry_depends_on_the_converter_and_on_what_reads_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gguf_cache.entry_name(b"digest")
    monkeypatch.setattr(gguf_cache, "CONVERTER", gguf_cache.CONVERTER + 1)
    after = gguf_cache.entry_name(b"digest")
    monkeypatch.setattr(gguf_cache.importlib.metadata, "version", lambda library: "0.0")
    assert len({before, after, gguf_cache.entry_name(b"digest")}) == 3


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", cut),
        ("model.safetensors", flip),
        ("model.safetensors", Path.unlink),
        ("tokenizer.json", flip),
        ("config.json", Path.unlink),
        ("listing.json", cut),
        ("listing.json", Path.unlink),
    ],
)
def test_a_damaged_entry_is_made_anew(tiny: Path, cache: Path, file: str, damage: Callable[[Path], object]) -> None:
    load_model(str(tiny), device="cpu")
    damage(weights(cache).parent / file)
    assert_same(load_model(str(tiny), device="cpu"), tiny)
    assert [user_cache.is_whole(entry) for entry in cache.glob("gguf-*")] == [True]


LOAD = "import sys; from perturbkv.models.loading import load_model; load_model(sys.argv[1], device='cpu')"


@pytest.mark.chaos
@pytest.mark.chaos
def test_two_processes_at_once_make_one_entry(tiny: Path, cache: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", LOAD, str(tiny)], cwd=ROOT) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert_same(load_model(str(tiny), device="cpu"), tiny)
    assert len(list(cache.glob("gguf-*"))) == 1


def test_the_first_to_be_done_wins(cache: Path) -> None:
    def fill(folder: Path) -> None:
        user_cache.cached_folder("entry", lambda other: (other / "file").write_text("first"))
        (folder / "file").write_text("second")

    entry = user_cache.cached_folder("entry", fill)
    assert (entry / "file").read_text() == "first"
    assert list(cache.iterdir()) == [entry]


KILLED = """
import os, signal
from perturbkv.models import user_cache
def fill(folder):
    (folder / "model.safetensors").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
user_cache.cached_folder("entry", fill)
"""


def test_what_a_killed_process_left_is_no_entry_and_goes_away(cache: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT).returncode == -signal.SIGKILL
    assert len(list(cache.iterdir())) == 1
    assert user_cache.usage()[0] == 0
    entry = user_cache.cached_folder("entry", lambda folder: (folder / "file").write_text("whole"))
    assert list(cache.iterdir()) == [entry]


def test_what_a_living_process_is_filling_stays(cache: Path) -> None:
    def fill(folder: Path) -> None:
        user_cache.cached_folder("another", lambda other: None)
        (folder / "file").write_text("still here")

    assert (user_cache.cached_folder("entry", fill) / "file").read_text() == "still here"


def test_a_failure_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    broken = gguf_file(tmp_path / "broken.gguf", without="blk.1.attn_q.weight")
    with pytest.raises(ModelError, match="broken.gguf"):
        load_model(str(broken), device="cpu")
    assert list(cache.glob("gguf-*")) == []


def test_without_a_writable_cache_the_file_is_read_as_it_is(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PERTURBKV_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING, "perturbkv"):
        assert_same(load_model(str(tiny), device="cpu"), tiny)
    (record,) = caplog.records
    assert "tiny.gguf is read as it is" in record.getMessage()
    assert str(tmp_path / "file" / "cache") in record.getMessage()


def test_a_tokenizer_that_would_come_back_as_another_is_not_kept(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = gguf_cache.read_tokenizer

    def another(folder: Path) -> Any:
        tokenizer = read(folder)
        tokenizer.backend_tokenizer.add_tokens(["thin"])
        return tokenizer

    monkeypatch.setattr(gguf_cache, "read_tokenizer", another)
    assert_same(load_model(str(tiny), device="cpu"), tiny)
    assert "does not come back" in caplog.text
    assert not list(cache.glob("gguf*"))


def test_kept_weights_lie_where_torch_would_put_them(tiny: Path, cache: Path) -> None:
    load_model(str(tiny), device="cpu")
    start = 8 + int.from_bytes(weights(cache).read_bytes()[:8], "little")
    assert start % 64 == 0


def test_the_same_weights_give_the_same_logits_wherever_they_lie_in_a_file(tiny: Path, tmp_path: Path) -> None:
    """A product of a matrix and one vector is rounded differently where the matrix lies at an odd place."""
    from safetensors.torch import load_file, save_file

    adapter = load_model(str(tiny), device="cpu")
    folder = tmp_path / "odd"
    adapter.model.save_pretrained(folder)
    adapter.tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for width in range(4):
        save_file(tensors, folder / "model.safetensors", {"format": "pt", "pad": " " * 8 * width})
        odd = load_model(str(folder), device="cpu")
        assert {parameter.data_ptr() % 64 for parameter in odd.model.parameters()} == {0}
        ids = torch.tensor([[7]])
        with torch.inference_mode():
            assert torch.equal(odd.model(input_ids=ids).logits, adapter.model(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PERTURBKV_CACHE": "/chosen", "XDG_CACHE_HOME": "/caches"}, "/chosen"),
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/perturbkv"),
        ({"HOME": "/home/somebody"}, "/home/somebody/.cache/perturbkv"),
    ],
)
def test_the_cache_is_where_the_user_wants_it(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PERTURBKV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", "linux")
    assert user_cache.cache_folder() == Path(expected)


def test_its_size_is_that_of_its_files(cache: Path) -> None:
    assert user_cache.usage() == (0, 0)
    entry = user_cache.cached_folder("entry", lambda folder: (folder / "file").write_text("12345"))
    assert user_cache.usage() == (1, 5 + os.path.getsize(entry / "listing.json"))
