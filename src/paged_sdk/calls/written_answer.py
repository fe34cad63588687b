"""Keeps the parts of an answer in the order in which the model wrote them."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from paged_sdk.types.logprobs import Logprobs, TokenLogprob
from paged_sdk.types.response import ChunkChoice, Delta, ToolCallDelta, ToolCallResponse

__all__ = ["WrittenAnswer"]

_REASONING, _CONTENT, _CALLS = range(3)


@define
class _Run:
    """Holds reasoning, then content, then calls: the parts of one delta, in the order of a delta."""

    reasoning: list[str] = field(factory=list)
    text: list[str] = field(factory=list)
    tokens: list[TokenLogprob] = field(factory=list)
    calls: list[ToolCallResponse] = field(factory=list)
    begun: dict[int, tuple[ToolCallDelta, list[str]]] = field(factory=dict)


class WrittenAnswer:
    """Holds the part of one choice that has been read. The result does not depend on how it was split into :meth:`add`
    calls.
    """

    __slots__ = ("_last_kind", "_runs", "has_begun")

    def __init__(self) -> None:
        self._runs: list[_Run] = [_Run()]
        self._last_kind = _REASONING
        self.has_begun: bool = False

    def add(
        self,
        text: str,
        tokens: Sequence[TokenLogprob] = (),
        reasoning: str = "",
        calls: Sequence[ToolCallResponse] = (),
        call_deltas: Sequence[ToolCallDelta] = (),
    ) -> None:
        """Append reasoning, then content, then calls.

        :param tokens: logprobs of the content's tokens, if they are needed
        :param calls: the calls that are complete now
        :param call_deltas: the new parts of calls
        """
        self.has_begun = True
        if reasoning:
            self._run(_REASONING).reasoning.append(reasoning)
        if text:
            run = self._run(_CONTENT)
            run.text.append(text)
            run.tokens += tokens
        if calls or call_deltas:
            run = self._run(_CALLS)
            run.calls += calls
            for delta in call_deltas:
                run.begun.setdefault(delta.index, (delta, []))[1].append(delta.arguments)

    @property
    def text(self) -> str:
        """Return all content."""
        return "".join(part for run in self._runs for part in run.text)

    @property
    def reasoning(self) -> str:
        """Return all reasoning."""
        return "".join(part for run in self._runs for part in run.reasoning)

    @property
    def tokens(self) -> list[TokenLogprob]:
        """Return the tokens of the content."""
        return [token for run in self._runs for token in run.tokens]

    @property
    def calls(self) -> tuple[ToolCallResponse, ...]:
        """Return the complete calls."""
        return tuple(call for run in self._runs for call in run.calls)

    def pieces(self, index: int) -> tuple[ChunkChoice, ...]:
        """Return the answer in as few deltas as its order allows.

        :param index: the choice's index
        """
        return tuple(
            ChunkChoice(
                index=index,
                delta=Delta(
                    content="".join(run.text),
                    is_first=place == 0,
                    tool_calls=tuple(run.calls),
                    reasoning_content="".join(run.reasoning) or None,
                    tool_call_deltas=tuple(
                        ToolCallDelta(index=first.index, arguments="".join(arguments), id=first.id, name=first.name)
                        for first, arguments in run.begun.values()
                    ),
                ),
                content_logprobs=Logprobs(content=tuple(run.tokens)) if run.tokens else None,
            )
            for place, run in enumerate(self._runs)
        )

    def _run(self, kind: int) -> _Run:
        """Return the run to which to add a part; a new one if the last run already has parts that come later in a
        delta.
        """
        if kind < self._last_kind:
            self._runs.append(_Run())
        self._last_kind = kind
        return self._runs[-1]
