"""Maps OpenAI's list of models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from attrs import frozen

from paged_sdk.wire.forms import ModelForm, ModelList

__all__ = ["ModelCard", "model_card", "model_list"]


@frozen(kw_only=True)
class ModelCard:
    """Describes a model, or an adapter, that can be asked.

    :ivar created: Unix time in seconds at which it was loaded
    :ivar parent: the model that an adapter belongs to
    :ivar max_model_len: tokens of prompt and answer together
    :ivar takes_images: whether messages may have images
    :ivar generates_text: whether it writes text; a model that does not makes vectors, or ranks texts
    :ivar ranks_texts: whether it says how well documents go with a query
    """

    id: str
    created: int
    max_model_len: int
    parent: str | None = None
    takes_images: bool = False
    generates_text: bool = True
    ranks_texts: bool = False


def model_card(card: ModelCard) -> ModelForm:
    """Return a model as OpenAI's API has it; what comes after ``owned_by`` are extensions."""
    outputs: list[Literal["text", "embedding", "rank"]] = ["text"] if card.generates_text else []
    outputs += ["rank"] if card.ranks_texts else []
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "paged_sdk",
        "parent": card.parent,
        "max_model_len": card.max_model_len,
        "input_modalities": ["text", "image"] if card.takes_images else ["text"],
        "output_modalities": outputs or ["embedding"],
    }


def model_list(cards: Iterable[ModelCard]) -> ModelList:
    """Return models as OpenAI's API lists them."""
    return {"object": "list", "data": [model_card(card) for card in cards]}
