"""α per layer or head: what a file may hold, what it becomes, and that equal shares keep what the number keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from perturbkv.analyses.sides import matches
from perturbkv.configs import alpha_table
from perturbkv.configs.alpha_table import AlphaTable
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError
from perturbkv.selection.grid import configuration, grid
from tests.core.test_selection_equals_the_oracle import LAYERS, check, statistics
from tests.support.resolved import select

ROWS = [[0.0, 0.3, 1.0, 0.8], [0.6, 0.1, 0.45, 0.95], [0.5, 0.5, 0.25, 0.0]]
HEAD = {"by": "head", "alpha": ROWS, "layers": [0, 1, 2]}
LAYER = {"by": "layer", "alpha": [0.1, 0.9, 0.4], "layers": [0, 1, 2]}
GLOBAL = {"by": "global", "alpha": 0.7}


def written(folder: Path, document: object, name: str = "a.json") -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def of(table: object, **fields: Any) -> EvictionConfig:
    return configuration(20, selection=Choice("two-stage", {"alpha": table}), **{"window": 6, **fields})


def table(document: dict[str, Any], name: str = "a.json") -> AlphaTable:
    return AlphaTable.from_document(document, name)


def test_a_file_becomes_a_table_that_the_configuration_holds(tmp_path: Path) -> None:
    path = written(tmp_path, {**HEAD, "about": {"samples": 8}}, "alpha-head.json")
    (config,) = grid(20, window=6, selection=f"two-stage(alpha={path})")
    path.unlink()
    assert config.alpha == AlphaTable("alpha-head.json", "head", tuple(map(tuple, ROWS)), (0, 1, 2))
    text = f"alpha-head.json@{config.alpha.digest}"
    assert config.label() == f"snapkv:two-stage(alpha={text}) b=20 w=6 query"
    assert (config.flat()["selection_alpha"], config.label_parts()["alpha"]) == (text, f"a={text}")
    assert config.mean_alpha == pytest.approx(sum(map(sum, ROWS)) / 12)


def test_a_run_carries_the_table(tmp_path: Path) -> None:
    for document in (HEAD, LAYER, GLOBAL):
        named = of(table(document, "mine, yours.json"))
        run = RunConfig("m", "d", (named, configuration(20, window=6)))
        again = RunConfig.from_json(run.to_json())
        assert again == run and again.labels() == run.labels()
        assert again.configs[0].alpha == table(document, "mine, yours.json")
        assert hash(again.configs[0]) == hash(named)
    assert '(alpha="mine, yours.json@' in named.label()


def test_labels_of_numbers_stay_what_they_were() -> None:
    labels = [configuration(20, window=6, selection=f"two-stage(alpha={alpha})").label() for alpha in (0, 0.25, 0.5)]
    assert labels == [f"snapkv:two-stage{alpha} b=20 w=6 query" for alpha in ("(alpha=0.0)", "", "(alpha=0.5)")]
    document = configuration(20, window=6).to_document()
    assert document["selection_options"]["alpha"] == 0.25


def test_files_of_one_name_are_told_apart_and_one_table_is_not_taken_twice() -> None:
    first, second = table(HEAD), table({**HEAD, "alpha": ROWS[::-1]})
    assert str(first) != str(second) and str(first).startswith("a.json@")
    assert first.digest == table(HEAD, "b.json").digest
    model = type("Config", (), {"num_hidden_layers": 3, "num_attention_heads": 4})()
    alpha_table.check_tables([first, second, 0.25, first], model)
    with pytest.raises(ConfigError, match="a.json and b.json hold one table of alpha; give one of them"):
        alpha_table.check_tables([first, table(HEAD, "b.json")], model)


def test_a_label_names_the_file_and_what_has_to_be_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    held = table(HEAD)
    written(tmp_path, HEAD)
    assert of(f"{held}").alpha == held
    written(tmp_path, LAYER)
    with pytest.raises(ConfigError, match=f"expected the table {held.digest} in a.json, got .*: the file was changed"):
        of(f"{held}")


def test_a_side_of_a_comparison_is_told_by_the_file() -> None:
    config = of(table(HEAD))
    for side in (
        "two-stage",
        "two-stage(alpha=a.json)",
        "two-stage(alpha=runs/x/a.json)",
        f"two-stage(alpha={config.alpha})",
    ):
        assert matches(config, side)
    assert not matches(config, "two-stage(alpha=b.json)") and not matches(config, "two-stage(alpha=0.25)")


BY_HEAD = ("adakv", "headkv")
"""Their budgets are by head, which one kept set per layer does not take."""
TAKEN = [
    (policy, granularity)
    for policy in ("snapkv", "pyramidkv", "h2o", *BY_HEAD)
    for granularity in (("query", "kv") if policy in BY_HEAD else ("query", "kv", "layer"))
]


@pytest.mark.parametrize("document", [HEAD, LAYER, GLOBAL], ids=lambda one: one["by"])
@pytest.mark.parametrize(("policy", "granularity"), TAKEN)
def test_what_a_table_keeps_equals_the_oracle(policy: str, document: dict[str, Any], granularity: str) -> None:
    for more in ({}, {"split": "total", "protect_first": 3}):
        check(of(table(document), policy=policy, granularity=granularity, **more), 4, 2, n=50, seed=7, ties=bool(more))


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.25, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("policy", ["snapkv", "adakv", "pyramidkv", "headkv", "h2o", "tova"])
@pytest.mark.parametrize("granularity", ["query", "kv"])
def test_equal_shares_keep_exactly_what_the_number_keeps(granularity: str, policy: str, alpha: float) -> None:
    documents = [
        {**HEAD, "alpha": [[alpha] * 6] * LAYERS},
        {**LAYER, "alpha": [alpha] * LAYERS},
        {**GLOBAL, "alpha": alpha},
    ]
    for seed, more in enumerate(({}, {"split": "total"}, {"protect_first": 2})):
        given = statistics(6, 2, 60, 6, seed)
        fields = {"policy": policy, "granularity": granularity, **more}
        number = select(of(alpha, **fields), given, 60)
        for document in documents:
            found = select(of(table(document), **fields), given, 60)
            assert torch.equal(found.kept, number.kept) and torch.equal(found.stage1, number.stage1)


def test_heads_that_share_a_kept_set_take_their_mean() -> None:
    assert of(table(HEAD), granularity="kv").alphas(1, 2) == (0.35, 0.7)
    assert of(table(HEAD), granularity="layer").alphas(1, 2) == (0.525, 0.525)
    assert of(table(HEAD)).alphas(2, 4) == (0.5, 0.5, 0.25, 0.0)
    assert table({**HEAD, "alpha": [[0.1] * 3, [0.3] * 3, [0.7] * 3]}).kept_set_shares(1, 1) == (0.3,)


BAD: dict[str, tuple[object, str]] = {
    "no json": ("{", "text that is no JSON"),
    "a list": ([1], 'expected {"by": "global|layer|head", .* got list'),
    "by nothing": ({"alpha": 0.5}, "got None"),
    "by what": ({"by": "sample", "alpha": 0.5}, "got 'sample'"),
    "another key": ({**LAYER, "layer": [0]}, "expected by, alpha, layers and about in a.json, got 'layer'"),
    "no alpha": ({"by": "global"}, "to be a number, got None"),
    "text": ({"by": "global", "alpha": "0.5"}, "to be a number, got 0.5"),
    "true": ({"by": "global", "alpha": True}, "to be a number, got True"),
    "above 1": ({"by": "global", "alpha": 1.5}, r"expected every alpha of a.json in \[0, 1\], got 1.5"),
    "below 0": ({**LAYER, "alpha": [0.1, -0.1, 0.4]}, r"in \[0, 1\], got -0.1"),
    "nan": ('{"by": "global", "alpha": NaN}', "NaN is no number"),
    "a huge number": ('{"by": "global", "alpha": 1e999}', "to be a number, got inf"),
    "a huge integer": ({"by": "global", "alpha": 10**400}, "to be a number, got 1000"),
    "rows for layers": ({**LAYER, "alpha": ROWS}, "to be a list of a number per layer, got"),
    "numbers for rows": ({**HEAD, "alpha": [0.1, 0.2, 0.3]}, "to be a list of numbers per head for each layer, got"),
    "uneven rows": ({**HEAD, "alpha": [[0.1], [0.1, 0.2], [0.1]]}, "for its 3 layers; got 3 × 1, 2"),
    "too few rows": ({**HEAD, "alpha": ROWS[:2]}, "for its 3 layers; got 2 × 4"),
    "no layers": ({"by": "layer", "alpha": [0.1]}, "for its 0 layers; got 1 × 1"),
    "layers of text": ({**LAYER, "layers": ["0", "1", "2"]}, "decoder layers such as"),
}


@pytest.mark.parametrize(("document", "said"), BAD.values(), ids=BAD)
def test_another_file_is_refused(document: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        of(str(written(tmp_path, document)))
    assert "\n" not in str(error.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="expected shares of stage 1 as JSON at .*, got nothing; studies/alpha.py writes them"
    ):
        of(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="got a folder, not a regular file"):
        of(str(tmp_path))
    huge = tmp_path / "huge.json"
    with huge.open("wb") as stream:
        stream.truncate(17 * 2**20)
    with pytest.raises(ConfigError, match="more than 16 MiB"):
        of(str(huge))


@pytest.mark.parametrize("selection", ["attention", "value", "random"])
def test_selections_without_stages_take_numbers_alone(selection: str, tmp_path: Path) -> None:
    path = written(tmp_path, GLOBAL)
    with pytest.raises(ConfigError, match=f"alpha of selection '{selection}' is a number, got"):
        configuration(20, window=6, selection=f"{selection}(alpha={path})")


def test_a_table_of_another_model_is_refused() -> None:
    heads = type("Config", (), {"num_hidden_layers": 3, "num_attention_heads": 6})()
    layers = type("Config", (), {"num_hidden_layers": 2, "num_attention_heads": 4})()
    with pytest.raises(
        ConfigError, match="expected shares of layers 0-2 and 6 heads, .* got those of layers 0-2 and 4"
    ):
        alpha_table.check_tables([table(HEAD)], heads)
    alpha_table.check_tables([table(LAYER), table(GLOBAL)], heads)
    for document in (HEAD, LAYER, {**GLOBAL, "layers": [0, 1, 2]}):
        with pytest.raises(ConfigError, match="expected shares of layers 0-1.* got those of layers 0-2"):
            alpha_table.check_tables([table(document)], layers)
