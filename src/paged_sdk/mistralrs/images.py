"""Reads the images of a conversation, which programs for mistral.rs give as paths or URLs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paged_sdk import Image

__all__ = ["with_images"]


def with_images(messages: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
    """Return the messages with images read from their paths. ``data:`` URLs are kept.

    The SDK itself reads no path in a message, since messages may be untrusted. mistral.rs does, and programs for it
    rely on that.

    :raises InvalidRequestError: a file cannot be read, or the URL has another scheme: nothing is fetched
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return messages  # refused later, with the reason
    return [_with_images(message) for message in messages]


def _with_images(message: Mapping[str, object]) -> Mapping[str, object]:
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list | tuple):
        return message
    return {**message, "content": [_part(part) for part in parts]}


def _part(part: object) -> object:
    if not isinstance(part, Mapping) or part.get("type") != "image_url":
        return part
    holder = part.get("image_url")
    url = holder.get("url") if isinstance(holder, Mapping) else holder
    if not isinstance(url, str) or url.strip().startswith("data:"):
        return part
    return Image.parse(url.strip().removeprefix("file://"))
