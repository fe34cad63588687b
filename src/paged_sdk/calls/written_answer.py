"""Keeps what an answer consists of in the order in which the model wrote it."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from paged_sdk.types.logprobs import Logprobs, TokenLogprob
from paged_sdk.types.response import ChunkChoice, Delta, ToolCallDelta, ToolCallResponse

__all__ = ["WrittenAnswer"]

_REASONING, _CONTENT, _CALLS = range(3)


@define
class _Run:
    """Is thoughts, then text, then calls, as deltas are."""

    reasoning: list[str] = field(factory=list)
    text: list[str] = field(factory=list)
    tokens: list[TokenLogprob] = field(factory=list)
    calls: list[ToolCallResponse] = field(factory=list)
    begun: dict[int, tuple[ToolCallDelta, list[str]]] = field(factory=dict)


class WrittenAnswer:
    """Holds one choice as far as it was read. How it was cut into what is added makes no difference."""

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
        """Add what comes next: thoughts, then text, then calls.

        :param tokens: of which the text is made, if they are of interest
        :param calls: those that have become whole
        :param call_deltas: what there is of calls
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
        """Return all of its text."""
        return "".join(part for run in self._runs for part in run.text)

    @property
    def reasoning(self) -> str:
        """Return all that the model thought."""
        return "".join(part for run in self._runs for part in run.reasoning)

    @property
    def tokens(self) -> list[TokenLogprob]:
        """Return the tokens of which the text is made."""
        return [token for run in self._runs for token in run.tokens]

    @property
    def calls(self) -> tuple[ToolCallResponse, ...]:
        """Return the calls that are whole."""
        return tuple(call for run in self._runs for call in run.calls)

    def pieces(self, index: int) -> tuple[ChunkChoice, ...]:
        """Return the answer in as few pieces as its order allows.

        :param index: the choice's
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
        """Return the run to which something of a kind is added: another one if the last holds what comes later."""
        if kind < self._last_kind:
            self._runs.append(_Run())
        self._last_kind = kind
        return self._runs[-1]
