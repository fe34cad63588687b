"""List the pre-tokenizers of byte-level vocabularies, which split a text into words before BPE merges bytes in each.

A GGUF file only names the pre-tokenizer (``tokenizer.ggml.pre``); the patterns are from the models' own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import evolve, frozen

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]


@frozen(kw_only=True)
class PreTokenizer:
    """Describes how to split a text into words.

    :ivar splits: patterns applied in turn, each within the words that the previous ones produced; every match is a word
    :ivar nfc: whether to compose characters first (Unicode NFC), as the model's own tokenizer does. The models were
        trained on composed text only, though neither llama.cpp nor transformers' GGUF reader composes. For decomposed
        texts, as files from a Mac may be, Qwen2.5-Coder-1.5B finds the composed tokens likelier by 222 nats in 62
        tokens of French, by 415 in 40 of Vietnamese and by 1,436 in 50 of Korean
    :ivar ignore_merges: whether a word that is in the vocabulary is one token, regardless of merges
    :ivar add_bos: whether texts begin with the bos token, unless the file says otherwise
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cl100k(
    digits: str,
    *,
    letter: str = r"\p{L}",
    word: str = "",
    contraction: str = rf"{_CONTRACTION}|",
    signs: str = "",
    spaces: str = _SPACES,
) -> str:
    """Return OpenAI's pattern of GPT-4, or a variant of it.

    :param digits: pattern of a run of digits
    :param letter: content of the character class of words
    :param word: pattern of a word, after one optional other character; empty: a run of ``letter``
    :param contraction: pattern of endings such as 's that are separate words, with a trailing ``|``
    :param signs: pattern of a run of other characters; empty: with an optional space before and line ends after it
    :param spaces: pattern of white space
    """
    word = word or rf"[{letter}]+"
    signs = signs or rf" ?[^\s{letter}\p{{N}}]+[\r\n]*"
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?{word}|{digits}|{signs}|{spaces}"


def _o200k(digits: str, *, contraction: str) -> str:
    """Return OpenAI's pattern of GPT-4o, or a variant of it: words are also split where lower case turns to upper
    case.
    """
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{_UPPER}*{_LOWER}+{contraction}|{start}{_UPPER}+{_LOWER}*{contraction}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


def _deepseek(lines: str) -> str:
    """Return DeepSeek-V3's pattern of words and punctuation.

    :param lines: the end of the pattern: what may follow a run of punctuation, and alternatives for white space
    """
    return rf"[!-/:-@\[-`{{-~][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+{lines}"


_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CJK = r"[一-龥ࠀ-一가-퟿]+"
_KANA_HAN = r"[一-龥぀-ゟ゠-ヿ]+"
_THOUSANDS = r"\d{1,3}(?=(?:\d{3})*(?!\d))"  # groups of three from the right
_NO_SENTENCE = r" ?[^(\s|.,!?…。，、।۔،)]+"
_HALVING_SPACES = r"\s*[\r\n]+|" + "|".join(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s"

_GPT2 = PreTokenizer(splits=(_GPT2_SPLIT,))
_MODERN_BERT = evolve(_GPT2, nfc=True)
_DIGITS_GPT2 = PreTokenizer(splits=(r"\p{N}", _GPT2_SPLIT))
_NEOX = PreTokenizer(splits=(_GPT2_SPLIT,), nfc=True)
_COHERE = PreTokenizer(splits=(r"\p{N}", _GPT2_SPLIT), nfc=True)
_FALCON = PreTokenizer(splits=(r"[\p{P}$+<=>^~|`]+", _GPT2_SPLIT, "[0-9]{3}"))
_LLAMA3 = PreTokenizer(splits=(_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer(splits=(_cl100k(r"\p{N}{1,3}"),))
_MINICPM5 = PreTokenizer(splits=(r"\p{N}{1,3}", _cl100k(r"\p{N}+")), ignore_merges=True)
_JAIS2 = PreTokenizer(splits=(_cl100k(r"\p{N}{1,3}", spaces=_HALVING_SPACES),))
_QWEN2 = PreTokenizer(splits=(_cl100k(r"\p{N}"),), nfc=True)
_ONE_DIGIT = PreTokenizer(splits=(_cl100k(r"\p{N}"),))
_LAGUNA = PreTokenizer(splits=(r"[^\n]+|\n+", _cl100k(r"\p{N}")))
_UFAKZEKA = PreTokenizer(splits=(_cl100k(r"\p{N}", contraction=""),))
_SEED_CODER = PreTokenizer(splits=(_cl100k(r"\p{N}", signs=r" ?[^\s\p{L}\p{N}]+"),))
_BAILING = PreTokenizer(splits=(_cl100k(r"\p{N}", spaces=r"\s*[\r\n]|\s+(?!\S)|\s+"),))
_EXAONE_MOE = PreTokenizer(
    splits=(
        _cl100k(
            r"\p{N}",
            word=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
            signs=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
            spaces=r"\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    )
)
_QWEN35 = PreTokenizer(splits=(_cl100k(r"\p{N}", letter=r"\p{L}\p{M}"),), nfc=True)
_TEKKEN = PreTokenizer(splits=(_o200k(r"\p{N}", contraction=""),), ignore_merges=True, add_bos=True)
_GPT4O = PreTokenizer(splits=(_o200k(r"\p{N}{1,3}", contraction=f"{_CONTRACTION}?"),))
_TINY_AYA = PreTokenizer(splits=(r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.splits))
_YOUTU = PreTokenizer(
    splits=(
        r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        _o200k(r"\p{N}", contraction=f"{_CONTRACTION}?"),
    ),
    ignore_merges=True,
)
_KIMI = PreTokenizer(
    splits=(
        r"\p{Han}+",
        _o200k(r"\p{N}{1,3}", contraction=f"{_CONTRACTION}?").replace(r"[\r\n/]*", r"[\r\n]*"),
    )
)
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
_DEEPSEEK_V3 = PreTokenizer(splits=(r"\p{N}{1,3}", _KANA_HAN, _deepseek(rf"[\r\n]*|{_SPACES}")))
_SPARK = PreTokenizer(splits=(r"\p{N}{1,3}", _KANA_HAN, _deepseek(r"|[\r\n]|\s+(?!\S)|\s+"), r"\p{N}"))
_AFMOE = PreTokenizer(
    splits=(
        _THOUSANDS,
        r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
        _deepseek(rf"[\r\n]*|{_SPACES}"),
    )
)
_SUPERBPE = PreTokenizer(splits=(r"\p{N}+", _THOUSANDS))
_BLOOM = PreTokenizer(splits=(_NO_SENTENCE,))
_VIKING = PreTokenizer(splits=(_NO_SENTENCE, r"\p{N}"))
_CHAMELEON = PreTokenizer(
    splits=(
        "<sentinel:[0-9]+>",
        "IMGIMG[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2_SPLIT,
    ),
    add_bos=True,
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        name: pre_tokenizer
        for pre_tokenizer, names in (
            (_GPT2, "default gpt-2 roberta-bpe phi-2 exaone4 trillion granite-docling jais gigachat a.x-4.0 mellum"),
            (_MODERN_BERT, "modern-bert"),
            (_NEOX, "mpt olmo"),
            (_DIGITS_GPT2, "smollm starcoder refact codeshell exaone minerva-7b mellum2"),
            (_COHERE, "command-r"),
            (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
            (_FALCON, "falcon"),
            (_CL100K, "dbrx smaug-bpe chatglm-bpe glm4"),
            (_MINICPM5, "minicpm5"),
            (_JAIS2, "jais-2"),
            (_QWEN2, "qwen2 stablelm2 deepseek-r1-qwen megrez f2llmv2"),
            (_ONE_DIGIT, "kormo hunyuan solar-open grok-2"),
            (_LAGUNA, "laguna"),
            (_UFAKZEKA, "ufakzeka"),
            (_SEED_CODER, "seed-coder"),
            (_BAILING, "bailingmoe bailingmoe2 llada-moe"),
            (_EXAONE_MOE, "exaone-moe"),
            (_QWEN35, "qwen35"),
            (_TEKKEN, "tekken"),
            (_GPT4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
            (_TINY_AYA, "tiny_aya cohere2moe"),
            (_YOUTU, "youtu"),
            (_KIMI, "kimi-k2"),
            (_DEEPSEEK_LLM, "deepseek-llm"),
            (_DEEPSEEK_CODER, "deepseek-coder"),
            (_DEEPSEEK_V3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
            (_SPARK, "spark2_5"),
            (_AFMOE, "afmoe"),
            (_SUPERBPE, "superbpe"),
            (_BLOOM, "bloom poro-chat gpt3-finnish"),
            (_VIKING, "viking"),
            (_CHAMELEON, "chameleon"),
        )
        for name in names.split()
    }
)
