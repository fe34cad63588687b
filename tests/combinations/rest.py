"""Looks for what is left of requests, of adapters and of a model."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import soak
from combinations.configuration import layer_drafts_of
from paged_sdk import Model
from paged_sdk.engine.engine import Engine
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.runner.draft_model import DraftModel
from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.speculative.several_proposers import SeveralProposers
from shadow_kv import check_paged

__all__ = ["more_threads", "problems_at_rest", "threads_of_package"]


async def problems_at_rest(model: Model, proposer: Proposer) -> list[str]:
    """Unload the adapters of a model that has answered all requests, and return what is left of these and of those.

    :param proposer: the model's
    """
    report = soak.Report("at rest")
    await soak.expect_rest(model, report)
    for name in model.adapters:
        await model.unload_adapter(name)
    adapters: Any = model._adapters
    if adapters._bank is not None:
        report.expect(not adapters._bank._loras, f"adapters are left: {adapters._bank._loras}")
    worker: Any = model._worker
    if (layers := layer_drafts_of(worker._engine)) is not None:
        report.expect(layers.num_followed <= 1, f"the layers follow {layers.num_followed} texts")
    for drafter in _draft_models(proposer):  # it is told of the last text's end with the next step
        report.expect(drafter.num_followed <= 1, f"{drafter.num_followed} texts are followed")

    def check(engine: Engine) -> None:
        if isinstance(engine._kv, KvCacheManager):
            check_paged(engine._kv, [])
        for drafter in _draft_models(proposer):
            if isinstance(drafter._kv, KvCacheManager):
                check_paged(drafter._kv, [state.table for state in drafter._states.values()])

    try:
        await worker.call(check)
    except AssertionError as error:
        told = "".join(traceback.format_exception(error))
        report.expect(False, f"the pool of blocks is not as it should be: {told}")
    return report.complaints


def _draft_models(proposer: Proposer) -> Iterator[DraftModel]:
    if isinstance(proposer, DraftModel):
        yield proposer
    elif isinstance(proposer, SeveralProposers):
        for each in proposer._proposers:
            yield from _draft_models(each)


def threads_of_package() -> list[str]:
    """Return the names of the package's own threads: others' helpers stay for a while, in case that they are needed
    again.
    """
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("paged-sdk")]


def more_threads(before: Sequence[str]) -> list[str]:
    """Return what is wrong if there are more threads than before, a moment after a model was closed."""
    gc.collect()  # helpers end with their event loop
    report = soak.Report("at the end")
    soak.expect_no_more("threads", len(before), lambda: len(threads_of_package()), report)
    return [f"{complaint}: {threads_of_package()}" for complaint in report.complaints]
