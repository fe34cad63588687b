"""Importance matrices as llama.cpp writes them, in both forms, and files that are none."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from paged_sdk.errors import CheckpointError
from paged_sdk.weights.importance import read_importance

DENSE, EXPERTS = "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"
SQUARES = {DENSE: np.array([[1.0, 2.0, 9.0, 0.0]]), EXPERTS: np.array([[4.0, 2.0], [0.0, 0.0], [1.0, 3.0]])}
COUNTS = {DENSE: [10], EXPERTS: [4, 0, 2]}


def write_gguf(path: Path, squares: Mapping[str, np.ndarray] = SQUARES, kind: str = "imatrix") -> Path:
    """Write sums and counts, as ``llama-imatrix`` does."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_type(kind)
    writer.add_uint32("imatrix.chunk_count", 1)
    for name, values in squares.items():
        counts = np.array(COUNTS[name], dtype=np.float32)[:, None]
        writer.add_tensor(f"{name}.in_sum2", (values * counts).astype(np.float32))
        writer.add_tensor(f"{name}.counts", counts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def legacy(squares: Mapping[str, np.ndarray] = SQUARES, calls: int = 8) -> bytes:
    """Return the older form: means times a number of calls, and what it was made from."""
    parts = [struct.pack("<i", len(squares))]
    for name, values in squares.items():
        parts += [struct.pack("<i", len(name)), name.encode(), struct.pack("<ii", calls, values.size)]
        parts.append((values * calls).astype(np.float32).tobytes())
    return b"".join([*parts, struct.pack("<ii", 1, 4), b"text"])


@pytest.mark.parametrize("form", ["gguf", "dat"])
def test_both_forms_say_the_same(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"m.{form}"
    path.write_bytes(legacy()) if form == "dat" else write_gguf(path)
    importance = read_importance(path)
    dense = importance.column_weights(DENSE, 1, 4)
    assert dense is not None
    torch.testing.assert_close(dense, torch.tensor([[1 / 3, 2 / 3, 3.0, 1e-3]]))  # none is without any
    experts = importance.column_weights(EXPERTS, 3, 2)
    assert experts is not None
    torch.testing.assert_close(experts, torch.tensor([[4 / 3, 2 / 3], [1.0, 1.0], [0.5, 1.5]]))
    assert importance.column_weights("blk.0.attn_k.weight", 1, 4) is None
    sizes = {DENSE: (1, 4), EXPERTS: (3, 2), "token_embd.weight": (1, 4), "blk.0.ffn_down.weight": (1, 8)}
    importance.check_model(sizes, sizes)
    importance.check_model(sizes | {"blk.1.attn_norm.weight": (1, 4)}, {EXPERTS})  # what is not quantized may be in it


def test_nothing_of_a_layer(tmp_path: Path) -> None:
    importance = read_importance(write_gguf(tmp_path / "m.gguf"))
    sizes = {DENSE: (1, 4), EXPERTS: (3, 2), "blk.1.attn_q.weight": (1, 4)}
    with pytest.raises(CheckpointError, match=r"m\.gguf is for another model: .* tensor 'blk\.1\.attn_q\.weight'"):
        importance.check_model(sizes, sizes)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({DENSE: (1, 6), EXPERTS: (3, 2)}, "blk.0.attn_q.weight' has 4 columns, expected 6"),
        ({DENSE: (1, 4), EXPERTS: (4, 2)}, "blk.0.ffn_up_exps.weight' has 6 columns, expected 8"),
        ({DENSE: (1, 4)}, "tensor 'blk.0.ffn_up_exps.weight' is not in this one"),
    ],
)
def test_another_model_s_is_refused(sizes: dict[str, tuple[int, int]], said: str, tmp_path: Path) -> None:
    importance = read_importance(write_gguf(tmp_path / "m.gguf"))
    with pytest.raises(CheckpointError, match="is for another model") as caught:
        importance.check_model(sizes, ())
    assert said in str(caught.value)
    assert "m.gguf" in str(caught.value)


def test_two_are_added(tmp_path: Path) -> None:
    one = read_importance(write_gguf(tmp_path / "one.gguf"))
    both = one.plus(read_importance(write_gguf(tmp_path / "two.gguf")))
    assert both.num_chunks == 2
    for name in one.sums:
        torch.testing.assert_close(both.means(name), one.means(name))
        assert both.counts[name].tolist() == [2 * count for count in COUNTS[name]]
    (tmp_path / "m.dat").write_bytes(legacy())
    older = read_importance(tmp_path / "m.dat")
    for pair in ((one, older), (older, one)):
        with pytest.raises(CheckpointError, match=r"m\.dat cannot be combined with others"):
            pair[0].plus(pair[1])
    for squares in ({DENSE: SQUARES[DENSE]}, SQUARES | {DENSE: np.ones((1, 6))}):
        other = read_importance(write_gguf(tmp_path / "other.gguf", squares))
        with pytest.raises(CheckpointError, match=r"one\.gguf and .*other\.gguf are for different models: .* 'blk\.0"):
            one.plus(other)


@pytest.mark.parametrize("cut", [0, 3, 4, 7, 20, 40, 70])
def test_files_that_are_cut_off(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "m.dat"
    path.write_bytes(legacy()[:cut])
    with pytest.raises(CheckpointError, match=r"m\.dat"):
        read_importance(path)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<i", -1),
        struct.pack("<i", 1 << 30),
        struct.pack("<ii", 1, -5),
        struct.pack("<ii", 1, 1) + b"a" + struct.pack("<ii", 1, -1),
        struct.pack("<ii", 1, 1) + b"a" + struct.pack("<ii", 1, 1 << 29),
        legacy({DENSE: np.array([[1.0, -2.0]])}),
        legacy({DENSE: np.array([[1.0, np.nan]])}),
        b"PK\x03\x04 a pickle of torch's",
    ],
)
def test_files_that_are_none(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.dat"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="cannot be read as an importance matrix"):
        read_importance(path)


def test_gguf_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"general\.type must be 'imatrix', found 'model'"):
        read_importance(write_gguf(tmp_path / "m.gguf", kind="model"))
    monkeypatch.setitem(COUNTS, DENSE, [np.inf])
    with pytest.raises(CheckpointError, match=r"k\.gguf .*tensor 'blk\.0\.attn_q\.weight'"):
        read_importance(write_gguf(tmp_path / "k.gguf", {DENSE: np.ones((1, 4))}))
    with pytest.raises(CheckpointError, match="no sums of squares"):
        read_importance(write_gguf(tmp_path / "n.gguf", {}))
