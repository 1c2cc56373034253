"""Run a judge: a program that reads lines on its standard input and writes lines on its standard output.

No shell reads the command. All questions are written at once, so that a judge may answer them in any order, one by one
or together; each answer is taken as soon as it is there, so that none that came is lost.

Ask a judge what it has not been asked yet.
"""

from __future__ import annotations

import os
import queue
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, cast

from perturbkv.configs import option
from perturbkv.errors import ConfigError, PluginError
from perturbkv.escaping import escape_line
from perturbkv.storage.answers_file import WrittenAnswers
from perturbkv.storage.judgements import (
    Judge,
    Judgement,
    JudgementFile,
    Question,
    pair_questions,
    parse_judgement,
    single_questions,
    tie_judgement,
)
from perturbkv.user_files import parse_json

_LONGEST = 2**20
"""Bytes of one answer: more is no judgement."""
_TOLD = 300


def split(command: str) -> list[str]:
    """Program and arguments, as a shell would part them. Raises ConfigError where there is none, or none such."""
    try:
        found = shlex.split(command)
    except ValueError as error:
        msg = f"expected a command such as 'python my_judge.py', got {command[:_TOLD]!r}: {error}"
        raise ConfigError(msg) from None
    if not found:
        msg = "expected a command such as 'python my_judge.py', got an empty one"
        raise ConfigError(msg)
    if shutil.which(found[0]) is None:
        msg = f"expected a judge that can be started, got '{escape_line(found[0])[:_TOLD]}', which is no program here"
        raise ConfigError(msg)
    return found


def answered(command: Sequence[str], questions: Sequence[str], limit: float) -> Generator[bytes, None, None]:
    """Every line that the command writes, as soon as it does, until it ends.

    Raises PluginError where it cannot be started, is silent for more than `limit` seconds, writes a line without end,
    or leaves with another code than 0.
    """
    with tempfile.TemporaryFile() as said, _started(command, said) as process:
        lines: queue.Queue[bytes] = queue.Queue()
        for work in (lambda: _write(process, questions), lambda: _read(process, lines)):
            threading.Thread(target=work, daemon=True).start()
        while found := _next(lines, limit):
            if len(found) > _LONGEST:
                msg = f"expected lines of at most {_LONGEST:,} bytes from the judge, got a longer one"
                raise PluginError(msg)
            yield found
        _check_end(process, limit, said)


@contextmanager
def _started(command: Sequence[str], said: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process, in a session of its own, all of which is over when the block is left."""
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, start_new_session=True)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        msg = f"expected a judge that can be started, got '{escape_line(command[0])}': {why}; check --command"
        raise PluginError(msg) from None
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _write(process: subprocess.Popen[bytes], questions: Sequence[str]) -> None:
    """All questions; a judge that no longer reads says why with its exit code."""
    with suppress(OSError), cast("IO[bytes]", process.stdin) as stream:
        for question in questions:
            stream.write(question.encode())


def _read(process: subprocess.Popen[bytes], lines: queue.Queue[bytes]) -> None:
    """Line by line, an empty one at the end."""
    with cast("IO[bytes]", process.stdout) as stream:
        while found := stream.readline(_LONGEST + 1):
            lines.put(found)
    lines.put(b"")


def _next(lines: queue.Queue[bytes], limit: float) -> bytes:
    try:
        return lines.get(timeout=limit)
    except queue.Empty:
        msg = f"the judge said nothing for {limit:g} seconds; raise --time-limit, or look why it waits"
        raise PluginError(msg) from None


def _check_end(process: subprocess.Popen[bytes], limit: float, said: IO[bytes]) -> None:
    """Raise PluginError for a judge that does not end, or ends in failure, with its last words."""
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        msg = f"the judge closed its output and did not end within {limit:g} seconds; let it end after its last answer"
        raise PluginError(msg) from None
    if code:
        said.seek(0)
        words = said.read().decode(errors="replace").strip().splitlines()
        told = f": {escape_line(words[-1])[:_TOLD]}" if words else ""
        msg = f"expected a judge that ends with exit code 0, got {code}{told}"
        raise PluginError(msg)


FILE = "judgements.jsonl"
LIMIT = 600.0
"""Seconds without an answer, where the user says nothing."""
_RUN_LONGEST = 10**7


def check(judge: Judge, limit: float) -> None:
    """Raise ConfigError for what no judge can be asked."""
    option.check_number("seed (--seed)", judge.seed)
    option.check_number("time_limit (--time-limit)", limit, _RUN_LONGEST)
    if limit <= 0:
        msg = f"time_limit (--time-limit) must be a number of seconds above 0, got {limit:g}"
        raise ConfigError(msg)
    for end in judge.scale or ():
        option.check_number("scale (--scale)", end)
    if judge.scale is not None and not judge.scale[0] < judge.scale[1]:
        msg = f"scale (--scale) must be the least and the largest score, such as 1,10; got {judge.scale}"
        raise ConfigError(msg)


def ask_judge(
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
    questions = list(pair_questions(answers, judge.seed) if judge.pairwise else single_questions(answers))
    with TemporaryDirectory() as folder:
        kept = JudgementFile(path or Path(folder) / FILE, judge, questions, overwrite)
        for question in questions:
            if question.is_tie and (question.sample, question.label) not in kept.judgements:
                kept.add(tie_judgement(question))
        progress(len(kept.judgements), len(questions))
        _ask(judge, questions, kept, limit, progress)
        return tuple(kept.judgements[one.sample, one.label] for one in questions)


def _ask(
    judge: Judge, questions: Sequence[Question], kept: JudgementFile, limit: float, progress: Callable[[int, int], None]
) -> None:
    """Ask what is not there yet. Raises PluginError where an answer belongs to no question, or one gets none."""
    todo = {one.id: one for one in questions if (one.sample, one.label) not in kept.judgements}
    if not todo:
        return
    left = dict(todo)
    with closing(answered(judge.command, [one.line() for one in todo.values()], limit)) as answers:
        for answer in filter(bytes.strip, answers):
            said = _parsed(answer)
            name = said.get("id")
            if not isinstance(name, str) or name not in left:
                again = (
                    f"given already, of {todo[name].description}"
                    if isinstance(name, str) and name in todo
                    else "unknown"
                )
                got = escape_line(repr(name))[:60]
                msg = f"expected from the judge an `id` it was given, each once, got {got} ({again})"
                raise PluginError(msg)
            kept.add(parse_judgement(left.pop(name), said, judge))
            progress(len(kept.judgements), len(questions))
    if left:
        first = next(iter(left.values())).description
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
        msg = f"expected lines from the judge that are JSON objects, got '{escape_line(said)[:60]}'"
        raise PluginError(msg)
    return found
