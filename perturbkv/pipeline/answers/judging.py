"""Judges: programs that read questions as lines on standard input and write answers as lines on standard output.

No shell reads the command. All questions are written at once, so that a judge may answer them in any order, one by one
or together; each answer is stored as soon as it arrives, and stored ones are not asked for again.
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
"""Largest number of bytes of one answer."""
_SHOWN = 300
"""Largest number of characters of foreign text in a message."""


def split_command(command: str) -> list[str]:
    """Return the program and arguments of a command, split as by a shell. Raises ConfigError for a missing program."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"expected a command such as 'python my_judge.py', got {command[:_SHOWN]!r}: {error}"
        ) from None
    if not arguments:
        raise ConfigError("expected a command such as 'python my_judge.py', got an empty one")
    if shutil.which(arguments[0]) is None:
        program = escape_line(arguments[0])[:_SHOWN]
        raise ConfigError(f"expected a judge that can be started, got '{program}', which is no program here")
    return arguments


def read_answers(command: Sequence[str], questions: Sequence[str], limit: float) -> Generator[bytes, None, None]:
    """Run a judge on the questions, and yield every output line as soon as it arrives.

    Raises PluginError where it cannot be started, is silent for more than `limit` seconds, writes a line without end,
    or ends with another code than 0.
    """
    with tempfile.TemporaryFile() as stderr, _start_process(command, stderr) as process:
        lines: queue.Queue[bytes] = queue.Queue()
        for work in (lambda: _write_questions(process, questions), lambda: _read_lines(process, lines)):
            threading.Thread(target=work, daemon=True).start()
        while answer := _next_line(lines, limit):
            if len(answer) > _LONGEST:
                raise PluginError(f"expected lines of at most {_LONGEST:,} bytes from the judge, got a longer one")
            yield answer
        _check_end(process, limit, stderr)


@contextmanager
def _start_process(command: Sequence[str], stderr: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own, yield it, and kill the session after the block."""
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, start_new_session=True)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PluginError(
            f"expected a judge that can be started, got '{escape_line(command[0])}': {why}; check --judge"
        ) from None
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _write_questions(process: subprocess.Popen[bytes], questions: Sequence[str]) -> None:
    """Write all questions to a judge's input; a judge that stops reading is reported later, by its exit code."""
    with suppress(OSError), cast("IO[bytes]", process.stdin) as stream:
        for question in questions:
            stream.write(question.encode())


def _read_lines(process: subprocess.Popen[bytes], lines: queue.Queue[bytes]) -> None:
    """Put every line of a judge's output into the queue, then an empty line at the end of the output."""
    with cast("IO[bytes]", process.stdout) as stream:
        while answer := stream.readline(_LONGEST + 1):
            lines.put(answer)
    lines.put(b"")


def _next_line(lines: queue.Queue[bytes], limit: float) -> bytes:
    """Return the next output line of a judge, empty at the end. Raises PluginError after `limit` seconds."""
    try:
        return lines.get(timeout=limit)
    except queue.Empty:
        raise PluginError(
            f"the judge said nothing for {limit:g} seconds; raise --time-limit, or look why it waits"
        ) from None


def _check_end(process: subprocess.Popen[bytes], limit: float, stderr: IO[bytes]) -> None:
    """Raise PluginError, with the last line of `stderr`, where a judge fails or does not end within `limit` seconds."""
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        raise PluginError(
            f"the judge closed its output and did not end within {limit:g} seconds; let it end after its last answer"
        ) from None
    if code:
        stderr.seek(0)
        error_lines = stderr.read().decode(errors="replace").strip().splitlines()
        detail = f": {escape_line(error_lines[-1])[:_SHOWN]}" if error_lines else ""
        raise PluginError(f"expected a judge that ends with exit code 0, got {code}{detail}")


FILE = "judgements.jsonl"
LIMIT = 600.0
"""Default for the largest number of seconds without an answer."""
_LARGEST_LIMIT = 10**7
"""Largest time limit in seconds."""


def check(judge: Judge, limit: float) -> None:
    """Raise ConfigError for a judge with an invalid seed or scale, or an invalid time limit."""
    option.check_number("seed (--seed)", judge.seed)
    option.check_number("time_limit (--time-limit)", limit, _LARGEST_LIMIT)
    if limit <= 0:
        raise ConfigError(f"time_limit (--time-limit) must be a number of seconds above 0, got {limit:g}")
    for end in judge.scale or ():
        option.check_number("scale (--scale)", end)
    if judge.scale is not None and not judge.scale[0] < judge.scale[1]:
        raise ConfigError(f"scale (--scale) must be the least and the largest score, such as 1,10; got {judge.scale}")


def ask_judge(
    answers: WrittenAnswers,
    judge: Judge,
    *,
    path: Path | None = None,
    overwrite: bool = False,
    limit: float = LIMIT,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Judgement, ...]:
    """Return a judgement per answer, or per pair of answers, in the order of samples and configurations.

    Judgements in the file `path` are not asked for again; each new one is stored there at once, so that a call that
    fails loses none. Without a path they are not stored.

    Raises PluginError for a judge that fails or gives an invalid judgement, and what `JudgementFile` raises.
    """
    check(judge, limit)
    questions = list(pair_questions(answers, judge.seed) if judge.pairwise else single_questions(answers))
    with TemporaryDirectory() as folder:
        file = JudgementFile(path or Path(folder) / FILE, judge, questions, overwrite)
        for question in questions:
            if question.is_tie and (question.sample, question.label) not in file.judgements:
                file.add(tie_judgement(question))
        progress(len(file.judgements), len(questions))
        _ask_missing(judge, questions, file, limit, progress)
        return tuple(file.judgements[question.sample, question.label] for question in questions)


def _ask_missing(
    judge: Judge, questions: Sequence[Question], file: JudgementFile, limit: float, progress: Callable[[int, int], None]
) -> None:
    """Ask the judge all questions that `file` has no judgement of, and store the judgements.

    Raises PluginError for an answer to an unknown question, and for a question without an answer.
    """
    missing = {
        question.id: question for question in questions if (question.sample, question.label) not in file.judgements
    }
    if not missing:
        return
    left = dict(missing)
    with closing(read_answers(judge.command, [question.line() for question in missing.values()], limit)) as answers:
        for answer in filter(bytes.strip, answers):
            answer_object = _parse_answer(answer)
            name = answer_object.get("id")
            if not isinstance(name, str) or name not in left:
                question = missing.get(name) if isinstance(name, str) else None
                reason = f"given already, of {question.description}" if question else "unknown"
                got = escape_line(repr(name))[:60]
                raise PluginError(f"expected from the judge an `id` it was given, each once, got {got} ({reason})")
            file.add(parse_judgement(left.pop(name), answer_object, judge))
            progress(len(file.judgements), len(questions))
    if left:
        first = next(iter(left.values())).description
        raise PluginError(
            f"expected from the judge an answer to each of {len(missing)} questions, got none to {len(left)}, "
            f"such as {first}"
        )


def _parse_answer(answer: bytes) -> dict[str, object]:
    """Return the JSON object in one output line of a judge. Raises PluginError for any other content."""
    try:
        parsed = parse_json(answer.decode())
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        line = answer.decode(errors="replace").strip()
        raise PluginError(f"expected lines from the judge that are JSON objects, got '{escape_line(line)[:60]}'")
    return parsed
