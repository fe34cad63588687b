"""Stream what models say whose tokens come grouped as one likes, without an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, cycle, pairwise
from typing import Any, Final, Protocol, cast

import anyio
import anyio.lowlevel
from attrs import field, frozen

from paged_sdk.calls.responses import ChatShape, CompletionShape, ResponseParts
from paged_sdk.chat.answer import AnswerStyle
from paged_sdk.chat.output_text import OutputText
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.engine.events import RequestEvent
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.scheduler.request import Request
from paged_sdk.streaming import ResponseStream
from paged_sdk.testing.byte_text import END, byte_text
from paged_sdk.types.response import FinishReason, Usage
from paged_sdk.worker.engine_access import EngineAccess
from paged_sdk.worker.subscription import Subscriber

TOOLS: Final[dict[str, dict[str, Any]]] = {
    "look": {"type": "object", "properties": {"at": {"type": "string"}, "for": {"type": "integer"}}},
    "wait": {"type": "object", "properties": {}},
}


class Vocabulary(Protocol):
    """Knows of what tokens a text consists.

    :ivar end: the token that ends a text
    """

    @property
    def end(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def tokens(self, text: str) -> list[int]: ...


class Bytes:
    """Has a token for each byte."""

    end = END
    tokenizer = byte_text().tokenizer

    def tokens(self, text: str) -> list[int]:
        return list(text.encode())


class Slices:
    """Cuts one text into tokens, each of which is known by its place. Some have no text.

    :param sizes: how many bytes each of them has, over and over
    :param strips_leading_space: whether a space at the beginning is no part of the text
    :ivar slices: the first byte of each, and that after its last one
    """

    def __init__(self, text: str, sizes: Sequence[int], *, strips_leading_space: bool = False) -> None:
        self.text = text
        self.strips_leading_space = strips_leading_space
        data = text.encode()
        size = len(data)
        ends = accumulate(cycle(sizes))
        cuts = [0]
        while cuts[-1] < size:
            cuts.append(min(next(ends), size))
        self.slices: Final = list(pairwise(cuts))
        self._data = data

    @property
    def end(self) -> int:
        return len(self.slices)

    @property
    def tokenizer(self) -> Tokenizer:
        return cast(Tokenizer, self)

    def tokens(self, text: str) -> list[int]:
        assert text == self.text
        return list(range(len(self.slices)))

    def token_bytes(self, id: int) -> bytes:
        return self._data[slice(*self.slices[id])] if id < len(self.slices) else b""

    def decode_bytes(self, ids: Iterable[int], *, skip_special_tokens: bool, kept: frozenset[int]) -> bytes:
        return b"".join(map(self.token_bytes, ids))


@frozen
class Said:
    """Is what one choice's model says.

    :ivar ends: why the text ends, unless a stop string is in it
    """

    text: str
    ends: FinishReason = "stop"

    def tokens(self, stops: Sequence[str], words: Vocabulary) -> tuple[list[int], FinishReason, bool]:
        """Return the tokens that the engine sends, why it stops, and whether a token without text ends it."""
        tokens = words.tokens(self.text)
        if stops:
            seen = OutputText(words.tokenizer, stops)
            count = seen.push_until_stopped(tokens)
            if seen.is_stopped:
                return tokens[:count], "stop", False
        return tokens, self.ends, self.ends == "stop"


@frozen
class Engine:
    """Sends what several choices say, grouped by ``sizes``: so many tokens of each choice are sent before the reader
    reads again; all that are left come at last."""

    said: Sequence[Said]
    sizes: Sequence[int]
    stops: Sequence[str] = ()
    has_logprobs: bool = False
    words: Vocabulary = field(factory=Bytes)
    subscribers: list[Subscriber] = field(factory=list)

    def check(self) -> None: ...

    def check_process(self) -> None: ...

    is_this_thread = False

    def abort(self, request_id: str) -> None: ...

    def submit(self, request: Request, subscription: Subscriber) -> None:
        self.subscribers.append(subscription)

    def steps(self) -> Iterator[None]:
        """Send a group, and go on when the reader has read it."""
        (subscriber,) = self.subscribers
        texts = [said.tokens(self.stops, self.words) for said in self.said]
        at = [0] * len(texts)
        total = sum(len(tokens) + is_stopped for tokens, _, is_stopped in texts)
        ended: set[int] = set()
        for size in (*self.sizes, max(len(tokens) for tokens, _, _ in texts) + 1):
            for index, (tokens, reason, has_end) in enumerate(texts):
                if index in ended:
                    continue
                new = tokens[at[index] : at[index] + size]
                is_last = size > len(new)
                at[index] += len(new)
                if new:
                    subscriber.add_tokens(index, new)
                drawn = [*new, self.words.end] if is_last and has_end else new
                if self.has_logprobs and drawn:
                    entries = tuple(RawLogprobs(token, -1.0 - token / 8, ((token, -0.5),)) for token in drawn)
                    subscriber.add(RequestEvent(request_id="one", index=index, logprobs=entries))
                if is_last:
                    ended.add(index)
                    usage = Usage(prompt_tokens=3, completion_tokens=total, total_tokens=3 + total)
                    subscriber.add(
                        RequestEvent(
                            request_id="one",
                            index=index,
                            finish_reason=reason,
                            usage=usage if len(ended) == len(texts) else None,
                        )
                    )
            yield
            if len(ended) == len(texts):
                return


async def streamed(stream: ResponseStream[Any, Any], engine: Engine) -> tuple[list[Any], Any]:
    """Return all chunks of a stream, and the response in the end."""
    chunks: list[Any] = []

    async def read() -> None:
        chunks.extend([chunk async for chunk in stream])

    async with stream, anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        for _ in engine.steps():
            for _ in range(8):  # the reader wakes, and reads
                await anyio.lowlevel.checkpoint()
    return chunks, stream.response_so_far()


def stream_of(engine: Engine, template: str | None) -> ResponseStream[Any, Any]:
    style = None if template is None else AnswerStyle.of_template(template)
    parsers = [] if style is None else [style.parser(TOOLS) for _ in engine.said]
    tokenizer = engine.words.tokenizer
    texts = [OutputText(tokenizer, engine.stops) for _ in engine.said]
    sampling = SamplingParams(n_choices=len(engine.said))

    async def prepare() -> list[Request]:
        return [Request(request_id="one", prompt_token_ids=[1, 2, 3], sampling=sampling, max_tokens=999)]

    return ResponseStream(
        cast(EngineAccess, engine),
        prepare,
        cast(Any, CompletionShape() if style is None else ChatShape()),
        ResponseParts(
            tokenizer,
            texts,
            [parser for parser in parsers if parser is not None],
            sorts_logprobs=style is not None,
        ),
        request_id="chatcmpl-one",
        part_ids=["one"],
        model="fake",
        timeout=None,
    )
