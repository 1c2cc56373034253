"""Tokens that the server moves in its cache, instead of reading them again, were computed after other text."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.llamacpp.conftest import Audited, complete, save, start

WHAT = "right in layer 0, from layer 1 on computed after other text"
MADE = [("float32", "f16"), ("q4_1", "f16"), ("q4_1", "q8_0"), *product(("float32", "q4_1"), ("q4_0", "q4_1"))]


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "kind"), MADE)
def test_a_part_that_is_moved_to_another_place_is_named(
    files: dict[str, Path], audited: Audited, text: tuple[int, ...], tmp_path: Path, weights: str, kind: str
) -> None:
    """Of the second prompt the server moves tokens 50 to 99 of the first one to 20 to 69, and rotates their keys.

    With weights in 4 bits one to four of these tokens lie above the limits of layer 1, and in a cache of 4 bits none.
    """
    server = start(files[weights], kind, kind, True, tmp_path, n_cache_reuse=16)
    complete(server, text[:100], 4)
    complete(server, [*text[:20], *text[50:100], *text[200:210]], 4)
    save(server, "reused.bin")
    audit = audited(tmp_path / "reused.bin", weights)
    first = audit.faults[0]
    assert (first.kind, first.what, first.first) == ("context", WHAT, 20), audit.summary
    ends = {"float32": (69, 69), "q4_1": (69, 70)}[weights] if kind in ("f16", "q8_0") else (64, 72)
    assert ends[0] <= first.last <= ends[1]
    assert first.layers[0] == 1 or kind in ("q4_0", "q4_1")


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "kind"), MADE)
def test_a_context_that_was_shifted_is_named(
    files: dict[str, Path], audited: Audited, text: tuple[int, ...], tmp_path: Path, weights: str, kind: str
) -> None:
    """A full context loses half of its tokens; those after them stay as they were computed."""
    server = start(files[weights], kind, kind, True, tmp_path, context=256, ctx_shift=True)
    complete(server, text[:230], 50)
    save(server, "shifted.bin")
    audit = audited(tmp_path / "shifted.bin", weights)
    assert audit.verdict == "differs" and audit.requests[0].tokens < 256
    first = audit.faults[0]
    assert (first.kind, first.first) == ("context", 0), audit.summary
    assert 110 < first.last < 133
    assert first.layers[0] == 1 or kind in ("q4_0", "q4_1")
