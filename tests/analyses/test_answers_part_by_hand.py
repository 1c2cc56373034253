"""Where answers part and how far: small answers by hand, every number computed here in plain loops."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import perturbkv as pk
from perturbkv.analyses.quality.divergence import divergence
from perturbkv.analyses.quality.divergence_point import rouge_l
from perturbkv.analyses.stats.intervals import Interval
from perturbkv.errors import ConfigError
from perturbkv.storage.answers_file import read_answers
from tests.support.answers import CONFIGS, row, said, written

FULL = [1, 2, 3, 4, 5, 6]
ROWS = (
    row("a", FULL, [[1, 2, 9, 4, 5, 6], FULL], [[0, 0, 2, 1, 1, 2], [0] * 6]),
    row("b", FULL, [[9, 9], [1, 2, 3, 4, 5, 7]], [[3] * 6, [0, 0, 0, 0, 0, 6]]),
    row("c", [1, 2], [[1, 2, 3], [1, 2]], [[0.5, 0.5], [0, 0]]),
    row("d", FULL, [[1, 2, 3], FULL], [[1, 2, 3, 4, 5, 6], [0] * 6]),
    row("e", [7, 8, 9], [[7, 8, 1], [7, 8, 9]], [[0.25] * 3, [0.1] * 3]),
)


def test_the_first_token_that_differs_is_found_and_an_end_is_one() -> None:
    first, second = divergence(written(*ROWS)).configs
    assert first.first_difference.tolist() == [2, 0, 2, 3, 2]  # c: the full answer ends; d: the evicted one does
    assert second.first_difference.tolist() == [math.inf, 5, math.inf, math.inf, math.inf]
    assert (first.median_first_difference, second.median_first_difference) == (2, math.inf)
    assert second.equal.tolist() == [True, False, True, True, True]
    low, high = stats.beta.ppf(0.025, 4, 2), stats.beta.ppf(0.975, 5, 1)
    interval = second.equal_share_interval
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((low, high))
    assert second.to_dict()["first_difference"] == [None, 5, None, None, None]


def test_shares_of_answers_alike_so_far_are_counted_token_by_token() -> None:
    first, second = divergence(written(*ROWS)).configs
    for one in (first, second):
        shares, band = one.equal_prefix_shares(6)
        wanted = [sum(place >= tokens for place in one.first_difference) / 5 for tokens in range(7)]
        assert shares.tolist() == wanted
        assert band is not None
        assert (band.low <= shares).all()
        assert (band.high >= shares).all()
    assert first.equal_prefix_shares(6)[0].tolist() == [1, 0.8, 0.8, 0.2, 0, 0, 0]


def test_kl_is_averaged_over_an_answers_tokens_and_its_median_over_samples_told() -> None:
    found = divergence(written(*ROWS))
    first, second = (one.forced for one in found.configs)
    assert first is not None
    assert second is not None
    assert first.kl.tolist() == [1, 3, 0.5, 3.5, 0.25]
    assert np.mean(second.kl) == pytest.approx((1 + 0.1) / 5)
    assert first.last.tolist() == [1.5, 3, 0.5, 5.5, 0.25]  # of each answer's own steps, however long others are
    assert first.top1.tolist() == [2 / 6, 0, 1, 0, 1]
    assert found.span == 1
    columns = [[0, 3, 0.5, 1, 0.25], [0, 3, 0.5, 2, 0.25], [2, 3, 3, 0.25], [1, 3, 4], [1, 3, 5], [2, 3, 6]]
    np.testing.assert_allclose(first.curve, [np.median(column) for column in columns])
    assert (first.median_kl, first.median_last) == (1, 1.5)
    assert first.kl_interval == Interval(0.25, 3.5)  # five samples: the least and the largest hold it in 93.75 %
    assert first.curve_interval is not None
    assert np.isnan(first.curve_interval.low).tolist() == [False, False, True, True, True, True]  # of fewer than five
    assert found.lengths == (6, 6, 2, 6, 3)


def test_long_answers_are_shown_in_spans() -> None:
    kl = [float(place) for place in range(70)]
    found = divergence(written(row("a", range(70), [range(70)] * 2, [kl, kl])))
    assert found.span == 3
    forced = found.configs[0].forced
    assert forced is not None
    np.testing.assert_allclose(forced.curve, [np.mean(kl[start : start + 3]) for start in range(0, 70, 3)])


def test_what_was_not_measured_is_said_and_nothing_is_made_up() -> None:
    found = divergence(written(*(row(name, FULL, [FULL, [1]]) for name in "ab")))
    assert all(one.forced is None for one in found.configs)
    assert found.noise_floor.size == 0
    assert "perturbkv generate --divergence" in repr(found)
    assert "never" in repr(found)
    assert found.records()[0]["kl"] is None


def test_a_conclusion_says_both_questions_with_n() -> None:
    told = divergence(written(*ROWS)).conclusion()
    assert told == (
        "The median answer equals the full cache's for 2 tokens at attention to throughout at two-stage; "
        "where every cache reads the full one's, the median KL of 5 answers is 0 nat [0, 1] at two-stage to 1 nat "
        "[0.25, 3.5] at attention (n = 5 samples)."
    )
    alone = divergence(written(*(row(name, FULL, [[1, 2]], configs=CONFIGS[:1]) for name in "ab"), configs=CONFIGS[:1]))
    assert alone.conclusion().startswith("The median answer equals the full cache's for 2 tokens (n = 2")


def test_an_empty_answer_has_no_kl_and_one_that_carries_the_mean_does_not_carry_what_is_told() -> None:
    values = [0.1, 0.2, 0.3, 0.4, 0.5, 900.0]
    rows = [row(f"s{place}", [1], [[1], [1]], [[value], [value]]) for place, value in enumerate(values)]
    rows += [row(f"e{place}", [], [[], []], [[], []]) for place in range(3)]
    found = divergence(written(*rows))
    forced = found.configs[0].forced
    assert forced is not None
    assert forced.median_kl == pytest.approx(0.35)
    assert "the median KL of 6 answers is 0.35 nat" in found.conclusion()
    assert "the 6 answers with any" in str(found.details())
    assert found.conclusion().endswith("(n = 9 samples).")


def test_caches_that_are_compressed_again_hold_so_much_at_the_start_alone() -> None:
    found = divergence(written(*ROWS, compress_over=1100))
    assert [len(one.caveats()) for one in (found, divergence(written(*ROWS)))] == [1, 0]
    assert "As the answers began; caches were compressed again above 1,100 entries." in found.details()[-1]
    assert "(held 0.50 at the start)" in "".join(text.get_text() for text in found.plot().legends[0].get_texts())
    assert "at the start" not in repr(divergence(written(*ROWS)))


def test_a_cache_above_the_full_one_is_explained() -> None:
    rows = [dict(one) for one in ROWS]
    for one in rows:
        one["evicted"] = {label: {**made, "held_share": 1.2} for label, made in one["evicted"].items()}
    said = "Cache shares above 1 save nothing: each query head keeps its own set."
    assert said in divergence(written(*rows)).notes()
    assert said not in divergence(written(*ROWS)).notes()


def lcs(first: list[str], second: list[str]) -> int:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if one == other else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@pytest.mark.parametrize("seed", range(20))
def test_rouge_l_is_the_f1_of_the_longest_common_sequence(seed: int) -> None:
    draw = np.random.default_rng(seed)
    first, second = ([f"w{word}" for word in draw.integers(0, 9, draw.integers(1, 90))] for _ in range(2))
    shared = lcs(first, second)
    precision, recall = shared / len(first), shared / len(second)
    wanted = 2 * precision * recall / (precision + recall) if shared else 0
    assert rouge_l(" ".join(first), ", ".join(second).upper()) == pytest.approx(wanted)


def test_rouge_l_reads_signs_of_scripts_that_part_no_words() -> None:
    assert rouge_l("巴黎在法国", "巴黎在英国") == pytest.approx(0.8)
    assert (rouge_l("", ""), rouge_l("", "a"), rouge_l("!", "?")) == (1, 0, 0)


def stored(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def header(**more: object) -> dict[str, object]:
    return {"run": json.loads(written(*ROWS).run.to_json()), **more}


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    cut = written(*ROWS, compress_over=9)
    path = stored(tmp_path / "g.jsonl", {"run": json.loads(cut.run.to_json())}, *ROWS, '{"sample": "f", "unfini')
    found = read_answers(path)
    assert found.rows == ROWS
    assert (found.run.compress_over, found.source, len(found.digest)) == (9, str(path), 12)
    assert divergence(found).to_dict() == divergence(cut).to_dict()


LABEL = CONFIGS[0].label()


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "an empty one"),
        (["{"], "a line 1 that is no JSON object"),
        ([header(), "{", ROWS[0]], "a line 2 that is no JSON object"),
        ([{"run": 3}, ROWS[0]], "a first line without its run; "),
        ([{"prompt": "x"}], "a first line without its run; "),
        ([{"run": {}}], "a first line whose run cannot be read .*got one without "),
        ([{"run": {**header()["run"], "configs": 3}}], "got one with an entry that no run has"),
        ([header()], "one without answers"),
        ([header(), ROWS[0], ROWS[0]], "one that answers a sample twice"),
        ([header(), {**ROWS[0], "evicted": {LABEL: said(FULL)}}], "a line 2 that is no sample's answers of its run"),
    ],
)
def test_what_is_no_file_of_answers_is_refused_in_one_line(tmp_path: Path, lines: list[object], told: str) -> None:
    path = tmp_path / "g.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    with pytest.raises(ConfigError, match=f"expected a file of answers.* at {path}, got .*{told}") as refused:
        read_answers(path)
    assert "\n" not in str(refused.value)


def test_what_is_no_answers_is_refused_in_a_line() -> None:
    for wrong in ("answers.jsonl", None):
        with pytest.raises(ConfigError, match=r"expected answers, as pk.read_answers .* give them; got (str|NoneType)"):
            pk.divergence(wrong)  # type: ignore[arg-type]
