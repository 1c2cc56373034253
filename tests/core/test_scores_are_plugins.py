"""Anyone's score goes in by a name, a file or a package, sees what it needs alone, and breaks in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import perturbkv as pk
from perturbkv.configs import plugins
from perturbkv.configs.choice import Choice
from perturbkv.configs.resources import CHUNK_BYTES
from perturbkv.configs.run import RunConfig
from perturbkv.errors import BudgetError, ConfigError, PluginError, UnknownNameError
from perturbkv.scoring.compute import layer_scores
from perturbkv.scoring.layer_view import NEEDS, LayerView
from perturbkv.scoring.score import Score
from perturbkv.scoring.score_registry import SCORES
from perturbkv.scoring.scores.snapkv import SnapKV
from perturbkv.selection import compatibility
from perturbkv.selection.policies import registry
from perturbkv.selection.resolved_config import resolve
from tests.support.layers import layer_view

PEAK = """
from dataclasses import dataclass
import perturbkv as pk

@dataclass(frozen=True)
class Peak(pk.Score):
    tau: float = pk.option(1.0, "exponent")

    def score(self, layer):
        return layer.attention[..., : layer.prefix].amax(dim=1) ** self.tau

class Other:
    pass
"""


def computed(score: Score, view: LayerView | None = None, chunk_bytes: int = CHUNK_BYTES) -> torch.Tensor:
    return layer_scores(view or layer_view(4, 2, 30, 1), [score], chunk_bytes)[score]


@pytest.fixture
def peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(PEAK)
    return path


@pytest.fixture
def registered() -> Iterator[type[Score]]:
    @pk.register_score
    @dataclass(frozen=True)
    class Middle(pk.Score):
        name = "middle"
        summary = "the median of the window's attention"

        def score(self, layer: LayerView) -> torch.Tensor:
            return layer.attention[..., : layer.prefix].median(dim=1).values

    yield Middle
    del SCORES.registered["middle"]


def test_a_registered_score_is_a_policy_and_ranks_for_others(registered: type[Score]) -> None:
    (alone,), (competing,) = pk.grid(24, policy="middle", window=5), pk.grid(24, policy="adakv(middle)", window=5)
    assert registry.build(alone.policy).score == registered() == registry.build(competing.policy).score
    assert competing.label().startswith("adakv(by=middle())")
    assert competing in pk.grid(24, policy="adakv(by=middle(pool=none), floor=0.2)", window=5)
    assert registry.names()[-1] == "middle"
    with pytest.raises(ConfigError, match="registered already"):
        pk.register_score(registered)


def test_a_score_of_a_file_is_read_and_told_from_its_next_version(peak: Path) -> None:
    (config,) = pk.grid(24, policy="mine.py:Peak(tau=2)", selection="attention", window=5)
    assert config.label().startswith("mine.py:Peak(tau=2.0):attention")
    score = registry.build(config.policy).score
    expected = layer_view(4, 2, 30, 1).attention[..., :25].amax(dim=1).square()
    torch.testing.assert_close(computed(score), expected)
    (before,) = registry.plugin_digests(config).items()
    peak.write_text(PEAK.replace("amax", "amin"))
    (after,) = registry.plugin_digests(config).items()
    assert (before[0], after[0]) == ("mine.py:Peak", "mine.py:Peak")
    assert before[1] != after[1]
    assert registry.plugin_digests(pk.grid(64, policy="adakv(mine.py:Peak)")[0]) == dict([after])
    assert registry.plugin_digests(pk.grid(64)[0]) == {}


def test_policy_and_selection_of_a_file_stand_in_one_text(peak: Path) -> None:
    (config,) = pk.grid(24, selection="mine.py:Peak(tau=2):attention-unpooled", window=5)
    assert (config.policy.name, config.selection.name) == ("mine.py:Peak", "attention-unpooled")


def test_what_a_trace_stores_of_a_nested_choice_is_read_without_the_plugin(peak: Path) -> None:
    (config,) = pk.grid(24, policy="adakv(mine.py:Peak(pool=max, tau=3), floor=0.1)", window=5)
    run = RunConfig("m", "d", (config,), plugins=registry.plugin_digests(config))
    text = run.to_json()
    peak.unlink()
    held = RunConfig.from_json(text)
    assert held == run
    assert held.configs[0].label() == config.label()
    assert held.configs[0].policy["by"].options["kernel"] == 7
    assert held.to_json() == text


def test_an_installed_package_brings_a_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brings_peak.py").write_text(PEAK)
    info = tmp_path / "brings_peak-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brings-peak\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[perturbkv.scores]\nsharp-peak = brings_peak:Peak\nno-peak = brings_peak:Other\ngone = brings_peak:Gone\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.installed_entry_points.cache_clear()
    try:
        assert "sharp-peak" in registry.names()
        (config,) = pk.grid(24, policy="sharp-peak(tau=2)", window=5)
        assert computed(registry.build(config.policy).score).shape == (4, 25)
        assert list(registry.plugin_digests(config)) == ["sharp-peak"]
        with pytest.raises(PluginError, match="expected 'no-peak' to be a subclass of Score"):
            pk.grid(24, policy="no-peak")
        with pytest.raises(PluginError, match="'gone' of the package brings-peak cannot be loaded: AttributeError"):
            pk.grid(24, policy="gone")
    finally:
        monkeypatch.undo()
        plugins.installed_entry_points.cache_clear()


@pytest.mark.parametrize("line", ["import beside", "from beside.deeper import what"])
def test_a_file_that_imports_what_lies_beside_it_is_told_how(peak: Path, line: str) -> None:
    (peak.parent / "beside.py").write_text("what = 1\n")
    peak.write_text(f"{line}\n{PEAK}")
    with pytest.raises(PluginError, match="cannot be loaded: ModuleNotFoundError: No module named 'beside'") as raised:
        registry.policy_class("mine.py:Peak")
    how = f"files beside it are imported by their names with PYTHONPATH={peak.parent} before the command"
    assert str(raised.value).endswith(f"(mine.py, line 1); {how}")
    peak.write_text(f"import nowhere_at_all\n{PEAK}")
    with pytest.raises(PluginError, match="nowhere_at_all") as raised:
        registry.policy_class("mine.py:Peak")
    assert "PYTHONPATH" not in str(raised.value)
    peak.write_text("x" * 1_000_000)
    with pytest.raises(PluginError, match=r"NameError: name 'x{100,200}… \(mine.py, line 1\)$"):
        registry.policy_class("mine.py:Peak")


def test_a_helper_on_the_path_is_imported(peak: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (peak.parent / "beside_the_score.py").write_text("exponent = 3.0\n")
    peak.write_text(f"from beside_the_score import exponent\n{PEAK.replace('1.0', 'exponent')}")
    monkeypatch.syspath_prepend(peak.parent)
    assert registry.policy_class("mine.py:Peak").options()["tau"].default == 3.0


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("nowhere.py:Peak", "expected a Python file at nowhere.py, got nothing"),
        ("mine.py:Pek", "no class 'Pek'; its classes: Peak, Other"),
        ("mine.py:Other", "expected 'mine.py:Other' to be a subclass of Score or Policy, got Other"),
        ("mine.py:Peak(sigma=1)", "no option 'sigma'; its options: tau, pool, kernel"),
        ("mine.py:Peak(tau=high)", "tau of policy 'mine.py:Peak' is a number, got 'high'"),
        ("broken.py:Peak", "broken.py cannot be loaded: ZeroDivisionError: division by zero"),
        ("adakv(peek)", "unknown score 'peek'"),
        ("adakv(adakv)", "unknown score 'adakv'"),
        ("adakv(by=snapkv(pool=none))", "is the policy's own score"),
        ("adakv(by=h2o, pool=none)", "pool of policy 'adakv' has no effect here: it needs the policy's own score"),
        ("adakv(by=h2o(kernel=3))", "kernel of score 'h2o' has no effect here"),
    ],
)
def test_what_is_no_score_is_one_line(peak: Path, policy: str, said: str) -> None:
    peak.with_name("broken.py").write_text("1 / 0\n")
    with pytest.raises((PluginError, ConfigError, UnknownNameError)) as found:
        pk.grid(24, policy=policy, window=5)
    assert said in str(found.value)
    assert "\n" not in str(found.value)


def broken(give: Any, **told: Any) -> Score:
    """A score of somebody else that gives this."""

    def score(self: Score, layer: LayerView) -> Any:
        return give(layer)

    kind = dataclass(frozen=True)(type("Broken", (Score,), {"score": score, "__module__": "theirs", **told}))
    return kind()


@pytest.mark.parametrize(
    ("give", "said"),
    [
        (lambda layer: torch.zeros(4, 30), r"gives the shape \(4, 30\), expected \(4, 25\): a row per query head, or"),
        (lambda layer: torch.zeros(3, 25), r"gives the shape \(3, 25\)"),
        (lambda layer: [1.0], "gives list, expected a tensor"),
        (lambda layer: torch.zeros(4, 25, dtype=torch.bool), "gives bool, expected numbers"),
        (lambda layer: torch.full((4, 25), torch.nan), "gives NaN or infinity for 100 entries"),
        (lambda layer: -torch.ones(4, 25), "gives numbers below 0; write signed = True into its class, and rank"),
        (lambda layer: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda layer: layer.values, "looks at values, which its needs"),
        (
            lambda layer: layer.next_query,
            "'next_query', which no layer shows: what comes after the prompt is not",
        ),
        (lambda layer: layer.hidden, "hidden of the layer were not captured"),
    ],
)
def test_a_broken_score_is_one_line_that_names_it(give: Any, said: str) -> None:
    score = broken(give, needs=("attention", "keys", "hidden"))
    with pytest.raises(PluginError, match=said) as found:
        computed(score)
    assert "\n" not in str(found.value)
    assert "Broken" in str(found.value) or "hidden" in said


def test_what_a_score_writes_to_changes_nothing_for_others(capsys: pytest.CaptureFixture[str]) -> None:
    def write(layer: LayerView) -> torch.Tensor:
        sys.stdout.write("hello")
        layer.keys.copy_(layer.keys.flip(1))
        return layer.attention.mul_(0).add_(1)[..., :25].sum(dim=1)

    view, score = layer_view(4, 2, 30, 1), broken(write, needs=("attention", "keys"))
    found = layer_scores(view, [score, SnapKV()], CHUNK_BYTES)
    assert torch.equal(found[SnapKV()], computed(SnapKV()))
    assert (capsys.readouterr().out, float(found[score].min())) == ("", 5.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("needs = ('attentoin',)", "expected needs to name some of queries, keys"),
        ("needs = 'attention'", "got 'attention'"),
        ("x: float = 2.0", "expected x to be an option"),
        ("import sys; sys.exit(0)", "cannot be loaded: SystemExit: 0 (mine.py, line"),
    ],
)
def test_a_class_that_cannot_work_is_told_before_anything_is_read(peak: Path, line: str, said: str) -> None:
    peak.write_text(PEAK.replace("    tau:", f"    {line}\n    tau:"))
    with pytest.raises(PluginError) as found:
        pk.grid(64, policy="mine.py:Peak")
    assert said in str(found.value)


def test_a_row_per_group_and_a_signed_score_are_taken() -> None:
    grouped = broken(lambda layer: torch.ones(2, 25, dtype=torch.float16))
    assert computed(grouped).dtype == torch.float64
    assert computed(broken(lambda layer: -torch.ones(4, 25), signed=True)).max() == -1


def test_signed_scores_are_refused_where_they_are_multiplied_or_mixed(registered: type[Score]) -> None:
    registered.signed = True
    with pytest.raises(ConfigError, match="selection 'two-stage' multiplies or mixes scores, and 'middle' gives some"):
        pk.grid(24, policy="middle", window=5)
    with pytest.raises(ConfigError, match="policy 'adakv' multiplies"):
        pk.grid(24, policy="adakv(middle)", selection="attention", window=5)
    assert pk.grid(24, policy="middle", selection="attention", window=5)
    assert pk.grid(24, policy="adakv(middle, safeguard=guaranteed)", selection="attention", window=5)


def test_a_score_that_holds_value_norms_is_told_where_they_are_multiplied_in_again() -> None:
    asked = [
        *pk.grid(64, policy=("caote", "snapkv", "adakv(obcache-value)"), selection=("attention", "two-stage")),
        *pk.grid(64, policy="dropkv", selection="two-stage-uniform"),
    ]
    assert compatibility.scores_with_norms_counted_twice(map(resolve, asked)) == ["caote", "obcache-value"]


def test_a_budget_that_a_scores_own_first_entries_fill_is_refused() -> None:
    """Nothing would be ranked, and the label would still name the score."""
    small, enough, all_of_it = (resolve(*pk.grid(budget, policy="value-norm", window=8)) for budget in (28, 29, 200))
    with pytest.raises(
        BudgetError, match="keeps 28 entries of 100, no more than policy 'value-norm' always keeps: the "
    ):
        compatibility.check_ends(small, 100)
    compatibility.check_ends(enough, 100)
    compatibility.check_ends(all_of_it, 100)
    compatibility.check_ends(resolve(*pk.grid(12, selection="streaming-llm:position", window=8)), 100)


def test_heads_in_parts_give_what_the_whole_layer_gives() -> None:
    for name in [name for name in SCORES.names() if "replay" not in SCORES.load(name).needs]:
        score = SCORES.load(name)()
        if {"hidden", "unrotated", "rotations"}.isdisjoint(score.needs):
            view = layer_view(6, 3, 40, 3)
            assert len(list(view.parts(1))) == 3
            torch.testing.assert_close(computed(score, view, 1), computed(score, view), rtol=1e-12, atol=0)


def test_needs_are_known_names() -> None:
    for name in SCORES.names():
        assert set(SCORES.load(name).needs) <= set(NEEDS), name


def test_scores_that_differ_in_pooling_alone_are_computed_once() -> None:
    assert SnapKV(pool="max").unpooled() == SnapKV(pool="average", kernel=3).unpooled()


def test_the_policy_that_a_score_is_is_made_once() -> None:
    """Making a class takes a millisecond."""
    for name in ("snapkv", "caote", "knorm"):
        assert registry.policy_class(name) is registry.policy_class(name)
        assert registry.build(Choice(name)) == registry.build(Choice(name))
