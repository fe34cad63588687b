"""Describe how a model scores a query and a document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from paged_sdk.config.pooling import Pooling

__all__ = ["AnswerTokens", "PairForm", "RankRecipe"]


@frozen(kw_only=True)
class AnswerTokens:
    """Names the tokens whose logits make the score.

    :ivar true: the token that a model answers for relevant documents
    :ivar false: the token that it answers for irrelevant documents, whose logit is subtracted; None: nothing is
        subtracted
    """

    true: int
    false: int | None = None


@frozen(kw_only=True)
class PairForm:
    """Says how a chat template renders a pair, given as a message with role "query" and one with role "document".

    :ivar add_generation_prompt: whether the text ends with the opening of the model's turn
    :ivar variables: further variables of the template
    """

    add_generation_prompt: bool = False
    variables: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class RankRecipe:
    """Holds how a model ranks documents.

    :ivar pooling: how the hidden states of a pair become the vector that the rank head scores; None: ``answer`` makes
        the score
    :ivar answer: the tokens whose logits make the score
    :ivar form: how the chat template renders a pair; None: the tokenizer joins the two texts
    :ivar instruction: the checkpoint's instruction before each query; a system message if there is a chat template
    :ivar padding: a token to strip from the end of a pair, where transformers' class reads the last token that is not
        padding
    :ivar why_not: why the model cannot rank; None if it can
    """

    pooling: Pooling | None = None
    answer: AnswerTokens | None = None
    form: PairForm | None = None
    instruction: str | None = None
    padding: int | None = None
    why_not: str | None = None
