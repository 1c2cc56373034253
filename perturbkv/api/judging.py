"""Judgements of answers by a program of the user; imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from perturbkv.pipeline.answers import judging as judges
from perturbkv.pipeline.answers.judging import split_command
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
    """Ask a program of the user to judge every answer, and analyse its judgements.

    The command gets a JSON object per line on its standard input, with an `id`, and writes one per line, in any order:
    the `id`, with a `score`, or of a pair a `winner` (`a`, `b` or `tie`), and an optional `comment`.

    Args:
        answers: from `read_answers`, or `.written` of `generate`'s result.
        command: program and arguments, without a shell: `python my_judge.py`.
        pairwise: show the full cache's answer and an evicted one's in a drawn order, instead of one answer.
        seed: seed of that order.
        scale: least and largest score; None: any number.
        path: file of the judgements, each written at once; the same call resumes from it. None: no file.
        overwrite: replace the judgements of another judge at `path`.
        time_limit: most seconds without a judgement.
        progress: whether a bar is shown.

    Raises ConfigError for a command or a file that cannot be used, PluginError for a judge that fails.
    """
    from perturbkv.analyses.quality.judge import judge_preferences, judge_scores

    check_answers(answers)
    settings = Judge(tuple(split_command(command)), pairwise, seed, scale)
    with bar("judgements", shown=progress) as progress_bar:
        judgements = judges.ask_judge(
            answers, settings, path=None if path is None else Path(path), overwrite=overwrite, limit=time_limit,
            progress=progress_bar.update,
        )  # fmt: skip
    return judge_preferences(answers, settings, judgements) if pairwise else judge_scores(answers, settings, judgements)
