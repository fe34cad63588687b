"""Build a tokenizer from the metadata of a GGUF file (keys ``tokenizer.ggml.*`` of ggml's GGUF specification)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from paged_sdk.chat.backend import MAX_GROWTH, failing_as, growth_of
from paged_sdk.chat.gguf_vocabulary import MAX_TOKEN, SPECIAL_IDS, BuiltTokenizer, GgufVocabulary, TokenType, array
from paged_sdk.chat.gguf_word_pieces import word_pieces
from paged_sdk.chat.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from paged_sdk.chat.tokenizer import SpecialTokens, Tokenizer
from paged_sdk.errors import CheckpointError, shown
from paged_sdk.logs import get_logger

__all__ = ["tokenizer_from_gguf", "word_splitter"]

_logger = get_logger(__name__)

_SPACE = "▁"
_LINES: Final = r"[^\n]+|\n+"
_OWN_TOKENIZER = "give the model's own tokenizer.json with with_tokenizer_json"
_UNKNOWN_PENALTY: Final = 10.0  # SentencePiece's: subtracted from the score of the least likely piece


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that the metadata describes: kind ``gpt2`` (byte-level BPE), ``llama`` (SentencePiece BPE),
    ``gemma4`` (the same with merges by rank), ``t5`` (SentencePiece Unigram) or ``bert`` (WordPiece).

    :param metadata: maps keys to values; arrays are lists or numpy arrays
    :raises CheckpointError: the metadata is malformed, or its kind or pre-tokenizer is unknown here. Another
        pre-tokenizer than the one of the training would silently lower the model's quality; the remedy is the model's
        own tokenizer.json
    """
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise CheckpointError(
            f"tokenizer.ggml.model = {shown(kind)} is not supported: {', '.join(_KINDS)} are; {_OWN_TOKENIZER}"
        )
    with failing_as(lambda what: CheckpointError(f"the metadata describes no tokenizer: {what}")):
        return _tokenizer(GgufVocabulary.of(metadata), kind)


def _tokenizer(vocabulary: GgufVocabulary, kind: str) -> Tokenizer:
    built = _KINDS[kind](vocabulary)
    ids = {name: vocabulary.token_id(key, built.special_ids.get(key)) for name, key in SPECIAL_IDS.items()}
    _add_tokens(built.backend, vocabulary, {id for id in ids.values() if id is not None})
    bos, eos = ids["bos_token"], ids["eos_token"]
    first, last = built.around or (
        bos if vocabulary.flag("add_bos_token", default=built.add_bos) else None,
        eos if vocabulary.flag("add_eos_token", default=built.add_eos) else None,
    )
    special = SpecialTokens(
        names={name: str(built.backend.id_to_token(id)) for name, id in ids.items() if id is not None},
        bos=bos,
        eos=eos,
        prefix=() if first is None else (first,),
        suffix=() if last is None else (last,),
    )
    if special.suffix:  # the end token also separates the texts of a pair
        _join_pairs(built, vocabulary, special)
    return Tokenizer(built.backend, special)


def _join_pairs(built: BuiltTokenizer, vocabulary: GgufVocabulary, special: SpecialTokens) -> None:
    """Set the special tokens around and between the two texts of a pair, as llama.cpp does for rerankers."""
    separator = vocabulary.token_id("seperator_token_id", special.suffix[0])
    marks: dict[str, tuple[int, ...]] = {
        "first": special.prefix,
        "last": special.suffix,
        "between": (),
    }
    if separator is not None and vocabulary.flag("add_sep_token", default=built.separates):
        marks["between"] = (separator,)
    part = int(built.takes_token_types)

    def named(name: str, kind: int = 0) -> list[str]:
        return [f"{name}:{kind}"] if marks[name] else []

    single = [*named("first"), "$A:0", *named("last")]
    built.backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *named("between"), f"$B:{part}", *named("last", part)],
        special_tokens=[
            {"id": name, "ids": list(ids), "tokens": list(map(built.backend.id_to_token, ids))}
            for name, ids in marks.items()
            if ids
        ],
    )


def _byte_level(vocabulary: GgufVocabulary) -> BuiltTokenizer:
    """Build a tokenizer of GPT-2's kind: words are split into bytes, which are merged by rank."""
    pre_tokenizer = _pre_tokenizer(vocabulary.metadata.get("tokenizer.ggml.pre"))
    merges = array(vocabulary.metadata, "merges", str)
    backend = _bpe(vocabulary, _Pairs(merges), ignore_merges=pre_tokenizer.ignore_merges)
    if pre_tokenizer.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = word_splitter(pre_tokenizer)
    backend.decoder = decoders.ByteLevel()
    return BuiltTokenizer(backend=backend, add_bos=pre_tokenizer.add_bos, special_ids={})


def word_splitter(pre_tokenizer: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """Make the backend's pre-tokenizer, which splits text into words and words into bytes.

    :param pre_tokenizer: an entry of :data:`PRE_TOKENIZERS`
    """
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated") for split in pre_tokenizer.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(vocabulary: GgufVocabulary) -> BuiltTokenizer:
    """Build a SentencePiece BPE tokenizer (Llama 2, Mistral, Gemma): it merges characters of the whole text, the merge
    with the best-scoring result first.
    """
    scores = _scores(vocabulary)
    unknown = vocabulary.token_id("unknown_token_id", 0)
    backend = _bpe(
        vocabulary,
        _merges_by_score(vocabulary, scores),
        unk_token=list(vocabulary.ids)[unknown or 0],
        fuse_unk=True,
        byte_fallback=bool(vocabulary.of_type(TokenType.BYTE)),
    )
    prefix_space = vocabulary.flag("add_space_prefix", default=True)
    backend.normalizer = normalizers.Sequence(_spaces_as_signs(prefix_space=prefix_space))
    backend.decoder = _signs_as_spaces(prefix_space=prefix_space)
    special_ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} if len(vocabulary.ids) > 2 else {}
    return BuiltTokenizer(backend=backend, add_bos=True, special_ids=special_ids)


def _gemma4(vocabulary: GgufVocabulary) -> BuiltTokenizer:
    """Build Gemma 4's tokenizer: like SentencePiece's BPE, with merges by rank, within lines or runs of line ends."""
    unknown = vocabulary.token_id("unknown_token_id", 3)
    backend = _bpe(
        vocabulary,
        _Pairs(array(vocabulary.metadata, "merges", str)),
        unk_token=None if unknown is None else list(vocabulary.ids)[unknown],
        fuse_unk=True,
        byte_fallback=bool(vocabulary.of_type(TokenType.BYTE)),
    )
    backend.normalizer = normalizers.Sequence(_spaces_as_signs(prefix_space=False))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_LINES), behavior="isolated")
    backend.decoder = _signs_as_spaces(prefix_space=False)
    special_ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3} if len(vocabulary.ids) > 3 else {}
    return BuiltTokenizer(backend=backend, add_bos=True, special_ids=special_ids)


def _unigram(vocabulary: GgufVocabulary) -> BuiltTokenizer:
    """Build a SentencePiece Unigram tokenizer (T5 and others): it finds the likeliest segmentation into pieces."""
    scores, unknown = _scores(vocabulary), vocabulary.token_id("unknown_token_id", 2)
    if not all(map(math.isfinite, scores)):
        raise CheckpointError("tokenizer.ggml.scores holds numbers that are not finite")
    spelled = [id for id, type_ in enumerate(vocabulary.types) if type_ == TokenType.NORMAL]
    # Control, byte and unused tokens must never match text, so they are less likely than unknown characters one by one.
    never = (min((scores[id] for id in spelled), default=0.0) - _UNKNOWN_PENALTY) * MAX_TOKEN
    pieces = [
        (token, scores[id] if type_ == TokenType.NORMAL else never)
        for (token, id), type_ in zip(vocabulary.ids.items(), vocabulary.types, strict=True)
    ]
    backend = tokenizers.Tokenizer(
        models.Unigram(pieces, unk_id=unknown, byte_fallback=bool(vocabulary.of_type(TokenType.BYTE)))
    )
    prefix_space = vocabulary.flag("add_space_prefix", default=True)
    steps: list[normalizers.Normalizer] = []
    if charsmap := _charsmap(vocabulary.metadata):
        steps.append(normalizers.Precompiled(charsmap))
    # XLM-RoBERTa splits at white space of any length, although its converter writes another remove_extra_whitespaces.
    if is_xlm_roberta := vocabulary.metadata.get("general.architecture") == "bert":
        scheme = "always" if prefix_space else "never"
        words = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    else:
        if vocabulary.flag("remove_extra_whitespaces", default=True):
            steps += [
                normalizers.Replace(tokenizers.Regex("^ +| +$"), ""),
                normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
            ]
        steps += _spaces_as_signs(prefix_space=prefix_space)
    backend.normalizer = normalizers.Sequence(steps)
    if growth_of(backend) > MAX_GROWTH:
        raise CheckpointError("tokenizer.ggml.precompiled_charsmap makes texts thousands of times longer")
    backend.decoder = _signs_as_spaces(prefix_space=prefix_space)
    special_ids = {"eos_token_id": 1, "unknown_token_id": 2, "padding_token_id": 0} if len(scores) > 2 else {}
    return BuiltTokenizer(
        backend=backend, add_bos=is_xlm_roberta, special_ids=special_ids, add_eos=True, separates=is_xlm_roberta
    )


def _charsmap(metadata: Mapping[str, Any]) -> bytes:
    """Return SentencePiece's character map, stored as an array of signed or unsigned bytes; empty: there is none."""
    found = metadata.get("tokenizer.ggml.precompiled_charsmap", b"")
    if isinstance(found, bytes):
        return found
    return bytes(entry & 0xFF for entry in array(metadata, "precompiled_charsmap", int))


def _scores(vocabulary: GgufVocabulary) -> list[float]:
    if "tokenizer.ggml.scores" not in vocabulary.metadata:
        raise CheckpointError("the metadata has no tokenizer.ggml.scores, which a SentencePiece tokenizer needs")
    scores = array(vocabulary.metadata, "scores", float)
    if len(scores) != len(vocabulary.ids):
        raise CheckpointError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary.ids)} tokens")
    return scores


def _spaces_as_signs(*, prefix_space: bool) -> list[normalizers.Normalizer]:
    return [*([normalizers.Prepend(_SPACE)] if prefix_space else []), normalizers.Replace(" ", _SPACE)]


def _signs_as_spaces(*, prefix_space: bool) -> decoders.Decoder:
    return decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", left=1)] if prefix_space else []),
        ]
    )


_KINDS: Mapping[str, Callable[[GgufVocabulary], BuiltTokenizer]] = MappingProxyType(
    {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4, "t5": _unigram, "bert": word_pieces}
)


def _bpe(vocabulary: GgufVocabulary, merges: Sequence[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    with failing_as(lambda what: CheckpointError(f"tokenizer.ggml.merges do not fit the vocabulary: {what}")):
        return tokenizers.Tokenizer(models.BPE(vocab=dict(vocabulary.ids), merges=merges, **options))


def _merges_by_score(vocabulary: GgufVocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """List every merge of two tokens into a third, the best-scoring result first.

    Only normal tokens merge: the others are control tokens, single bytes, or matched as a whole before merging.
    """
    normal = {token: id for token, id in vocabulary.ids.items() if vocabulary.types[id] == TokenType.NORMAL}
    found = [
        (scores[id], left, right)
        for token, id in normal.items()
        for cut in range(1, len(token))
        if (left := token[:cut]) in normal and (right := token[cut:]) in normal
    ]
    found.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in found]


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: GgufVocabulary, special: set[int]) -> None:
    """Add control and user-defined tokens, which are matched as a whole before pre-tokenization."""
    architecture = vocabulary.metadata.get("general.architecture")
    marks = dict.fromkeys([*vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN), *special])

    def added(id: int, *, is_special: bool) -> tokenizers.AddedToken:
        token = str(backend.id_to_token(id))
        takes_spaces = is_special and _takes_spaces(architecture, token)
        return tokenizers.AddedToken(token, special=is_special, normalized=False, rstrip=takes_spaces)

    backend.add_special_tokens([added(id, is_special=True) for id in marks])
    others = (id for id in vocabulary.of_type(TokenType.USER_DEFINED) if id not in marks)
    backend.add_tokens([added(id, is_special=False) for id in others])


def _takes_spaces(architecture: object, token: str) -> bool:
    """Tell whether a special token swallows the white space after it: Phi-3's do, but GGUF has no key for that."""
    return architecture == "phi3" and token not in ("<unk>", "<s>", "<|endoftext|>")


def _pre_tokenizer(name: object) -> PreTokenizer:
    if name is None:
        _logger.warning(
            "The file has no tokenizer.ggml.pre: GPT-2's pre-tokenizer is used, which may not be the model's"
        )
        name = "default"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(
            f"tokenizer.ggml.pre = {shown(name)} is not known here; {_OWN_TOKENIZER} (known: {known})"
        )
    return PRE_TOKENIZERS[name]


class _Pairs(Sequence[tuple[str, str]]):
    """Splits each merge, ``"left right"``, only when it is read: split all at once, Qwen2.5's take 26 MiB, which Python
    would not fully return to the system.
    """

    def __init__(self, merges: Sequence[str]) -> None:
        self._merges = merges

    def __len__(self) -> int:
        return len(self._merges)

    def __getitem__(self, index: Any) -> Any:  # no slices: the reader takes all items in order
        return _pair(self._merges[index])

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return map(_pair, self._merges)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
