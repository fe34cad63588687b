"""Say how a model makes one number of a query and a document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from paged_sdk.config.pooling import Pooling

__all__ = ["AnswerTokens", "PairForm", "RankRecipe"]


@frozen(kw_only=True)
class AnswerTokens:
    """Names the tokens whose logits make the number.

    :ivar true: a model answers this where a document goes with a query
    :ivar false: it answers this where it does not, and the logit is subtracted; None: nothing is
    """

    true: int
    false: int | None = None


@frozen(kw_only=True)
class PairForm:
    """Says how a chat template is asked for a pair: by a message of the role "query" and one of the role "document".

    :ivar add_generation_prompt: whether the text ends with the opening of the model's turn
    :ivar variables: what else the template gets
    """

    add_generation_prompt: bool = False
    variables: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class RankRecipe:
    """Holds what is known of how texts are ranked.

    :ivar pooling: which vector of both texts goes through layers that make a number of it; None: ``answer`` does
    :ivar answer: the tokens whose logits make it
    :ivar form: how the chat template writes both texts; None: they are written as the tokenizer writes a pair
    :ivar instruction: what the checkpoint has said before each query, by a system message where there is a template
    :ivar padding: a token that is left off the end of a text, where transformers' class reads the last one that is
        another
    :ivar why_not: why nothing can be ranked; None: it can
    """

    pooling: Pooling | None = None
    answer: AnswerTokens | None = None
    form: PairForm | None = None
    instruction: str | None = None
    padding: int | None = None
    why_not: str | None = None
