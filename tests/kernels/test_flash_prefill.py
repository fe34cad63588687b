"""Prefill by torch's FlashAttention: what is around it on any machine, against attention written token by token in
float64; torch's own kernels, and the choice between them and Triton's, where there is a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
from attrs import evolve
from paged_case import PagedCase
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paged_sdk.kernels import flash_prefill as module
from paged_sdk.kernels import prefill_choice
from paged_sdk.kernels.attention_inputs import LayerCache, PagedRows
from paged_sdk.kernels.flash_prefill import PrefillRows, VarlenAttention, flash_prefill, torch_flash, why_not
from paged_sdk.kernels.kv_cache import gather_decoded
from paged_sdk.kernels.paged_attention import paged_attention_reference
from paged_sdk.kernels.prefill_choice import PagedPrefill, PrefillShape, compare_prefills, faster_for_prefill
from plain_varlen import plain_varlen

CPU: Final = torch.device("cpu")
CUDA: Final = torch.device("cuda")
SCALE: Final = 0.3
MIXED: Final = [(9, 9), (1, 37), (0, 0), (0, 9), (5, 40), (3, 3), (5, 2), (4, 0)]
TOLERANCE: Final = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NEEDS_GPU: Final = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def rows_of(case: PagedCase, device: torch.device = CPU) -> PrefillRows:
    return PrefillRows(
        PagedRows(
            block_tables=case.block_tables.to(device),
            context_lens=case.context_lens.to(device),
            cu_seqlens_q=case.cu_seqlens_q.to(device),
            max_seqlen_q=case.max_seqlen_q,
            max_context_len=case.max_context_len,
        ),
        block_size=case.key_cache.shape[1],
        num_tokens=len(case.query),
        total_context_len=int(case.context_lens.sum()),
        begin_sequences=all(num_tokens == length for num_tokens, length in case.rows),
    )


def own_keys(case: PagedCase) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the rows' own tokens."""
    rows = zip(case.slots, case.rows, strict=True)
    slots = torch.cat([slots[len(slots) - num_tokens :] for slots, (num_tokens, _) in rows])
    return case.key_cache.flatten(0, 1)[slots], case.value_cache.flatten(0, 1)[slots]


def check(output: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(output.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 1, 7, 16, 33, 100])
@pytest.mark.parametrize("block_size", [8, 24])
def test_keys_are_gathered_from_their_pages(window: int | None, block_size: int) -> None:
    """What lies in other slots is NaN, and what table entries hold of blocks that no query sees is no block."""
    case = PagedCase(MIXED, block_size=block_size, window=window)
    own = own_keys(case)
    rows = rows_of(case)
    output = flash_prefill(case.query, *own, case.cache, rows, scale=SCALE, window=window, attend=plain_varlen)
    check(output, case.expected(scale=SCALE))


def test_keys_at_hand_are_not_gathered() -> None:
    case = PagedCase([(9, 9), (20, 20), (0, 0), (1, 1)])
    rows = rows_of(case)
    assert rows.begin_sequences
    nan = torch.full_like(case.key_cache, torch.nan)
    nowhere = LayerCache(nan, nan)
    output = flash_prefill(case.query, *own_keys(case), nowhere, rows, scale=SCALE, window=7, attend=plain_varlen)
    case.window = 7
    check(output, case.expected(scale=SCALE))


def test_only_keys_that_are_seen_are_gathered() -> None:
    """With a window, the number of keys is known on the host as a bound only: the rest is the last key again."""
    case = PagedCase([(2, 90), (6, 8), (3, 50)], window=10)
    rows = rows_of(case)
    spans = rows.key_spans(10)
    assert spans.cu_seqlens.tolist() == [0, 11, 19, 31]
    assert spans.max_seqlen == 15
    assert rows.num_keys(10) == len(spans.slots) == 38
    seen = [slots[-count:] for slots, count in zip(case.slots, (11, 8, 12), strict=True)]
    torch.testing.assert_close(spans.slots, torch.cat((*seen, case.slots[2][-1:].expand(7))))
    assert rows.num_keys(None) == len(rows.key_spans(1000).slots) == 148


def test_keys_are_found_once_per_window() -> None:
    rows = rows_of(PagedCase(MIXED))
    assert rows.key_spans(9) is rows.key_spans(9)
    assert rows.key_spans(None) is not rows.key_spans(9)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operations run, with what arguments by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        self.calls.append((func._schema.name, dict(zip(names, args, strict=False)) | (kwargs or {})))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("into", [False, True], ids=["new", "out"])
@pytest.mark.parametrize(("window", "left"), [(None, -1), (1, 0), (64, 63)])
def test_what_torch_is_asked_for(window: int | None, left: int, *, into: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the schema of whatever torch is installed; an older torch, too, than the one that writes in place."""
    query, key = (torch.empty(n, heads, 64, dtype=torch.bfloat16, device="meta") for n, heads in ((7, 8), (12, 2)))
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    out = torch.empty_like(query) if into else None

    def call() -> tuple[str, dict[str, Any]]:
        operations = Operations()
        with operations:
            result = torch_flash(
                query, key, key, ends, ends, max_seqlen_q=5, max_seqlen_k=9, scale=0.5, window=window, out=out
            )
        assert result.shape == query.shape
        assert out is None or result is out
        return next(each for each in operations.calls if "flash_attention" in each[0])

    expected = {
        "max_q": 5,
        "max_k": 9,
        "dropout_p": 0.0,
        "is_causal": window is None,
        "return_debug_mask": False,
        "scale": 0.5,
        "window_size_left": left,
        "window_size_right": 0,
    }
    name, arguments = call()
    assert arguments.items() >= expected.items()
    assert (name == "aten::_flash_attention_forward") == (not into or module._FORWARD_INTO is None)
    monkeypatch.setattr(module, "_FORWARD_INTO", None)
    name, arguments = call()
    assert arguments.items() >= expected.items()
    assert name == "aten::_flash_attention_forward"


@pytest.mark.parametrize("window", [None, 64])
def test_nothing_waits_for_the_device(window: int | None) -> None:
    """Tensors that have no contents: whoever asked for some would be refused."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    rows = PrefillRows(
        PagedRows(
            block_tables=empty(2, 32, dtype=torch.int32),
            context_lens=empty(2, dtype=torch.int32),
            cu_seqlens_q=empty(3, dtype=torch.int32),
            max_seqlen_q=200,
            max_context_len=500,
        ),
        block_size=16,
        num_tokens=300,
        total_context_len=700,
        begin_sequences=False,
    )
    query, key, cache = empty(300, 8, 64), empty(300, 2, 64), empty(100, 16, 2, 64)
    output = flash_prefill(query, key, key, LayerCache(cache, cache), rows, scale=SCALE, window=window)
    assert output.shape == query.shape


@pytest.mark.parametrize(
    ("reason", "arguments"),
    [
        ("CUDA devices, not on 'cpu'", {"device": CPU}),
        ("not in torch.float32", {"dtype": torch.float32}),
        ("not 100", {"head_dim": 100}),
        ("not 264", {"head_dim": 264}),
        ("softcap", {"softcap": 30.0}),
        ("alibi", {"alibi": True}),
        ("sinks", {"sinks": True}),
        ("without it", {}),
    ],
)
def test_why_not(reason: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    defaults: dict[str, Any] = {"dtype": torch.float16, "head_dim": 128, "device": CUDA}
    said = why_not(**defaults | arguments)
    assert said is not None
    assert reason in said


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_it_needs_ampere(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    said = why_not(torch.float16, 128, CUDA)
    assert (said is None) == (capability >= (8, 0))
    assert said is None or "Tesla T4" in said


def shape_of(case: PagedCase, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> PrefillShape:
    return PrefillShape(
        num_heads=case.query.shape[1],
        num_kv_heads=case.key_cache.shape[2],
        head_dim=case.query.shape[2],
        block_size=case.key_cache.shape[1],
        dtype=dtype,
        device=device,
        scale=SCALE,
        window=case.window,
    )


TINY: Final = PrefillShape(
    num_heads=2, num_kv_heads=1, head_dim=8, block_size=16, dtype=torch.float32, device=CPU, scale=0.3
)


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_choice, "_COMPARED_ROWS", ((20, 50), (20, 20)))
    monkeypatch.setattr(prefill_choice, "_TIMED_ROWS", ((20, 50),))


def seconds(*times: float) -> Callable[[Callable[[], Tensor]], float]:
    """Return a clock for calls that take some time each."""
    remaining = iter(times)

    def time(call: Callable[[], Tensor]) -> float:
        call()
        return next(remaining)

    return time


@pytest.mark.usefixtures("small_probe")
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(
    ("paged_time", "flash_time", "said"),
    [
        (2.8, 2.0, "torch flash (1.40 x as fast as Triton)"),
        (2.0, 2.5, "Triton (torch flash: 0.80 x as fast)"),
        (2.0, 1.99, "Triton (torch flash: 1.01 x as fast)"),
    ],
)
def test_the_faster_is_chosen(paged_time: float, flash_time: float, said: str, window: int | None) -> None:
    time = seconds(paged_time, flash_time)
    choice = compare_prefills(evolve(TINY, window=window), paged_attention_reference, plain_varlen, time)
    assert str(choice) == said
    assert choice.name == said.partition(" (")[0]


def without_first_key(query: Tensor, key: Tensor, value: Tensor, *ends: Tensor, **options: Any) -> Tensor:
    return plain_varlen(query, key.roll(1, 0), value.roll(1, 0), *ends, **options)


def with_wrong_window(*arguments: Tensor, window: int | None, **options: Any) -> Tensor:
    return plain_varlen(*arguments, window=None if window is None else window + 1, **options)


def with_nan(query: Tensor, *arguments: Tensor, **options: Any) -> Tensor:
    return torch.full_like(query, torch.nan)


@pytest.mark.usefixtures("small_probe")
@pytest.mark.parametrize("flash", [without_first_key, with_wrong_window, with_nan])
def test_other_results_are_not_taken_however_fast(flash: VarlenAttention) -> None:
    choice = compare_prefills(evolve(TINY, window=30), paged_attention_reference, flash, seconds(9.0, 1.0))
    assert choice.flash is None
    assert "its results differ" in choice.reason


@pytest.mark.usefixtures("small_probe")
@pytest.mark.parametrize("message", ["no kernel image\nfor sm_75", ""])
def test_errors_are_reasons(message: str) -> None:
    def broken(*arguments: Tensor, **options: Any) -> Tensor:
        raise RuntimeError(message)

    choice = compare_prefills(TINY, paged_attention_reference, broken, seconds(9.0, 1.0))
    assert str(choice) == f"Triton (torch flash: RuntimeError: {message.partition(chr(10))[0] or 'no message'})"


@pytest.mark.parametrize("rows_of", [prefill_choice._COMPARED_ROWS, prefill_choice._TIMED_ROWS])
def test_the_probes_fill_a_gpu(rows_of: Sequence[tuple[int, int]]) -> None:
    """With SmolLM2-135M's 9 heads, and an H200's 132 multiprocessors; and they have keys to gather."""
    *_, rows = prefill_choice._random_batch(TINY, rows_of)
    assert rows.num_tokens * 9 >= 128 * 132
    assert not rows.begin_sequences


def test_what_is_timed_takes_a_device_longer_than_its_launches() -> None:
    """With SmolLM2-135M's 9 heads of 64 elements at 500 TFLOP/s: launches take a host some 0.1 ms."""
    pairs = sum(tokens * length - tokens**2 // 2 for tokens, length in prefill_choice._TIMED_ROWS)
    assert 4 * 9 * 64 * pairs / 500e12 > 1e-4


def test_where_there_is_no_cuda_triton_keeps_it() -> None:
    pytest.importorskip("triton")
    assert str(faster_for_prefill(TINY)) == "Triton (torch flash: it runs on CUDA devices, not on 'cpu')"


class Spy:
    """Stands in for attention and counts its calls."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        self.attention = attention
        self.num_calls = 0

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        self.num_calls += 1
        return self.attention(*arguments, **options)


@pytest.mark.parametrize("into", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(
    ("rows", "most_gathered", "by_flash"),
    [
        ([(60, 60), (30, 70)], 1 << 20, True),
        ([(60, 60), (30, 70)], 1 << 10, False),  # too much to gather
        ([(60, 60), (30, 30)], 1 << 10, True),  # nothing is gathered
        ([(5, 60), (6, 6)], 1 << 20, False),  # one program per tile would leave the device idle
    ],
    ids=str,
)
def test_each_step_goes_to_whom_it_suits(
    rows: list[tuple[int, int]],
    most_gathered: int,
    *,
    by_flash: bool,
    window: int | None,
    into: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_choice, "_MOST_GATHERED_BYTES", most_gathered)
    case = PagedCase(rows, (4, 2, 16), window=window)
    paged, flash = Spy(paged_attention_reference), Spy(plain_varlen)
    prefill = PagedPrefill(shape=shape_of(case), paged=paged, flash=flash, reason="")
    out = torch.full_like(case.query, 7.0) if into else None
    output = prefill(case.query, *own_keys(case), case.cache, rows_of(case), out=out)
    assert out is None or output is out
    check(output, case.expected(scale=SCALE))
    assert (paged.num_calls, flash.num_calls) == ((0, 1) if by_flash else (1, 0))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("offset", [None, 2.0])
@pytest.mark.parametrize("rows", [[(40, 40), (9, 150)], [(30, 30), (20, 20)]], ids=["chunks", "whole"])
def test_pages_of_fp8_are_decoded_once(
    rows: list[tuple[int, int]], offset: float | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flash and by Triton's kernels; what is seen are the stored keys, those of a whole prompt too."""
    monkeypatch.setattr(prefill_choice, "_TILE", 1)
    case = PagedCase(rows, (4, 2, 16), quantized=True, offset=offset, window=window)
    shape = evolve(shape_of(case), quantized=True)
    other = torch.full((len(case.query), 2, 16), torch.nan)
    seen: list[bool] = []

    def paged(query: Tensor, cache: LayerCache, *arguments: Any) -> Tensor:
        seen.append(cache.quantized)
        return paged_attention_reference(query, cache, *arguments)

    for worth, decoded in ((20, True), (1000, False)):
        monkeypatch.setattr(prefill_choice, "_WORTH_DECODING", worth)
        for flash in (None, plain_varlen):
            prefill = PagedPrefill(shape=shape, paged=paged, flash=flash, reason="")
            assert prefill.suits(rows_of(case)) == decoded
            check(prefill(case.query, other, other, case.cache, rows_of(case)), case.expected(scale=SCALE))
    assert seen == [False, True, True]  # but once, flash was called


def test_latent_vectors_of_fp8_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is decoded are keys that are the values, too, as the pages are."""
    monkeypatch.setattr(prefill_choice, "_TILE", 1)
    monkeypatch.setattr(prefill_choice, "_WORTH_DECODING", 1)
    case = PagedCase([(40, 40), (9, 150)], (4, 1, 24), quantized=True, key_only=8)
    shape = evolve(shape_of(case), quantized=True, values_are_keys=True)
    seen: list[tuple[bool, bool, int]] = []

    def paged(query: Tensor, cache: LayerCache, *arguments: Any) -> Tensor:
        seen.append((cache.quantized, cache.values_are_keys, cache.key_only))
        return paged_attention_reference(query, cache, *arguments)

    nothing = case.query.new_empty(0)  # all keys are in the cache
    output = PagedPrefill(shape=shape, paged=paged, flash=None, reason="")(
        case.query, nothing, nothing, case.cache, rows_of(case)
    )
    check(output, case.expected(scale=SCALE))
    assert seen == [(False, True, 8)]
    assert str(faster_for_prefill(shape)) == "Triton (torch flash: it takes keys and values, not latent vectors)"


@pytest.mark.parametrize(("offset", "key_only"), [(None, None), (2.0, None), (None, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_gathers_what_torch_gathers(
    dtype: torch.dtype, offset: float | None, key_only: int | None, triton_device: torch.device
) -> None:
    pytest.importorskip("triton")
    from paged_sdk.kernels.triton import decoded_pages

    case = PagedCase([(1, 150), (3, 20)], (4, 2, 24), quantized=True, offset=offset, key_only=key_only)
    spans = rows_of(case).key_spans(None)
    wanted = gather_decoded(case.cache, spans.slots, spans.positions, dtype)
    slots, positions = (each.to(triton_device) for each in (spans.slots, spans.positions))
    gathered = decoded_pages.gather_decoded(case.cache_on(triton_device), slots, positions, dtype)
    assert (gathered[1] is gathered[0]) == (wanted[1] is wanted[0]) == (key_only is not None)
    for got, expected in zip(gathered, wanted, strict=True):
        # The interpreter cuts bfloat16 off instead of rounding it; a device may fuse the scale with the offset.
        tolerance = 2.0**-7 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(got.cpu(), expected, rtol=tolerance, atol=tolerance)
    none = decoded_pages.gather_decoded(case.cache, spans.slots[:0], spans.positions[:0], dtype)
    assert [each.shape for each in none] == [(0, 2, 24)] * 2


def test_triton_serves_the_rest() -> None:
    case = PagedCase([(40, 40)], (4, 2, 16), quantized=True)
    shape = evolve(shape_of(case), softcap=0.7, quantized=True)
    prefill = PagedPrefill(shape=shape, paged=paged_attention_reference, flash=None, reason="")
    output = prefill(case.query, *own_keys(case), case.cache, rows_of(case))
    check(output, case.expected(scale=SCALE, softcap=0.7))


@NEEDS_GPU
@pytest.mark.parametrize("into", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(8, 2, 64), (6, 6, 128), (5, 1, 80), (4, 2, 256)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 33, 200])
def test_torch_flash_on_a_gpu(
    window: int | None, heads: tuple[int, int, int], dtype: torch.dtype, *, into: bool
) -> None:
    mixed = [(9, 9), (1, 37), (0, 0), (0, 9), (70, 150), (3, 3)]
    for rows in (mixed, [*mixed, (5, 3), (4, 0)], [(9, 9), (70, 70), (0, 0), (1, 1)]):
        case = PagedCase(rows, heads, dtype=dtype, window=window)
        out = torch.full(case.query.shape, torch.nan, dtype=dtype, device=CUDA) if into else None
        scale = heads[2] ** -0.5
        tensors = (each.to(CUDA) for each in (case.query, *own_keys(case), case.key_cache, case.value_cache))
        query, key, value, key_cache, value_cache = tensors
        cache = LayerCache(key_cache, value_cache)
        output = flash_prefill(query, key, value, cache, rows_of(case, CUDA), scale=scale, window=window, out=out)
        assert out is None or output is out
        check(output, case.expected(scale=scale), dtype)


@NEEDS_GPU
@pytest.mark.parametrize("window", [None, 500])
def test_the_choice_on_a_gpu(window: int | None) -> None:
    """Whichever it is; a build that comes with FlashAttention must be found to agree and not to fail."""
    shape = PrefillShape(
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=32,
        dtype=torch.bfloat16,
        device=CUDA,
        scale=128**-0.5,
        window=window,
    )
    choice = faster_for_prefill(shape)
    if why_not(shape.dtype, shape.head_dim, CUDA) is None:
        assert "x as fast" in choice.reason, str(choice)
    batch = prefill_choice._random_batch(shape, prefill_choice._COMPARED_ROWS)
    expected = evolve(choice, flash=None)(*batch)
    assert prefill_choice._difference(choice(*batch), expected) < 2**-5
