"""Tell the layouts of tensors that hold the matrices of all experts of a layer."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["are_transposed"]


def are_transposed(
    gate_up: Sequence[int], down: Sequence[int], *, hidden_size: int, intermediate_size: int, is_gated: bool = True
) -> bool:
    """Return whether a layer's two tensors have their matrices transposed, as those of Qwen3-VL and gpt-oss have.

    Either tensor may have square matrices, and tells nothing then: gates and ups in Granite 3.0 1B-A400M, whose hidden
    size is 1,024 and whose experts have 512 neurons. With gates, not both have; without, square ones are taken as they
    are, since no checkpoint has such experts transposed.

    :param gate_up: the shape of the tensor with gates and ups, or with ups alone: ``[num_experts, rows, cols]``
    :param down: the shape of the tensor with the last matrices, likewise
    """
    rows = intermediate_size * (2 if is_gated else 1)
    plain = (rows, hidden_size), (hidden_size, intermediate_size)
    shapes = tuple(gate_up[1:]), tuple(down[1:])
    return shapes == tuple(each[::-1] for each in plain) != plain
