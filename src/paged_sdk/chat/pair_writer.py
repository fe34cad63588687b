"""Write a query and documents, each beside it, as the tokens that a model ranks."""

from __future__ import annotations

from functools import cached_property
from itertools import takewhile
from typing import Final

from paged_sdk.chat.renderer import Interruption
from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.chat.tokenizer import TextPair
from paged_sdk.config.ranking import PairForm, RankRecipe
from paged_sdk.errors import InvalidRequestError

__all__ = ["PairWriter", "carries_pairs", "names_pairs"]

# A text that is written for a query, or a document, is seen by what changes with it.
_SOME: Final = "0"
_OTHER: Final = "1"


class PairWriter:
    """Writes pairs of one query and a document each, from one thread at a time.

    :param recipe: says how
    :param interruption: lets another thread end a rendering that takes long
    """

    def __init__(self, text: TextProcessor, recipe: RankRecipe, query: str, interruption: Interruption) -> None:
        self._text = text
        self._recipe = recipe
        self._query = query
        self._interruption = interruption

    def encode(self, document: str) -> TextPair:
        """Return the tokens of the query and a document.

        :raises InvalidRequestError: the chat template refuses them, or the tokenizer fails at one
        """
        if self._recipe.form is None:
            return self._text.tokenizer.encode_pair((self._recipe.instruction or "") + self._query, document)
        ids, (num_before, after) = self._render(self._recipe.form, document), self._around
        return TextPair(ids, range(num_before, len(ids) - len(after)), after)

    @cached_property
    def _around(self) -> tuple[int, list[int]]:
        """Return how many tokens there are before any document, and the tokens after it."""
        form = self._recipe.form
        assert form is not None
        some, other = (self._render(form, document) for document in (_SOME, _OTHER))
        return len(_common(some, other)), _common(some[::-1], other[::-1])[::-1]

    def _render(self, form: PairForm, document: str) -> list[int]:
        instruction = {"system": self._recipe.instruction} if self._recipe.instruction else {}
        parts = {**instruction, "query": self._query, "document": document}
        return self._text.encode_roles(form, parts, self._interruption)


def carries_pairs(text: TextProcessor, form: PairForm) -> bool:
    """Say whether the chat template writes both texts of a pair: one that knows other roles alone leaves them out."""
    if text.pair_template is None and text.template is None:
        return False
    pairs = ((_SOME, _SOME), (_OTHER, _SOME), (_SOME, _OTHER))
    try:
        both, *others = [text.encode_roles(form, {"query": query, "document": document}) for query, document in pairs]
    except InvalidRequestError:
        return False
    return both not in others


def names_pairs(text: TextProcessor, form: PairForm) -> bool:
    """Say whether the chat template was written for pairs: it names their roles, where others pass any role on."""
    template = text.pair_template or text.template
    return template is not None and template.names_pairs and carries_pairs(text, form)


def _common(some: list[int], other: list[int]) -> list[int]:
    """Return the tokens that both begin with."""
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, other, strict=False))]
