"""Run a rank other than 0 in a process that rank 0 has started."""

from __future__ import annotations

import os
import pickle
import shutil
import traceback
from functools import partial
from typing import BinaryIO, NoReturn

import torch
from torch._C._distributed_c10d import FileStore

from paged_sdk.build.child_process import end_with_parent
from paged_sdk.build.loading import Loading
from paged_sdk.build.placement import choose_devices
from paged_sdk.build.ranks.child_ranks import GROUP_LOST, READY, Assignment
from paged_sdk.build.ranks.part import ModelPart
from paged_sdk.errors import EngineDeadError
from paged_sdk.kernels.native.library import Workspace, load
from paged_sdk.parallel.group import Group
from paged_sdk.system.processors import pin_thread

__all__ = ["main"]


def main() -> NoReturn:
    """Read an assignment from standard input, and follow rank 0 until it ends."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # other writes to standard output go to standard error
    status = 1
    try:
        size = int.from_bytes(_read(0, 8), "big")
        assignment: Assignment = pickle.loads(_read(0, size))
        # Rank 0 owns the directory, but may be killed before it removes it.
        remove_rendezvous = partial(shutil.rmtree, assignment.rendezvous, ignore_errors=True)
        end_with_parent(GROUP_LOST, pipe=0, tidy_up=remove_rendezvous)
        _follow(assignment, answers)
        status = 0
    except EngineDeadError:
        status = GROUP_LOST
    except BaseException as error:
        answers.write("".join(traceback.format_exception_only(error)).encode())
    os._exit(status)  # skip the interpreter's clean-up, which takes time: nothing needs it


def _read(pipe: int, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = os.read(pipe, size - len(content))
        if not part:
            os._exit(GROUP_LOST)
        content += part
    return content


def _follow(assignment: Assignment, answers: BinaryIO) -> None:
    pin_thread(assignment.processors)
    settings = assignment.settings
    (device,) = choose_devices(settings)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    library = load() if device.type == "cpu" else None
    workspace = None if library is None else Workspace(library, num_threads=settings.num_threads)
    group = Group(assignment.rank, assignment.size)
    if assignment.shared is not None:
        assert library is not None, "rank 0 has loaded it"
        group.share(library, assignment.shared)
        os.close(assignment.shared)
    loading = Loading(
        path=assignment.path,
        settings=settings,
        environment=assignment.environment,
        devices=(device,),
        workspace=workspace,
    )
    part = ModelPart.load(loading, group)
    answers.write(READY)
    group.join(FileStore(str(assignment.rendezvous / "ranks"), assignment.size), device=device)
    group.use_pipes([0])
    part.follow(group)
