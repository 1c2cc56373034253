"""Tokens that the server moves in its cache, instead of reading them again, were computed after other text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.llamacpp.conftest import Audited, complete, save, start


@pytest.mark.slow
def test_a_part_that_is_moved_to_another_place_is_named(
    in_float32: Path, audited: Audited, text: tuple[int, ...], tmp_path: Path
) -> None:
    """Of the second prompt the server moves tokens 50 to 99 of the first one to 20 to 69, and rotates their keys."""
    server = start(in_float32, "f16", "f16", True, tmp_path, n_cache_reuse=16)
    complete(server, text[:100], 4)
    complete(server, [*text[:20], *text[50:100], *text[200:210]], 4)
    save(server, "reused.bin")
    audit = audited(tmp_path / "reused.bin", "float32")
    first = audit.faults[0]
    assert (first.kind, first.first, first.last, first.layers[0]) == ("context", 20, 69, 1), audit.summary
    assert first.what == "right in layer 0, from layer 1 on computed after other text"
    assert {fault.kind for fault in audit.faults} == {"context"}


@pytest.mark.slow
def test_a_context_that_was_shifted_is_named(
    in_float32: Path, audited: Audited, text: tuple[int, ...], tmp_path: Path
) -> None:
    """A full context loses half of its tokens; those after them stay as they were computed."""
    server = start(in_float32, "f16", "f16", True, tmp_path, context=256, ctx_shift=True)
    complete(server, text[:230], 50)
    save(server, "shifted.bin")
    audit = audited(tmp_path / "shifted.bin", "float32")
    assert audit.verdict == "differs" and audit.requests[0].tokens < 256
    assert (audit.faults[0].kind, audit.faults[0].layers[0]) == ("context", 1), audit.summary
