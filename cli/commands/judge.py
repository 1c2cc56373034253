"""`perturbkv judge`: what a judge that is not ours thinks of answers from evicted caches.

`perturbkv divergence`: how soon and how far answers from evicted caches leave the full cache's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.cli import console
from perturbkv.cli.choices import numbers
from perturbkv.cli.option_routing import with_options
from perturbkv.cli.saving import reachable
from perturbkv.cli.session import AnswerOptions, about
from perturbkv.errors import ConfigError
from perturbkv.storage.output import Lock

if TYPE_CHECKING:
    from perturbkv.analyses.result import Result
    from perturbkv.storage.answers_file import WrittenAnswers
    from perturbkv.storage.judgements import Judge, Judgement


_ANALYSIS = "judge"


@with_options
def judge(
    asked: AnswerOptions,
    command: Annotated[str, Option(metavar="TEXT", help="The judge, such as 'python my_judge.py'", show_default=False)],
    pairwise: Annotated[bool, Option("--pairwise", help="Show two answers, and ask which is better")] = False,
    seed: Annotated[int, Option(metavar="N", help="Of the order of two answers", show_default="0")] = 0,
    scale: Annotated[
        str | None, Option(metavar="LOW,HIGH", help="Least and largest score", show_default="any number")
    ] = None,
    time_limit: Annotated[float, Option(metavar="SECONDS", help="Without an answer at most")] = 600,
) -> None:
    """Ask a judge of your own about every answer.

    Of a file that perturbkv generate wrote. The command gets a JSON object per line on its standard input (id, prompt,
    question, accepted answers, the texts) and writes one per line: the id with a `score`, or with --pairwise a `winner`
    (a, b or tie), and a `comment` if it likes. It never learns which cache wrote an answer. What it said is kept in
    judgements.jsonl at once; the same command goes on from there.
    """
    from perturbkv.pipeline.answers.judging import FILE, ask_judge, split
    from perturbkv.pipeline.answers.judging import check as check_judge
    from perturbkv.storage.answers_file import read_answers
    from perturbkv.storage.judgements import Judge

    _check_effects(asked, pairwise)
    made = Judge(tuple(split(command)), pairwise, seed, _scale(scale))
    check_judge(made, time_limit)
    answers = read_answers(asked.file)
    path = reachable(asked.folder / FILE)
    place = asked.leaving(_ANALYSIS)
    with place.held(), Lock(path), console.progress("judgements") as bar:
        said = ask_judge(answers, made, path=path, overwrite=asked.overwrite, limit=time_limit, progress=bar.at)
        place.leave(_result(answers, made, said), about(answers))


def _result(answers: WrittenAnswers, made: Judge, said: Sequence[Judgement]) -> Result:
    from perturbkv.analyses.quality.judge import judged, preferred

    return preferred(answers, made, said) if made.pairwise else judged(answers, made, said)


def _check_effects(asked: AnswerOptions, pairwise: bool) -> None:
    """Raise ConfigError for an option that was typed and makes no difference."""
    if "seed" in asked.typed and not pairwise:
        msg = "--seed has no effect here: it needs --pairwise, whose order it draws; leave it out"
        raise ConfigError(msg)
    if "scale" in asked.typed and pairwise:
        msg = "--scale has no effect here: with --pairwise there are no scores; leave it out"
        raise ConfigError(msg)


def _scale(text: str | None) -> tuple[float, float] | None:
    """Least and largest score. Raises ConfigError for anything but two numbers."""
    if text is None:
        return None
    found = numbers("--scale", [text])
    if len(found) != 2:
        msg = f"--scale takes the least and the largest score, such as 1,10; got '{text}'"
        raise ConfigError(msg)
    return found[0], found[1]


@with_options
def divergence(asked: AnswerOptions) -> None:
    """Tell where evicted answers leave the full cache's.

    Of a file that perturbkv generate wrote: the first token that differs, ROUGE-L against the full cache's answer, and,
    with generate --divergence, KL and the same next token while every cache reads that answer. Long answers, with
    --compress-every, chats too.
    """
    from perturbkv.analyses.quality.divergence import ANALYSIS
    from perturbkv.analyses.quality.divergence import divergence as analyse
    from perturbkv.storage.answers_file import read_answers

    answers = read_answers(asked.file)
    place = asked.leaving(ANALYSIS)
    with place.held():
        place.leave(analyse(answers), about(answers))
