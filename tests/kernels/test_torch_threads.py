"""How many threads torch's operations use: of one thread, and of those that come after it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from paged_sdk.kernels.torch_threads import use_threads

ROUNDS = 100


def of_a_new_thread(body: Callable[[], object] = lambda: None) -> int:
    """Return the number of a thread that has run the body and has asked for it then."""
    found: list[int] = []

    def run() -> None:
        body()
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_threads_number_is_its_own() -> None:
    before = torch.get_num_threads()
    assert of_a_new_thread(lambda: use_threads(before + 1)) == before + 1
    assert of_a_new_thread() == torch.get_num_threads() == before


def test_many_that_choose_at_once_change_no_others() -> None:
    """One that began while another had just chosen took its number over for all that came later: 31 of 300 pools."""
    before = of_a_new_thread()
    for _ in range(ROUNDS):
        with ThreadPoolExecutor(8, initializer=use_threads, initargs=(before + 1,)) as pool:
            numbers = list(pool.map(lambda _: torch.get_num_threads(), range(40)))
        assert set(numbers) == {before + 1}
        assert of_a_new_thread() == before
