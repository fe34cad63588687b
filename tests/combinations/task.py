"""Describes a request, and what may change between requests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from attrs import evolve, field, fields, frozen
from jsonschema import Draft202012Validator

from combinations.configuration import AdapterContent
from compose import CONSTRAINTS as SENTENCES
from paged_sdk import Constraint, RequestBuilder, SamplingParams
from tiny_vision import picture

__all__ = ["CONSTRAINTS", "PROCESSORS", "Change", "Kind", "Task"]

Kind: TypeAlias = Literal["completion", "chat", "score", "embed", "rank"]

CONSTRAINTS: Final[Mapping[str, Constraint | None]] = {
    **SENTENCES,
    "choices": Constraint.regex("(the mountain|the mouse|a mountain of mice|no)"),
    "loose JSON": Constraint.json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 4}),
    "grammar": Constraint.lark('start: (WORD " ")+ "."\nWORD: /[a-f]{1,3}/'),
}
_GRAMMAR: Final = r"([a-f]{1,3} )+\."
"""What the grammar allows, as an expression."""
PROCESSORS: Final = ("no token twice in a row", "a batch's")


def _never_twice(token_ids: Sequence[int], logits: Any) -> None:
    logits[token_ids[-1]] = -float("inf")


class _Batch:
    """Favours the token after the last one, in one call for all texts."""

    def process_batch(self, token_ids: Sequence[Sequence[int]], logits: Any) -> None:
        for row, own in enumerate(token_ids):
            logits[row, (own[-1] + 1) % logits.shape[1]] += 2.0

    def __call__(self, token_ids: Sequence[int], logits: Any) -> None:
        self.process_batch([token_ids], logits[None])


_BATCH: Final = _Batch()


@frozen(kw_only=True)
class Task:
    """Describes a request.

    :ivar number: by which others refer to it
    :ivar prompts: of a completion, or the texts that are scored or become vectors; the messages of a chat; a query and
        the documents that are ranked
    :ivar prefix: what comes before texts that are scored
    :ivar adapter: the name that the request says
    :ivar follows: the number of the task whose text its prompt goes on from, which ends before it is sent
    :ivar continues: whether a chat's answer has been begun
    :ivar predicts: whether the request says what its answer may be
    :ivar num_chunks: after so many chunks nobody reads on; None: all are read
    :ivar is_streamed: whether it is read chunk by chunk
    :ivar delay: how many steps of the engine it waits for before it is sent
    :ivar is_pinned: whether what its chat begins with is pinned before it is sent, until all requests have ended
    """

    number: int
    kind: Kind
    prompts: tuple[tuple[int, ...] | str, ...]
    prefix: tuple[int, ...] = ()
    sampling: SamplingParams = field(factory=partial(SamplingParams, temperature=0.0))
    constraint: str = "no constraint"
    pictures: tuple[int, ...] = ()
    processor: str = ""
    adapter: str | None = None
    salt: str | None = None
    priority: int = 0
    follows: int | None = None
    continues: bool = False
    predicts: bool = False
    truncates: bool = False
    is_streamed: bool = False
    num_chunks: int | None = None
    delay: int = 0
    is_pinned: bool = False
    pooling: Literal["last", "mean"] = "last"

    def allows(self, text: str) -> bool:
        """Tell whether a text is a sentence of its constraint."""
        constraint = CONSTRAINTS[self.constraint]
        if constraint is None:
            return True
        if constraint.kind != "json_schema":
            return re.fullmatch(_GRAMMAR if constraint.kind == "lark" else constraint.source, text) is not None
        try:
            return Draft202012Validator(json.loads(constraint.source)).is_valid(json.loads(text))
        except ValueError:
            return False

    @property
    def generates(self) -> bool:
        return self.kind in ("completion", "chat")

    @property
    def tells_tokens(self) -> bool:
        """Tell whether its answer says which tokens its text is made of."""
        return self.kind == "completion" and self.sampling.top_n_logprobs is not None

    @property
    def has_plain_logprobs(self) -> bool:
        """Tell whether the logprobs of its text are those of the model alone."""
        sampling = self.sampling
        is_changed = (
            sampling.logits_bias
            or sampling.frequency_penalty
            or sampling.presence_penalty
            or sampling.repetition_penalty
            or sampling.dry_params
            or sampling.min_tokens
            or self.truncates
            or self.processor
            or CONSTRAINTS[self.constraint]
        )
        return self.tells_tokens and not is_changed

    @property
    def options(self) -> dict[str, Any]:
        """Return the options that do not depend on other answers."""
        options: dict[str, Any] = {"cache_salt": self.salt, "priority": self.priority}
        if self.generates:
            options |= {"constraint": CONSTRAINTS[self.constraint], "truncation": self.truncates}
            if self.processor:
                options["logits_processors"] = (_never_twice if self.processor == PROCESSORS[0] else _BATCH,)
        return options

    def chat(self, adapter: str | None, prediction: str | None) -> RequestBuilder:
        """Return the request of a chat."""
        request = RequestBuilder().add_message("system", "You are a small engine that reads letters.")
        for text in self.prompts:
            request = request.add_message("user", str(text))
        for seed in self.pictures:
            request = request.add_image_message("user", "And this?", picture(28 + 14 * seed, 42, seed=seed))
        if self.continues:
            request = request.add_message("assistant", "The letters that I").with_continue_final_message()
        own = self.options | {"sampling": self.sampling, "adapter": adapter, "prediction": prediction}
        return evolve(request, options=evolve(request.options, **own))

    def simpler(self) -> list[Task]:
        """Return this one with some of its settings each as if nothing had been said of them."""
        plain = Task(number=self.number, kind=self.kind, prompts=self.prompts)
        kept = {"number", "kind", "prompts"} | ({"sampling"} if self.generates else set())
        found = [
            evolve(self, **{each.name: getattr(plain, each.name)}) for each in fields(Task) if each.name not in kept
        ]
        if len(self.prompts) > 1:
            found += [evolve(self, prompts=self.prompts[:1])]
        if self.generates:
            changes = [{name: value} for name, value in _PLAIN_SAMPLING.items()]
            found += [evolve(self, sampling=evolve(self.sampling, **change)) for change in changes]
        return [each for each in found if each != self]


_PLAIN_SAMPLING: Final[dict[str, Any]] = {
    "temperature": 0.0,
    "top_k": None,
    "top_p": None,
    "min_p": None,
    "repetition_penalty": None,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_tokens": 0,
    "max_len": 8,
    "stop": (),
    "ignore_eos": True,
    "logits_bias": None,
    "n_choices": 1,
    "top_n_logprobs": None,
    "dry_params": None,
    "stop_token_ids": (),
    "prompt_logprobs": None,
}


@frozen(kw_only=True)
class Change:
    """Describes what changes between requests: another adapter gets a name, none has it any more, or the prefix cache
    is forgotten.

    :ivar name: an adapter's; empty: the prefix cache is forgotten
    :ivar content: what the adapter is from now on; None: there is none of that name
    """

    name: str = ""
    content: AdapterContent | None = None
