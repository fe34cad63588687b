"""Maps OpenAI's embeddings API."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Required, TypedDict

from attrs import frozen

from paged_sdk import EmbeddingResponse, Model
from paged_sdk.wire.body import BodyReader, Bounds
from paged_sdk.wire.limits import NUM_INPUTS, TokenIds

__all__ = ["EMBEDDING", "EmbeddingCall", "read_embedding"]


class EmbeddingBody(TypedDict, total=False):
    """Describes the body of ``/v1/embeddings``."""

    model: Required[Annotated[str, "The name of a model or a loaded adapter."]]
    input: Required[
        Annotated[
            str | Annotated[list[str], NUM_INPUTS] | TokenIds | Annotated[list[TokenIds], NUM_INPUTS],
            "A text or token ids, or several of them.",
        ]
    ]
    dimensions: Annotated[int | None, Bounds(1), "How many numbers of each embedding to keep, from its start."]
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
    """Holds a parsed request.

    :ivar label: the client's label for the end user
    """

    model: str
    body: EmbeddingBody
    label: str | None = None

    async def send(self, model: Model, *, adapter: str | None, timeout: float | None) -> EmbeddingResponse:
        """Send the request to a model.

        :param adapter: the loaded adapter to use
        :param timeout: time limit in seconds
        :raises PagedError: the model refuses the request, or fails
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
        """Return the embeddings in the form of OpenAI's API, which takes a second per million numbers."""
        form = self.body.get("encoding_format") or "float"
        return {**answer.to_dict(encoding_format=form), "model": self.model}


def read_embedding(value: object) -> EmbeddingCall:
    """Parse a body.

    :raises InvalidRequestError: the body is malformed
    """
    body = EMBEDDING.read(value)
    return EmbeddingCall(model=body["model"], body=body, label=body.get("user"))
