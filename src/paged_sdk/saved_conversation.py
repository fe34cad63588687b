"""Writes a conversation to a file, and reads it back."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from attrs import fields, frozen

from paged_sdk.config.checks import path_text
from paged_sdk.config.sampling import DryParams, SamplingParams
from paged_sdk.errors import CheckpointError, ConfigError, InvalidRequestError, PagedError, shown
from paged_sdk.system.files import MAX_TEXT_BYTES, read_json
from paged_sdk.types.image import Image
from paged_sdk.types.messages import Message
from paged_sdk.weights.new_target import new_file

__all__ = ["SavedConversation"]

_T = TypeVar("_T")

FORMAT: Final = "paged_sdk.Conversation"
VERSION: Final = 1
_PATH: Final = "a path"
_KEYS: Final = ("format", "version", "messages", "sampling", "tools", "max_rounds", "tool_timeout")
_SAMPLING_KEYS: Final = tuple(each.name for each in fields(SamplingParams) if not each.name.startswith("_"))
_DRY_KEYS: Final = tuple(each.name for each in fields(DryParams))
_IMAGE_KEYS: Final = ("type", "data", "shape")


@frozen(kw_only=True)
class SavedConversation:
    """Holds what a file keeps of a conversation: everything but the model, and its tools by name only.

    The file is a JSON object: ``format`` and ``version`` say what it is; ``messages`` are in OpenAI's form, except that
    an image is ``{"type": "image", "data": ...}`` with the base64 of its bytes, and the ``shape`` of pixels;
    ``sampling`` has the fields of :class:`SamplingParams`, where a bias of minus infinity is ``"-inf"``.
    """

    messages: tuple[Message, ...]
    sampling: SamplingParams | None
    tools: tuple[str, ...]
    max_rounds: int
    tool_timeout: float | None

    def write(self, path: str | PathLike[str]) -> None:
        """Write the file. It is complete before it takes the place of an earlier one.

        :raises ConfigError: the path cannot be written, or the file would be longer than 64 MiB
        """
        target = Path(path_text("path", path, _PATH))
        data = json.dumps(self._content(), ensure_ascii=False, allow_nan=False, indent=1).encode()
        if len(data) > MAX_TEXT_BYTES:
            raise ConfigError.of("path", str(target), f"at most {MAX_TEXT_BYTES} bytes, not {len(data)}: fewer images")
        try:
            with new_file(target, len(data), setting="path", replaces=True) as part:
                part.write_bytes(data)
        except CheckpointError as error:
            raise ConfigError.of("path", str(target), f"a path that can be written ({error})") from error

    @classmethod
    def read(cls, path: str | PathLike[str]) -> SavedConversation:
        """Read a file.

        :raises ConfigError: it cannot be read, or something in it is not as :meth:`write` would have written it; the
            error names the file, the place in it, and what is allowed
        """
        file = Path(path_text("path", path, _PATH))
        try:
            content = read_json(file)
        except CheckpointError as error:
            raise ConfigError.of("path", str(file), f"a file that a conversation was saved to ({error})") from error
        reader = _Reader(file)
        if content.get("format") != FORMAT:
            reader.refuse("format", content.get("format"), f"{FORMAT!r}, as Conversation.save writes it")
        if type(version := content.get("version")) is not int or version != VERSION:
            reader.refuse("version", version, f"{VERSION}, the only one that this release reads")
        reader.check_keys("", content, _KEYS, required=_KEYS)
        messages = reader.items("messages", content["messages"])
        names = reader.items("tools", content["tools"])
        max_rounds, tool_timeout = content["max_rounds"], content["tool_timeout"]
        if type(max_rounds) is not int or max_rounds < 1:
            reader.refuse("max_rounds", max_rounds, "an int >= 1")
        if tool_timeout is not None and not _is_positive(tool_timeout):
            reader.refuse("tool_timeout", tool_timeout, "a number of seconds > 0, or null")
        for place, name in enumerate(names):
            if not isinstance(name, str):
                reader.refuse(f"tools[{place}]", name, "the name of a tool")
        return cls(
            messages=tuple(reader.message(f"messages[{place}]", each) for place, each in enumerate(messages)),
            sampling=None if content["sampling"] is None else reader.sampling(content["sampling"]),
            tools=tuple(names),
            max_rounds=max_rounds,
            tool_timeout=tool_timeout,
        )

    def check_tools(self, path: str | PathLike[str], given: Collection[str]) -> None:
        """Check that all tools of the conversation are given.

        :raises ConfigError: some are not
        """
        missing = [name for name in self.tools if name not in given]
        if missing:
            allowed = f"load(..., tools=...) with functions of these names: {', '.join(map(repr, missing))} missing"
            _Reader(Path(path)).refuse("tools", list(self.tools), allowed)

    def _content(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "messages": list(map(_message, self.messages)),
            "sampling": None if self.sampling is None else _sampling(self.sampling),
            "tools": list(self.tools),
            "max_rounds": self.max_rounds,
            "tool_timeout": self.tool_timeout,
        }


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]


def _message(message: Message) -> dict[str, Any]:
    return message.to_dict() | ({"content": list(map(_part, message.parts))} if message.parts else {})


def _part(part: str | Image) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    content: dict[str, Any] = {"type": "image", "data": base64.b64encode(part.data).decode()}
    return content if part.shape is None else content | {"shape": list(part.shape)}


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    content: dict[str, Any] = {name: getattr(sampling, name) for name in _SAMPLING_KEYS}
    if sampling.logits_bias is not None:
        biases = sampling.logits_bias.items()
        content["logits_bias"] = {str(token): "-inf" if bias == -math.inf else bias for token, bias in biases}
    if sampling.dry_params is not None:
        content["dry_params"] = {name: getattr(sampling.dry_params, name) for name in _DRY_KEYS}
    return content


@frozen
class _Reader:
    """Reads the parts of a file, and names the file and the place in its errors."""

    file: Path

    def refuse(self, place: str, value: object, allowed: str) -> NoReturn:
        raise ConfigError.of(f"{self.file}: {place}", value, allowed)

    def made(self, place: str, value: object, make: Callable[[], _T]) -> _T:
        """Return what a function makes of a value.

        :raises ConfigError: the function refuses the value
        """
        try:
            return make()
        except PagedError as error:
            setting, part = f"{self.file}: {place}", value
            if isinstance(error, InvalidRequestError | ConfigError):
                part = error.value
            allowed = getattr(error, "allowed", "")
            raise ConfigError(f"{setting}: {error}", setting=setting, value=part, allowed=allowed) from error
        except (TypeError, ValueError, OverflowError) as error:
            self.refuse(place, value, f"what Conversation.save writes ({error})")

    def items(self, place: str, value: object) -> list[Any]:
        if not isinstance(value, list):
            self.refuse(place, value, "a list")
        return value

    def check_keys(
        self, place: str, value: object, allowed: Collection[str], required: Collection[str] = ()
    ) -> Mapping[str, Any]:
        """Return a value that is an object with some keys and no others."""
        if not isinstance(value, Mapping):
            self.refuse(place, value, "an object")
        for key in value:
            if key not in allowed:
                self.refuse(f"{place}.{shown(key)}".lstrip("."), value[key], f"no key but {', '.join(allowed)}")
        for key in required:
            if key not in value:
                self.refuse(f"{place}.{key}".lstrip("."), None, "a value: the key is missing")
        return value

    def message(self, place: str, value: object) -> Message:
        if not isinstance(value, Mapping) or not isinstance(value.get("content"), list):
            return self.made(place, value, lambda: Message.parse(value))
        parts = [self.part(f"{place}.content[{each}]", part) for each, part in enumerate(value["content"])]
        text = "".join(part for part in parts if isinstance(part, str))
        plain = self.made(place, value, lambda: Message.parse({**value, "content": text}))
        rest = {"tool_calls", "name", "tool_call_id", "reasoning_content"}
        others = {name: getattr(plain, name) for name in rest}
        return self.made(place, value, lambda: Message(plain.role, text, parts=tuple(parts), **others))

    def part(self, place: str, value: object) -> str | Image:
        part = self.check_keys(place, value, ("type", "text", "data", "shape"), ("type",))
        if part["type"] == "text" and isinstance(part.get("text"), str):
            text: str = part["text"]
            return text
        if part["type"] != "image":
            self.refuse(place, value, '{"type": "text", "text": ...} or {"type": "image", "data": ..., "shape": ...}')
        self.check_keys(place, value, _IMAGE_KEYS, ("data",))
        shape = part.get("shape")
        if shape is not None:
            shape = tuple(self.items(f"{place}.shape", shape))
        return self.made(place, value, lambda: Image(self._bytes(f"{place}.data", part["data"]), shape))

    def _bytes(self, place: str, value: object) -> bytes:
        try:
            return base64.b64decode(value, validate=True)  # type: ignore[arg-type]
        except (TypeError, ValueError, binascii.Error):
            self.refuse(place, value, "base64")

    def sampling(self, value: object) -> SamplingParams:
        values = dict(self.check_keys("sampling", value, _SAMPLING_KEYS))
        if values.get("dry_params") is not None:
            dry = dict(self.check_keys("sampling.dry_params", values["dry_params"], _DRY_KEYS))
            values["dry_params"] = self.made("sampling.dry_params", dry, lambda: DryParams(**dry))
        if values.get("logits_bias") is not None:
            values["logits_bias"] = self._biases(values["logits_bias"])
        return self.made("sampling", values, lambda: SamplingParams(**values))

    def _biases(self, value: object) -> dict[int, Any]:
        if not isinstance(value, Mapping) or not all(key.isascii() and key.isdecimal() for key in value):
            self.refuse("sampling.logits_bias", value, "an object of biases by token id")
        return {int(token[:20]): -math.inf if bias == "-inf" else bias for token, bias in value.items()}
