"""Manages a runner's adapters: the content that each alias refers to, and the requests that use it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Final

from attrs import frozen

from paged_sdk import AdapterError, AdapterInfo, BlockingModel, ConfigError, InvalidRequestError
from paged_sdk.mistralrs.adapters import (
    LoraAdapterError,
    LoraAdapterGeneration,
    LoraAdapterInfo,
    LoraResidentGenerationInfo,
    LoraRuntimeStatus,
)

__all__ = ["AdapterLimits", "Generations", "Selected"]


@frozen
class AdapterLimits:
    """Limits the adapters of a runner. The defaults are mistral.rs's."""

    max_adapters: int = 16
    max_rank: int = 256
    max_bytes: int = 8 << 30


@frozen
class Selected:
    """Holds the adapter of a request.

    :ivar name: the adapter's name in the model
    :ivar generation: hash of its content
    """

    name: str
    generation: str


class Generations:
    """Maps aliases to contents of adapters. May be used from any thread.

    In the model, each content in memory has its own name, so that an alias can be moved to a new content while requests
    still use the old one.

    :param sources: sources of the adapters that the model is loaded with, by alias
    """

    def __init__(self, sources: Mapping[str, str], limits: AdapterLimits) -> None:
        self._limits: Final = limits
        self._lock: Final = threading.RLock()  # reentrant: a stream's finalizer may release its lease while it is held
        self._answered: Final = threading.Condition(self._lock)
        self._loading: Final = threading.Lock()  # serializes loads and unloads
        self._names: dict[str, str] = {alias: alias for alias in sources}
        self._sources: dict[str, str] = dict(sources)  # by names in the model
        self._initial: Final = dict(sources)
        self._leases: Counter[str] = Counter()
        self._held: Counter[str] = Counter()  # leases that keep the content loaded until they end
        self._left: set[str] = set()  # names of contents without an alias that are kept for such leases
        self._answering: Counter[tuple[str, int]] = Counter()  # by name in the model and thread id
        self._waiters: set[int] = set()  # ids of threads that wait in _retire
        self._retiring: dict[str, AdapterInfo] = {}
        self._num_names = 0

    def reset(self) -> None:
        """Return to the initial adapters, because the model was loaded again."""
        with self._lock:
            self._names = {alias: alias for alias in self._initial}
            self._sources = dict(self._initial)
            for name in self._left:
                del self._retiring[name]
            self._left = set()

    def infos(self, model: BlockingModel) -> list[LoraAdapterInfo]:
        """Describe the content of each alias."""
        return [info for _, info in self._named_infos(model)]

    def select(self, model: BlockingModel, adapter: str | LoraAdapterGeneration | None) -> Selected | None:
        """Return the adapter that a request names; None if it names none.

        :raises InvalidRequestError: there is no such adapter
        """
        if adapter is None:
            return None
        named = self._named_infos(model)
        for name, info in named:
            if adapter in (info.alias, info.exact()):
                return Selected(name, info.generation)
        aliases = ", ".join(info.alias for _, info in named)
        raise InvalidRequestError.of(
            "adapter", adapter, f"one of {aliases}" if aliases else "None, as no adapter is loaded"
        )

    @contextmanager
    def leased(self, selected: Selected | None) -> Iterator[None]:
        """Keep an adapter's content loaded while the calling thread answers a request with it. The engine cannot do so:
        between two answers, while tools run, it does not know of the request.
        """
        if selected is None:
            yield
            return
        self.lease(selected, is_held=True)
        use = selected.name, threading.get_ident()
        with self._lock:
            self._answering[use] += 1
        try:
            yield
        finally:
            with self._answered:
                self._answering[use] -= 1
                if not self._answering[use]:
                    del self._answering[use]
                self._answered.notify_all()
            self.release(selected, is_held=True)

    def lease(self, selected: Selected | None, *, is_held: bool = False) -> None:
        """Record that a request uses an adapter.

        :param is_held: whether the content must stay loaded until :meth:`release`. No method waits for that call, since
            the waiting thread itself may have to make it; the next change of adapters, or :meth:`status`, frees the
            content
        """
        if selected is not None:
            with self._lock:
                self._leases[selected.name] += 1
                self._held[selected.name] += is_held

    def release(self, selected: Selected | None, *, is_held: bool = False) -> None:
        """Record that a request has ended, with the arguments of :meth:`lease`."""
        if selected is not None:
            with self._lock:
                for counter, count in ((self._leases, 1), (self._held, int(is_held))):
                    counter[selected.name] -= count
                    if not counter[selected.name]:
                        del counter[selected.name]

    def load(
        self,
        model: BlockingModel,
        alias: str,
        adapter_dir: str | PathLike[str],
        *,
        is_replaced: bool,
        expected: str | None,
    ) -> LoraAdapterInfo:
        """Load an adapter under an alias.

        :param is_replaced: whether the alias may exist already, and is then moved to the new content
        :param expected: the generation that the alias must have now; None: any
        :raises LoraAdapterError: the alias exists or has another generation, the adapter cannot be loaded, or a limit
            is exceeded
        """
        self._free_left(model)
        with self._loading:
            before = self._current(model, alias)
            if before is not None and not is_replaced:
                raise _error(
                    "lora_adapter_already_loaded", "alias", alias, "an alias that no adapter has, or load_inplace=True"
                )
            self._compare(before, expected, alias)
            if before is None and len(self.infos(model)) >= self._limits.max_adapters:
                raise _error("lora_adapter_limit_exceeded", "alias", alias, f"nothing beyond {self._limits}")
            name = self._new_name(alias)
            _load(model, name, adapter_dir)
            info = next(info for info in model.adapter_infos if info.name == name)
            over = next(self._exceeded(model, info), None)
            if over is not None:
                model.unload_adapter(name)
                raise _error(over, "adapter_dir", str(adapter_dir), f"nothing beyond {self._limits}")
            with self._lock:
                old = self._names.get(alias)
                self._names[alias] = name
                self._sources[name] = str(adapter_dir)
        if before is not None and old is not None:
            self._retire(model, old)
        return _info(alias, str(adapter_dir), info)

    def unload(self, model: BlockingModel, alias: str, expected: str | None) -> LoraAdapterInfo:
        """Remove an alias, and free its content once running requests have ended; see :meth:`_retire`.

        :raises LoraAdapterError: unknown alias, or its generation is not the expected one
        """
        self._free_left(model)
        with self._loading:
            before = self._current(model, alias)
            if before is None:
                loaded = ", ".join(info.alias for info in self.infos(model)) or "there is none"
                raise _error("lora_adapter_not_found", "alias", alias, f"the name of a loaded adapter: {loaded}")
            self._compare(before, expected, alias)
            with self._lock:
                name = self._names.pop(alias)
        self._retire(model, name)
        return before

    def status(self, model: BlockingModel) -> LoraRuntimeStatus:
        """Describe all adapters in memory, with their sizes and the limits."""
        self._free_left(model)
        infos = self.infos(model)
        with self._lock:
            loaded = self._retiring | {info.name: info for info in model.adapter_infos}
            aliases: dict[str, list[str]] = {name: [] for name in loaded}
            for alias, name in self._names.items():
                aliases.get(name, []).append(alias)
            generations = [
                LoraResidentGenerationInfo(
                    generation=info.digest,
                    aliases=aliases[name],
                    rank=info.rank,
                    bytes=info.num_bytes,
                    retired=not aliases[name],
                    active_leases=self._leases[name],
                )
                for name, info in loaded.items()
            ]
        return LoraRuntimeStatus(
            adapters=infos,
            generations=generations,
            resident_generations=len(generations),
            retired_generations=sum(generation.retired for generation in generations),
            resident_bytes=sum(generation.bytes for generation in generations),
            max_adapters=self._limits.max_adapters,
            max_rank=self._limits.max_rank,
            max_bytes=self._limits.max_bytes,
        )

    def check_limits(self, model: BlockingModel) -> None:
        """Check the adapters that a model was loaded with.

        :raises LoraAdapterError: a limit is exceeded
        """
        if len(model.adapter_infos) > self._limits.max_adapters:
            raise _error(
                "lora_adapter_limit_exceeded", "adapters", len(model.adapter_infos), f"nothing beyond {self._limits}"
            )
        for info in model.adapter_infos:
            for code in self._exceeded(model, info):
                raise _error(code, "adapters", info.name, f"nothing beyond {self._limits}")

    def _named_infos(self, model: BlockingModel) -> list[tuple[str, LoraAdapterInfo]]:
        """Describe the content of each alias, with its name in the model.

        This is a consistent snapshot: aliases may be moved to other contents at any time.
        """
        with self._lock:
            loaded = {info.name: info for info in model.adapter_infos}
            return [
                (name, _info(alias, self._sources[name], loaded[name]))
                for alias, name in self._names.items()
                if name in loaded
            ]

    def _new_name(self, alias: str) -> str:
        """Return a name for a content that was never used before, since requests may still refer to used names. An
        empty alias is returned unchanged, for the model to refuse.
        """
        name = alias
        while alias and name in (alias, *self._initial):
            self._num_names += 1
            name = f"{alias}#{self._num_names}"
        return name

    def _current(self, model: BlockingModel, alias: str) -> LoraAdapterInfo | None:
        return next((info for info in self.infos(model) if info.alias == alias), None)

    def _compare(self, before: LoraAdapterInfo | None, expected: str | None, alias: str) -> None:
        found = None if before is None else before.generation
        if expected is not None and found != expected:
            raise _error("lora_generation_mismatch", "expected_generation", expected, f"{alias}'s own, {found}")

    def _exceeded(self, model: BlockingModel, info: AdapterInfo) -> Iterator[str]:
        if info.rank > self._limits.max_rank:
            yield "lora_rank_limit_exceeded"
        if sum(each.num_bytes for each in model.adapter_infos) > self._limits.max_bytes:
            yield "lora_byte_limit_exceeded"

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Mark the calling thread, which holds the lock, as waiting in :meth:`_retire`."""
        own = threading.get_ident()
        self._waiters.add(own)
        self._answered.notify_all()
        try:
            yield
        finally:
            self._waiters.discard(own)

    def _retire(self, model: BlockingModel, name: str) -> None:
        """Free a content without an alias, once the requests that are answered with it have ended. Requests answered by
        the calling thread, whose tool made this call, are not waited for, nor are those of threads that wait here: two
        tools that each free the other's content would deadlock. For these requests, and for streams that run tools, the
        content is kept, and freed later.

        Other adapters can be changed while this waits: a tool of a request that is waited for may do so.
        """
        info = next(info for info in model.adapter_infos if info.name == name)
        is_left = False  # if True, _free_left also forgets it, maybe before this method returns
        with self._lock:
            self._retiring[name] = info
        try:
            with self._answered, self._waiting():
                self._answered.wait_for(lambda: all(use != name or by in self._waiters for use, by in self._answering))
            with self._lock:
                is_left = bool(self._held[name])
                if is_left:
                    self._left.add(name)
                    return
            model.unload_adapter(name)
        finally:
            if not is_left:
                with self._lock:
                    self._forget(name)

    def _free_left(self, model: BlockingModel) -> None:
        """Free contents that were kept for requests that have ended."""
        while True:
            with self._lock:
                name = next((name for name in self._left if not self._held[name]), None)
                if name is None:
                    return
                self._left.remove(name)
            try:
                model.unload_adapter(name)
            finally:
                with self._lock:
                    self._forget(name)

    def _forget(self, name: str) -> None:
        del self._retiring[name]
        self._sources.pop(name, None)


def _info(alias: str, source: str, info: AdapterInfo) -> LoraAdapterInfo:
    return LoraAdapterInfo(alias, source, generation=info.digest, rank=info.rank, bytes=info.num_bytes)


def _load(model: BlockingModel, name: str, adapter_dir: str | PathLike[str]) -> None:
    try:
        model.load_adapter(adapter_dir, name=name)
    except AdapterError as error:
        code = "invalid_lora_adapter" if os.path.exists(adapter_dir) else "adapter_file_not_found"
        raise LoraAdapterError(str(error), code=code, setting="adapter_dir", value=str(adapter_dir)) from error
    except ConfigError as error:
        raise LoraAdapterError(
            str(error), code="invalid_lora_name", setting=error.setting, value=error.value
        ) from error


def _error(code: str, setting: str, value: object, allowed: str) -> LoraAdapterError:
    return LoraAdapterError(str(ConfigError.of(setting, value, allowed)), code=code, setting=setting, value=value)
