"""results/paper.md: its commands leave what its rows read, a killed run goes on, and what is written by hand stays."""

from __future__ import annotations

import json
import resource
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from tests.support.folders import model_folder
from tests.support.scripts import DOCS, STUDIES, functions, perturbkv, study

FEWER = {"--samples": "4", "--max-new-tokens": "2", "--heads": "1", "--proven": "1", "--permutations": "8"}
FEWER |= {"--compress-over": "400", "--max-tokens": "400"}
"""What makes a command small, of a model whose tokens are bytes."""
SECTIONS = ("Bounds and Assumption 1", "Heads and layers", "Answers and cost", "Open questions")


@pytest.fixture(scope="module")
def longbench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("longbench")
    text = "The river is wide and slow. " * 14
    rows = [{"_id": f"n{place}", "input": "", "context": f"{place} {text}", "answers": ["slow"]} for place in range(5)]
    (folder / "multi_news.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chats = [{"prompt": f"{place} {text}", "answers": ["slow"], "id": f"c{place}"} for place in range(5)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return folder


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, longbench: Path) -> Path:
    """What every command of the page leaves, of a tiny model."""
    output = tmp_path_factory.mktemp("paper")
    model = model_folder(output / "tiny", positions=1200)
    for step in functions("paper", STUDIES)["STEPS"]:
        calls = step.calls(longbench, output)
        for call in calls:
            words = _small(call, model, longbench)
            study(Path(words[0]).stem, *words[1:]) if words[0].startswith("studies/") else perturbkv(*words)
        (output / step.name / "step.json").write_text(json.dumps({"calls": calls, "seconds": 90.0}))
    return output


def _small(call: list[str], model: Path, longbench: Path) -> list[str]:
    fewer = FEWER | ({"--max-tokens": "200"} if "studies/regret.py" in call else {})  # a set is proved best
    words = [fewer.get(before, word) for before, word in zip(["", *call], call, strict=False)]
    words = [str(longbench / "chats.jsonl") if word.endswith("paper_chats.jsonl") else word for word in words]
    finished = any(word.endswith(("trace.h5", ".jsonl")) for word in words) and call[0] != "generate"
    return words if finished else [*words, "--model", str(model)]


def _page(longbench: Path, output: Path, page: Path) -> dict[str, list[list[str]]]:
    """The page's rows, by section."""
    shutil.copy(DOCS / "results" / "paper.md", page)
    study("paper", longbench, "--output", output, "--page", page, "--read")
    sections: dict[str, list[list[str]]] = {}
    for line in page.read_text().splitlines():
        if line.startswith("## "):
            sections[line[3:]] = []
        elif line.startswith("| ") and sections:
            sections[[*sections][-1]].append([cell.strip() for cell in line.strip("|").split(" | ")])
    return {title: rows[2:] for title, rows in sections.items() if rows}


@pytest.mark.slow
def test_every_row_is_read_from_what_its_command_leaves(longbench: Path, output: Path, tmp_path: Path) -> None:
    sections = _page(longbench, output, tmp_path / "paper.md")
    rows = [row for title in functions("paper", STUDIES)["SECTIONS"] for row in sections[title]]
    assert len(rows) > 40
    for row in rows:
        assert row[2], row
        said = {part.partition(" (")[0].rstrip("0123456789 ") for part in row[3].strip("*").split(", ")}
        assert said <= {*functions("paper_verdicts", STUDIES)["WORDS"]}, row
        assert "{" not in row[2] and "None" not in row[2], row
    costs = {row[0] for row in sections["What it would cost"]}
    assert {name for row in rows for name in row[6].split(", ")} == costs


def test_of_what_is_not_finished_nothing_is_said(longbench: Path, tmp_path: Path) -> None:
    sections = _page(longbench, tmp_path / "nothing", tmp_path / "paper.md")
    assert {row[3] for row in sections["Bounds and Assumption 1"]} == {"**not measured**"}
    assert {row[2] for row in sections["Bounds and Assumption 1"]} == {""}
    assert "# heads: not finished" in (tmp_path / "paper.md").read_text()
    by_hand = [
        line for line in (DOCS / "results" / "paper.md").read_text().splitlines() if line and line[0] not in "|#`p"
    ]
    assert all(line in (tmp_path / "paper.md").read_text() for line in by_hand)


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="expected <!-- Steps: begin --> … <!-- Steps: end --> in the page"):
        functions("paper", STUDIES)["replace_part"]("text", "Steps", "rows")


def test_a_killed_run_goes_on_and_a_finished_step_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, called, clock = functions("paper", STUDIES), [], iter(range(100))

    def run(words: list[str], check: bool) -> None:
        called.append(words[3])
        (tmp_path / "a").mkdir(exist_ok=True)
        if called == ["trace", "heads"]:
            raise subprocess.CalledProcessError(1, words)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_utime=next(clock), ru_stime=0.5))
    made = [steps["Step"]("a", ("trace --data-dir {longbench}", "heads {folder}/trace.h5"))]
    with pytest.raises(subprocess.CalledProcessError):
        steps["run"](made, Path("data"), tmp_path)
    assert steps["seconds"](made[0], Path("data"), tmp_path) is None
    assert json.loads((tmp_path / "a" / "spent.json").read_text()) == 2
    steps["run"](made, Path("data"), tmp_path)
    steps["run"](made, Path("data"), tmp_path)
    assert called == ["trace", "heads"] * 2
    assert steps["seconds"](made[0], Path("data"), tmp_path) == 4
    assert steps["seconds"](made[0], Path("other"), tmp_path) is None


def test_every_step_took_less_than_its_limit_and_all_less_than_two_hours() -> None:
    text = (DOCS / "results" / "paper.md").read_text()
    took = [line.rpartition(": ")[2] for line in text.splitlines() if line.startswith("# ") and line.endswith(" min")]
    minutes = [int(one.removesuffix(" min")) for one in took]
    assert len(minutes) == len(functions("paper", STUDIES)["STEPS"])
    assert max(minutes) <= functions("paper", STUDIES)["LIMIT"] / 60
    assert sum(minutes) < 120


def test_commands_stand_in_the_page_as_they_are_run() -> None:
    text = (DOCS / "results" / "paper.md").read_text()
    for step in functions("paper", STUDIES)["STEPS"]:
        for command in step.shown():
            assert command in text
            program, first, *_ = shlex.split(command)
            assert program == "perturbkv" or (program == "python" and (DOCS.parent / first).is_file())


def _ends(low: float, high: float) -> dict[str, Any]:
    return {"low": low, "high": high, "kind": "interval"}


def test_verdicts_follow_the_interval() -> None:
    rules = functions("paper_verdicts", STUDIES)
    of = rules["verdict"]
    assert [of(_ends(*ends), 1, -1) for ends in ((0.5, 0.9), (1.1, 1.2), (0.9, 1.1))] == [
        "supports",
        "unlike",
        "undecided",
    ]
    assert of(_ends(0.6, 0.7), 0.5, 1) == "supports"
    assert of(None, 1, 1) == of({"low": 2.0, "high": 3.0, "kind": "range"}, 1, 1) == "undecided"
    joined = rules["join_verdicts"]
    assert joined(["supports", "supports"]) == "supports"
    assert joined([]) == "undecided"
    assert joined(["not comparable (task)", "undecided", "supports", "undecided"]) == (
        "supports 1, undecided 2, not comparable (task) 1"
    )


def test_a_small_model_is_unlike_and_contradicts_nothing() -> None:
    words = functions("paper_verdicts", STUDIES)["WORDS"]
    assert not [word for word in words if "contra" in word or "refute" in word]
    hand = _by_hand()
    assert not [word for word in ("contradict", "contrary") if word in hand]


def test_the_page_prints_words_and_rules_and_every_row_has_one(longbench: Path, tmp_path: Path) -> None:
    sections = _page(longbench, tmp_path / "nothing", tmp_path / "paper.md")
    text = (tmp_path / "paper.md").read_text()
    rules = functions("paper_verdicts", STUDIES)
    for said in (*rules["WORDS"].values(), *rules["RULES"].values()):
        assert f"| {said} |" in text
    used = {row[4].strip("*") for title in SECTIONS for row in sections[title]}
    assert used == {*rules["RULES"]}


def _by_hand() -> str:
    return " ".join(
        line for line in (DOCS / "results" / "paper.md").read_text().splitlines() if not line.startswith("| ")
    )


def test_the_page_says_what_it_is_of() -> None:
    hand = _by_hand()
    assert "Every perturbation, drift and KL, isolated or propagated, is that of the first decoding token alone" in hand
    assert "The verdict is by the share of a prompt's heads and its interval over prompts." in hand


def test_one_better_and_eleven_worse_are_told_apart_by_the_sign_test() -> None:
    rules = functions("paper_verdicts", STUDIES)
    differences = np.array([0.5] + [-0.5] * 11 + [0.0] * 52)
    found = rules["judge_pair"](differences)
    assert (found.better, found.worse, found.verdict) == (1, 11, "unlike")
    assert found.p == pytest.approx(2 * sum(1 + 11 * k for k in (0, 1)) / 2**12)  # of 12 draws at most one is better
    assert "1 better, 11 worse, p = 0.0063" in found.text()
    assert rules["judge_pair"](-differences).verdict == "supports"
    assert rules["judge_pair"](differences[[0, 1, 2, *range(12, 40)]]).verdict == "undecided"


def test_paired_numbers_are_told_apart_where_their_intervals_overlap() -> None:
    """Prompts differ much more than the two sides of each prompt do."""
    prompts = np.linspace(0.1, 0.9, 12)
    second = prompts + 0.05 + 0.01 * np.cos(np.arange(12))
    found = functions("paper_verdicts", STUDIES)["judge_pair"](second - prompts)
    assert found.verdict == "supports"
    assert abs(found.value) < prompts.std() / 2


def test_a_ratio_of_ratios_is_paired() -> None:
    rules = functions("paper_verdicts", STUDIES)
    sizes = np.array([1.0, 30.0, 2.0, 500.0, 3.0, 80.0, 9.0, 4.0])  # a few prompts carry most of either sum
    wobble = 1 + 0.01 * np.sin(np.arange(8))
    value, ends = rules["paired_ratio"]((sizes * wobble, sizes), (2 * sizes, sizes))
    expected = sum(size * part for size, part in zip(sizes, wobble, strict=True)) / sum(2 * size for size in sizes)
    assert value == pytest.approx(expected)
    assert ends["low"] < value < ends["high"] < 0.6
    assert rules["verdict"](ends, 1, -1) == "supports"


def test_a_fall_over_layers_must_end_below_attention() -> None:
    falls = functions("paper_verdicts", STUDIES)["judge_falls"]
    below, around, above = _ends(0.7, 0.9), _ends(0.8, 1.1), _ends(1.1, 1.3)
    assert [falls(last, below) for last in (below, around, above)] == ["supports", "undecided", "unlike"]
    assert falls(below, around) == "undecided"  # no lower than after the first layer


def test_sign_tests_are_exact() -> None:
    sign_test = functions("paper_verdicts", STUDIES)["sign_test"]
    for better, worse in ((0, 0), (5, 0), (6, 0), (3, 21), (4, 4)):
        total = better + worse
        assert sign_test(better, worse) == pytest.approx(binomtest(better, total).pvalue if total else 1.0)
    assert [functions("paper_verdicts", STUDIES)["judge_counts"](*pair) for pair in ((5, 0), (6, 0), (0, 6))] == [
        "undecided",
        "supports",
        "unlike",
    ]


def test_cases_at_the_floor_are_named_and_left_out(tmp_path: Path) -> None:
    answers = functions("paper_answers", STUDIES)
    against = answers["compare_methods"]
    both = (("snapkv", "two-stage"), ("snapkv", "attention"))
    lost, kept = np.zeros(16), np.array([1.0] * 10 + [0.0] * 6)
    scored = {
        "needle": {128: (lost, np.array([1.0] + [0.0] * 15)), 256: (lost, kept)},
        "multi_news": {128: (np.full(16, 0.04), np.full(16, 0.03)), 256: (np.full(16, 0.04), np.full(16, 0.03))},
    }
    full = {"needle": np.ones(16), "multi_news": np.full(16, 0.05)}

    def made(output: Path, step: str, name: str) -> Any:
        of = {
            (*one, budget): side
            for budget, sides in scored[name].items()
            for one, side in zip(both, sides, strict=True)
        }
        return answers["Answers"](name, full[name], of)

    against.__globals__["answers"] = made
    told = against([both], [("a", "needle"), ("b", "multi_news")], frozenset({"needle"}), tmp_path)
    assert told.verdict == "unlike"  # 0 better, 10 worse: of the one case that says something
    assert "left out, at the floor: needle, b = 128; multi_news, b = 128; multi_news, b = 256; n" in told.text
    other = against([both], [("a", "needle")], frozenset(), tmp_path)
    assert other.verdict == "not comparable (task)"
    assert "0.62 → 0.00" in other.text and "0 better, 10 worse" in other.text


def test_half_of_a_loss_is_told_prompt_by_prompt() -> None:
    halved = functions("paper_answers", STUDIES)["judge_half"]
    full, before = np.ones(12), np.linspace(0.2, 0.6, 12)
    assert halved(full, before, 0.9 * full)[0] == "supports"
    assert halved(full, before, before)[0] == "unlike"
    assert halved(full, np.where(np.arange(12) % 2, 0.9, 1.1), full)[0] == "undecided"  # nothing was lost


def test_a_theorem_is_checked_and_a_violation_is_printed(tmp_path: Path) -> None:
    told = functions("paper_heads", STUDIES)["_inequality"]
    for count, wrong, said in ((40, 0, "checked"), (40, 3, "violated"), (0, 0, "undecided")):
        found = {"inequalities_checked": {"L ≤ θ": count}, "violations": wrong}
        _summary(tmp_path / "shares", {"bound-tightness": found, "assumption": {"samples": 40}})
        assert told("L ≤ θ", tmp_path).verdict == said


def _summary(folder: Path, analyses: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps({"analyses": analyses}))


def _kind(share: tuple[float, float], improved: int) -> dict[str, Any]:
    middle = sum(share) / 2
    ratios = {"sum_ratio": 0.8, "sum_ratio_interval": _ends(0.7, 0.9)}
    shares = {"share": middle, "share_interval": _ends(*share), "even": 0.0}
    return {**shares, **ratios, "improved": improved, "tied": 0}


def _compared(policy: str, way: str, share: tuple[float, float], improved: int) -> dict[str, Any]:
    kinds = {"propagated": _kind(share, improved), "isolated": _kind((0.9, 0.95), 260)}
    return {"treatment": {"policy": policy, "selection": way, "budget": 128}, "heads": 270, "samples": 40, **kinds}


def test_figure_2_leads_with_the_papers_estimator_and_decides_by_the_other(tmp_path: Path) -> None:
    told = functions("paper_heads", STUDIES)["_policy_heads"]
    told.__globals__["comparisons"] = lambda *asked: [_compared("snapkv", asked[3], (0.47, 0.57), 171)]
    found = told("snapkv", tmp_path)
    assert found.text.startswith(
        "propagated lower in 171 of 270 heads by their means, in 52 % [47, 57] of the heads of a prompt"
    )
    assert found.verdict == "undecided"  # 63 % by means has no verdict of its own


def test_equal_kept_sets_are_even() -> None:
    """Of ten heads four tie and three are better: 50 %, where a share of better heads would be 30 %."""
    differences = np.tile([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, -1.0, -1.0, -1.0], (12, 1, 1))
    found = functions("paper_verdicts", STUDIES)["even_share"](differences)
    assert (found["share"], found["even"]) == (0.5, 0.4)
    assert functions("paper_verdicts", STUDIES)["verdict"](found["share_interval"], 0.5, 1) == "undecided"


def test_answers_are_linked_beyond_the_methods_names(tmp_path: Path) -> None:
    """ρ above 0, as the methods that perturb less happen to score less, is no verdict."""
    high = {"value": 0.18, "interval": _ends(0.01, 0.36), "prompts": 20}
    none = {"value": 0.0, "interval": _ends(-0.02, 0.02), "prompts": 20}
    own = {"value": -0.1, "interval": _ends(-0.15, -0.05), "prompts": 20}
    for beyond, said in ((none, "undecided"), (own, "supports")):
        strengths = [{"measure": one, "rho": high} for one in ("isolated", "propagated")]
        names = [{"measure": one, "rho": {"others": high, "beyond": beyond}} for one in ("isolated", "propagated")]
        for folder in ("link", "link/news"):
            _summary(tmp_path / folder, {"correlation": {"overall": [{"strengths": strengths, "names": names}]}})
        assert functions("paper_answers", STUDIES)["_score_correlations"](tmp_path).verdict == said


@pytest.mark.parametrize(("closed", "least"), [(0, True), (128, False)])
def test_regret_is_a_lower_bound_that_depends_on_the_order(tmp_path: Path, closed: int, least: bool) -> None:
    factor = {"value": 3.84, "interval": _ends(2.18, 6.77)}
    one = {"config": {"selection": "two-stage"}, **dict.fromkeys(("factor", "form", "query", "criterion"), factor)}
    part = {"part": "prompt", "heads": 128, "closed": closed, "methods": [one]}
    (tmp_path / "regret").mkdir()
    (tmp_path / "regret" / "regret.json").write_text(json.dumps({"parts": [part], "samples": ["a"] * 8}))
    told = functions("paper_answers", STUDIES)["_regret"](tmp_path)
    assert ("at least 3.84 [2.18, 6.77]" in told.text) is least
    assert "another order would share it out otherwise" in told.text
    assert f"proven best in {closed} of 128 heads" in told.text


def test_harm_can_be_shown_and_excluded() -> None:
    harmless = functions("paper_verdicts", STUDIES)["judge_margin"]
    cases = ((1.02, 1.05), (0.9, 1.05), (0.9, 1.2), (1.2, 1.6))
    assert [harmless(_ends(*ends)) for ends in cases] == ["unlike", "supports", "undecided", "unlike"]


def test_open_questions_can_stay_open() -> None:
    rules, inside = functions("paper_verdicts", STUDIES), functions("paper_answers", STUDIES)["judge_inside"]
    assert [rules["judge_alike"](_ends(*ends)) for ends in ((0.99, 1.01), (1.03, 1.2), (0.9, 1.1))] == [
        "answered",
        "answered",
        "undecided",
    ]
    most = next(count for count in range(30) if binomtest(count + 1, 30, 0.08, "greater").pvalue <= 0.05)
    assert [rules["judge_players"](count, 30) for count in (most, most + 1)] == ["undecided", "answered"]
    known = {"value": 0.1, "interval": _ends(0.05, 0.2)}
    assert inside(known) == "answered"
    assert inside({**known, "interval": {**known["interval"], "high": None}}) == "undecided"
    assert inside({**known, "interval": {**known["interval"], "low": 0}}) == "undecided"
    assert inside({"value": None, "interval": None}) == "undecided"


def test_sister_rows_have_one_n_and_the_papers_window() -> None:
    calls = {step.name: step.calls(Path("data"), Path()) for step in functions("paper", STUDIES)["STEPS"]}
    for name in ("heads", "heads-v2", "context-only", "shares"):
        made = calls[name][0]
        assert made[made.index("--samples") + 1] == "40"
        assert "--window" not in made or made[made.index("--window") + 1] == "32"
    for name in ("quality", "summaries"):
        made = calls[name][0]
        assert made[made.index("--samples") + 1] == "16" and "--window" not in made


def test_costs_come_from_shapes_and_the_measured_rate() -> None:
    cost = functions("paper", STUDIES)
    shape = cost["Shape"](100.0, 2, 3)
    assert shape.prefill(10) == 2 * 100 * 10 + 2 * 10 * 10 * 3 * 2
    one = cost["Settling"]("a", "b", (10,), 4, 5, answer=6, runs=1, shape=shape)
    assert one.operations(2.0) == 3 * 4 * shape.prefill(10) + 2 * 100 * 4 * 5 * 6
    assert one.bytes_read() == 2 * 100 * 4 * 6
