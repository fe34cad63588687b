"""Sends a request as a task describes it."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from combinations.answer import check_chunks, said
from combinations.task import Task
from faces import read_off
from paged_sdk import ChatCompletionResponse, Model
from paged_sdk.model import ChatStream, CompletionStream

__all__ = ["Request", "WrongAnswerError"]


class WrongAnswerError(Exception):
    """Tells that an answer is not what it should be."""


@frozen(kw_only=True)
class Request:
    """Holds all of a request that follows from others' answers.

    :ivar prompts: the task's, or what they have become
    :ivar prediction: of its answer; None: there is none
    :ivar adapter: what the model that is asked calls the adapter
    """

    task: Task
    prompts: tuple[tuple[int, ...] | str, ...]
    prediction: str | None = None
    adapter: str | None = None

    def stream(self, model: Model) -> ChatStream | CompletionStream:
        """Return the stream of a request that generates."""
        task = self.task
        if task.kind == "chat":
            return model.stream_chat_request(task.chat(self.adapter, self.prediction))
        prompts = self.prompts[0] if len(self.prompts) == 1 else self.prompts
        options = task.options | {"adapter": self.adapter, "prediction": self.prediction}
        return model.stream_completion_request(prompts, task.sampling, **options)

    async def whole(self, model: Model) -> dict[str, Any]:
        """Return what the whole answer says.

        :raises PagedError: the request is refused
        """
        task = self.task
        if task.generates:
            return said(await self.stream(model).collect())
        options = task.options | {"adapter": self.adapter}
        if task.kind == "embed":
            return said(await model.embed(self.prompts, pooling=task.pooling, **options))
        if task.kind == "rank":
            query, *documents = map(str, self.prompts)
            return said(await model.rank(query, documents, **options))
        return said(await model.score(self.prompts, prefix=task.prefix or None, **options))

    async def piecewise(self, stream: ChatStream | CompletionStream) -> tuple[dict[str, Any], bool]:
        """Return what was read of a stream, chunk by chunk, and whether that is all of it.

        :raises WrongAnswerError: the chunks say something else
        """
        chunks: list[Any] = []
        while len(chunks) != self.task.num_chunks:
            try:
                chunks.append(await anext(stream))
            except StopAsyncIteration:
                break
        response = stream.response_so_far()
        is_whole = bool(chunks) and chunks[-1].usage is not None
        if is_whole:
            try:
                if isinstance(response, ChatCompletionResponse):
                    read_off(chunks, response)
                else:
                    check_chunks(chunks, response)
            except AssertionError as error:
                raise WrongAnswerError("its chunks say something else than the whole") from error
        elif self.task.num_chunks is None:
            raise WrongAnswerError("its stream has ended without usage")
        return said(response), is_whole
