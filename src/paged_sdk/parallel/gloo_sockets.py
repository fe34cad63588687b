"""Find the sockets that gloo has opened."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from torch._C._distributed_c10d import Store

__all__ = ["gloo_sockets", "open_descriptors"]

_DESCRIPTORS: Final = "/proc/self/fd"


def open_descriptors() -> set[str]:
    """Return the numbers of this process's open file descriptors; empty on systems that do not list them."""
    return set(os.listdir(_DESCRIPTORS)) if sys.platform == "linux" else set()


def gloo_sockets(store: Store, descriptors: Collection[str], *, rank: int, size: int) -> list[socket.socket]:
    """Return duplicates of gloo's sockets, to shut them down: gloo has no abort and stops waiting only on a broken one.

    :param store: the store in which ranks publish the ports that they listen on
    :param descriptors: descriptors opened meanwhile, by gloo and perhaps by other threads
    """
    found = [copy for each in descriptors if (copy := _duplicate(int(each))) is not None]
    listening = {copy for copy in found if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}
    store.set(f"ports/{rank}", json.dumps([copy.getsockname()[:2] for copy in listening]))
    ports = [tuple(place) for each in range(size) for place in json.loads(store.get(f"ports/{each}"))]
    own = []
    for copy in found:
        with suppress(OSError):  # not connected
            if copy not in listening and (copy.getsockname()[:2] in ports or copy.getpeername()[:2] in ports):
                own.append(copy)
                continue
        copy.close()
    return own


def _duplicate(descriptor: int) -> socket.socket | None:
    """Return a duplicate of a TCP socket; None if the descriptor is anything else."""
    try:
        copy = os.dup(descriptor)
    except OSError:  # closed meanwhile
        return None
    try:
        made = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    if made.family in (socket.AF_INET, socket.AF_INET6) and made.type == socket.SOCK_STREAM:
        return made
    made.close()
    return None
