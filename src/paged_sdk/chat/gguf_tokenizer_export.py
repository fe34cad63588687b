"""Convert a tokenizer.json to GGUF metadata, which :mod:`paged_sdk.chat.gguf_tokenizer` reads."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import tokenizers
from tokenizers import models, normalizers

from paged_sdk.chat.gguf_tokenizer import tokenizer_from_gguf, word_splitter
from paged_sdk.chat.gguf_vocabulary import SPECIAL_IDS, TokenType
from paged_sdk.chat.pre_tokenizers import PRE_TOKENIZERS
from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.errors import CheckpointError, shown

__all__ = ["gguf_from_text_processor"]

_BYTE: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LEAST_SCORE: Final = -1e9  # of tokens that no merge produces

# Distinguishes pre-tokenizers: case, digits, punctuation, white space, line ends, scripts, decomposed characters.
_PROBE: Final = (
    "Hello, World! it's IT'S we'LL  don’t\n\n  a\tb \r\nx  \n1 12 123 1234 12345 3.14 ½ ²  camelCase HTTPServer ABCdef "
    "naïve cafe\u0301 ÀÉÎ Straße русский язык Ελληνικά עברית العربية हिन्दी ไทย 中文字符 日本語のテキスト 한국어 "
    "\u1112\u1161\u11ab !!?? -- ... (a[b]{c}) #tag @you $5 50% a_b a/b\\c <x> </x> 'quoted' \"double\" `code` "
    "x=y+1;// end\n\t\tif(x){}\n🙂👍🏽 ∑ → ½ ™ \u00a0nbsp\u3000wide   "
)


def gguf_from_text_processor(text: TextProcessor, architecture: str, vocab_size: int) -> dict[str, Any]:
    """Return the metadata of a tokenizer and a chat template, by GGUF key.

    :param architecture: GGUF's name of the model's architecture
    :param vocab_size: vocabulary size of the model, which may be larger than the tokenizer's
    :raises CheckpointError: GGUF cannot describe the tokenizer: read back, it would encode text differently
    """
    tokenizer = text.tokenizer
    content = json.loads(tokenizer.to_json())
    backend, model = tokenizers.Tokenizer.from_str(tokenizer.to_json()), content["model"]
    if model.get("type") not in ("BPE", "Unigram"):
        raise _refused(f"its model is {model.get('type')}, neither BPE nor Unigram")
    tokens, types = _tokens(content, vocab_size)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(each) for each in types],
    }
    if model["type"] == "Unigram":
        metadata |= _unigram(content, tokens, backend)
    elif model.get("byte_fallback") and architecture == "gemma4":
        metadata["tokenizer.ggml.model"] = "gemma4"
        metadata["tokenizer.ggml.merges"] = [" ".join(pair) for pair in _merges(model)]
        metadata["tokenizer.ggml.add_space_prefix"] = False
    elif model.get("byte_fallback"):
        metadata["tokenizer.ggml.model"] = "llama"
        metadata["tokenizer.ggml.scores"] = _scores(model, tokens)
        metadata["tokenizer.ggml.add_space_prefix"] = _begins_with_a_space(backend)
    else:
        metadata["tokenizer.ggml.pre"] = _pre_tokenizer_name(backend, model)
        metadata["tokenizer.ggml.merges"] = [" ".join(pair) for pair in _merges(model)]
    metadata |= _special_ids(text)
    if text.template is not None:
        metadata["tokenizer.chat_template"] = text.template.source
    _must_be_equal(tokenizer, tokenizer_from_gguf({"general.architecture": architecture} | metadata))
    return metadata


def _tokens(content: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[TokenType]]:
    """Return all tokens and their types, by id; ids without a token get a placeholder name."""
    vocabulary = _vocabulary(content["model"])
    tokens, types = [f"[PAD{id}]" for id in range(vocab_size)], [TokenType.UNUSED] * vocab_size
    is_byte = content["model"].get("byte_fallback")
    for token, id in vocabulary.items():
        if id < vocab_size:
            tokens[id] = token
            types[id] = TokenType.BYTE if is_byte and _BYTE.fullmatch(token) else TokenType.NORMAL
    unknown = content["model"].get("unk_id", vocabulary.get(content["model"].get("unk_token") or ""))
    if unknown is not None and unknown < vocab_size:
        types[unknown] = TokenType.UNKNOWN
    for added in content.get("added_tokens", ()):
        if (id := added["id"]) < vocab_size and types[id] is not TokenType.UNKNOWN:
            tokens[id] = added["content"]
            types[id] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    return tokens, types


def _vocabulary(model: Mapping[str, Any]) -> dict[str, int]:
    """Map tokens to ids. The vocabulary of a Unigram model is a list of tokens with their scores."""
    if model["type"] == "Unigram":
        return {token: id for id, (token, _) in enumerate(model["vocab"])}
    vocabulary: dict[str, int] = model["vocab"]
    return vocabulary


def _unigram(content: Mapping[str, Any], tokens: list[str], backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return the keys of a SentencePiece Unigram vocabulary and of its normalizer."""
    scores = {token: float(score) for token, score in content["model"]["vocab"]}
    values: dict[str, Any] = {
        "model": "t5",
        "scores": [scores.get(token, _LEAST_SCORE) for token in tokens],
        "add_space_prefix": _begins_with_a_space(backend),
        "remove_extra_whitespaces": _ids(backend, "x  x ") == _ids(backend, "x x"),
    }
    if (unknown := content["model"].get("unk_id")) is not None:
        values["unknown_token_id"] = unknown
    normalizer = content.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    if charsmap := next((step["precompiled_charsmap"] for step in steps if step.get("type") == "Precompiled"), None):
        values["precompiled_charsmap"] = base64.b64decode(charsmap)
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def _begins_with_a_space(backend: tokenizers.Tokenizer) -> bool:
    return backend.encode("x", add_special_tokens=False).tokens[0] != "x"


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


def _merges(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for merge in model["merges"]:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        yield left, right


def _merges_make_all_tokens(model: Mapping[str, Any]) -> bool:
    """Return whether each token's own text is merged to the token, so that looking words up first makes no difference.

    This takes about two seconds for a vocabulary of Kimi's size, 160,000 tokens.
    """
    merging = models.BPE(vocab=model["vocab"], merges=list(_merges(model)))
    return all(len(merging.tokenize(token)) == 1 for token in model["vocab"])


def _scores(model: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """Return scores by the order of merges: the earlier the merge that produces a token, the higher its score."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(_merges(model)):
        ranks.setdefault(left + right, rank)
    return [-float(ranks[token]) if token in ranks else _LEAST_SCORE for token in tokens]


def _pre_tokenizer_name(backend: tokenizers.Tokenizer, model: Mapping[str, Any]) -> str:
    """Return GGUF's name of the tokenizer's pre-tokenizer: the one that splits a probe text in the same way, and says
    the same of words that are tokens, unless merges make these anyway.
    """
    if backend.pre_tokenizer is None:
        raise _refused("it has no pre-tokenizer")
    text = _PROBE if backend.normalizer is None else backend.normalizer.normalize_str(_PROBE)
    words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    alike = []
    for name, known in PRE_TOKENIZERS.items():
        if name == "default":
            continue
        probe = normalizers.NFC().normalize_str(_PROBE) if known.nfc else _PROBE
        if probe == text and [word for word, _ in word_splitter(known).pre_tokenize_str(probe)] == words:
            if known.ignore_merges is bool(model.get("ignore_merges")):
                return name
            alike.append(name)
    if alike and _merges_make_all_tokens(model):
        return str(alike[0])
    raise _refused("GGUF has no name for its pre-tokenizer")


def _special_ids(text: TextProcessor) -> dict[str, Any]:
    special = text.tokenizer.special
    names = special.names
    ids = {key: text.tokenizer.token_id(names[name]) for name, key in SPECIAL_IDS.items() if name in names}
    ends = [id for id in text.defaults.eos_token_ids if id != ids.get("eos_token_id")]
    if ids.get("eos_token_id") is None and ends:
        ids["eos_token_id"] = ends.pop(0)
    ids |= dict(zip(("eot_token_id", "eom_token_id"), ends, strict=False))
    found: dict[str, Any] = {f"tokenizer.ggml.{key}": id for key, id in ids.items() if id is not None}
    found["tokenizer.ggml.add_bos_token"] = bool(special.prefix)
    found["tokenizer.ggml.add_eos_token"] = bool(special.suffix)
    return found


def _must_be_equal(tokenizer: Tokenizer, written: Tokenizer) -> None:
    for text in (_PROBE, *_PROBE.split(), _PROBE.lower()):
        if tokenizer.encode(text, add_special_tokens=True) != written.encode(text, add_special_tokens=True):
            raise _refused(f"read back from the file it would encode {shown(text)} differently")


def _refused(what: str) -> CheckpointError:
    return CheckpointError(f"the tokenizer cannot be written to a GGUF file: {what}")
