"""Choose which calls of tools a streamed answer shows."""

from __future__ import annotations

from paged_sdk import Delta, ToolCallDelta

__all__ = ["ShownCalls"]


class ShownCalls:
    """Knows which calls of one text are shown: all, or the first one alone. A call that turned out to be text is none:
    then it is the next one.

    :param has_one_call: whether calls but the first are left out
    """

    def __init__(self, *, has_one_call: bool) -> None:
        self._has_one_call = has_one_call
        self._index: int | None = None
        self._is_whole = False

    def shown(self, delta: Delta) -> list[ToolCallDelta]:
        """Return what is shown of the calls in the next piece of the text."""
        if not self._has_one_call:
            return list(delta.tool_call_deltas)
        if not self._is_whole:
            if delta.content:  # it does not follow a call that is still to become whole: that was text, and here it is
                self._index = None
            whole = [call.index for call in delta.tool_calls]
            begun = [call.index for call in delta.tool_call_deltas if call.id is not None]
            self._is_whole = bool(whole)
            self._index = next(iter(whole or ([] if self._index is not None else begun)), self._index)
        return [call for call in delta.tool_call_deltas if call.index == self._index]
