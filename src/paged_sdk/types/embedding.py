"""Hold the embeddings of texts."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Literal

from attrs import cmp_using, field, frozen

from paged_sdk.errors import InvalidRequestError
from paged_sdk.types.response import Usage
from paged_sdk.types.wire import Wire

if TYPE_CHECKING:  # importing the package loads no numpy
    import numpy as np
    import numpy.typing as npt

__all__ = ["EmbeddingResponse"]


def _read_only(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    vectors.setflags(write=False)
    return vectors


def _are_equal(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> bool:
    return one.shape == other.shape and bool((one == other).all())


@frozen(kw_only=True)
class EmbeddingResponse(Wire):
    """Holds an embedding of each text.

    :ivar embeddings: float32 ``[num_texts, dimensions]``, in the order of the texts; read-only
    :ivar model: the model's name
    :ivar usage: of all texts together
    """

    embeddings: npt.NDArray[np.float32] = field(converter=_read_only, eq=cmp_using(eq=_are_equal), hash=False)
    model: str
    usage: Usage
    object: Literal["list"] = "list"

    def to_dict(self, *, encoding_format: Literal["float", "base64"] = "float") -> dict[str, Any]:
        """Return the wire form.

        :param encoding_format: "float": lists of numbers; "base64": the little-endian float32 bytes of each embedding
        :raises InvalidRequestError: another format
        """
        if encoding_format not in ("float", "base64"):
            raise InvalidRequestError.of("encoding_format", encoding_format, '"float" or "base64"')
        written: list[Any]
        if encoding_format == "float":
            written = self.embeddings.tolist()
        else:
            written = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in self.embeddings]
        return {
            "object": self.object,
            "data": [{"object": "embedding", "index": place, "embedding": each} for place, each in enumerate(written)],
            "model": self.model,
            "usage": {"prompt_tokens": self.usage.prompt_tokens, "total_tokens": self.usage.total_tokens},
        }
