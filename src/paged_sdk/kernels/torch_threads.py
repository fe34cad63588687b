"""Say how many threads torch's operations use, for one thread alone."""

from __future__ import annotations

import threading
from typing import Final

import torch

__all__ = ["use_threads"]

# torch has one number for all threads that it has not met yet.
_ONE_AT_A_TIME: Final = threading.Lock()


def use_threads(count: int) -> None:
    """Have torch's operations of the calling thread use so many threads, and leave all other threads the number that
    they have or will get.
    """
    with _ONE_AT_A_TIME:
        # A thread that torch has not met takes over what was set last, wherever that was: asking makes this one known.
        others = torch.get_num_threads()
        torch.set_num_threads(count)
        setting_back = threading.Thread(target=torch.set_num_threads, args=(others,))
        try:
            setting_back.start()
        except RuntimeError:  # no more threads can be started
            torch.set_num_threads(others)
        else:
            setting_back.join()
