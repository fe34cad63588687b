"""List how byte-level vocabularies cut a text into words, before they merge bytes within each word.

A GGUF file only names the method (``tokenizer.ggml.pre``); the patterns are those of the models' own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import frozen

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]


@frozen(kw_only=True)
class PreTokenizer:
    """Describes one way to cut a text into words.

    :ivar splits: patterns applied in turn, each within the words that those before have cut; every match is a word
    :ivar nfc: compose characters first (Unicode's NFC), where the model's own tokenizer does. The models have learned
        nothing else, though neither llama.cpp nor transformers' reader of GGUF composes: of texts that are decomposed,
        as files from a Mac may be, Qwen2.5-Coder-1.5B finds the composed tokens likelier by 222 nats in 62 tokens of
        French, by 415 in 40 of Vietnamese and by 1,436 in 50 of Korean
    :ivar ignore_merges: a word that is a token as a whole is that token, whatever the merges say
    :ivar add_bos: the model's texts begin with the bos token, unless the file says otherwise
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cl100k(digits: str, *, letter: str = r"\p{L}") -> str:
    """Return OpenAI's pattern of GPT-4, or a variant of it.

    :param digits: how many digits stay together
    :param letter: the inside of the class that words are made of
    """
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[{letter}]+"
    return rf"{_CONTRACTION}|{word}|{digits}| ?[^\s{letter}\p{{N}}]+[\r\n]*|{_SPACES}"


def _o200k(digits: str, *, contraction: str) -> str:
    """Return OpenAI's pattern of GPT-4o, or a variant of it: words are also cut where lower case turns to upper
    case.
    """
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{_UPPER}*{_LOWER}+{contraction}|{start}{_UPPER}+{_LOWER}*{contraction}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CJK = r"[一-龥ࠀ-一가-퟿]+"

_GPT2 = PreTokenizer(splits=(_GPT2_SPLIT,))
_DIGITS_GPT2 = PreTokenizer(splits=(r"\p{N}", _GPT2_SPLIT))
_NEOX = PreTokenizer(splits=(_GPT2_SPLIT,), nfc=True)
_COHERE = PreTokenizer(splits=(r"\p{N}", _GPT2_SPLIT), nfc=True)
_LLAMA3 = PreTokenizer(splits=(_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer(splits=(_cl100k(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer(splits=(_cl100k(r"\p{N}"),), nfc=True)
_QWEN35 = PreTokenizer(splits=(_cl100k(r"\p{N}", letter=r"\p{L}\p{M}"),), nfc=True)
_TEKKEN = PreTokenizer(splits=(_o200k(r"\p{N}", contraction=""),), ignore_merges=True, add_bos=True)
_GPT4O = PreTokenizer(splits=(_o200k(r"\p{N}{1,3}", contraction=f"{_CONTRACTION}?"),))
_DEEPSEEK_LLM = PreTokenizer(
    splits=(
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        _CJK,
        r"\p{N}",
    )
)
_DEEPSEEK_CODER = PreTokenizer(splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))
_DEEPSEEK_V3 = PreTokenizer(
    splits=(
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    )
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        name: pre_tokenizer
        for pre_tokenizer, names in (
            (_GPT2, "default gpt-2 phi-2 exaone4 trillion granite-docling"),
            (_NEOX, "mpt olmo"),
            (_DIGITS_GPT2, "smollm starcoder refact codeshell exaone minerva-7b"),
            (_COHERE, "command-r"),
            (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
            (_CL100K, "dbrx smaug-bpe chatglm-bpe glm4"),
            (_QWEN2, "qwen2 stablelm2 deepseek-r1-qwen megrez"),
            (_QWEN35, "qwen35"),
            (_TEKKEN, "tekken"),
            (_GPT4O, "gpt-4o llama4"),
            (_DEEPSEEK_LLM, "deepseek-llm"),
            (_DEEPSEEK_CODER, "deepseek-coder"),
            (_DEEPSEEK_V3, "deepseek-v3"),
        )
        for name in names.split()
    }
)
