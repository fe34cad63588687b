"""End a text at stop strings, which may cross token boundaries."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["StopStrings"]


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces.

    The first stop string is the one that is complete first; of several that are complete at the same character, the
    longest. So the result does not depend on where the pieces are cut. The stop string and the text after it are
    dropped. Only text that could be the beginning of a stop string is held back. Time is linear in the text (Knuth,
    Morris and Pratt 1977), and almost none where no stop string begins.

    :param stops: stop strings, not empty
    :ivar found: the stop string that has ended the text, or None
    """

    __slots__ = ("_beginning", "_held", "_matchers", "found")

    def __init__(self, stops: Iterable[str]) -> None:
        stops = list(dict.fromkeys(stops))
        self._matchers = [_Matcher(stop) for stop in stops]
        self._beginning = re.compile("|".join(re.escape(stop[0]) for stop in stops))
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Process the next piece of text.

        :returns: the text that is certain to come before any stop string, and whether a stop string has been found;
            after that, the text is empty
        """
        if self.found is not None:
            return "", True
        if not self._matchers:
            return text, False
        seen = self._held + text
        position = progress = len(self._held)
        while position < len(seen):
            if not progress:
                beginning = self._beginning.search(seen, position)
                if beginning is None:
                    break
                position = beginning.start()
            found = [matcher.size for matcher in self._matchers if matcher.advance(seen[position])]
            position += 1
            if found:
                start = position - max(found)
                self.found = seen[start:position]
                self._held = ""
                return seen[:start], True
            progress = max(matcher.progress for matcher in self._matchers)
        safe = len(seen) - progress
        self._held = seen[safe:]
        return seen[:safe], False

    def flush(self) -> str:
        """Return the text that was held back, as the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Matches one stop string: the text so far ends with its first ``progress`` characters."""

    __slots__ = ("_fallback", "_stop", "progress", "size")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.size = len(stop)
        self.progress = 0
        # _fallback[n]: the longest proper prefix of stop[:n] that also ends it.
        self._fallback = [0, 0]
        for character in stop[1:]:
            self._fallback.append(self._step(self._fallback[-1], character))

    def advance(self, character: str) -> bool:
        """Process one character, and tell whether it completes the stop string."""
        self.progress = self._step(self.progress, character)
        return self.progress == self.size

    def _step(self, progress: int, character: str) -> int:
        while progress and self._stop[progress] != character:
            progress = self._fallback[progress]
        return progress + 1 if self._stop[progress] == character else 0
