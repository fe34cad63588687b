"""Proposes what a smaller model says next."""

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
"""So likely is a draft of a new pair of models expected to be right."""
FIRST_PAUSE: Final = 16
"""Where drafts of a text do not pay, one is made after so many steps to see whether they would now, then after twice as
many, up to :data:`LONGEST_PAUSE`. The next text begins with the last one's pause, unless drafts have paid since: with
this pause for each, drafts of a third of a model's layers cost texts of 160 tokens 5 % instead of 1 %."""
LONGEST_PAUSE: Final = 512
FIRST_CHUNK: Final = 32
"""So many tokens of a text are read at once before it is known how long that takes."""
LEAST_CHUNK: Final = 16
"""And at least so many: products take rows in tiles of about as many."""
READ_SHARE: Final = 1.0
"""Reading makes a step longer by so much of what it takes without drafts. The first 8 of 28 layers of
Qwen2.5-Coder-1.5B read 1,000 tokens in 1 s: at once, that held up all texts for as long as 40 steps."""


class DraftModel:
    """Lets a smaller model with the same tokens guess (Leviathan et al., "Fast Inference from Transformers via
    Speculative Decoding", 2023).

    It has KV memory of its own, of the same kind and for as many tokens, with a prefix cache. It reads what it does not
    know of a text when it is first asked for drafts, some tokens a step so that no other text waits long. Then it
    guesses the likeliest token after each: as the target draws every token from its own distribution, given the text
    before it, nothing is gained by drawing drafts. It guesses no further than a constraint allows.

    How many drafts there are follows from how many were right, and from the measured times of its own steps and of the
    target's.

    :param model: the smaller model
    :param backend: keeps its KV, under the ids of ``kv``
    :param kv: its KV memory
    :param vocab_size: how many tokens it has
    :param target_vocab_size: how many the target has
    :param gamma: the most drafts of one text
    :param max_tokens: the longest text that it can read
    :param max_batched_tokens: how many tokens it computes at once
    :param times: how long steps of the target take
    :param balance: whether drafts have paid so far
    :ivar compilations: notices kernels that are compiled for a step; None: nothing is compiled
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
        self._reading_seconds = 0.0  # for a token; 0: not known
        self._balance = balance
        self._acceptance = Acceptance(priors=(PRIOR,))
        self._pause = _Pause()
        self._texts: dict[int, _Text] = {}

    @property
    def num_followed(self) -> int:
        """Return of how many sequences it keeps KV."""
        return len(self._texts)

    def propose(self, sequences: Texts[Sequence]) -> list[list[int]]:
        """Propose the tokens that follow each sequence, as many as should pay."""
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
        """Give back the KV of sequences that have ended; later texts that begin like them find it."""
        for seq_id in seq_ids:
            text = self._texts.pop(seq_id, None)
            if text is not None:
                text.take_in()
                if text.table.ids:
                    self._kv.free(text.table, text.sequence.token_ids, text.num_computed)

    def reset(self) -> None:
        """Forget what is kept of texts that have ended."""
        self._kv.reset_prefix_cache()

    def _text_of(self, sequence: Sequence) -> _Text:
        """Return what is known of a sequence, which may have got tokens since."""
        text = self._texts.get(sequence.seq_id)
        if text is None:
            text = self._texts[sequence.seq_id] = _Text(sequence, Acceptance(self._acceptance), self._pause)
        text.take_in()
        if text.table.ids:
            self._kv.commit(text.table, sequence.token_ids, text.num_computed)
        return text

    def _most_drafts(self, text: _Text) -> int:
        """Return how many drafts of a text may be made: the last of them is not read, and one token follows it."""
        sequence = text.sequence
        num_tokens = len(sequence.token_ids)
        if text.largest_token >= self._vocab_size:  # the smaller model may have fewer
            return 0
        return min(self._gamma, sequence.max_length - num_tokens - 1, self._max_tokens - num_tokens + 1)

    def _make_room(self, text: _Text) -> bool:
        """Get KV memory for the drafts of a text, or for fewer; tell whether there is any."""
        token_ids, table = text.sequence.token_ids, text.table
        text.num_wanted = min(text.num_wanted, self._most_drafts(text))  # it may have grown while it was read
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
        """Read what is not known of texts yet, as much as a step has time for.

        They are read here rather than while the target reads their prompts: a text may end before it gets drafts.

        :param plain: how long a step without drafts takes; 0 if that is not known
        :returns: the texts that are known
        """
        known: list[_Text] = []
        left = int(READ_SHARE * plain / self._reading_seconds) if plain and self._reading_seconds else FIRST_CHUNK
        left = min(max(left, LEAST_CHUNK), self._max_batched_tokens)
        most = max(self._gamma + 1, LEAST_CHUNK)  # so many are read with the first guess
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
        """Make the drafts of texts for which there is room, one of each in a step."""
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
        """Compute some tokens, and return the likeliest one after each row that asks for logits."""
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
    """Holds for how many steps a new text goes without drafts before one is tried, where they have not paid so far."""

    __slots__ = ("num_steps",)

    def __init__(self) -> None:
        self.num_steps: int = FIRST_PAUSE


class _Text:
    """Holds what is known of one sequence.

    :ivar num_computed: how many tokens of it, drafts included, have KV
    :ivar drafts: the tokens that were proposed last
    :ivar num_wanted: how many drafts are to be made
    :ivar is_being_read: whether drafts are wanted, and the text is too long to be read in one step
    :ivar largest_token: the largest token id of the text
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
        self.table = KvTable(request.cache_keys, share=request.shares_prefix)
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
        """Return how many tokens have no KV yet, drafts included."""
        return len(self.sequence.token_ids) + len(self.drafts) - self.num_computed

    def take_in(self) -> None:
        """Compare the drafts with the tokens that the sequence has got since they were made."""
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
        # Beyond the drafts that were right, the KV is another text's. The last token is read again where it was a draft
        # that the step did not verify: what follows it is asked for.
        self.num_computed = min(self.num_computed, known + num_right, len(token_ids) - 1)
        self.drafts = []
        self._num_known = len(token_ids)

    def follow_grammar(self) -> None:
        """Move the request's constraint, if there is one, to the end of the text."""
        sequence = self.sequence
        if sequence.request.grammar is None:
            return
        text = self._grammar
        if text is None:
            text = self._grammar = sequence.request.grammar.begin((), 0)
        text.tokens += sequence.token_ids[sequence.num_prompt_tokens + len(text.tokens) :]
        text.move_to(sequence.num_output_tokens)

    def add(self, token: int, vocab_size: int) -> None:
        """Take in the next draft. One that no sentence of the constraint goes on with is wrong, and none follows it. So
        is what is no token of the target: a number of the columns by which the smaller model has more logits, or, on a
        device, the one that stands for logits that are not finite.

        :param vocab_size: how many tokens the target has
        """
        is_token, grammar = 0 <= token < vocab_size, self._grammar
        if not is_token or (grammar is not None and grammar.num_allowed([*self.drafts, token]) <= len(self.drafts)):
            self.num_wanted = len(self.drafts)
            self._acceptance.note(0, right=False)
        else:
            self.drafts.append(token)

    def chances(self, most: int) -> list[float]:
        """Return how likely the first draft is right, the first two are, and so on."""
        rate = self._acceptance.rates[0]
        return [rate**count for count in range(1, most + 1)]

    def choose(self, count: int) -> int:
        """Take a number of drafts to make, and return how many are made: one, now and then, where none would pay."""
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
        """Make a step's row of its next tokens without KV."""
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
