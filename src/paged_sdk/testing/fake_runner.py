"""Run steps without computing anything, to test the engine, its scheduling and its streams without weights."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence

from paged_sdk.config.isq import IsqType
from paged_sdk.errors import ConfigError, ModelClosedError, NumericalError, RequestError
from paged_sdk.runner.output import FinishedStep, PendingStep, RunnerOutput
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.scheduler.output import ScheduledSequence, SchedulerOutput
from paged_sdk.scheduler.request import Request
from paged_sdk.testing.next_token import NextToken
from paged_sdk.types.reading import PromptScores, TokenScores

__all__ = ["FakeRunner"]


class FakeRunner:
    """Executes a scheduler's steps with a function in place of the model.

    Of the sampling settings only those for logprobs are used. Every distribution is the same: one half for the
    function's token, the rest shared evenly by the other tokens.

    :param next_token: chooses each next token; a :class:`~paged_sdk.errors.RequestError` or
        :class:`~paged_sdk.errors.NumericalError` that it raises ends that request alone
    :param vocab_size: token ids are below it; at least 2
    :param delay: seconds that every step takes
    :param row_failure: returns, for a row's prompt and output, None or why its logits count as not finite; a reason
        ends the request with :class:`~paged_sdk.errors.NumericalError`
    :param crashes: maps the number of a step, from 0, to the exception that it raises, which ends the engine
    :param overlaps: whether to act as a device whose steps overlap: the engine then submits a step before it takes the
        results of the previous one. Rows sampled on the host are withheld, unless they outnumber the others
    :raises ConfigError: for a vocabulary or delay out of its range
    """

    def __init__(
        self,
        next_token: NextToken,
        *,
        vocab_size: int,
        delay: float = 0.0,
        row_failure: Callable[[Sequence[int], Sequence[int]], str | None] | None = None,
        crashes: Mapping[int, Exception] | None = None,
        overlaps: bool = False,
    ) -> None:
        if vocab_size < 2:
            raise ConfigError.of("vocab_size", vocab_size, "an int >= 2")
        if not (isinstance(delay, int | float) and math.isfinite(delay) and delay >= 0):
            raise ConfigError.of("delay", delay, "a finite number of seconds >= 0")
        self._next_token = next_token
        self._vocab_size = vocab_size
        self._delay = delay
        self._row_failure = row_failure
        self._crashes = dict(crashes or {})
        self._overlaps = overlaps
        self._said: dict[int, int] = {}
        self._num_steps = 0
        self._hurried = threading.Event()
        self._closed = False

    @property
    def num_steps(self) -> int:
        """Return the number of steps so far, the crashed ones included."""
        return self._num_steps

    @property
    def is_closed(self) -> bool:
        return self._closed

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Run one step.

        :raises ModelClosedError: after :meth:`close`
        :raises ConfigError: if ``next_token`` leaves the vocabulary
        """
        if self._closed:
            raise ModelClosedError("the runner is closed")
        step = self._num_steps
        self._num_steps += 1
        if self._delay:
            self._hurried.wait(self._delay)
        if step in self._crashes:
            raise self._crashes[step]
        result = RunnerOutput(token_ids=[], logprobs=[])
        for index, row in enumerate(output.scheduled):
            tokens: list[int] = []
            logprobs: list[RawLogprobs] | None = None
            try:
                tokens = self._tokens(row)
                logprobs = self._sampled_logprobs(row, tokens)
                prompt_top_n = row.sequence.request.sampling.prompt_logprobs
                if prompt_top_n is not None:
                    result.prompt_logprobs[index] = self._prompt_logprobs(row, prompt_top_n)
                self._read(row, index, result)
            except (RequestError, NumericalError) as error:
                result.failed[index] = error
            result.token_ids.append(tokens)
            result.logprobs.append(logprobs)
        if not self._overlaps:
            return FinishedStep(result)
        on_host = [index for index, row in enumerate(output.scheduled) if _needs_host(row)]
        on_device = [index for index, row in enumerate(output.scheduled) if row.num_samples and index not in on_host]
        self._said = {
            output.scheduled[index].sequence.seq_id: result.token_ids[index][-1]
            for index in on_device
            if result.token_ids[index]
        }
        if on_host and len(on_host) <= len(on_device):
            return FinishedStep(result, overlaps=True, withheld_rows=on_host)
        return FinishedStep(result, overlaps=len(on_host) < len(output.scheduled), early_rows=on_host)

    def requantize(self, isq: IsqType, check_cancelled: Callable[[], None]) -> None:
        """Do nothing: there are no weights."""

    def hurry(self) -> None:
        """End the delay of the running step, and let later steps have none. May be called from any thread."""
        self._hurried.set()

    def close(self) -> None:
        """Refuse further steps; a second call does nothing."""
        self._closed = True

    def next_token(self, request: Request, prompt: Sequence[int], output: Sequence[int], choice_index: int) -> int:
        """Choose the next token of a request, as :class:`NextToken` does."""
        return self._next_token(prompt, output, choice_index)

    def _tokens(self, row: ScheduledSequence) -> list[int]:
        """Return the tokens that a row samples.

        :raises NumericalError: ``row_failure`` returned a reason
        """
        request = row.sequence.request
        prompt, text = self._texts(row)
        failure = None if self._row_failure is None else self._row_failure(prompt, text)
        if failure is not None:
            raise NumericalError(f"request {request.request_id}: {failure}", request_id=request.request_id)
        choices = range(row.sequence.choice_index, row.sequence.choice_index + row.num_samples)
        tokens = [self._say(request, prompt, text, choice) for choice in choices]
        for draft in row.draft_token_ids if tokens else ():
            if tokens[-1] != draft:
                break
            text.append(draft)
            tokens.append(self._say(request, prompt, text, row.sequence.choice_index))
        return tokens

    def _read(self, row: ScheduledSequence, index: int, result: RunnerOutput) -> None:
        """Compute the reading of a completed prompt: the frequency of each token in it, which is the mean of one-hot
        hidden states; or the scores of its tokens, of which the first are taken as the prompt and the rest as the
        output.
        """
        sequence, reading = row.sequence, row.sequence.request.reading
        if reading is None or row.end != sequence.num_prompt_tokens:
            return
        import numpy as np  # imported here: only readings need it

        if isinstance(reading, PromptScores):
            prompt, text = sequence.token_ids[: reading.first_token], sequence.token_ids[reading.first_token :]
            said = [self._say(sequence.request, prompt, text[:place], 0) for place in range(len(text))]
            raw = [self._logprobs(token, said=one, top_n=0) for token, one in zip(text, said, strict=True)]
            logprobs = np.array([each.logprob for each in raw], np.float32)
            result.readings[index] = TokenScores(logprobs, np.array(said) == np.array(text))
        else:
            counts = np.bincount(sequence.token_ids, minlength=self._vocab_size)
            result.readings[index] = (counts / len(sequence.token_ids)).astype(np.float32)

    def _texts(self, row: ScheduledSequence) -> tuple[list[int], list[int]]:
        """Return prompt and output of a row, with the token that the previous step sampled."""
        sequence = row.sequence
        output = sequence.output_token_ids
        if row.known_end > len(sequence.token_ids):
            output.append(self._said.get(sequence.seq_id, 0))  # 0 if that row failed
        return sequence.token_ids[: sequence.num_prompt_tokens], output

    def _sampled_logprobs(self, row: ScheduledSequence, tokens: Sequence[int]) -> list[RawLogprobs] | None:
        top_n = row.sequence.request.sampling.top_n_logprobs
        if top_n is None or not tokens:
            return None
        return [self._logprobs(token, said=token, top_n=top_n) for token in tokens]

    def _prompt_logprobs(self, row: ScheduledSequence, top_n: int) -> list[RawLogprobs]:
        """Return entries for the prompt tokens after those computed in this step."""
        sequence = row.sequence
        end = min(row.start + row.num_new_tokens, sequence.num_prompt_tokens - 1)
        entries = []
        for position in range(row.start, end):
            said = self._say(sequence.request, sequence.token_ids[: position + 1], [], sequence.choice_index)
            entries.append(self._logprobs(sequence.token_ids[position + 1], said=said, top_n=top_n))
        return entries

    def _say(self, request: Request, prompt: Sequence[int], output: Sequence[int], choice_index: int) -> int:
        token = self.next_token(request, prompt, output, choice_index)
        if not 0 <= token < self._vocab_size:
            raise ConfigError.of("next_token()", token, f"a token id below vocab_size = {self._vocab_size}")
        return token

    def _logprobs(self, token: int, *, said: int, top_n: int) -> RawLogprobs:
        """Return logprobs with one half for ``said`` and the rest shared evenly; the likeliest are in the order of
        their ids.
        """
        likely, unlikely = math.log(0.5), math.log(0.5 / (self._vocab_size - 1))
        others = [other for other in range(min(top_n, self._vocab_size)) if other != said]
        top = [(said, likely), *((other, unlikely) for other in others)]
        return RawLogprobs(token, likely if token == said else unlikely, tuple(top[:top_n]))


def _needs_host(row: ScheduledSequence) -> bool:
    """Return whether a device would leave a row's sampling to the host: with drafts, several samples, or a logits bias,
    which stands for all other reasons.
    """
    if row.num_samples != 1:
        return row.num_samples > 1
    return bool(row.draft_token_ids or row.sequence.request.sampling.logits_bias)
