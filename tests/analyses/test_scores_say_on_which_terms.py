"""What tables of scores say of metric, length of answers, cut prompts and chat template."""

from __future__ import annotations

from typing import Any

from perturbkv.analyses.quality.quality import quality
from tests.analyses.test_quality_by_hand import NEWS, QASPER
from tests.support.graded import graded

LONG = {"multi_news": {"metric": "get_rouge_with_score", "generation_length": 512, "chat_template": True}}
SHORT = {"qasper": {"metric": "get_qa_f1_with_score", "generation_length": 8, "chat_template": True}}
FEW = {"trec": {"metric": "get_classification_with_score", "generation_length": 8, "chat_template": False}}


def of_data(recorded: dict[str, Any], metric: str) -> dict[str, Any]:
    return {"dataset_options": {"wording": recorded, "metrics": [metric]}}


def test_what_is_the_data_sets_own_is_named_by_its_metric_alone() -> None:
    own = quality(graded("qasper", *QASPER, **of_data(SHORT, "qa_f1")))
    assert "Scores × 100: means of qasper's own metric (qa_f1), n = 6." in own.details()
    both = quality(
        [
            graded("qasper", *QASPER, **of_data(SHORT, "qa_f1")),
            graded("trec", *NEWS, chat_template=False, **of_data(FEW, "classification")),
        ]
    )
    assert "means of the data sets' own metrics (classification, qa_f1), n = 5 to 6 of each data set." in str(
        both.details()
    )
    worded = {"metrics": ["exact-number"], "wording": {"needle": ["The number is", "What is it?"]}}
    needle = quality(graded("needle", *QASPER, dataset_options=worded))
    assert "means of needle's own metric (exact-number)" in str(needle.details())
    task = {"ruler:vt": {"metric": "string_match_all", "generation_length": 8, "chat_template": True}}
    assert (
        "ruler:vt's own metric (string_match_all), n = 6."
        in quality(graded("ruler:vt", *QASPER, **of_data(task, "string_match_all"))).details()[0]
    )


def test_another_metric_length_cut_or_template_is_told_wherever_scores_are() -> None:
    cut = graded("multi_news", *NEWS, max_tokens=1500, chat_template=False, **of_data(LONG, "exact-match"))
    result = quality([cut, graded("qasper", *QASPER, **of_data(SHORT, "qa_f1"))])
    told = (
        "means of exact-match (multi_news), qasper's own metric (qa_f1), n = 5 to 6 of each data set. Answers: at most "
        "8 tokens (multi_news) (own lengths: multi_news 512). Prompts: uncut (qasper), cut to at most 1,500 tokens "
        "(multi_news). Without a chat template (multi_news)."
    )
    assert all(sentence in told for sentence in result.caveats())
    assert told in result.to_markdown().replace("\\_", "_")
    assert told in result.to_latex().replace(r"\_", "_")
    assert "Prompts: cut to at most 1,500 tokens. Without a chat template." in quality(cut).notes()
    with_it = graded("trec", *NEWS, **of_data(FEW, "classification"))
    assert "With a chat template." in quality(with_it).notes()


def test_a_file_of_several_data_sets_tells_whose_answers_had_another_length() -> None:
    mixed = quality(graded("mixed.jsonl", *NEWS, **of_data({**LONG, **SHORT}, "rouge")))
    assert "Answers: at most 8 tokens (own lengths: multi_news 512)." in mixed.notes()
    own = quality(graded("own.jsonl", *NEWS, dataset_options={"metrics": ["f1"]}))
    assert own.caveats() == ["Answers: at most 8 tokens."]
    assert "means of f1, n = 5." in str(own.details())
    assert "means of a metric that the trace does not name, n = 5" in str(quality(graded("own.jsonl", *NEWS)).details())
