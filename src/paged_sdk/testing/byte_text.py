"""Makes the text processor of a model without a vocabulary: every byte is a token."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paged_sdk.chat.pieces import BYTE_LEVEL_ALPHABET
from paged_sdk.chat.template import ChatTemplate
from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.chat.tokenizer import SpecialTokens, Tokenizer
from paged_sdk.config.sampling import GenerationDefaults

__all__ = ["END", "VOCAB_SIZE", "byte_text"]

_START, END = 256, 257
"""Tokens that begin and end a turn; ids below 256 are bytes."""

VOCAB_SIZE = 258

_CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ '<tool>' + (tool | tojson) + '</tool>\\n' }}{% endfor %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['reasoning_content'] %}{{ '<think>' + message['reasoning_content'] + '</think>' }}{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_text() -> TextProcessor:
    """Make a text processor whose tokens are the bytes of UTF-8, with the ChatML chat template, reasoning and Hermes'
    tool calls.
    """
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_LEVEL_ALPHABET), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    assert backend.token_to_id("<|im_start|>") == _START
    assert backend.token_to_id("<|im_end|>") == END
    tokenizer = Tokenizer(backend, SpecialTokens(names={"eos_token": "<|im_end|>"}, eos=END))
    return TextProcessor(
        tokenizer=tokenizer,
        template=ChatTemplate(_CHAT_TEMPLATE, tokenizer.special.names),
        defaults=GenerationDefaults(),
        stop_token_ids=frozenset({END}),
    )
