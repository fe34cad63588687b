"""How a query and a document become tokens: by a chat template, or as the tokenizer writes a pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import tiny
from paged_sdk.chat.pair_writer import PairWriter, carries_pairs, names_pairs
from paged_sdk.chat.renderer import Interruption
from paged_sdk.chat.text_processor import TextProcessor, load_text_processor
from paged_sdk.config.ranking import PairForm, RankRecipe
from paged_sdk.errors import InvalidRequestError
from tiny_ranker import RANK_TEMPLATE

REVERSED = (
    "{% for role in ['document', 'query'] %}<|im_start|>{{ role }}\n"
    "{{ (messages | selectattr('role', 'eq', role) | list)[0].content | trim }}<|im_end|>\n{% endfor %}"
)
CHAT = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}."


def processor(directory: Path, template: str | None) -> TextProcessor:
    tiny.tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    return load_text_processor(directory)


def writer(text: TextProcessor, form: PairForm | None, instruction: str | None = None) -> PairWriter:
    return PairWriter(text, RankRecipe(form=form, instruction=instruction), "Where is the sea?", Interruption())


@pytest.mark.parametrize("template", [RANK_TEMPLATE, REVERSED])
@pytest.mark.parametrize("document", ["a sea", " x ", "It is there.\n", "", "Zwölf Boxkämpfer"])
def test_tokens_are_those_of_transformers(template: str, document: str, tmp_path: Path) -> None:
    text = processor(tmp_path, template)
    assert text.template is not None
    assert text.template.runs_in_process
    pair = writer(text, PairForm()).encode(document)
    messages = [{"role": "query", "content": "Where is the sea?"}, {"role": "document", "content": document}]
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=True, return_dict=True)
    assert pair.token_ids == theirs["input_ids"]


@pytest.mark.parametrize(("template", "after"), [(RANK_TEMPLATE, "<|im_end|>\n"), (REVERSED, None)])
def test_the_end_of_a_document_is_cut(template: str, after: str | None, tmp_path: Path) -> None:
    text = processor(tmp_path, template)
    document = "There is a village on the sea, and a ship. " * 4
    pair = writer(text, PairForm()).encode(document)
    assert after is None or text.tokenizer.decode(pair.after, skip_special_tokens=False) == after
    for most in (len(pair.token_ids) + 1, len(pair.token_ids) - 1, len(pair.token_ids) - len(pair.second) + 1):
        cut = pair.cut(most)
        assert cut is not None
        assert len(cut.token_ids) == min(most, len(pair.token_ids))
        said = text.tokenizer.decode(cut.token_ids, skip_special_tokens=False)
        assert "Where is the sea?" in said
        assert said.endswith(text.tokenizer.decode(pair.after, skip_special_tokens=False))
    assert pair.cut(len(pair.token_ids) - len(pair.second)) is None


def test_an_instruction_is_a_system_message_or_before_the_query(tmp_path: Path) -> None:
    text = processor(tmp_path, RANK_TEMPLATE)
    by_template = writer(text, PairForm(), "Say it").encode("x").token_ids
    assert "<Instruct>: Say it\n" in text.tokenizer.decode(by_template, skip_special_tokens=False)
    pair = writer(text, None, "Say it: ").encode("x")
    assert pair.token_ids == tiny.tokenizer().encode("Say it: Where is the sea?", "x").ids
    assert (list(pair.second), pair.after) == ([len(pair.token_ids) - 1], [])


def test_templates_are_told_apart(tmp_path: Path) -> None:
    form = PairForm()
    for template, carries, names in (
        (RANK_TEMPLATE, True, True),
        (tiny.CHAT_TEMPLATE, True, False),
        (CHAT, False, False),
        ("{{ 'query' if 'document' else messages }}", False, False),
        ("{{ messages[0].content }}", False, False),
        ("{{ raise_exception('never') }}", False, False),
        (None, False, False),
    ):
        text = processor(tmp_path, template)
        assert (carries_pairs(text, form), names_pairs(text, form)) == (carries, names)


def test_what_a_template_refuses_is_an_error(tmp_path: Path) -> None:
    text = processor(tmp_path, "{{ raise_exception('never') }}")
    with pytest.raises(InvalidRequestError, match="never"):
        writer(text, PairForm()).encode("x")
