"""Grammars know the bytes of every token, also of SentencePiece's vocabularies and of those that fall back to bytes."""

from __future__ import annotations

import random
import re
from typing import Final

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from paged_sdk import Constraint
from paged_sdk.chat.tokenizer import SpecialTokens, Tokenizer
from paged_sdk.constraints.compiler import GrammarCompiler
from paged_sdk.constraints.masks import Mask, MaskFiller, Positions
from paged_sdk.constraints.vocabulary import Vocabulary

_BYTES: Final = [f"<0x{byte:02X}>" for byte in range(256)]
_PIECES: Final = ["▁", "a", "b", "▁a", "ab", "▁ab", '"', ":", "▁▁", "zw", "ö", "é", "▁é", "l", "f", "lf", "{", "}"]
_MERGES: Final = [("▁", "a"), ("a", "b"), ("▁", "ab"), ("▁", "▁"), ("l", "f"), ("▁", "é")]
_END: Final = 2
_NUM_LOGITS: Final = 320
"""More than there are tokens: matrices are padded."""


def make_tokenizer(kind: str) -> Tokenizer:
    """Make a tokenizer in llama's way: a space before the text, spaces as letters, bytes for what is not known."""
    names = ["<unk>", "<s>", "</s>", *_BYTES, *_PIECES]
    model: models.Model
    if kind == "BPE":
        vocabulary = {name: number for number, name in enumerate(names)}
        model = models.BPE(vocabulary, _MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    else:
        model = models.Unigram([(name, -float(len(names) - at)) for at, name in enumerate(names)], 0, True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens(["🐲zw", "<call>"])
    return Tokenizer(backend, SpecialTokens())


def make_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(
        tokens=[tokenizer.token_bytes(token) for token in range(_NUM_LOGITS)],
        special_ids=[token for token in range(_NUM_LOGITS) if tokenizer.is_special(token)],
        end_ids=(_END,),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


TEXTS: Final = {
    "letters of two to four bytes": "(é🐲|zwölf| ab|€){1,4}",
    "spaces first": " {1,3}ab? a",
    "an added token": "(<call>|🐲zw|ab)+🐲",
    "any letter": "[^a-z]{3,5}",
    "JSON": r'\{"(a|é|🐉)": ?"[ö🐲 ]{0,3}"\}',
}


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
@pytest.mark.parametrize("name", TEXTS)
def test_what_tokens_say_is_what_the_grammar_says(kind: str, name: str) -> None:
    tokenizer = make_tokenizer(kind)
    grammar = GrammarCompiler(lambda: make_vocabulary(tokenizer)).compile(Constraint.regex(TEXTS[name]))
    filler, rng, found = MaskFiller(_NUM_LOGITS), random.Random(name), set()
    for _ in range(30):
        text = grammar.begin((_END,), _NUM_LOGITS)
        while True:
            (mask,) = filler.fill([Positions(text, len(text.tokens), 1)])
            assert isinstance(mask, Mask), mask
            allowed = set(range(_NUM_LOGITS)) - set(mask.tokens.tolist())
            token = rng.choice(sorted(mask.tokens.tolist() if mask.are_allowed else allowed))
            if token == _END:
                break
            assert tokenizer.token_bytes(token)
            assert not tokenizer.is_special(token)
            text.tokens.append(token)
        said = b"".join(map(tokenizer.token_bytes, text.tokens)).decode()
        assert re.fullmatch(TEXTS[name], said), said
        found.add(said)
    assert len(found) >= 4


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_letters_may_be_made_of_their_bytes(kind: str) -> None:
    """A model may choose the bytes of a letter that has a token, too."""
    tokenizer = make_tokenizer(kind)
    grammar = GrammarCompiler(lambda: make_vocabulary(tokenizer)).compile(Constraint.regex("[éa🐲]{2}"))
    text = grammar.begin((_END,), _NUM_LOGITS)
    text.tokens += [3 + byte for byte in "é🐲".encode()]
    assert text.move_to(6) == ""
    assert text.may_end()


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_a_text_goes_on_after_drafts_with_marks(kind: str) -> None:
    """Masks of drafts leave the text where it was: llguidance 1.9 does not find back over a token that a grammar names
    by its number.
    """
    tokenizer = make_tokenizer(kind)
    vocabulary, mark = make_vocabulary(tokenizer), tokenizer.encode("<call>", add_special_tokens=False)[-1]
    lark = f'start: call{{4}}\ncall: <[{mark}]> "lf" name\nname: /[ab]{{1,3}}/'
    text = GrammarCompiler(lambda: vocabulary).compile(Constraint.lark(lark)).begin((_END,), _NUM_LOGITS)
    filler, rng = MaskFiller(_NUM_LOGITS), random.Random(3)
    num_drafted = 0
    while True:
        num_tokens = len(text.tokens)
        assert not text.move_to(num_tokens)
        drafts = text.forced()[:4]
        num_drafted += mark in drafts
        text.tokens += drafts
        masks = filler.fill([Positions(text, num_tokens, len(drafts) + 1)])
        mask = masks[-1]
        assert isinstance(mask, Mask)
        if mask.ending is not None:
            break
        assert mask.are_allowed
        text.tokens.append(int(rng.choice(list(mask.tokens))))
    assert num_drafted >= 3
