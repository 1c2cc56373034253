"""`perturbkv divergence`: how soon and how far answers from evicted caches leave the full cache's."""

from __future__ import annotations

from perturbkv.cli.answered import AnswerOptions, about
from perturbkv.cli.option_routing import with_options


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
