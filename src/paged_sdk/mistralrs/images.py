"""Read the images of a conversation, which mistral.rs's programs give as addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paged_sdk import Image

__all__ = ["with_images"]


def with_images(messages: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
    """Return messages in whose parts the paths of images are read. ``data:`` URLs stay as they are.

    The SDK reads no path that a message holds, since messages may come from strangers. mistral.rs does, and its
    programs rely on it.

    :raises InvalidRequestError: a file that cannot be read, or another address, which nobody fetches here
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return messages  # which is refused with the reason
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
