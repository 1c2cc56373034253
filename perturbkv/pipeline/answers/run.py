"""Ask a judge what it has not been asked yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from perturbkv.configs import numbers
from perturbkv.errors import ConfigError, PluginError
from perturbkv.pipeline.answers import judging
from perturbkv.storage.answers_file import WrittenAnswers
from perturbkv.storage.judgements import Judge, Judgement, Kept, judged, tie
from perturbkv.storage.questions import Question, pairwise, singly
from perturbkv.user_files import parse_json
from perturbkv.visible import line

FILE = "judgements.jsonl"
LIMIT = 600.0
"""Seconds without an answer, where the user says nothing."""
_LONGEST = 10**7


def check(judge: Judge, limit: float) -> None:
    """Raise ConfigError for what no judge can be asked."""
    numbers.check("seed (--seed)", judge.seed)
    numbers.check("time_limit (--time-limit)", limit, _LONGEST)
    if limit <= 0:
        msg = f"time_limit (--time-limit) must be a number of seconds above 0, got {limit:g}"
        raise ConfigError(msg)
    for end in judge.scale or ():
        numbers.check("scale (--scale)", end)
    if judge.scale is not None and not judge.scale[0] < judge.scale[1]:
        msg = f"scale (--scale) must be the least and the largest score, such as 1,10; got {judge.scale}"
        raise ConfigError(msg)


def ask(
    answers: WrittenAnswers,
    judge: Judge,
    *,
    path: Path | None = None,
    overwrite: bool = False,
    limit: float = LIMIT,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Judgement, ...]:
    """A judgement of every answer, or every pair, in the order of samples and configurations.

    Those that `path` holds already are not asked for again; each new one is there as soon as it comes, so that a call
    that fails loses none. None: they are kept nowhere.

    Raises PluginError for a judge that fails, or says what is no judgement; what `Kept` raises.
    """
    check(judge, limit)
    questions = list(pairwise(answers, judge.seed) if judge.pairwise else singly(answers))
    with TemporaryDirectory() as folder:
        kept = Kept(path or Path(folder) / FILE, judge, questions, overwrite)
        for question in questions:
            if question.is_tie and (question.sample, question.label) not in kept.found:
                kept.keep(tie(question))
        progress(len(kept.found), len(questions))
        _ask(judge, questions, kept, limit, progress)
        return tuple(kept.found[one.sample, one.label] for one in questions)


def _ask(
    judge: Judge, questions: Sequence[Question], kept: Kept, limit: float, progress: Callable[[int, int], None]
) -> None:
    """Ask what is not there yet. Raises PluginError where an answer belongs to no question, or one gets none."""
    todo = {one.id: one for one in questions if (one.sample, one.label) not in kept.found}
    if not todo:
        return
    left = dict(todo)
    with closing(judging.answered(judge.command, [one.line() for one in todo.values()], limit)) as answers:
        for answer in filter(bytes.strip, answers):
            said = _parsed(answer)
            name = said.get("id")
            if not isinstance(name, str) or name not in left:
                again = f"given already, of {todo[name].whose}" if isinstance(name, str) and name in todo else "unknown"
                msg = f"expected from the judge an `id` it was given, each once, got {line(repr(name))[:60]} ({again})"
                raise PluginError(msg)
            kept.keep(judged(left.pop(name), said, judge))
            progress(len(kept.found), len(questions))
    if left:
        first = next(iter(left.values())).whose
        asked = f"an answer to each of {len(todo)} questions"
        msg = f"expected from the judge {asked}, got none to {len(left)}, such as {first}"
        raise PluginError(msg)


def _parsed(answer: bytes) -> dict[str, object]:
    try:
        found = parse_json(answer.decode())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        said = answer.decode(errors="replace").strip()
        msg = f"expected lines from the judge that are JSON objects, got '{line(said)[:60]}'"
        raise PluginError(msg)
    return found
