"""`quality --metric perplexity` and `budget --max-perplexity`: from nothing, from the trace, and what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import perturbkv as pk
from perturbkv.analyses.budget.criteria import criteria
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.figures import style
from tests.support.swept import swept
from tests.support.traces import sample_trace, trace

Run = Callable[..., Any]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Prompts of 100 tokens and more, a byte each. A space ends them, so that texts of 4 and 6 bytes have as many."""
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{word} is a word. " * 8, "answers": ["yes"], "text": word} for word in ("four", "summer")]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize(
    ("options", "steps", "tokens", "cut", "title"),
    [
        (["--text", "given"], 5, [3, 5], 0, "the row's `text`, 3 to 5 of its 4 to 6 tokens scored"),
        (["--text", "answer"], 2, [2, 2], 0, "the first accepted answer, 2 of its 3 tokens scored"),
        (["--text", "given", "--steps", 4], 4, [3, 4], 1, "the row's `text`, 3 to 4 of its 4 to 6 tokens scored"),
        (["--text", "given", "--steps", 1], 1, [1, 1], 2, "the row's `text`, 1 of its 4 to 6 tokens scored"),
    ],
)
def test_a_text_is_read_to_its_end_or_for_the_steps(
    perturbkv: Run, model: Path, rows: Path, options: list[object], steps: int, tokens: list[int], cut: int, title: str
) -> None:
    made = ["--model", model, "--dataset", rows, "--budget", 24, "--window", 8, "--no-chat-template", *options]
    asked = ["quality", "--metric", "perplexity", "--compare", "attention,two-stage", *made]
    ran = perturbkv(*asked, "-o", "out", "--format", "png", "--json")
    assert ran.code == 0, ran.err
    told, measured = ran.json(), pk.read_trace("out/trace.h5")
    assert (measured.run.steps, measured.run.text, told["text"]) == (steps, options[1], options[1])
    assert (told["tokens"], told["cut"], pk.perplexity(measured).title()) == (tokens, cut, title)
    said = f"Read in part: {cut} of 2 texts; without --steps each is read to its end."
    assert (said in pk.perplexity(measured).caveats()) == (cut > 0)
    again = perturbkv(*asked, "-o", "out", "--format", "png", "--json")  # the same command goes on
    assert again.json()["configs"] == told["configs"]
    looked = perturbkv("quality", "out/trace.h5", "--metric", "perplexity", "--format", "png", "--json")
    assert looked.json()["configs"] == told["configs"]
    assert [Path(path).name for path in told["tables"]] == [f"quality-perplexity.{end}" for end in ("tex", "md", "csv")]


def test_an_own_text_is_read_as_far_as_answers_go(perturbkv: Run, model: Path, rows: Path) -> None:
    asked = ["--model", model, "--dataset", rows, "--budget", 24, "--window", 8, "--dry-run", "--json"]
    assert perturbkv("quality", "--metric", "perplexity", *asked).json()["steps"] == 64
    assert perturbkv("budget", "--max-perplexity", 2, *asked).json()["steps"] == 64
    assert perturbkv("budget", "--max-kl", 2, *asked).json()["steps"] == 8


@pytest.mark.parametrize("question", [["quality", "--metric", "perplexity"], ["budget", "--max-perplexity", 2]])
def test_a_prefill_without_further_steps_reads_one(
    perturbkv: Run, model: Path, rows: Path, question: list[Any]
) -> None:
    asked = ["--model", model, "--dataset", rows, "--budget", 24, "--window", 8, "--dry-run", "--json"]
    ran = perturbkv(*question, "--compare", "vertical-slash:attention", *asked)
    assert (ran.code, ran.err) == (0, "")
    assert ran.json()["steps"] == 1


def ratios(each: list[list[float]]) -> pk.Trace:
    """A trace of two steps in which each sample has these ratios to the full cache's perplexity, (sample, config)."""
    samples = []
    for place, row in enumerate(each):
        arrays = dict(sample_trace(f"s{place}", steps=2).arrays)
        full = np.array([-0.3, -0.1 * place])
        arrays |= {"next_token_id": np.array([3, 4]), "text_logp_full": full}
        arrays["text_logp"] = full - 2 * np.log(row)[:, None] * np.array([0.25, 0.75])
        samples.append(type(sample_trace())(f"s{place}", arrays))
    return trace(*samples)


def test_ratios_are_geometric_means_with_their_intervals() -> None:
    """Student's t on the logarithm, with 7/32 degrees of freedom per sample."""
    each = [[1.0, 2.0], [1.0, 4.0], [1.0, 8.0], [1.0, 2.0], [1.0, 4.0], [1.0, 1.0]]
    same, other = pk.perplexity(ratios(each)).configs
    logs = np.log(each)[:, 1]
    assert (same.ratio, same.ratio_interval.low, same.ratio_interval.high) == pytest.approx((1, 1, 1))  # type: ignore[union-attr]
    assert other.ratio == pytest.approx(np.exp(logs.mean()))
    reach = stats.t.ppf(0.975, max(1, 7 / 32 * 6)) * logs.std(ddof=1) / np.sqrt(6)
    ends = (other.ratio_interval.low, other.ratio_interval.high)  # type: ignore[union-attr]
    assert ends == pytest.approx(np.exp([logs.mean() - reach, logs.mean() + reach]))
    full = np.exp(np.mean([(0.3 + 0.1 * place) / 2 for place in range(6)]))
    assert other.perplexity == pytest.approx(full * other.ratio)


def test_methods_are_compared_with_the_first_of_their_budget() -> None:
    """Sample by sample, and typeset: ratios of 2 and 8 have the geometric mean 4 whatever the first method's are."""
    result = pk.perplexity(ratios([[1.5, 3.0], [2.0, 16.0]]))
    first, second = result.configs
    assert (first.baseline, first.over_baseline) == (None, None)
    assert (second.baseline, second.over_baseline) == (first.config, pytest.approx(4))
    ends = second.over_baseline_interval
    assert ends == Interval(pytest.approx(2), pytest.approx(8), "range")  # type: ignore[arg-type]
    cells = result.to_csv().splitlines()
    assert [float(cell) for cell in cells[3].split(",")[-3:]] == pytest.approx([4, 2, 8])
    assert cells[2].endswith(",,,")
    assert "| – |" in result.to_markdown()
    assert "4.00 (2.00 … 8.00) |" in result.to_markdown()
    assert r"{\tiny (2.00 \dots{} 8.00)}" in result.to_latex()
    assert "over first" in str(result)


def test_a_limit_bounds_the_mean_ratio() -> None:
    each = [[1.01, 2.0]] * 6
    criterion = criteria(None, None, None, 1.05)[0]
    found = pk.safe_budget(ratios(each), max_perplexity=1.05, sides="attention")
    (tested,) = found[0].verdicts[0].budgets
    assert (tested.mean, tested.bound, tested.holds) == (pytest.approx(1.01), pytest.approx(1.01), True)
    assert str(criterion) == "mean perplexity over the full cache's ≤ 1.05"
    assert "which bounds no answer; 95 % bounds, of excess perplexity if lognormal" in found.conclusion()
    told = " ".join(map(str, found.details()))
    assert "A budget whose perplexity is no larger on any prompt" in told
    assert "KL" not in told
    assert pk.safe_budget(ratios(each), max_perplexity=1.05).exit_code == 1


def test_a_trace_without_log_p_is_told_so() -> None:
    old = swept(np.ones((8, 2, 5)))
    for asked in (pk.perplexity, lambda it: pk.safe_budget(it, max_perplexity=2)):
        with pytest.raises(pk.PerturbkvError, match="needs the variable 'next_token_id', which .* lacks"):
            asked(old)


def test_the_figure_has_a_row_per_configuration() -> None:
    result = pk.perplexity(ratios([[1.0, 2.0], [1.0, 4.0]]))
    axes = result.plot(style.WIDE_MM).axes[0]
    points = np.concatenate([one.lines[0].get_xydata() for one in axes.containers])  # type: ignore[attr-defined]
    np.testing.assert_allclose(points, [(one.ratio, row) for row, one in enumerate(result.configs)])
