"""Define the messages between a remote model (its face) and its engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from attrs import frozen

from paged_sdk.config.isq import IsqType
from paged_sdk.engine.events import RequestEvent
from paged_sdk.remote.sent_error import SentError
from paged_sdk.types.adapter import AdapterUse
from paged_sdk.types.stats import ModelStats

__all__ = [
    "Abort",
    "Answer",
    "Ask",
    "CancelOperation",
    "Close",
    "Ended",
    "FromEngine",
    "LoadAdapter",
    "Operation",
    "Output",
    "Ping",
    "Pong",
    "Requantize",
    "ResetPrefixCache",
    "Submit",
    "ToEngine",
    "UnloadAdapter",
]


@frozen
class Submit:
    """Asks to queue a request, which is the rest of the parcel.

    :ivar number: identifies the request on this link
    :ivar age: seconds since the request was made; not a time, since the clocks of machines differ
    :ivar processors: the request's logits processors, each pickled
    """

    number: int
    age: float
    processors: tuple[bytes, ...] = ()


@frozen
class Abort:
    """Asks to abort a request."""

    number: int


@frozen
class ResetPrefixCache:
    """Asks to empty the prefix cache."""


@frozen
class Requantize:
    """Asks to requantize the weights."""

    isq: IsqType


@frozen
class LoadAdapter:
    """Asks to load an adapter."""

    path: str
    name: str | None


@frozen
class UnloadAdapter:
    """Asks to unload an adapter."""

    name: str


Operation: TypeAlias = ResetPrefixCache | Requantize | LoadAdapter | UnloadAdapter


@frozen
class Ask:
    """Asks for an operation, whose outcome comes as an :class:`Answer`.

    :ivar number: identifies the operation on this link
    """

    number: int
    operation: Operation


@frozen
class CancelOperation:
    """Cancels an operation, since its caller no longer waits for it."""

    number: int


@frozen
class Close:
    """Asks the engine to stop: once all requests have ended (``drain``), or at once."""

    drain: bool


@frozen
class Ping:
    """Asks for a :class:`Pong`."""


ToEngine: TypeAlias = Submit | Abort | Ask | CancelOperation | Close | Ping


@frozen
class Output:
    """Brings the output of requests since the last message.

    Tokens are in three parallel lists, as in an :class:`~paged_sdk.engine.events.Outbox`.

    :ivar numbers: the request that each list of tokens belongs to
    :ivar indices: the choice that each list of tokens belongs to
    :ivar token_ids: the lists of tokens
    :ivar events: other events of requests, in order, except errors; they come after the tokens
    :ivar errors: the errors that requests ended with
    :ivar stats: the engine's statistics; None if they have not changed
    """

    numbers: Sequence[int] = ()
    indices: Sequence[int] = ()
    token_ids: Sequence[Sequence[int]] = ()
    events: Sequence[tuple[int, RequestEvent]] = ()
    errors: Sequence[tuple[int, SentError]] = ()
    stats: ModelStats | None = None


@frozen
class Answer:
    """Brings the outcome of an operation.

    :ivar adapters: the adapters that are loaded now, by name
    :ivar error: the exception that the operation raised
    """

    number: int
    adapters: Mapping[str, AdapterUse]
    error: SentError | None = None


@frozen
class Ended:
    """Says that the engine has ended; no other message follows.

    :ivar error: the error that the engine died of; None if it was closed
    """

    error: SentError | None = None


@frozen
class Pong:
    """Answers a :class:`Ping`. It is meant for the link, which watches the engine's process; requests are not affected.

    :ivar running_step: the number of the step that the engine is running; None if it runs none
    """

    running_step: int | None


FromEngine: TypeAlias = Output | Answer | Ended | Pong
