"""A tokenizer for RULER's tasks, and files as they read them: small, and lm-eval's 500 questions long."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.support import lm_eval_ruler


class Words:
    """A token per word, or where it is `spelled` per character; a chat template that shows its turns."""

    chat_template = "yes"

    def __init__(self, spelled: bool = False) -> None:
        self.spelled = spelled

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": tuple(map(ord, text)) if self.spelled else lm_eval_ruler.words(text)}

    def apply_chat_template(self, turns: list[dict[str, str]], **more: Any) -> str:
        return f"<user>{turns[0]['content']}</user><assistant>"


def prose(draw: random.Random, sentences: int) -> str:
    words = ("stone", "river", "maker", "early", "quiet", "number", "idea", "work", "essay", "long", "Tuesday")
    return " ".join(" ".join(draw.choices(words, k=draw.randrange(4, 15))).capitalize() + "." for _ in range(sentences))


def squad(draw: random.Random) -> dict[str, Any]:
    def question(place: str) -> dict[str, Any]:
        answers = [{"text": f"answer {place}"}, {"text": f"The answer {place}"}]
        return {"question": f"What is {place}?", "is_impossible": draw.random() < 0.2, "answers": answers}

    return {"data": [
        {"paragraphs": [
            {"context": f"{article}-{place} {prose(draw, 3)}",
             "qas": [question(f"{article}-{place}-{i}") for i in range(6)]}
            for place in range(4)
        ]}
        for article in range(30)
    ]}  # fmt: skip


def hotpot(draw: random.Random) -> list[dict[str, Any]]:
    """The first question's documents are too long for any short prompt."""
    return [
        {"question": f"Which is {i}?", "answer": f"number {i}",
         "context": [[f"Title {i}-{j}", [prose(draw, 200 if i == 0 else 2), " And so on."]] for j in range(3)]}
        for i in range(500)
    ]  # fmt: skip


def write(folder: Path) -> None:
    """All three, under RULER's names and under lm-eval's; and what nltk needs to tell sentences apart."""
    draw = random.Random(0)
    (folder / "PaulGrahamEssays.json").write_text(json.dumps({"text": prose(draw, 900).replace(". ", ".\n\n", 50)}))
    for names, found in (
        (("squad", "dev-v2.0"), squad(draw)),
        (("hotpotqa", "hotpot_dev_distractor_v1"), hotpot(draw)),
    ):
        for name in names:
            (folder / f"{name}.json").write_text(json.dumps(found))
    punkt = folder / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    punkt.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (punkt / name).touch()
