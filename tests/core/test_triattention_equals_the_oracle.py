"""TriAttention's score against complex numbers in float64, its file of centres, and what is refused of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perturbkv as pk
from perturbkv.configs.resources import CHUNK_BYTES
from perturbkv.engines import work_items
from perturbkv.errors import ConfigError, PluginError
from perturbkv.scoring import score_registry
from perturbkv.scoring.compute import layer_scores
from perturbkv.scoring.layer_view import LayerView, Rotation
from perturbkv.selection.layer_statistics import LayerStatistics
from perturbkv.selection.policies import registry
from perturbkv.selection.ranking import Scores
from perturbkv.selection.resolved_config import resolve
from tests.oracle import later_scores as naive
from tests.oracle.scores import rotated
from tests.support.layers import layer_view
from tests.support.models import HEADS

FREQUENCIES = np.array([1.0, 0.03])
"""Four of the six components of a head are rotary."""
FACTOR, N = 1.25, 24


def rotary(positions: range) -> Rotation:
    angles = torch.tensor(positions, dtype=torch.float64).unsqueeze(-1) * torch.from_numpy(FREQUENCIES).repeat(2)
    return Rotation(FACTOR * angles.cos(), FACTOR * angles.sin())


def seen(heads: tuple[int, int], seed: int = 3) -> tuple[LayerView, np.ndarray, np.ndarray]:
    """A layer, its queries and its keys before rotation; queries lie around a centre."""
    plain = layer_view(*heads, n=N, seed=seed)
    queries, keys = (plain.queries + 2 * plain.queries[:, :1]).numpy(), plain.keys.numpy()
    turned = {
        name: torch.from_numpy(
            np.array([[rotated(row, place, FREQUENCIES, FACTOR) for place, row in enumerate(head)] for head in vectors])
        )
        for name, vectors in (("queries", queries), ("keys", keys))
    }
    return layer_view(*heads, n=N, seed=seed, rotary=rotary, **turned), queries, keys


def computed(text: str, layer: LayerView) -> torch.Tensor:
    score = score_registry.build(text)
    return layer_scores(layer, [score], CHUNK_BYTES)[score]


def centres(queries: np.ndarray, layer: int = 0) -> dict[str, Any]:
    """The document of these queries, by hand."""
    found = {}
    for head, rows in enumerate(queries):
        size = [float(np.mean([abs(complex(row[f], row[f + 2])) for row in rows])) for f in range(2)]
        found[f"{layer}-{head}"] = {"mean": rows.mean(axis=0).tolist(), "size": size}
    return found


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("farthest", "normalise"), [(65_536, True), (65_536, False), (1, False), (100, True)])
def test_a_score_is_its_formula(heads: tuple[int, int], farthest: int, normalise: bool) -> None:
    layer, queries, keys = seen(heads)
    expected = naive.triattention(queries, keys, FREQUENCIES, FACTOR, N, layer.prefix, farthest, normalise)
    found = computed(f"triattention(farthest={farthest}, normalise={str(normalise).lower()})", layer)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9)


def test_a_group_takes_its_largest() -> None:
    layer, queries, keys = seen((4, 2))
    expected = np.array(naive.triattention(queries, keys, FREQUENCIES, FACTOR, N, layer.prefix, 65_536, True))
    (chosen,) = pk.grid(12, policy="triattention", selection="attention", granularity="kv", window=5)
    rows = LayerStatistics(computed("triattention", layer), layer.norms[:, : layer.prefix], 2, 0, 1, "s")
    largest = expected.reshape(2, 2, -1).max(axis=1)
    np.testing.assert_allclose(Scores(rows).attention(resolve(chosen)).numpy(), largest, rtol=1e-9, atol=1e-9)


def test_a_file_of_the_prompts_own_centres_gives_the_same_scores(tmp_path: Path) -> None:
    layer, queries, _ = seen((4, 2))
    path = tmp_path / "centres.json"
    path.write_text(json.dumps(centres(queries)))
    found = computed(f"triattention(file={path})", layer)
    torch.testing.assert_close(found, computed("triattention", layer), rtol=1e-9, atol=1e-9)
    path.write_text(json.dumps(centres(queries[::-1])))
    assert not torch.allclose(computed(f"triattention(file={path})", layer), found), "the file is read anew"


def test_prompts_inside_the_window_have_no_score() -> None:
    assert computed("triattention", layer_view(4, 2, n=4, seed=2, rotary=rotary)).shape == (4, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "expected query centres as JSON at .*, got nothing; studies/triattention.py makes them"),
        ("{", "got text that is no JSON"),
        ("{}", "got JSON that is not"),
        ('{"0-0": {"mean": [1, 2]}}', "got JSON that is not"),
        ('{"0-0": {"mean": [1, "a"], "size": [1]}}', "got JSON that is not"),
    ],
)
def test_a_file_that_holds_no_centres_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "centres.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        resolve(*pk.grid(40, policy=f"triattention(file={path})", selection="attention"))


def test_centres_of_another_model_are_refused(tmp_path: Path) -> None:
    layer, queries, _ = seen((4, 2))
    for document in (centres(queries[:3]), centres(queries, layer=1), centres(queries[..., :5])):
        path = tmp_path / "centres.json"
        path.write_text(json.dumps(document))
        with pytest.raises(ConfigError, match="expected query centres of 1 layers × 4 heads in .*of another model"):
            computed(f"triattention(file={path})", layer)


def test_a_run_knows_the_version_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "centres.json"
    path.write_text(json.dumps(centres(seen((4, 2))[1])))
    policies = (f"triattention(file={path})", f"pyramidkv(by=triattention(file={path}))")
    configs = [pk.grid(40, policy=policy, selection="attention")[0] for policy in policies]
    first = [registry.plugin_digests(config) for config in configs]
    assert [set(digests) for digests in first] == [{str(path)}] * 2
    run = pk.RunConfig("m", "d", tuple(configs), plugins=first[0])
    assert work_items.registered_modules(run) == ()
    work_items.import_plugins((), run)
    path.write_text(path.read_text() + "\n")
    with pytest.raises(PluginError, match="got another version of it here; copy its file"):
        work_items.import_plugins((), run)
    assert [registry.plugin_digests(config) for config in configs] != first
    assert registry.plugin_digests(pk.grid(40, policy="triattention", selection="attention")[0]) == {}
