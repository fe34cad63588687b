"""Native decoder layers without attention among others, against the same arithmetic in float64, one operation after the
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from native_weights import every_level, library, needs_library, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.gated_delta import gated_delta_rule
from paged_sdk.kernels.mamba2 import selective_scan
from paged_sdk.kernels.native.decoder import NativeDecoder
from paged_sdk.kernels.native.decoder_layer import DecoderLayer
from paged_sdk.kernels.native.packed import pack_dense
from paged_sdk.kernels.native.paged_attention import AttentionShape, NativeRows, VarlenBatch, cumulated
from paged_sdk.kernels.native.projection import Projection
from paged_sdk.kernels.native.recurrent import NativeGatedDelta, NativeMamba2, NativeRecurrentRows, NativeShortConv
from paged_sdk.kernels.native.recurrent_layer import RecurrentMixing
from paged_sdk.kernels.recurrent_step import RecurrentRows
from paged_sdk.kernels.row_drafts import RowDrafts
from paged_sdk.kernels.short_conv import short_conv

pytestmark = needs_library

CPU: Final = torch.device("cpu")
HIDDEN, INNER, BLOCK, EPS, TAPS = 64, 96, 8, 1e-6, 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 16, 32
SCAN_HEADS, SCAN_DIM, GROUPS, STATE = 6, 16, 2, 20
KINDS: Final = ("conv", "delta", "attention", "scan", "delta in one matrix", "scan alone", "mlp alone")
# Tokens of each sequence in a step: a prompt; a chunk beside a decode and another prompt; a chunk beside two decodes,
# one of several tokens; decodes; a short prompt.
STEPS: Final[Sequence[dict[int, int]]] = (
    {0: 50},
    {1: 34, 0: 1, 2: 20},
    {0: 1, 1: 40, 2: 3},
    {2: 1, 1: 1, 0: 1},
    {3: 5},
)
LENGTHS: Final = (53, 75, 24, 5)


class Stack:
    """Holds random layers of dense float32 matrices, and computes a text with them in float64.

    :param kinds: the layers, of :data:`KINDS`
    :param kept: dtype of the inputs that convolutions keep
    """

    def __init__(self, kinds: Sequence[str], kept: torch.dtype = torch.float32) -> None:
        self._generator = torch.Generator().manual_seed(len(kinds))
        self.kinds, self.kept = kinds, kept
        self.weights = [self._weights(kind) for kind in kinds]
        self.frequencies = torch.rand(HEAD_DIM // 2, generator=self._generator)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def _matrix(self, rows: int, cols: int) -> Tensor:
        return self._random(rows, cols) * (1.5 / math.sqrt(cols))

    def _weights(self, kind: str) -> dict[str, Tensor]:
        """Return a layer's weights; those that project the stream have names of ``in`` and a number."""
        own = {"norm": 1 + 0.2 * self._random(HIDDEN), "mlp_norm": 1 + 0.2 * self._random(HIDDEN)}
        if not kind.endswith("alone") or kind == "mlp alone":
            own |= {"gate": self._matrix(INNER, HIDDEN), "up": self._matrix(INNER, HIDDEN)}
            own["down"] = self._matrix(HIDDEN, INNER)
        rows, width, channels = [HIDDEN] * 3, HIDDEN, HIDDEN
        match kind.split()[0]:
            case "mlp":
                return own
            case "attention":
                queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
                rows, width = [2 * queries, keys, keys], queries
            case "delta":
                width = VALUE_HEADS * VALUE_DIM
                channels = 2 * KEY_HEADS * KEY_DIM + width
                rows = [channels, width]
                own |= {"rates": self._matrix(2 * VALUE_HEADS, HIDDEN) * 2, "rate": self._random(VALUE_HEADS).exp()}
                own |= {"step_bias": self._random(VALUE_HEADS), "inner_norm": 1 + 0.2 * self._random(VALUE_DIM)}
            case "scan":
                width = SCAN_HEADS * SCAN_DIM
                channels = width + 2 * GROUPS * STATE
                rows = [width + channels + SCAN_HEADS]
                own |= {"rate": self._random(SCAN_HEADS).exp(), "step_bias": self._random(SCAN_HEADS)}
                own |= {"skip": self._random(SCAN_HEADS), "inner_norm": 1 + 0.2 * self._random(width)}
        if "one matrix" in kind:
            rows = [sum(rows)]
        own |= {f"in{number}": self._matrix(count, HIDDEN) for number, count in enumerate(rows)}
        own |= {"conv": self._random(channels, TAPS), "conv_bias": self._random(channels)}
        return own | {"out": self._matrix(HIDDEN, width)}

    def expected(self, hidden: Tensor) -> Tensor:
        """Compute one whole text, in float64."""
        x = hidden.double()
        for kind, each in zip(self.kinds, self.weights, strict=True):
            w = {name: tensor.double() for name, tensor in each.items()}
            mix: dict[str, Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]] = {
                "conv": self._conv, "delta": self._delta, "scan": self._scan, "attention": self._attention,
            }  # fmt: skip
            if "out" in w:
                normed = F.rms_norm(x, (HIDDEN,), w["norm"], EPS)
                projected = torch.cat(
                    [normed @ w[name].T for name in w if name.startswith("in") and name[2:].isdigit()], 1
                )
                x = x + mix[kind.split()[0]](w, projected, normed) @ w["out"].T
            if "down" in w:
                normed = F.rms_norm(x, (HIDDEN,), w["mlp_norm"], EPS)
                x = x + (F.silu(normed @ w["gate"].T) * (normed @ w["up"].T)) @ w["down"].T
        return x

    def _convolved(self, w: dict[str, Tensor], inputs: Tensor) -> Tensor:
        pool = torch.zeros(1, TAPS - 1, inputs.shape[1], dtype=torch.float64)
        return short_conv(inputs.to(self.kept).double(), w["conv"], w["conv_bias"], pool, _whole(len(inputs)))

    def _conv(self, w: dict[str, Tensor], projected: Tensor, normed: Tensor) -> Tensor:
        before, after, inputs = projected.chunk(3, 1)
        return after * self._convolved(w, before * inputs)

    def _delta(self, w: dict[str, Tensor], projected: Tensor, normed: Tensor) -> Tensor:
        width, keys = VALUE_HEADS * VALUE_DIM, KEY_HEADS * KEY_DIM
        inputs, gates = torch.split(projected, [2 * keys + width, width], 1)
        query, key, value = torch.split(F.silu(self._convolved(w, inputs)), [keys, keys, width], 1)
        strength, decay = (normed @ w["rates"].T).chunk(2, 1)
        read = gated_delta_rule(
            query.view(len(query), KEY_HEADS, -1),
            key.view(len(query), KEY_HEADS, -1),
            value.view(len(query), VALUE_HEADS, -1),
            -w["rate"] * F.softplus(decay + w["step_bias"]),
            strength.sigmoid(),
            torch.zeros(1, VALUE_HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64),
            _whole(len(query)),
        )
        return F.rms_norm(read, (VALUE_DIM,), w["inner_norm"], EPS).flatten(1) * F.silu(gates)

    def _scan(self, w: dict[str, Tensor], projected: Tensor, normed: Tensor) -> Tensor:
        width, size = SCAN_HEADS * SCAN_DIM, GROUPS * STATE
        gates, inputs, steps = torch.split(projected, [width, width + 2 * size, SCAN_HEADS], 1)
        x, write, read = torch.split(F.silu(self._convolved(w, inputs)), [width, size, size], 1)
        x, step = x.view(len(x), SCAN_HEADS, -1), F.softplus(steps + w["step_bias"])
        out = selective_scan(
            x,
            write.view(len(x), GROUPS, -1),
            read.view(len(x), GROUPS, -1),
            step,
            -w["rate"] * step,
            torch.zeros(1, SCAN_HEADS, STATE, SCAN_DIM, dtype=torch.float64),
            _whole(len(x)),
        )
        gated = (out + x * w["skip"][:, None]).flatten(1) * F.silu(gates)
        groups = gated.view(len(x), GROUPS, -1)
        return F.rms_norm(groups, groups.shape[-1:], None, EPS).flatten(1) * w["inner_norm"]

    def _attention(self, w: dict[str, Tensor], projected: Tensor, normed: Tensor) -> Tensor:
        """Each head's gates follow its query."""
        heads = projected.view(len(projected), -1, HEAD_DIM)
        query, gates = heads[:, : 2 * HEADS : 2], heads[:, 1 : 2 * HEADS : 2]
        key, value = heads[:, 2 * HEADS : 2 * HEADS + KV_HEADS], heads[:, 2 * HEADS + KV_HEADS :]
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (self._turned(key), value))
        attended = F.scaled_dot_product_attention(
            self._turned(query).transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=True
        )
        return (attended.transpose(0, 1) * gates.sigmoid()).flatten(1)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None] * self.frequencies
        return angles.cos(), angles.sin()

    def _turned(self, heads: Tensor) -> Tensor:
        cosines, sines = (each.double()[:, None] for each in self.rope(torch.arange(len(heads))))
        a, b = heads.chunk(2, -1)
        return torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1)

    def decoder(self, isa: str, num_threads: int = 2) -> NativeDecoder:
        """Return the layers in one native call, with states and caches of NaN."""
        layers = [self.layer(isa, kind, each) for kind, each in zip(self.kinds, self.weights, strict=True)]
        return NativeDecoder(workspace(isa, num_threads), layers)

    def layer(self, isa: str, kind: str, w: dict[str, Tensor]) -> DecoderLayer:
        def packed(name: str) -> Projection | None:
            if name not in w:
                return None
            rows, cols = w[name].shape
            return Projection(pack_dense(library(isa), [w[name].contiguous()], (rows, cols), torch.float32))

        inputs = [packed(f"in{number}") for number in range(3)]
        common: dict[str, Any] = {name: packed(name) for name in ("gate", "up", "down")} | {
            "qkv": tuple(each for each in inputs if each is not None),
            "output": packed("out"),
            "attention_norm": w["norm"],
            "mlp_norm": w["mlp_norm"],
            "norm_eps": EPS,
        }
        match kind.split()[0]:
            case "mlp":
                return DecoderLayer(**common)
            case "attention":
                pages = torch.full((len(LENGTHS) * 10, BLOCK, KV_HEADS, HEAD_DIM), torch.nan)
                shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, scale=HEAD_DIM**-0.5)
                cache = LayerCache(pages, pages.clone())
                return DecoderLayer(shape=shape, cache=cache, gates="with queries", **common)
        return DecoderLayer(recurrent=self._mixing(isa, kind, w), **common)

    def _mixing(self, isa: str, kind: str, w: dict[str, Tensor]) -> RecurrentMixing:
        conv = NativeShortConv(w["conv"], w["conv_bias"], silu=kind != "conv")
        kept = torch.full((len(LENGTHS), TAPS - 1, conv.channels), torch.nan, dtype=self.kept)
        rule: NativeGatedDelta | NativeMamba2
        rates: list[Tensor] = []
        match kind.split()[0]:
            case "delta":
                rates = [w["rates"]] if "one matrix" in kind else list(w["rates"].chunk(2))
                shape = [VALUE_HEADS, KEY_DIM, VALUE_DIM]
                rule = NativeGatedDelta(
                    KEY_HEADS, KEY_DIM, rate=w["rate"], step_bias=w["step_bias"], norm_weight=w["inner_norm"],
                    norm_eps=EPS,
                )  # fmt: skip
            case "scan":
                shape = [SCAN_HEADS, STATE, SCAN_DIM]
                rule = NativeMamba2(
                    SCAN_DIM, STATE, GROUPS, rate=w["rate"], step_bias=w["step_bias"], skip=w["skip"],
                    norm_weight=w["inner_norm"], norm_eps=EPS, gate_first=True,
                )  # fmt: skip
            case _:
                return RecurrentMixing(conv=conv, states=(kept,))
        packed = [pack_dense(library(isa), [each.contiguous()], (len(each), HIDDEN), torch.float32) for each in rates]
        states = torch.full((len(LENGTHS), *shape), torch.nan)
        drafts = torch.empty(len(LENGTHS), 0, rule.channels + sum(map(len, rates)) + (0 if rates else SCAN_HEADS))
        return RecurrentMixing(
            conv=conv, rule=rule, rates=tuple(map(Projection, packed)), states=(kept, states, drafts)
        )


def _whole(count: int) -> RecurrentRows:
    return RecurrentRows([0], [0], [count], device=CPU)


def texts() -> list[Tensor]:
    return [torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


def run(
    stack: Stack,
    decoder: NativeDecoder,
    own: Sequence[Tensor],
    steps: Sequence[dict[int, int]] = STEPS,
    read: int | None = None,
) -> list[Tensor]:
    """Run texts step by step.

    :param read: rows of each sequence in a step that are read; None: all
    :returns: the rows that are read of each text
    """
    order = torch.randperm(10 * len(own), generator=torch.Generator().manual_seed(9)).view(len(own), 10).int()
    computed, parts = [0] * len(own), [[] for _ in own]  # type: tuple[list[int], list[list[Tensor]]]
    for step in steps:
        places = [(i, torch.arange(computed[i], computed[i] + count)) for i, count in step.items()]
        counts = list(step.values())
        batch = VarlenBatch(
            cumulated(torch.tensor(counts)),
            order[list(step)].contiguous(),
            torch.tensor([int(positions[-1]) + 1 for _, positions in places], dtype=torch.int32),
        )
        starts = [computed[i] for i in step]
        states = RecurrentRows(list(step), starts, counts, device=CPU, workspace=workspace()).native
        out = decoder(
            torch.cat([own[i][positions] for i, positions in places]),
            [stack.rope(torch.cat([positions for _, positions in places]))],
            torch.cat([order[i].long()[positions // BLOCK] * BLOCK + positions % BLOCK for i, positions in places]),
            batch,
            None if read is None else cumulated(torch.tensor([min(read, count) for count in counts])),
            states=states,
        )
        for (i, positions), part in zip(places, torch.split(out, counts), strict=True):
            parts[i].append(part[-min(read or len(part), len(part)) :])
            computed[i] = int(positions[-1]) + 1
    return [torch.cat(each) for each in parts]


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def ending_with(last: int) -> list[str]:
    """Return all kinds of layers, with one of them as the last one that keeps anything."""
    return [*KINDS[last + 1 :], *KINDS[: last + 1]]


every_end = pytest.mark.parametrize("last", range(len(KINDS)), ids=KINDS)


@pytest.mark.thinned("isa", "last", "kept")
@every_level
@every_end
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_mixed_steps(isa: str, last: int, kept: torch.dtype) -> None:
    """In slots that hold NaN; of all rows, and of those alone that are read."""
    stack, own = Stack(ending_with(last), kept), texts()
    expected = [stack.expected(text) for text in own]
    # Kept inputs on a rounding boundary fall either way.
    limit = {torch.float32: 5e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[kept]
    got = run(stack, stack.decoder(isa), own)
    assert max(map(relative, got, expected)) < limit
    for count in (1, 3):
        read = run(stack, stack.decoder(isa), own, read=count)
        assert relative(read[3], expected[3][-count:]) < limit
        of_parts = [got[0][50 - count : 50], got[0][50:51], got[0][51:52], got[0][52:]]
        assert relative(read[0], torch.cat(of_parts).double()) < 1e-6


@pytest.mark.thinned("isa", "kept")
@every_level
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
def test_results_depend_on_no_step_or_thread(isa: str, kept: torch.dtype) -> None:
    """Bit for bit."""
    stack, own = Stack(KINDS, kept), texts()
    whole = run(stack, stack.decoder(isa, 1), own)
    apart = [{0: 30}, {1: 74}, {0: 20, 2: 20}, {0: 1}, {0: 2}, {1: 1, 2: 1}, {2: 3}, {3: 4}, {3: 1}]
    for num_threads, steps in ((3, STEPS), (1, apart), (2, apart)):
        assert all(map(torch.equal, run(stack, stack.decoder(isa, num_threads), own, steps), whole))


def test_parts_of_a_step_have_their_own_states() -> None:
    """A sequence with prompt tokens and generated ones in one step has its state in both parts, one after the other."""
    rows = RecurrentRows([4, 2, 7], [0, 5, 0], [6, 1, 2], device=CPU, workspace=workspace()).native
    batch = VarlenBatch(
        cumulated(torch.tensor([4, 2, 1, 2])),
        torch.zeros(4, 1, dtype=torch.int32),
        torch.tensor([4, 6, 6, 2], dtype=torch.int32),
        in_chunks=torch.tensor([1, 0, 0, 1]).byte(),
    )
    found = []
    for tokens, part in NativeRows(torch.arange(9), batch, 2, states=rows).parts():
        assert part.states is not None
        slots, is_new, first_tokens = part.states._kept
        found.append((tokens.tolist(), slots.tolist(), is_new.tolist(), first_tokens.tolist()))
    assert found == [
        ([0, 1, 2, 3, 7, 8], [4, 7], [True, True], [0, 4, 6]),
        ([4, 5, 6], [4, 2], [False, False], [0, 2, 3]),
    ]


def test_what_does_not_fit_is_refused() -> None:
    isa = library().isa
    stack = Stack(KINDS)
    conv, delta, attention, scan, *_ = (
        stack.layer(isa, kind, each) for kind, each in zip(stack.kinds, stack.weights, strict=True)
    )
    mixing, other = delta.recurrent, scan.recurrent
    assert mixing is not None
    assert other is not None
    changes: list[tuple[DecoderLayer, dict[str, Any], str]] = [
        (delta, {"recurrent": evolve(mixing, rates=())}, "12 rows of 64 columns, in at most two matrices"),
        (delta, {"recurrent": evolve(mixing, states=mixing.states[:1])}, "two others with a rule"),
        (delta, {"recurrent": evolve(mixing, conv=other.conv)}, "256, as the rule has"),
        (delta, {"recurrent": other}, "shapes of a layer's weights"),
        (delta, {"qkv": delta.qkv[:1]}, "shapes of a layer's weights"),
        (delta, {"qkv": ()}, "at least one weight"),
        (delta, {"qkv": delta.qkv * 3}, "at most 4 weights"),
        (delta, {"output": None}, "a matrix, with qkv"),
        (delta, {"shape": attention.shape}, "None, with attention"),
        (delta, {"recurrent": None}, "both, with attention"),
        (conv, {"recurrent": None, "qkv": (), "output": None, "up": None, "gate": None, "down": None}, "experts"),
        (attention, {"gates": "apart"}, "one weight, or 4"),
        (attention, {"shares_keys": True, "qkv": attention.qkv[:1]}, "keys and values of the layer's own"),
    ]
    for layer, change, allowed in changes:
        with pytest.raises(ConfigError, match=allowed):
            evolve(layer, **change)
    wrong_states = evolve(mixing, states=(mixing.states[0], mixing.states[1][:, 1:], mixing.states[2]))
    with pytest.raises(ConfigError, match=r"contiguous torch.float32 \[num_slots, 6, 16, 32\]"):
        NativeDecoder(workspace(), [evolve(delta, recurrent=wrong_states)])
    decoder, own = stack.decoder(isa), texts()
    batch = VarlenBatch(
        torch.tensor([0, 5]).int(), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    )
    fewer: NativeRecurrentRows | None = RecurrentRows([0], [0], [4], device=CPU, workspace=workspace()).native
    for states in (None, fewer):
        with pytest.raises(ConfigError, match="of 5 tokens, with recurrent layers"):
            decoder(own[3], [stack.rope(torch.arange(5))], torch.arange(5), batch, states=states)
    guessed = RecurrentRows([0], [3], [5], drafts=RowDrafts((0,), (0,), (2,)), device=CPU, workspace=workspace()).native
    with pytest.raises(ConfigError, match="rows of at most 0 drafts"):
        decoder(own[3], [stack.rope(torch.arange(5))], torch.arange(5), batch, states=guessed)
