"""Setting up a device, where there is one to set up and where there is not."""

from __future__ import annotations

import threading

import pytest
import torch

from paged_sdk.build.device_setup import alone_on, prepare_thread
from paged_sdk.runner.device import choose_device

CPU = torch.device("cpu")


def test_a_cuda_device_has_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one it would mean another device for each thread."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)


def test_models_are_set_up_one_at_a_time_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, most, devices = 0, 0, []

    class Current:
        def __init__(self, device: torch.device) -> None:
            devices.append(device)

        def __enter__(self) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)

        def __exit__(self, *_: object) -> None:
            nonlocal at_once
            at_once -= 1

    monkeypatch.setattr(torch.cuda, "device", Current)
    begun = threading.Barrier(4)

    def set_up(index: int) -> None:
        begun.wait()
        with alone_on(torch.device("cuda", index)):
            threading.Event().wait(0.01)

    threads = [threading.Thread(target=set_up, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, len(devices)) == (1, 4)


def test_the_cpu_is_nobodys_alone() -> None:
    with alone_on(CPU), alone_on(CPU):
        pass


def test_a_thread_gets_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: chosen.append("cuBLAS"))
    before = torch.get_num_threads()
    prepare_thread(CPU, None)
    assert chosen == []
    prepare_thread(torch.device("cuda", 1), 3)
    assert chosen == [3, before, torch.device("cuda", 1), "cuBLAS"]
