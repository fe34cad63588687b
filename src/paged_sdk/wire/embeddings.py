"""Maps OpenAI's embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Required, TypedDict

from attrs import frozen

from paged_sdk import EmbeddingResponse, Model
from paged_sdk.wire.body import BodyReader, Bounds
from paged_sdk.wire.completions import TokenIds

__all__ = ["EMBEDDING", "EmbeddingCall", "read_embedding"]


FEW: Final = Bounds(1, 2048)
"""As in OpenAI's API."""


class EmbeddingBody(TypedDict, total=False):
    """Is what a client sends to ``/v1/embeddings``."""

    model: Required[Annotated[str, "The name of a model or a loaded adapter."]]
    input: Required[
        Annotated[
            str | Annotated[list[str], FEW] | TokenIds | Annotated[list[TokenIds], FEW],
            "A text or token ids, or several of them.",
        ]
    ]
    dimensions: Annotated[int | None, Bounds(1), "Keep only the first so many numbers of each embedding."]
    encoding_format: Annotated[Literal["float", "base64"] | None, "Lists of numbers, or base64 of float32."]
    user: Annotated[str | None, "A label for the end user, for the server's log."]
    pooling: Annotated[
        Literal["last", "mean", "cls", "max", "weighted_mean"] | None,
        "Extension: how hidden states are pooled, instead of the checkpoint's way.",
    ]
    normalize: Annotated[bool | None, "Extension: whether embeddings have length 1."]
    prompt_name: Annotated[str | None, "Extension: which of the checkpoint's prompts to put before each text."]
    truncate_sequence: Annotated[bool | None, "Extension: cut a text that is too long at its end."]
    cache_salt: Annotated[str | None, Bounds(1, 256), "Extension: share cached prefixes only with the same salt."]


EMBEDDING: Final = BodyReader(EmbeddingBody)


@frozen(kw_only=True)
class EmbeddingCall:
    """Is what a body asks of a model.

    :ivar label: for whom it is
    """

    model: str
    body: EmbeddingBody
    label: str | None = None

    async def send(self, model: Model, *, adapter: str | None, timeout: float | None) -> EmbeddingResponse:
        """Ask a model.

        :param adapter: the loaded adapter that the texts go through
        :param timeout: seconds that it may take
        :raises PagedError: the model refuses it, or fails
        """
        return await model.embed(
            self.body["input"],
            pooling=self.body.get("pooling"),
            normalize=self.body.get("normalize"),
            dimensions=self.body.get("dimensions"),
            prompt_name=self.body.get("prompt_name"),
            truncation=self.body.get("truncate_sequence") or False,
            cache_salt=self.body.get("cache_salt"),
            adapter=adapter,
            timeout=timeout,
        )

    def response(self, answer: EmbeddingResponse) -> dict[str, Any]:
        """Return the vectors as OpenAI's API has them, which takes a second for a million numbers."""
        form = self.body.get("encoding_format") or "float"
        return {**answer.to_dict(encoding_format=form), "model": self.model}


def read_embedding(value: object) -> EmbeddingCall:
    """Return what a body asks for.

    :raises InvalidRequestError: it is malformed
    """
    body = EMBEDDING.read(value)
    return EmbeddingCall(model=body["model"], body=body, label=body.get("user"))
