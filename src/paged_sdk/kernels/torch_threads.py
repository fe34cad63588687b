"""Set the number of threads of torch's operations for one calling thread only."""

from __future__ import annotations

import threading
from typing import Final

import torch

__all__ = ["use_threads"]

# torch's setting for threads that have not used torch yet is global.
_ONE_AT_A_TIME: Final = threading.Lock()


def use_threads(count: int) -> None:
    """Make torch's operations of the calling thread use ``count`` threads, without changing other threads, current or
    future.
    """
    with _ONE_AT_A_TIME:
        # set_num_threads also sets the default of threads that have not used torch yet. Asking first initializes this
        # thread; setting the old number in another thread afterwards restores the default.
        others = torch.get_num_threads()
        torch.set_num_threads(count)
        setting_back = threading.Thread(target=torch.set_num_threads, args=(others,))
        try:
            setting_back.start()
        except RuntimeError:  # no more threads can be started
            torch.set_num_threads(others)
        else:
            setting_back.join()
