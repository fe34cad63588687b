"""Load several layers at once, each on its own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from paged_sdk.kernels.torch_threads import use_threads

__all__ = ["loading_threads"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _ThisThread(Executor):
    """Runs submitted functions immediately, on the calling thread."""

    def submit(self, run: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        done: Future[_T] = Future()
        done.set_result(run(*args, **kwargs))
        return done


@contextmanager
def loading_threads(count: int) -> Iterator[Executor]:
    """Return an executor with ``count`` threads for the ``with`` block; an error cancels calls that have not started.

    torch's operations in these threads do not use torch's thread pool: one layer per thread is loaded at a time, and on
    a busy machine each pooled operation would wait for its slowest thread.
    """
    pool: Executor = _ThisThread()
    if count > 1:
        name = "paged-sdk load"
        pool = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=use_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
