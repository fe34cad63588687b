"""Selects the tool calls that a streamed answer shows."""

from __future__ import annotations

from paged_sdk import Delta, ToolCallDelta

__all__ = ["ShownCalls"]


class ShownCalls:
    """Selects which tool calls of one choice are shown: all, or only the first. A call that turns out to be text does
    not count: the next call is then the first.

    :param has_one_call: whether only the first call is shown
    """

    def __init__(self, *, has_one_call: bool) -> None:
        self._has_one_call = has_one_call
        self._index: int | None = None
        self._is_whole = False

    def shown(self, delta: Delta) -> list[ToolCallDelta]:
        """Return those call deltas of the next delta that are shown."""
        if not self._has_one_call:
            return list(delta.tool_call_deltas)
        if not self._is_whole:
            if delta.content:  # content follows an incomplete call only if that call was text: this is that text
                self._index = None
            whole = [call.index for call in delta.tool_calls]
            begun = [call.index for call in delta.tool_call_deltas if call.id is not None]
            self._is_whole = bool(whole)
            self._index = next(iter(whole or ([] if self._index is not None else begun)), self._index)
        return [call for call in delta.tool_call_deltas if call.index == self._index]
