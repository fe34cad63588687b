"""Define what a model's face and an engine that runs elsewhere say to each other."""

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
    "Close",
    "Ended",
    "Forsake",
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
    """Asks to queue a request, which is the parcel's second part.

    :ivar number: names it from now on
    :ivar age: how many seconds ago it was made: clocks of machines differ
    :ivar processors: its logits processors, each as bytes
    """

    number: int
    age: float
    processors: tuple[bytes, ...] = ()


@frozen
class Abort:
    """Asks to end a request."""

    number: int


@frozen
class ResetPrefixCache:
    """Asks to forget every cached prefix."""


@frozen
class Requantize:
    """Asks to hold the weights in another type."""

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
    """Asks for something that is done beside requests, and is answered.

    :ivar number: names the question
    """

    number: int
    operation: Operation


@frozen
class Forsake:
    """Says that nobody waits for the answer to a question any more."""

    number: int


@frozen
class Close:
    """Asks to stop: when all requests have ended (``drain``), or at once."""

    drain: bool


@frozen
class Ping:
    """Asks for a sign of life."""


ToEngine: TypeAlias = Submit | Abort | Ask | Forsake | Close | Ping


@frozen
class Output:
    """Brings what requests have got since the last time.

    Tokens lie in three parallel lists, as in an :class:`~paged_sdk.engine.events.Outbox`.

    :ivar numbers: the requests that tokens have come for
    :ivar indices: the choice that each list of tokens belongs to
    :ivar token_ids: the tokens
    :ivar events: what else has happened to requests, in order, after the tokens; without errors
    :ivar errors: the errors that requests have ended with
    :ivar stats: the engine's figures; None: they are as they were
    """

    numbers: Sequence[int] = ()
    indices: Sequence[int] = ()
    token_ids: Sequence[Sequence[int]] = ()
    events: Sequence[tuple[int, RequestEvent]] = ()
    errors: Sequence[tuple[int, SentError]] = ()
    stats: ModelStats | None = None


@frozen
class Answer:
    """Answers a question.

    :ivar adapters: those that there are now, by name
    :ivar error: what was raised
    """

    number: int
    adapters: Mapping[str, AdapterUse]
    error: SentError | None = None


@frozen
class Ended:
    """Says that the engine has ended, and that nothing else will come.

    :ivar error: what it has died of; None: it was closed
    """

    error: SentError | None = None


@frozen
class Pong:
    """Answers a :class:`Ping`. It is for what carries messages, and says nothing to whoever has sent requests.

    :ivar running_step: the number of the engine's step that is running; None: none is
    """

    running_step: int | None


FromEngine: TypeAlias = Output | Answer | Ended | Pong
