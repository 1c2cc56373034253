"""What a judge of one's own thinks of every answer; imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from perturbkv.pipeline.answers import judging as judges
from perturbkv.pipeline.answers.judging import split
from perturbkv.pipeline.progress import bar
from perturbkv.storage.answers_file import WrittenAnswers, check_answers
from perturbkv.storage.judgements import Judge

if TYPE_CHECKING:
    from perturbkv.analyses.quality.judge import JudgeScores, Preferences


def judge(
    answers: WrittenAnswers,
    command: str,
    *,
    pairwise: bool = False,
    seed: int = 0,
    scale: tuple[float, float] | None = None,
    path: str | Path | None = None,
    overwrite: bool = False,
    time_limit: float = judges.LIMIT,
    progress: bool = True,
) -> JudgeScores | Preferences:
    """What a judge of one's own thinks of every answer.

    The command gets a JSON object per line on its standard input, with an `id`, and writes one per line, in any order:
    the `id`, with a `score`, or of a pair a `winner` (`a`, `b` or `tie`), and a `comment` if it likes.

    Args:
        answers: of `read_answers`, or a `generate`'s `.written`.
        command: program and arguments, which no shell reads: `python my_judge.py`.
        pairwise: show the full cache's answer and an evicted one's in a drawn order, instead of one answer.
        seed: of that order.
        scale: least and largest score; None: any number.
        path: where judgements are kept, each as soon as it is there; the same call goes on from there.
        overwrite: replace those of another judge at `path`.
        time_limit: seconds without an answer, at most.
        progress: whether a bar is shown.

    Raises ConfigError for a command or a file that cannot be used, PluginError for a judge that fails.
    """
    from perturbkv.analyses.quality.judge import judge_preferences, judge_scores

    check_answers(answers)
    asked = Judge(tuple(split(command)), pairwise, seed, scale)
    with bar("judgements", shown=progress) as drawn:
        said = judges.ask_judge(
            answers, asked, path=None if path is None else Path(path), overwrite=overwrite, limit=time_limit,
            progress=drawn.at,
        )  # fmt: skip
    return judge_preferences(answers, asked, said) if pairwise else judge_scores(answers, asked, said)
