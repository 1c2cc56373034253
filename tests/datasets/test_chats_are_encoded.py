"""Rows with `messages`: what the template makes of them, where the question begins, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from perturbkv.datasets import jsonl
from perturbkv.datasets.dataset_registry import DatasetOptions
from perturbkv.datasets.encode import Prompt, encode
from perturbkv.datasets.prompts import load
from perturbkv.errors import DatasetError
from tests.support.folders import model_folder

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = CHATML.replace("m['content']", "m['content'] | trim")
STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
)
COUNTING = "{% for m in messages %}<{{ m['content'] | length }}>{{ m['content'] }}{% endfor %}<answer>"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is Paris?"},
    {"role": "assistant", "content": "In France."},
    {"role": "user", "content": " And Rome? "},
]
Encode = Callable[..., Prompt]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    """One token per byte, and one per special token."""
    found = AutoTokenizer.from_pretrained(folder)
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    found.chat_template = CHATML
    return found


@pytest.fixture
def encoded(tokenizer: Any, tmp_path: Path) -> Encode:
    """The prompt of one row, in a file of which it is the second."""

    def of(row: Mapping[str, Any], template: str | None = CHATML, chat: bool = True, most: int | None = None) -> Prompt:
        path = tmp_path / "chats.jsonl"
        path.write_text(f"{json.dumps({'prompt': 'first'})}\n{json.dumps(row)}\n")
        tokenizer.chat_template = template
        _, sample = jsonl.load(str(path), DatasetOptions(2), tokenizer).samples
        return encode(sample, tokenizer, chat_template=chat, max_tokens=most)

    return of


def ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


HEAD = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere is Paris?<|im_end|>\n"
HEAD += "<|im_start|>assistant\nIn France.<|im_end|>\n<|im_start|>user\n"
TAIL = "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("template", "asked"), [(CHATML, " And Rome? "), (TRIMMED, "And Rome?")])
def test_the_last_users_text_is_the_question_and_all_before_it_the_context(
    encoded: Encode, tokenizer: Any, template: str, asked: str
) -> None:
    prompt = encoded({"messages": CHAT, "id": "c", "answers": ["In Italy."]}, template)
    assert prompt.parts("context-only") == (ids(tokenizer, HEAD), ids(tokenizer, asked + TAIL))
    assert (prompt.sample_id, prompt.answers, prompt.chat_template) == ("c", ("In Italy.",), True)
    assert prompt.excerpt.startswith("Be brief. Where is Paris?")
    assert prompt.control_tokens == 0


def test_an_answers_beginning_stands_behind_the_template_and_typed_tokens_are_counted(
    encoded: Encode, tokenizer: Any
) -> None:
    typed = [*CHAT[:-1], {"role": "user", "content": "Rome<|im_end|>"}]
    prompt = encoded({"messages": typed, "answer_prefix": "It is"})
    assert prompt.token_ids == ids(tokenizer, f"{HEAD}Rome<|im_end|>{TAIL}It is")
    assert (prompt.sample_id, prompt.control_tokens) == ("1", 1)


def tail(tokenizer: Any, prompt: Prompt) -> str:
    return str(tokenizer.decode(prompt.token_ids[prompt.template_tail.start : prompt.template_tail.stop]))


@pytest.mark.parametrize("beginning", ["", "It is", " \n<|im_end|>"])
@pytest.mark.parametrize("template", [CHATML, TRIMMED])
def test_the_templates_end_is_known_behind_a_chat_and_before_an_answers_beginning(
    encoded: Encode, tokenizer: Any, template: str, beginning: str
) -> None:
    asked = [{"messages": CHAT, "answer_prefix": beginning}, {"prompt": "Why?\n", "answer_prefix": beginning}]
    for prompt in (encoded(row, template) for row in asked):
        assert tail(tokenizer, prompt) == TAIL
        assert len(prompt.token_ids) - prompt.template_tail.stop == len(ids(tokenizer, beginning))


def test_a_typed_end_of_a_turn_is_text(encoded: Encode, tokenizer: Any) -> None:
    typed = encoded({"prompt": f"Why?{TAIL}"})
    assert tail(tokenizer, typed) == TAIL
    assert typed.template_tail.stop == len(typed.token_ids)


def test_what_has_no_template_has_no_end_of_one(encoded: Encode, tokenizer: Any) -> None:
    assert not encoded({"prompt": f"Why?{TAIL}"}, chat=False).template_tail
    silent = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert not encoded({"prompt": "Why?"}, silent).template_tail


@pytest.mark.parametrize("most", [60, 20, 9, 8, 7, 2])
def test_a_cut_keeps_what_fits_its_last_half_of_the_templates_end(encoded: Encode, tokenizer: Any, most: int) -> None:
    prompt = encoded({"prompt": "Why? " * 20, "answer_prefix": "It"}, most=most)
    whole, last = TAIL + "It", tokenizer.decode(prompt.token_ids[-(most // 2) :])
    assert len(prompt.token_ids) == most
    assert tail(tokenizer, prompt) == (TAIL if last.endswith(whole) else last.removesuffix("It") if most > 2 else "")


def test_a_chat_of_one_turn_is_the_prompt_that_says_the_same(encoded: Encode) -> None:
    chat, plain = encoded({"messages": [{"role": "user", "content": "Why?"}]}), encoded({"prompt": "Why?"})
    assert (chat.token_ids, chat.question_tokens) == (plain.token_ids, plain.question_tokens)
    with pytest.raises(DatasetError, match="no question of its own"):
        chat.parts("context-only")


def test_a_long_chat_loses_its_middle_and_never_its_question(encoded: Encode, tokenizer: Any) -> None:
    whole = encoded({"messages": CHAT})
    cut = encoded({"messages": CHAT}, most=80)
    assert cut.token_ids == whole.token_ids[:40] + whole.token_ids[-40:]
    assert (cut.cut_tokens, cut.question_tokens) == (len(whole.token_ids) - 80, whole.question_tokens)
    with pytest.raises(DatasetError, match="to leave the question of sample '1' whole"):
        encoded({"messages": CHAT}, most=30)


def said(role: str, content: Any = "a", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_what_chat_services_write_into_every_message_is_taken(encoded: Encode) -> None:
    empty = {"name": "ada", "tool_calls": [], "function_call": None, "refusal": None, "annotations": []}
    plain, full = (encoded({"messages": [said("user", "Why?", **more)]}) for more in ({}, empty))
    assert full.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": []}, "`messages` to be a list of messages, got an empty list"),
        ({"messages": "hi"}, "`messages` to be a list of messages, got text"),
        ({"messages": CHAT, "prompt": "a"}, "`prompt` or `messages`, got both"),
        ({"messages": ["hi"]}, "message 1 to be an object with `role` and `content`, got text"),
        ({"messages": [said("tool")]}, "message 1 to have one of the roles system, user, assistant, got 'tool'"),
        ({"messages": [said("user"), {"content": "a"}]}, "message 2 to have one of the roles .*, got null"),
        ({"messages": [said("user", [{"type": "text"}])]}, "`content` of message 1 to be text, got a list"),
        ({"messages": [said("user", "\ud800")]}, "expected its prompt to be text, got half of a surrogate"),
        ({"messages": [said("user"), said("assistant", "", tool_calls=[1]), said("user")]}, "2, got `tool_calls`"),
        ({"messages": [said("user", contents="b")]}, "`name` in message 1, got `contents`; take it out"),
        ({"messages": [said("user", "a", weight=0)]}, "`name` in message 1, got `weight`; take it out"),
        (
            {"messages": CHAT[:3]},
            "last message to be a user's, .*; got one of the assistant.*`answers`",
        ),
        ({"messages": CHAT[:1]}, "last message to be a user's, who asks something; got one of the system"),
        ({"messages": [said("user", " ")]}, "last message to be a user's, who asks something; got an empty one"),
        ({"messages": CHAT, "answers": "Italy"}, "`answers` to be a list of texts"),
    ],
)
def test_what_is_no_chat_is_refused_by_file_and_line(encoded: Encode, row: dict[str, Any], told: str) -> None:
    with pytest.raises(DatasetError, match=f"chats.jsonl, line 2: .*{told}") as refused:
        encoded(row)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("messages", "template", "chat", "told"),
    [
        (CHAT, STRICT, True, "refuses messages of system, user, assistant, user: .*System role not supported"),
        ([said("user"), said("user")], STRICT, True, "refuses messages of user, user: .*roles must alternate"),
        (CHAT, COUNTING, True, "where the question begins cannot be told"),
        (CHAT, None, True, "messages need the model's chat template, which this tokenizer lacks; use a chat model"),
        (CHAT, CHATML, False, "which --no-chat-template leaves out; leave that option out"),
    ],
)
def test_a_template_that_does_not_go_with_a_chat_is_named_with_the_line(
    encoded: Encode, messages: list[Any], template: str | None, chat: bool, told: str
) -> None:
    with pytest.raises(DatasetError, match=f"chats.jsonl, line 2: .*{told}") as refused:
        encoded({"messages": messages}, template, chat)
    assert "\n" not in str(refused.value)


def test_a_strict_template_takes_turns_that_alternate(encoded: Encode, tokenizer: Any) -> None:
    prompt = encoded({"messages": CHAT[1:]}, STRICT)
    context, question = prompt.parts("context-only")
    assert context == ids(tokenizer, "<user>Where is Paris?<assistant>In France.<user>")
    assert question == ids(tokenizer, " And Rome? <assistant>")


def test_a_file_of_chats_is_a_dataset(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": CHAT, "id": name}) for name in "ab"))
    prompts = load(str(path), tokenizer)
    assert (prompts.ids, prompts.chat_template) == (["a", "b"], True)
    assert all(prompt.question_tokens for prompt in prompts)
