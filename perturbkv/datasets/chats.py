"""A row with `messages`, as chat services write them, as a sample: the last user's turn is the question."""

from __future__ import annotations

from typing import Any

from perturbkv.datasets.rows import Row, kind
from perturbkv.datasets.sample import Sample
from perturbkv.datasets.templates import Chat, Message

ROLES = ("system", "user", "assistant")
_CALLS = ("tool_calls", "function_call")
"""Fields of a message that say something that no text says."""


def chat_sample(row: Row) -> Sample:
    """The sample of a row's messages. Raises DatasetError, which names file and line, for what is no chat."""
    if "prompt" in row.fields:
        msg = "expected `prompt` or `messages`, got both; leave one out"
        raise row.refusal(msg)
    messages = tuple(_message(row, place, one) for place, one in enumerate(_listed(row)))
    *earlier, last = messages
    _check_last(row, last)
    return row.sample(
        id=row.identity("id"),
        context="".join(f"{one.text}\n\n" for one in earlier),
        question=last.text,
        answers=row.texts("answers"),
        answer_prefix=row.text("answer_prefix"),
        chat=Chat(messages, row.where),
    )


def _listed(row: Row) -> list[Any]:
    found = row.fields["messages"]
    if not isinstance(found, list) or not found:
        got = "an empty list" if found == [] else kind(found)
        msg = f"expected `messages` to be a list of messages, got {got}"
        raise row.refusal(msg)
    return found


def _message(row: Row, place: int, found: Any) -> Message:
    """One message, of one of the known roles and with text; `place` counts from 0."""
    if not isinstance(found, dict):
        msg = f"expected message {place + 1} to be an object with `role` and `content`, got {kind(found)}"
        raise row.refusal(msg)
    role, text = found.get("role"), found.get("content")
    if role not in ROLES:
        got = repr(role)[:40] if isinstance(role, str) else kind(role)
        msg = f"expected message {place + 1} to have one of the roles {', '.join(ROLES)}, got {got}"
        raise row.refusal(msg)
    if calls := next((name for name in _CALLS if found.get(name)), None):
        msg = f"expected message {place + 1} to be text alone, got `{calls}` beside it; leave such chats out"
        raise row.refusal(msg)
    if not isinstance(text, str):
        msg = f"expected the `content` of message {place + 1} to be text, got {kind(text)}"
        raise row.refusal(msg)
    return Message(role, row.encodable(f"the content of message {place + 1}", text))


def _check_last(row: Row, last: Message) -> None:
    """Raise DatasetError unless the last message is a user's and says something."""
    if last.role == "assistant":
        msg = (
            "expected the last message to be a user's, got an assistant's; leave it out, or move its text to "
            "`answers`, where it is an accepted answer, or to `answer_prefix`, where the model goes on with it"
        )
        raise row.refusal(msg)
    if last.role != "user" or not last.text.strip():
        got = "an empty one" if last.role == "user" else f"a {last.role}'s"
        msg = f"expected the last message to be a user's, who asks something; got {got}"
        raise row.refusal(msg)
