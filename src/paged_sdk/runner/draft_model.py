"""Proposes drafts made by a smaller model."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Texts
from contextlib import nullcontext
from typing import Final

import torch

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.constraints.grammar import GrammarText
from paged_sdk.kernels.step import StepContext
from paged_sdk.kv.manager import KvManager, KvTable
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner.input_batch import make_input_batch
from paged_sdk.runner.live_compilations import LiveCompilations
from paged_sdk.sampling.candidates import argmax, select_rows
from paged_sdk.scheduler.draft_account import DraftBalance
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.scheduler.step_times import StepTimes
from paged_sdk.speculative.acceptance import Acceptance
from paged_sdk.speculative.draft_counts import draft_counts
from paged_sdk.types.step import StepRow

__all__ = ["DraftModel"]

PRIOR: Final = 0.7
"""Prior acceptance rate of drafts, for a new pair of models."""
FIRST_PAUSE: Final = 16
"""Steps without drafts before a trial draft, if drafts of a sequence do not pay. Each trial doubles the pause, up to
:data:`LONGEST_PAUSE`, until drafts pay. New sequences start with the longest pause reached since drafts last paid: with
this pause for each, drafting with a third of a model's layers cost sequences of 160 tokens 5 % instead of 1 %."""
LONGEST_PAUSE: Final = 512
FIRST_CHUNK: Final = 32
"""Size of the first prefill chunk, before any chunk's time has been measured."""
LEAST_CHUNK: Final = 16
"""Minimum size of a prefill chunk: matrix products compute rows in tiles of about this size."""
READ_SHARE: Final = 1.0
"""Time that prefill may add to a step, as a fraction of a step without drafts. The first 8 of 28 layers of
Qwen2.5-Coder-1.5B take 1 s to prefill 1,000 tokens: in one chunk, that delayed all sequences by 40 steps."""


class DraftModel:
    """Drafts with a smaller model that has the same vocabulary (Leviathan et al., "Fast Inference from Transformers via
    Speculative Decoding", 2023).

    The draft model has its own KV memory, of the same kind and for as many tokens as the target's, with a prefix cache.
    It prefills a sequence when drafts are first requested for it, in chunks so that other sequences do not wait long.
    Drafts are the likeliest tokens: since the target draws every token from its own distribution, sampled drafts would
    gain nothing. Drafting stops where the constraint allows no further token.

    The number of drafts depends on the acceptance rate and on the measured step times of both models.

    :param model: the draft model
    :param backend: holds the draft model's KV, under the ids of ``kv``
    :param kv: manages the draft model's KV memory
    :param vocab_size: vocabulary size of the draft model
    :param target_vocab_size: vocabulary size of the target
    :param gamma: maximum number of drafts per sequence and step
    :param max_tokens: the draft model's context length
    :param max_batched_tokens: maximum number of tokens of a prefill chunk
    :param times: step times of the target
    :param balance: time that drafts have gained and lost so far
    :ivar compilations: detects kernels that are compiled during a step; None: nothing is compiled
    """

    def __init__(
        self,
        model: CausalModel,
        backend: AttentionBackend,
        kv: KvManager,
        *,
        vocab_size: int,
        target_vocab_size: int,
        gamma: int,
        max_tokens: int,
        max_batched_tokens: int,
        times: StepTimes,
        balance: DraftBalance,
    ) -> None:
        self.compilations: LiveCompilations | None = None
        self._model = model
        self._backend = backend
        self._kv = kv
        self._vocab_size = vocab_size
        self._target_vocab_size = target_vocab_size
        self._gamma = gamma
        self._max_tokens = min(max_tokens, kv.max_sequence_tokens)
        self._max_batched_tokens = max_batched_tokens
        self._times = times
        self._own_times = StepTimes()
        self._reading_seconds = 0.0  # prefill time per token; 0: not measured
        self._balance = balance
        self._acceptance = Acceptance(priors=(PRIOR,))
        self._pause = _Pause()
        self._texts: dict[int, _Text] = {}

    @property
    def num_followed(self) -> int:
        """Return the number of sequences that have state here, such as KV."""
        return len(self._texts)

    def propose(self, sequences: Texts[Sequence]) -> list[list[int]]:
        """Propose drafts for each sequence, as many as are expected to pay."""
        texts = [self._text_of(sequence) for sequence in sequences]
        if not self._balance.allows:
            return [[] for _ in texts]
        chances = [text.chances(self._most_drafts(text)) for text in texts]
        counts = draft_counts(
            chances,
            self._times.expected,
            self._balance.left,
            lambda ahead: ahead * self._own_times.expected(len(texts)),
        )
        chosen = [
            text
            for text, count, chance in zip(texts, counts, chances, strict=True)
            if chance and (text.is_being_read or text.choose(count)) and self._make_room(text)
        ]
        with torch.inference_mode():
            chosen = self._read(chosen, self._times.nearest(len(texts)) or 0.0)
            start = time.monotonic()
            self._draft(chosen)
        self._balance.claim((text.sequence.seq_id for text in chosen), time.monotonic() - start)
        return [text.drafts for text in texts]

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Free the KV of sequences that have ended; it stays in the prefix cache."""
        for seq_id in seq_ids:
            text = self._texts.pop(seq_id, None)
            if text is not None:
                text.take_in()
                if text.table.ids:
                    self._kv.free(text.table, text.sequence.token_ids, text.num_computed)

    def reset(self) -> None:
        """Clear the prefix cache."""
        self._kv.reset_prefix_cache()

    def _text_of(self, sequence: Sequence) -> _Text:
        """Return the state of a sequence, updated with the tokens that it has got since."""
        text = self._texts.get(sequence.seq_id)
        if text is None:
            text = self._texts[sequence.seq_id] = _Text(sequence, Acceptance(self._acceptance), self._pause)
        text.take_in()
        if text.table.ids:
            self._kv.commit(text.table, sequence.token_ids, text.num_computed)
        return text

    def _most_drafts(self, text: _Text) -> int:
        """Return the maximum number of drafts for a sequence. The draft model does not compute the last draft, and the
        target adds one token after it.
        """
        sequence = text.sequence
        num_tokens = len(sequence.token_ids)
        if text.largest_token >= self._vocab_size:  # the draft model's vocabulary may be smaller
            return 0
        return min(self._gamma, sequence.max_length - num_tokens - 1, self._max_tokens - num_tokens + 1)

    def _make_room(self, text: _Text) -> bool:
        """Allocate KV memory for a sequence's drafts, or for fewer drafts; return whether there is room for any."""
        token_ids, table = text.sequence.token_ids, text.table
        text.num_wanted = min(text.num_wanted, self._most_drafts(text))  # the sequence may have grown during prefill
        if not table.ids:
            prefix = self._kv.match(table, token_ids)
            if not self._kv.fits(prefix, len(token_ids) + text.num_wanted, num_growing=len(self._texts)):
                return False
            self._kv.attach(table, prefix, token_ids)
            text.num_computed = prefix.num_tokens
        num_tokens = len(token_ids) + text.num_wanted - 1 - text.num_computed
        text.num_wanted -= num_tokens - self._kv.grow(table, text.num_computed, num_tokens)
        return text.num_wanted > 0

    def _read(self, texts: list[_Text], plain: float) -> list[_Text]:
        """Prefill sequences, within the time that a step allows.

        This happens here and not along with the target's prefill, since a sequence may end before it gets drafts.

        :param plain: time of a step without drafts; 0: not known
        :returns: the sequences that are ready for drafting
        """
        known: list[_Text] = []
        left = int(READ_SHARE * plain / self._reading_seconds) if plain and self._reading_seconds else FIRST_CHUNK
        left = min(max(left, LEAST_CHUNK), self._max_batched_tokens)
        most = max(self._gamma + 1, LEAST_CHUNK)  # this many tokens are computed along with the first draft
        for text in texts:
            text.is_being_read = text.num_unread > most
            if text.is_being_read and left:
                num_tokens = min(text.num_unread - 1, left)
                start = time.monotonic()
                self._watched_step([text.row(num_tokens, num_logits=0)])
                self._reading_seconds = (time.monotonic() - start) / num_tokens
                left -= num_tokens
                text.num_computed += num_tokens
                text.is_being_read = text.num_unread > most
            if not text.is_being_read:
                known.append(text)
        return known

    def _draft(self, texts: list[_Text]) -> None:
        """Draft tokens, one per sequence and draft model step."""
        for text in texts:
            text.follow_grammar()
        while texts:
            start = time.monotonic()
            tokens = self._watched_step([text.row(text.num_unread, num_logits=1) for text in texts])
            self._own_times.note(len(texts), time.monotonic() - start)
            for text, token in zip(texts, tokens, strict=True):
                text.num_computed += text.num_unread
                text.add(token, self._target_vocab_size)
            texts = [text for text in texts if len(text.drafts) < text.num_wanted]

    def _watched_step(self, rows: list[StepRow]) -> list[int]:
        with nullcontext() if self.compilations is None else self.compilations.watching():
            return self._step(rows)

    def _step(self, rows: list[StepRow]) -> list[int]:
        """Compute rows, and return the likeliest next token of each; nothing if the rows ask for no logits."""
        if copies := self._kv.take_copies():
            self._backend.copy([(copy.src, copy.dst, copy.num_tokens) for copy in copies])
        self._backend.release(self._kv.take_released())
        batch = make_input_batch(rows, self._model.device)
        context = StepContext(attention=self._backend.prepare(rows))
        hidden = self._model.forward(batch.token_ids, batch.positions, context)
        last = [first + row.num_new_tokens - 1 for first, row in zip(batch.first_tokens, rows, strict=True)]
        if not rows[0].num_logits:
            return []
        tokens: list[int] = argmax(self._model.logits(select_rows(hidden, last))).tolist()
        return tokens


class _Pause:
    """Holds the number of steps without drafts with which a new sequence starts; see :data:`FIRST_PAUSE`."""

    __slots__ = ("num_steps",)

    def __init__(self) -> None:
        self.num_steps: int = FIRST_PAUSE


class _Text:
    """Holds the draft model's state of one sequence.

    :ivar num_computed: number of tokens with KV, drafts included
    :ivar drafts: the last proposed tokens
    :ivar num_wanted: number of drafts to make
    :ivar is_being_read: whether the sequence is still being prefilled in chunks
    :ivar largest_token: the largest token id of the sequence
    """

    __slots__ = (
        "_acceptance",
        "_first_pause",
        "_grammar",
        "_num_known",
        "_num_paused",
        "_pause",
        "drafts",
        "is_being_read",
        "largest_token",
        "num_computed",
        "num_wanted",
        "sequence",
        "table",
    )

    def __init__(self, sequence: Sequence, acceptance: Acceptance, first_pause: _Pause) -> None:
        request = sequence.request
        self.sequence = sequence
        self.table = KvTable(request.cache_keys, most_shared=request.most_shared)
        self.num_computed: int = 0
        self.drafts: list[int] = []
        self.largest_token: int = max(sequence.token_ids)
        self.num_wanted: int = 0
        self.is_being_read: bool = False
        self._grammar: GrammarText | None = None
        self._acceptance = acceptance
        self._num_known = len(sequence.token_ids)
        self._first_pause = first_pause
        self._pause = first_pause.num_steps
        self._num_paused = 0

    @property
    def num_unread(self) -> int:
        """Return the number of tokens without KV, drafts included."""
        return len(self.sequence.token_ids) + len(self.drafts) - self.num_computed

    def take_in(self) -> None:
        """Compare the drafts with the tokens that the sequence has got since, and drop the drafts."""
        token_ids, known = self.sequence.token_ids, self._num_known
        if len(token_ids) == known and not self.drafts and self.num_computed < known:
            return
        self.largest_token = max([self.largest_token, *token_ids[known:]])
        num_right = 0
        for draft, token in zip(self.drafts, token_ids[known:], strict=False):
            self._acceptance.note(0, right=draft == token)
            if draft != token:
                break
            num_right += 1
        # KV beyond the accepted drafts belongs to rejected tokens. The last token is always computed again, since the
        # next draft needs its logits.
        self.num_computed = min(self.num_computed, known + num_right, len(token_ids) - 1)
        self.drafts = []
        self._num_known = len(token_ids)

    def follow_grammar(self) -> None:
        """Advance the request's constraint, if any, to the end of the sequence."""
        sequence = self.sequence
        if sequence.request.grammar is None:
            return
        text = self._grammar
        if text is None:
            text = self._grammar = sequence.request.grammar.begin((), 0)
        text.tokens += sequence.token_ids[sequence.num_prompt_tokens + len(text.tokens) :]
        text.move_to(sequence.num_output_tokens)

    def add(self, token: int, vocab_size: int) -> None:
        """Append the next draft. A token that the constraint forbids counts as a rejected draft and ends drafting. So
        does a token outside of the target's vocabulary: the draft model may have more logits columns, and on a device
        -1 marks non-finite logits.

        :param vocab_size: vocabulary size of the target
        """
        is_token, grammar = 0 <= token < vocab_size, self._grammar
        if not is_token or (grammar is not None and grammar.num_allowed([*self.drafts, token]) <= len(self.drafts)):
            self.num_wanted = len(self.drafts)
            self._acceptance.note(0, right=False)
        else:
            self.drafts.append(token)

    def chances(self, most: int) -> list[float]:
        """Return the probabilities that the first draft is accepted, the first two are, and so on."""
        rate = self._acceptance.rates[0]
        return [rate**count for count in range(1, most + 1)]

    def choose(self, count: int) -> int:
        """Set the number of drafts to make and return it; if none pays, this is 1 after each pause, as a trial."""
        if count:
            self._pause, self._num_paused = FIRST_PAUSE, 0
            self._first_pause.num_steps = FIRST_PAUSE
        else:
            self._num_paused += 1
            if self._num_paused >= self._pause:
                self._pause, self._num_paused, count = min(2 * self._pause, LONGEST_PAUSE), 0, 1
                self._first_pause.num_steps = max(self._first_pause.num_steps, self._pause)
        self.num_wanted = count
        return count

    def row(self, num_tokens: int, *, num_logits: int) -> StepRow:
        """Make a step's row of the next tokens without KV."""
        start, sequence = self.num_computed, self.sequence
        num_known = len(sequence.token_ids)
        token_ids = sequence.token_ids[start : start + num_tokens]
        if start + num_tokens > num_known:
            token_ids += self.drafts[max(start - num_known, 0) : start + num_tokens - num_known]
        return StepRow(
            sequence.seq_id,
            start,
            token_ids,
            self.table.ids,
            sequence.num_prompt_tokens,
            self.table.version,
            num_logits,
        )
