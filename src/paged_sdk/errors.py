"""Defines every error that paged_sdk raises, with fields for programs and text for people.

PagedError
├── ConfigError (also ValueError)             a setting that cannot be used
├── ModelLoadError                            a model that cannot be loaded
│   ├── UnsupportedArchitectureError
│   ├── UnsupportedQuantizationError
│   ├── AdapterError                          an adapter that cannot be read, or was made for another model
│   ├── CheckpointError                       a file that is missing, cut off or malformed
│   └── OutOfMemoryError                      the KV cache or the weights do not fit
├── RequestError                              one request; others are not touched
│   ├── InvalidRequestError
│   ├── ContextLengthError
│   ├── PinLimitError                         a prefix that would pin too much of the KV pool
│   ├── ConstraintError                       a constraint that cannot be enforced
│   ├── QueueFullError
│   ├── LogitsProcessorError                  an exception in a function that the application gave
│   ├── RequestFailedError                    an unforeseen exception in the work for it; raised from that
│   ├── RequestTimeoutError
│   ├── ToolError                             an exception in a tool that the application gave; raised from that
│   └── ToolRoundsError                       a model that goes on calling tools
├── EngineError
│   ├── EngineDeadError                       the engine stopped; raised from the original exception
│   └── NumericalError                        NaN or Inf logits; that request only
└── ModelClosedError (also RuntimeError)
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from paged_sdk.types.response import ChatCompletionResponse, CompletionResponse

    PartialResponse: TypeAlias = ChatCompletionResponse | CompletionResponse

__all__ = [
    "AdapterError",
    "CheckpointError",
    "ConfigError",
    "ConstraintError",
    "ContextLengthError",
    "EngineDeadError",
    "EngineError",
    "InvalidRequestError",
    "LogitsProcessorError",
    "ModelClosedError",
    "ModelLoadError",
    "NumericalError",
    "OutOfMemoryError",
    "PagedError",
    "PinLimitError",
    "QueueFullError",
    "RequestError",
    "RequestFailedError",
    "RequestTimeoutError",
    "ToolError",
    "ToolRoundsError",
    "UnsupportedArchitectureError",
    "UnsupportedQuantizationError",
]


MAX_SHOWN = 120
"""The text of an error shows at most this many characters of a value: a prompt can have 600,000."""


def shown(value: object) -> str:
    """Return a value for the text of an error: the beginning of its repr, on one line. Never raises."""
    if isinstance(value, str | bytes | bytearray | list | tuple) and len(value) > MAX_SHOWN:
        value = value[:MAX_SHOWN]  # quotes and commas make its repr longer still
    try:
        text = " ".join(repr(value).splitlines())
    except Exception:  # an int of 5000 digits, a list nested too deep, a caller's __repr__ that raises
        text = f"<{type(value).__name__}>"
    return shortened(text)


def shortened(text: str) -> str:
    """Return the beginning of a text of unknown length, for the text of an error."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


class PagedError(Exception):
    """Is the base class of all errors that this package raises on purpose."""


class ConfigError(PagedError, ValueError):
    """A setting has an invalid value.

    :ivar setting: the parameter, flag or environment variable
    :ivar value: the value that was given
    :ivar allowed: what would have been accepted, in words
    """

    def __init__(self, message: str, *, setting: str = "", value: object = None, allowed: str = "") -> None:
        super().__init__(message)
        self.setting = setting
        self.value = value
        self.allowed = allowed

    @classmethod
    def of(cls, setting: str, value: object, allowed: str) -> ConfigError:
        """Make the error from the name of the setting, the value that was given, and what is allowed."""
        return cls(
            f"{setting} = {shown(value)} is not allowed: expected {allowed}",
            setting=setting,
            value=value,
            allowed=allowed,
        )


class ModelLoadError(PagedError):
    """A model cannot be loaded.

    :ivar path: the file, directory or Hub id concerned, if any
    """

    def __init__(self, message: str, *, path: str | Path | None = None) -> None:
        super().__init__(message)
        self.path = path


class UnsupportedArchitectureError(ModelLoadError):
    """The checkpoint's architecture is not supported.

    :ivar architecture: the name found in the checkpoint
    :ivar supported: the names that can be loaded
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | Path | None = None,
        architecture: str = "",
        supported: Iterable[str] = (),
    ) -> None:
        super().__init__(message, path=path)
        self.architecture = architecture
        self.supported: tuple[str, ...] = tuple(supported)


class UnsupportedQuantizationError(ModelLoadError):
    """The checkpoint's weights are in a format that cannot be read.

    :ivar quantization: the format found
    :ivar supported: the formats that can be read
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | Path | None = None,
        quantization: str = "",
        supported: Iterable[str] = (),
    ) -> None:
        super().__init__(message, path=path)
        self.quantization = quantization
        self.supported: tuple[str, ...] = tuple(supported)


class CheckpointError(ModelLoadError):
    """A checkpoint file is missing, truncated, malformed or of a refused kind (pickles)."""


class AdapterError(ModelLoadError):
    """An adapter cannot be read, or does not fit the model.

    :ivar tensor: the tensor concerned; empty if it is not about one tensor
    :ivar value: what was found and cannot be used
    """

    def __init__(self, message: str, *, path: str | Path | None = None, tensor: str = "", value: object = None) -> None:
        super().__init__(message, path=path)
        self.tensor = tensor
        self.value = value

    @classmethod
    def of(cls, path: str | Path, setting: str, value: object, allowed: str) -> AdapterError:
        """Make the error of a setting of an adapter's file."""
        return cls(f"{path}: {setting} = {shown(value)} is not allowed: expected {allowed}", path=path, value=value)


class OutOfMemoryError(ModelLoadError):
    """The memory needed is not available.

    :ivar needed: bytes needed
    :ivar available: bytes available
    :ivar largest_context: tokens of KV cache that would fit into the available bytes; None if it is not about the KV
        cache
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | Path | None = None,
        needed: int = 0,
        available: int = 0,
        largest_context: int | None = None,
    ) -> None:
        super().__init__(message, path=path)
        self.needed = needed
        self.available = available
        self.largest_context = largest_context


class RequestError(PagedError):
    """One request failed.

    :ivar request_id: the id that the response would have had; empty if it was refused before it got one
    :ivar partial_response: what had been generated so far, or None
    :ivar problem: the message without the advice
    :ivar advice: the end of the message, if it says what the application's code can do about it
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        partial_response: PartialResponse | None = None,
        advice: str = "",
    ) -> None:
        super().__init__(f"{message}: {advice}" if advice else message)
        self.request_id = request_id
        self.partial_response = partial_response
        self.problem = message
        self.advice = advice


class InvalidRequestError(RequestError):
    """A request is malformed.

    :ivar field: the part of the request concerned
    :ivar value: the value that was given
    :ivar allowed: what would have been accepted, in words
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        field: str = "",
        value: object = None,
        allowed: str = "",
        advice: str = "",
    ) -> None:
        super().__init__(message, request_id=request_id, advice=advice)
        self.field = field
        self.value = value
        self.allowed = allowed

    @classmethod
    def of(cls, field: str, value: object, allowed: str) -> InvalidRequestError:
        """Make the error from the name of the field, the value that was given, and what is allowed."""
        return cls(
            f"{field} = {shown(value)} is not allowed: expected {allowed}",
            field=field,
            value=value,
            allowed=allowed,
        )


class ContextLengthError(RequestError):
    """A prompt can never fit the model's context or the KV pool.

    :ivar field: the part of the request concerned: "messages", "prompt", or one of several, as "prompt[3]"
    :ivar num_tokens: tokens in the prompt
    :ivar limit: the largest prompt that fits
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        field: str = "",
        num_tokens: int = 0,
        limit: int = 0,
        advice: str = "",
    ) -> None:
        super().__init__(message, request_id=request_id, advice=advice)
        self.field = field
        self.num_tokens = num_tokens
        self.limit = limit


class PinLimitError(RequestError):
    """A prefix cannot be pinned, because too much of the KV pool would be: see :meth:`paged_sdk.Model.pin`.

    :ivar num_blocks: how many blocks it needs beside those that are pinned already
    :ivar num_pinned: how many are pinned already
    :ivar limit: how many may be pinned at once
    """

    def __init__(
        self, message: str, *, request_id: str = "", num_blocks: int = 0, num_pinned: int = 0, limit: int = 0
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.num_blocks = num_blocks
        self.num_pinned = num_pinned
        self.limit = limit


class ConstraintError(RequestError):
    """A constraint cannot be enforced: it is malformed, uses something unsupported, takes too long to compile, or
    leaves no token of the vocabulary to continue with. Also: an answer is not a valid instance of the requested type;
    ``partial_response`` holds it.

    :ivar kind: the constraint's kind: "regex", "json_schema", "lark" or "llguidance"; "tools" for tool calls; or empty
    :ivar keyword: the JSON schema keyword that is the reason, if known
    :ivar position: its place in the JSON schema, as a JSON pointer, if known
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        partial_response: PartialResponse | None = None,
        kind: str = "",
        keyword: str = "",
        position: str | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id, partial_response=partial_response)
        self.kind = kind
        self.keyword = keyword
        self.position = position


class QueueFullError(RequestError):
    """Too many requests are waiting.

    :ivar limit: how many may wait at once
    """

    def __init__(self, message: str, *, request_id: str = "", limit: int = 0) -> None:
        super().__init__(message, request_id=request_id)
        self.limit = limit


class LogitsProcessorError(RequestError):
    """A logits processor of the request raised an exception, which is this error's ``__cause__``, or left logits with
    which no token can be chosen.
    """


class RequestFailedError(RequestError):
    """An unforeseen exception, which is this error's ``__cause__``, was raised in the engine's work for this request
    only. Other requests continue.
    """


class RequestTimeoutError(RequestError):
    """A request did not finish within its own timeout; its blocks are free again.

    :ivar timeout: the limit, in seconds
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        partial_response: PartialResponse | None = None,
        timeout: float = 0.0,
    ) -> None:
        super().__init__(message, request_id=request_id, partial_response=partial_response)
        self.timeout = timeout


class ToolError(RequestError):
    """A tool raised an exception, which is this error's ``__cause__``. The partial response holds the call.

    :ivar tool: its name
    """

    def __init__(
        self, message: str, *, request_id: str = "", partial_response: PartialResponse | None = None, tool: str = ""
    ) -> None:
        super().__init__(message, request_id=request_id, partial_response=partial_response)
        self.tool = tool


class ToolRoundsError(RequestError):
    """The model called tools again after the maximum number of rounds. The partial response holds the last calls.

    :ivar max_rounds: the limit
    :ivar responses: all responses of the model, in order; each calls tools
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        partial_response: PartialResponse | None = None,
        max_rounds: int = 0,
        responses: Iterable[ChatCompletionResponse] = (),
    ) -> None:
        super().__init__(message, request_id=request_id, partial_response=partial_response)
        self.max_rounds = max_rounds
        self.responses: tuple[ChatCompletionResponse, ...] = tuple(responses)


class EngineError(PagedError):
    """The engine failed."""


class EngineDeadError(EngineError):
    """The engine has stopped because of an exception, which is this error's ``__cause__``, or because its process has
    ended or hung.

    :ivar partial_response: for a running request that generates text, what had been generated so far; otherwise None
    """

    def __init__(self, message: str, *, partial_response: PartialResponse | None = None) -> None:
        super().__init__(message)
        self.partial_response = partial_response


class NumericalError(EngineError):
    """The logits of one request held NaN or Inf; other requests continue.

    :ivar request_id: the request concerned
    """

    def __init__(self, message: str, *, request_id: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id


class ModelClosedError(PagedError, RuntimeError):
    """The model was used after it was closed, or in a forked child of the process that built it."""
