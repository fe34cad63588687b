"""Hold plain-text prompts: one or several, each a text or token ids."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TypeAlias, cast

from paged_sdk.config.checks import as_tuple
from paged_sdk.errors import InvalidRequestError

__all__ = ["PromptLike", "PromptsLike", "as_prompts", "name_of_prompt"]

PromptLike: TypeAlias = str | Sequence[int]
"""A completion's prompt: text, or token ids."""
PromptsLike: TypeAlias = PromptLike | Sequence[PromptLike]
"""One prompt, or several: a list of ints is one prompt, a list of texts or of lists is several."""


def as_prompts(prompt: PromptsLike, name: str = "prompt") -> list[PromptLike]:
    """Return the prompts of a completion. Token ids are not checked.

    :param name: the argument's name in errors
    :raises InvalidRequestError: an empty list, or one that begins with a text or a list and holds something else too;
        several prompts in an array or an iterator
    """
    if isinstance(prompt, str | bytes | Set):
        return [cast(PromptLike, prompt)]
    if not isinstance(prompt, Sequence):
        items = as_tuple(prompt)
        if isinstance(items, tuple) and items and _is_prompt(items[0]):
            raise InvalidRequestError.of(name, prompt, "a text, token ids, or a list or tuple of these")
        return [cast(PromptLike, items)]
    if not prompt:
        raise InvalidRequestError.of(name, prompt, "a text, token ids, or a list of at least one of them")
    if not _is_prompt(prompt[0]):
        return [cast(PromptLike, prompt)]
    for each in prompt:
        if not _is_prompt(each):
            raise InvalidRequestError.of(name, each, "a text or token ids, like the other prompts of the list")
    return list(cast(Sequence[PromptLike], prompt))


def name_of_prompt(name: str, place: int, num_prompts: int) -> str:
    """Return the name of a prompt in errors: with its index, if there are several."""
    return name if num_prompts == 1 else f"{name}[{place}]"


def _is_prompt(value: object) -> bool:
    return isinstance(value, str | Sequence) and not isinstance(value, bytes)
