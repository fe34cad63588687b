"""Draws what happens to a model."""

from __future__ import annotations

import random
from typing import Any, Final

from combinations.configuration import INVOCATION, AdapterContent, Configuration
from combinations.script import Event, Script
from combinations.task import CONSTRAINTS, PROCESSORS, Change, Kind, Task
from paged_sdk import SamplingParams
from paged_sdk.config.sampling import DryParams
from tiny import tokenizer

__all__ = ["draw_script"]

_KINDS: Final[tuple[Kind, ...]] = ("completion", "completion", "completion", "chat", "chat", "score", "embed", "rank")
_NAMES: Final = ("first", "second")
"""Those of adapters."""
_TEXTS: Final = (
    "Once upon a time there was a small engine",
    "The quick brown fox jumps over the lazy dog, and",
    "What is the capital of France? Please write",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter De",
    '{"name": "value", "numbers": [1, 2, 3',
    "def add(first, second): return first + sec",
    "no no no no no no no no no",
    "http:",
)
_MANY_LISTED: Final = 1000
"""More than there are tokens."""
_LETTERS: Final = tuple(sorted({*tokenizer().encode('",]{}tfnseak1 ').ids}))
"""Tokens that the sentences of constraints are made of."""
_STOPS: Final = ("e", "th", " a", "ou", "\ufffd", "1", "farm", "two")


class _Drawer:
    """Draws the tasks of one script, which have prefixes in common."""

    def __init__(self, rng: random.Random, configuration: Configuration) -> None:
        self._rng = rng
        self._configuration = configuration
        self.adapters: dict[str, AdapterContent] = {}
        if configuration.takes_adapters:
            self.adapters = {name: AdapterContent.draw(rng) for name in _NAMES if rng.random() < 0.7}
        self._are_exact = all(content.is_exact for content in self.adapters.values())
        self._loaded = set(self.adapters)
        self._shared = [self._tokens(120) for _ in range(2)]
        self._tasks: list[Task] = []
        # Texts that are admitted while they are short, and grow, compete for memory.
        self._are_growing = rng.random() < 0.5

    def _tokens(self, number: int) -> tuple[int, ...]:
        """Draw tokens that repeat themselves here and there."""
        rng, found = self._rng, list[int]()
        while len(found) < number:
            if rng.random() < 0.3 and len(found) > 6:
                found += found[-rng.randrange(2, 6) :] * rng.randrange(1, 4)
            elif rng.random() < 0.15:
                found += INVOCATION
            else:
                found += [rng.randrange(3, 512) for _ in range(rng.randrange(1, 8))]
        return tuple(found[:number])

    def _prompt(self) -> tuple[int, ...] | str:
        rng = self._rng
        if rng.random() < 0.25:
            return rng.choice(_TEXTS)
        if self._are_growing and rng.random() < 0.7:
            return self._shared[0][: rng.choice((0, 4, 9))] + self._tokens(rng.choice((1, 2, 5)))
        longest = self._configuration.max_model_len
        shared = rng.choice(self._shared)[: rng.choice((0, 16, 32, 33, 64))]
        return (shared + self._tokens(rng.choice((1, 2, 5, 9, 20, 40))))[: longest - 1 + (rng.random() < 0.02)]

    def _sampling(self) -> SamplingParams:
        rng = self._rng
        max_len = (
            rng.choice((24, 40, 60) if self._are_growing else (1, 2, 6, 12, 24, 40)) if rng.random() < 0.95 else None
        )

        # The order of a long list is that of numbers that are all but equal.
        lists = _MANY_LISTED if self._configuration.is_exact and self._are_exact else 2

        def maybe(chance: float, *values: Any, otherwise: Any = None) -> Any:
            return rng.choice(values) if rng.random() < chance else otherwise

        return SamplingParams(
            temperature=maybe(0.5, 0.3, 0.8, 1.3, otherwise=0.0),
            seed=rng.randrange(1000),
            top_k=maybe(0.2, 3, 20),
            top_p=maybe(0.2, 0.5, 0.95),
            min_p=maybe(0.1, 0.05),
            repetition_penalty=maybe(0.15, 1.3),
            frequency_penalty=maybe(0.1, 0.4, otherwise=0.0),
            presence_penalty=maybe(0.1, 0.4, otherwise=0.0),
            dry_params=maybe(0.1, DryParams(multiplier=0.8)),
            logits_bias=maybe(0.25, {7: 3.0, 9: -3.0}, {2: 4.0}, {77: 8.0, 78: 8.0}, {77: 20.0, 78: 20.0, 40: 19.0}),
            stop=maybe(0.25, *[tuple(rng.sample(_STOPS, number)) for number in (1, 2, 3)], otherwise=()),
            stop_token_ids=maybe(
                0.2, (7, 9, 40), *[tuple(rng.sample(_LETTERS, number)) for number in (1, 3)], otherwise=()
            ),
            ignore_eos=rng.random() < 0.7,
            min_tokens=min(maybe(0.15, 1, 6, otherwise=0), max_len or 1),
            max_len=max_len,
            n_choices=maybe(0.2, 2, 3, otherwise=1) if self._configuration.max_num_seqs > 1 else 1,
            top_n_logprobs=maybe(0.5, 0, 0, 2, 2, lists),
            prompt_logprobs=maybe(0.1, 0, 1, min(lists, 128)),
        )

    def task(self, number: int) -> Task:
        rng = self._rng
        kind = rng.choice(_KINDS if self._configuration.ranks else _KINDS[:-1])
        generates = kind in ("completion", "chat")
        if kind == "chat":
            prompts: tuple[tuple[int, ...] | str, ...] = tuple(rng.sample(_TEXTS, rng.choice((1, 1, 2))))
        elif kind == "rank":
            prompts = tuple(rng.sample(_TEXTS, rng.choice((2, 3, 4))))
        else:
            prompts = tuple(self._prompt() for _ in range(rng.choice((1, 1, 1, 2)) if generates else 3))
            if kind == "score" and rng.random() < 0.9:  # there is room for a prefix
                prompts = tuple(prompt[-30:] for prompt in prompts)
        alone = ("chat", "rank")
        same = [each.prompts for each in self._tasks if each.kind == kind or not {each.kind, kind}.intersection(alone)]
        if same and rng.random() < 0.4:  # the same text through another adapter, of another salt, or from the cache
            prompts = rng.choice(same)
        takes_adapters = self._configuration.takes_adapters
        takes_images = kind == "chat" and self._configuration.takes_images
        followed = [task.number for task in self._tasks if task.tells_tokens]
        follows = rng.choice(followed) if kind == "completion" and followed and rng.random() < 0.3 else None
        sampling = self._sampling()
        is_one = sampling.n_choices == len(prompts) == 1 or kind == "chat"
        is_streamed = generates and rng.random() < 0.5
        task = Task(
            number=number,
            kind=kind,
            prompts=prompts[:1] if follows is not None else prompts,
            prefix=rng.choice(self._shared)[:33] if kind == "score" and rng.random() < 0.6 else (),
            sampling=sampling,
            constraint=rng.choice(list(CONSTRAINTS)) if generates and rng.random() < 0.4 else "no constraint",
            pictures=tuple(rng.choices(range(3), k=rng.choice((0, 1, 1, 2)))) if takes_images else (),
            processor=rng.choice(PROCESSORS) if generates and rng.random() < 0.08 else "",
            adapter=rng.choice(sorted(self._loaded) or _NAMES) if takes_adapters and rng.random() < 0.5 else None,
            salt=rng.choice((None, None, None, "a", "b")),
            priority=rng.choice((0, 0, 0, 1, -1)),
            follows=follows,
            continues=kind == "chat" and rng.random() < 0.3,
            predicts=generates and rng.random() < (0.3 if is_one else 0.03),
            truncates=generates and rng.random() < 0.1,
            is_streamed=is_streamed,
            num_chunks=rng.choice((0, 1, 3, 8)) if is_streamed and rng.random() < 0.25 else None,
            delay=0 if self._are_growing and rng.random() < 0.8 else rng.choice((0, 0, 0, 1, 3, 10, 30)),
            is_pinned=kind == "chat" and rng.random() < 0.4,
            pooling=rng.choice(("last", "last", "mean")),
        )
        self._tasks.append(task)
        return task

    def change(self) -> Change:
        rng = self._rng
        if not self._configuration.takes_adapters or rng.random() < 0.2:
            return Change()
        name, content = rng.choice(_NAMES), AdapterContent.draw(rng) if rng.random() < 0.8 else None
        self._are_exact &= content is None or content.is_exact
        self._loaded = self._loaded - {name} if content is None and rng.random() < 0.9 else self._loaded | {name}
        return Change(name=name, content=content)


def draw_script(rng: random.Random, configuration: Configuration) -> Script:
    """Draw what happens to a model."""
    drawer = _Drawer(rng, configuration)
    events: list[Event] = []
    for number in range(rng.choice((3, 6, 12, 18))):
        if number and rng.random() < 0.15:
            events.append(drawer.change())
        events.append(drawer.task(number))
    return Script(drawer.adapters, tuple(events), rng.random() < 0.5, rng.choice(("asyncio", "trio")))
