"""Positions that another program kept: their layout, what is refused, and logits held against the masked reference."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import perturbkv as pk
from perturbkv.analyses.audit.audit import Audit
from perturbkv.auditing import positions_file
from perturbkv.configs.audit_settings import KEPT_FILE
from tests.audit import planted
from tests.audit.test_planted_faults_are_told_apart import model
from tests.support.models import token_ids

IDS = token_ids(60)
MORE = (5, 6, 7)
KEPT = [[planted.positions(60, head).tolist() for head in range(2)] for _ in range(3)]

NO_POSITIONS = "does not hold kept positions as docs/how-to/audit.md lays them out"


def audited(path: Path, **more: Any) -> Audit:
    asked = {"steps": 3, "losses": False, "progress": False, **more}
    return pk.audit(model("llama"), pk.Prompt("p", IDS, 0), path, **asked)


def logits(shift: int = 0) -> np.ndarray[Any, Any]:
    """What a right eviction decodes, `shift` positions too late."""
    adapter, ids = model("llama"), torch.tensor([IDS])
    with torch.inference_mode():
        cache = planted.right(adapter.model, ids, torch.ones_like(ids))
        found = [
            adapter.model(
                input_ids=torch.tensor([[token]]), position_ids=torch.tensor([[place]]), past_key_values=cache
            ).logits[0, -1]
            for place, token in enumerate(MORE, 60 + shift)
        ]  # fmt: skip
    assert isinstance(cache, DynamicCache)
    return torch.stack(found).numpy()


def as_npz(path: Path, **more: Any) -> Path:
    arrays = {f"layer_{layer}_head_{head}": one for layer, sets in enumerate(KEPT) for head, one in enumerate(sets)}
    np.savez(path, **arrays, **more)
    return path


def test_both_layouts_are_read_alike(tmp_path: Path) -> None:
    npz = as_npz(tmp_path / "a.npz", token_ids=IDS, tokens=MORE, logits=logits())
    text = tmp_path / "a.json"
    text.write_text(json.dumps({"token_ids": IDS, "kept": KEPT, "tokens": MORE, "logits": logits().tolist()}))
    for path in (npz, text):
        result = audited(path)
        assert (result.verdict, result.kind) == ("exact", "positions file")
        (run,) = result.runs
        assert run.entries is not None
        assert [[one.tolist() for one in layer] for layer in run.entries.kept_sets] == KEPT
        assert run.steps
        assert all(step.same_token for step in run.steps)


def test_logits_of_other_positions_differ_at_their_first_step(tmp_path: Path) -> None:
    wrong = logits()
    wrong[1:] = logits(shift=1)[1:]
    result = audited(as_npz(tmp_path / "a.npz", token_ids=IDS, tokens=MORE, logits=wrong))
    assert (result.verdict, result.faults[0].step, result.faults[0].layer) == ("differs", 1, -1)
    assert "the logits differ from the reference's" in result.conclusion()


def test_without_logits_only_the_kept_sets_are_looked_at(tmp_path: Path) -> None:
    result = audited(as_npz(tmp_path / "a.npz"), losses=True)
    assert result.conclusion().startswith("not compared: nothing was decoded")
    assert result.exit_code == 2
    assert result.losses[0].cache_share == pytest.approx(planted.KEPT / 60)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"kept": [[[0, 60], [1]]] * 3}, "layer 0, head 0 keeps position 60"),
        ({"kept": KEPT[:2]}, "it has 2 layers, the model 3"),
        ({"kept": [[[0]] * 3] * 3}, "layer 0 has 3 heads, expected 2 or 4"),
        ({"kept": KEPT, "logits": [[0.5, 1.0]]}, "its logits have 2 tokens, the model's 260"),
        ({"kept": KEPT, "token_ids": [260] * 60}, "the token 260, the model's vocabulary has 260"),
        ({"kept": KEPT, "tokens": [2**40]}, "the token 1099511627776, the model's vocabulary has 260"),
        ({"kept": KEPT, "tokens": [3], "logits": [[0.5] * 260] * 2}, "logits of 2 steps and tokens of 1"),
        ({"kept": [*KEPT[:2], KEPT[2] * 2]}, "layer 2 has 4 heads, expected 2 or 4, as many in every layer"),
    ],
)
def test_positions_of_another_model_or_prompt_are_unreadable(
    tmp_path: Path, document: dict[str, Any], words: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document))
    result = audited(path)
    assert (result.verdict, result.exit_code) == ("unreadable", 2)
    assert words in result.conclusion()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"kept": [[[0, 0], [1]]]}',
        '{"kept": [[[0.5], [1]]]}',
        '{"kept": [[[true, 5], [1]]]}',
        "{}",
        '{"kept": [[[0]]], "tokens": [1.7]}',
        '{"kept": [[[0]]], "token_ids": ["1"]}',
        '{"kept": [[[0]]], "token_ids": [-1]}',
        '{"kept": [[[0]]], "token_ids": [1180591620717411303424]}',
        '{"kept": [[[0]]], "logits": [[NaN]]}',
        '{"kept": [[[0]]], "logits": [[null]]}',
        '{"kept": ' + "[" * 5_000 + "]" * 5_000 + "}",
    ],
)
def test_a_file_of_another_layout_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(pk.PerturbkvError, match=NO_POSITIONS):
        audited(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"kept": [[[0]]], "kept": [[[1]]]}', "the key 'kept' is there twice"),
        ('{"kept": [[[0]]], "tokens": [1], "tokens": [2]}', "the key 'tokens' is there twice"),
        ('{"kept": [[[0]]], "token_id": [1]}', "unknown name 'token_id'; known: kept, token_ids, tokens, logits"),
    ],
)
def test_a_key_that_is_there_twice_or_means_nothing_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(pk.PerturbkvError, match=f"{NO_POSITIONS}: ValueError: {words}"):
        audited(path)


@pytest.mark.parametrize("name", ["token_id", "layer_00_head_0", "layer_0_head_٠", "layer_0", "kept"])
def test_an_array_that_means_nothing_is_refused_by_name(tmp_path: Path, name: str) -> None:
    known = "known: layer_0_head_0, …, token_ids, tokens, logits"
    with pytest.raises(pk.PerturbkvError, match=f"{NO_POSITIONS}: ValueError: unknown name '{name}'; {known}"):
        audited(as_npz(tmp_path / "a.npz", **{name: [1]}))


def test_an_array_that_is_there_twice_is_refused_by_name(tmp_path: Path) -> None:
    path = as_npz(tmp_path / "a.npz")
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("layer_0_head_0.npy", archive.read("layer_0_head_0.npy"))
    with pytest.raises(pk.PerturbkvError, match=f"{NO_POSITIONS}: ValueError: the array 'layer_0_head_0' is there"):
        audited(path)


def test_several_prompts_for_a_file_that_names_none_are_refused(tmp_path: Path) -> None:
    path = as_npz(tmp_path / "a.npz")
    prompts = [pk.Prompt(name, IDS, 0) for name in "ab"]
    with pytest.raises(pk.PerturbkvError, match="expected one prompt"):
        pk.audit(model("llama"), prompts, path, progress=False)


def npz_of(path: Path, member: bytes, compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as made:
        made.writestr("layer_0_head_0.npy", member)
    return path


def header(shape: str) -> bytes:
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def test_an_archive_that_unpacks_to_more_than_it_may_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = npz_of(tmp_path / "a.npz", header("(500000,)") + bytes(4_000_000))
    monkeypatch.setattr(positions_file, "KEPT_FILE", replace(KEPT_FILE, max_bytes=2**20))
    with pytest.raises(pk.PerturbkvError, match="it unpacks to 4,000,0.. bytes, more than 1 MiB"):
        audited(path)


@pytest.mark.parametrize("member", [header(f"({2**50},)"), header("(-1,)"), b"", b"no array", header("x") + bytes(8)])
def test_an_archive_of_no_arrays_is_one_line(tmp_path: Path, member: bytes) -> None:
    with pytest.raises(pk.PerturbkvError, match=NO_POSITIONS):
        audited(npz_of(tmp_path / "a.npz", member))


def test_a_damaged_archive_and_layers_that_are_far_apart_are_one_line(tmp_path: Path) -> None:
    whole = as_npz(tmp_path / "a.npz").read_bytes()
    encrypted = bytearray(whole)
    encrypted[whole.index(b"PK\x01\x02") + 8] |= 1
    for content in (b"", whole[:-30], whole[:99] + b"\xff" * 40 + whole[139:], bytes(encrypted)):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(pk.PerturbkvError, match=NO_POSITIONS):
            audited(tmp_path / "a.npz")
    with pytest.raises(pk.PerturbkvError, match=NO_POSITIONS):
        audited(as_npz(tmp_path / "b.npz", layer_1000000000_head_0=[1]))
