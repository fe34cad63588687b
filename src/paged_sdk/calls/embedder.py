"""Computes embeddings of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paged_sdk.calls.preparation import in_thread
from paged_sdk.calls.reading_requests import ReadingRequests, check_flag
from paged_sdk.config.checks import as_optional_int, is_token_id
from paged_sdk.config.embedding import EmbeddingRecipe
from paged_sdk.config.pooling import POOLINGS, Pooling
from paged_sdk.errors import ContextLengthError, InvalidRequestError
from paged_sdk.logs import get_logger
from paged_sdk.types.embedding import EmbeddingResponse
from paged_sdk.types.prompt import PromptLike, name_of_prompt
from paged_sdk.types.reading import PooledVector
from paged_sdk.types.request_options import RequestOptions

if TYPE_CHECKING:  # importing the package loads no numpy
    import numpy as np
    import numpy.typing as npt

__all__ = ["Embedder"]

_log = get_logger(__name__)


class Embedder:
    """Computes embeddings of texts, one engine request per text.

    :param recipe: the checkpoint's settings for embeddings
    :param hidden_size: size of a hidden state
    :param model: the model's name, as responses have it
    """

    def __init__(
        self,
        reader: ReadingRequests,
        *,
        recipe: EmbeddingRecipe,
        hidden_size: int,
        model: str,
    ) -> None:
        self._reader = reader
        self._recipe = recipe
        self._size = recipe.dense[-1].weight.shape[0] if recipe.dense else hidden_size
        self._model = model
        self._has_said_pooling = False

    async def embed(
        self,
        texts: Sequence[PromptLike],
        *,
        request_id: str,
        pooling: Pooling | None,
        normalize: bool | None,
        dimensions: int | None,
        prompt_name: str | None,
        truncation: bool,
        options: RequestOptions,
    ) -> EmbeddingResponse:
        """Implement :meth:`paged_sdk.Model.embed`."""
        recipe, pooling = self._recipe, self._pooling(pooling)
        normalize = recipe.normalize if normalize is None else normalize
        check_flag("truncation", truncation)
        check_flag("normalize", normalize)
        dimensions = as_optional_int(dimensions)
        if dimensions is not None and not (is_token_id(dimensions) and 1 <= dimensions <= self._size):
            raise InvalidRequestError.of("dimensions", dimensions, f"an int from 1 to {self._size}, or None")
        put_before = self._prompt(prompt_name)
        prompts = [
            self._checked(name_of_prompt("texts", place, len(texts)), text, prompt_name)
            for place, text in enumerate(texts)
        ]

        def encode(place: int) -> tuple[Sequence[int], PooledVector]:
            token_ids, num_before = self._encode(prompts[place], put_before, place, truncation=truncation)
            first_token = 0 if recipe.pools_prompt else min(num_before, len(token_ids) - 1)
            return token_ids, PooledVector(pooling, first_token)

        read, usage = await self._reader.read(encode, len(prompts), options, request_id)
        vectors = await in_thread(lambda: self._finish([each.vector for each in read], dimensions, normalize=normalize))
        return EmbeddingResponse(embeddings=vectors, model=self._model, usage=usage)

    def _pooling(self, asked: Pooling | None) -> Pooling:
        if asked is not None:
            if not isinstance(asked, str) or asked not in POOLINGS:
                allowed = "one of " + ", ".join(POOLINGS) + ", or None"
                raise InvalidRequestError.of("pooling", asked, allowed)
            return asked
        if self._recipe.why_not is not None:
            raise InvalidRequestError(
                f"{self._recipe.why_not}: with pooling = one of {', '.join(POOLINGS)}, vectors are made of the hidden "
                "states alone",
                field="pooling",
                allowed="one of " + ", ".join(POOLINGS),
            )
        if self._recipe.pooling is None and not self._has_said_pooling:
            self._has_said_pooling = True
            _log.info("%s names no pooling: embeddings are the hidden state of the last token.", self._model)
        return self._recipe.pooling or "last"

    def _prompt(self, name: str | None) -> str:
        """Return the prompt to put before each text.

        :raises InvalidRequestError: there is no prompt of that name
        """
        prompts = self._recipe.prompts
        name = self._recipe.default_prompt if name is None else name
        if name is None:
            return ""
        if not isinstance(name, str) or name not in prompts:
            names = ", ".join(prompts) or "the checkpoint has no prompts"
            raise InvalidRequestError.of("prompt_name", name, f"None, or one of the checkpoint's prompts: {names}")
        return prompts[name]

    def _checked(self, name: str, text: PromptLike, prompt_name: str | None) -> str | Sequence[int]:
        """Return a text, or a copy of token ids."""
        if prompt_name is not None and not isinstance(text, str):
            raise InvalidRequestError.of("prompt_name", prompt_name, "None beside texts that are token ids")
        return self._reader.checked(name, text)

    def _encode(
        self, text: str | Sequence[int], put_before: str, place: int, *, truncation: bool
    ) -> tuple[Sequence[int], int]:
        """Return the tokens of a text with its prompt, and how many of them are the prompt's.

        :raises InvalidRequestError: there are none
        :raises ContextLengthError: there are too many
        """
        preparer = self._reader.preparer
        tokenizer = preparer.text.tokenizer
        # Without a pooling, the tokenizer's model_max_length is meant for chats.
        limit = preparer.max_read_tokens if self._recipe.pooling is None else self._reader.limit(self._recipe)
        num_before, suffix = 0, tokenizer.special.suffix
        if isinstance(text, str):
            whole = put_before + text
            if self._recipe.lower_case:
                whole, put_before = whole.lower(), put_before.lower()
            token_ids: Sequence[int] = tokenizer.encode(whole, add_special_tokens=True)
            if put_before:
                num_before = len(tokenizer.encode(put_before, add_special_tokens=True)) - len(suffix)
        else:
            token_ids, suffix = text, ()
        if not token_ids:
            raise InvalidRequestError.of(f"texts[{place}]", text, "a text of at least one token")
        if len(token_ids) > limit:
            if not truncation:
                raise ContextLengthError(
                    f"texts[{place}] has {len(token_ids)} tokens, {limit} fit",
                    field=f"texts[{place}]",
                    num_tokens=len(token_ids),
                    limit=limit,
                    advice="shorten it, or use truncation=True",
                )
            token_ids = [*token_ids[: limit - len(suffix)], *suffix]
        return token_ids, num_before

    def _finish(
        self, pooled: Sequence[npt.NDArray[np.float32]], dimensions: int | None, *, normalize: bool
    ) -> npt.NDArray[np.float32]:
        import numpy as np

        vectors = np.stack(pooled)
        for layer in self._recipe.dense:
            vectors = layer.apply(vectors)
        if dimensions is not None:
            if dimensions > vectors.shape[1]:  # a transformers class may output less than its hidden size
                raise InvalidRequestError.of("dimensions", dimensions, f"an int from 1 to {vectors.shape[1]}, or None")
            vectors = vectors[:, :dimensions]
        if normalize:
            # The maximum keeps zero vectors as they are.
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return np.ascontiguousarray(vectors, dtype=np.float32)
