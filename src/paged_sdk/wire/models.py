"""Writes the list of models, in a form that is OpenAI's and Anthropic's at once."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal

from attrs import frozen

from paged_sdk.wire.forms import ModelForm, ModelList

__all__ = ["ModelCard", "model_card", "model_list"]


@frozen(kw_only=True)
class ModelCard:
    """Describes a served model or adapter.

    :ivar created: Unix time in seconds at which it was loaded
    :ivar parent: the model that an adapter belongs to
    :ivar max_model_len: tokens of prompt and answer together
    :ivar takes_images: whether messages may have images
    :ivar generates_text: whether the model generates text; otherwise it computes embeddings or ranks documents
    :ivar ranks_texts: whether the model scores documents by their relevance to a query
    """

    id: str
    created: int
    max_model_len: int
    parent: str | None = None
    takes_images: bool = False
    generates_text: bool = True
    ranks_texts: bool = False


def model_card(card: ModelCard) -> ModelForm:
    """Return a model in the form of both APIs; the fields after ``created_at`` are extensions."""
    outputs: list[Literal["text", "embedding", "rank"]] = ["text"] if card.generates_text else []
    outputs += ["rank"] if card.ranks_texts else []
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "paged_sdk",
        "type": "model",
        "display_name": card.id,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "parent": card.parent,
        "max_model_len": card.max_model_len,
        "input_modalities": ["text", "image"] if card.takes_images else ["text"],
        "output_modalities": outputs or ["embedding"],
    }


def model_list(cards: Iterable[ModelCard]) -> ModelList:
    """Return the list of models."""
    data = [model_card(card) for card in cards]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": ends[0], "last_id": ends[1], "has_more": False}
