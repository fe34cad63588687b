"""A sweep of odd values through every parameter of the public API.

Whatever is given, there are two outcomes. Either it is taken, and then it is what the parameter's type says; or a typed
error names the parameter, and is short. What is swept is found by introspection, so that a new class, method or
parameter is swept, too.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import anyio
import attrs
import numpy as np
import pytest
from attrs import frozen

import paged_sdk
import paged_sdk.mistralrs
from paged_sdk import (
    ConstraintError,
    Conversation,
    DryParams,
    GgufModelBuilder,
    InvalidRequestError,
    LayerTopology,
    MemoryGpuConfig,
    Message,
    Model,
    PagedAttentionMetaBuilder,
    PagedError,
    RequestBuilder,
    SamplingParams,
    TextMessages,
    TextModelBuilder,
    VisionModelBuilder,
)
from paged_sdk.mistralrs import ChatCompletionRequest, CompletionRequest, Runner, Which
from paged_sdk.streaming import ResponseStream
from paged_sdk.testing import fake_model
from paged_sdk.types import request as request_module
from paged_sdk.types.tool_call import ToolCall
from tiny_encoder import make_ranker

MAX_TEXT = 500
"""The text of an error has so many characters at most, whatever the value is."""


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("an object of the caller's own may do this")


DEEP: list[Any] = []
for _ in range(2000):
    DEEP = [DEEP]

VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "text": "no",
    "empty": "",
    "surrogate": "\ud800",
    "NUL": "\0",
    "long": "x" * 10**5,
    "bytes": b"x",
    "bytearray": bytearray(b"xy"),
    "5": 5,
    "0": 0,
    "-1": -1,
    "-2": -2,
    "huge int": 10**5000,
    "2.5": 2.5,
    "1e300": 1e300,
    "-1e300": -1e300,
    "tiny": 5e-324,
    "nan": float("nan"),
    "inf": float("inf"),
    "complex": 1j,
    "fraction": Fraction(1, 2),
    "list": [],
    "list of None": [None],
    "list of texts": ["a", "b"],
    "list of numbers": [1, 2],
    "long list": [0] * 1000,
    "deep list": DEEP,
    "dict": {},
    "dict of numbers": {1: 1},
    "dict of texts": {"role": "user"},
    "set": {1},
    "object": object(),
    "odd object": Odd(),
    "class": int,
    "function": lambda: None,
    "numpy int": np.int64(3),
    "numpy float": np.float32(0.5),
    "numpy bool": np.True_,
    "numpy nan": np.float64("nan"),
    "numpy array": np.array([1, 2]),
    "numpy matrix": np.ones((2, 2)),
    "path": Path("no/such/file/here"),
    "sampling": SamplingParams(max_len=1),
    "messages": TextMessages().add_message("user", "Hello"),
}


def has_no_parameters() -> None:
    """Be a tool."""


class Place(typing.TypedDict):
    name: str


# Values that are right, for what has to be given beside the odd one.
GOOD: dict[str, Any] = {
    "role": "user",
    "content": "Hello",
    "model_id_or_dir": "no/such/directory/here",
    "dir_or_repo": "no/such/directory/here",
    "model_id": "no/such/directory/here",
    "quantized_model_id": "no/such/directory/here",
    "quantized_filename": "model.gguf",
    "messages": [{"role": "user", "content": "Hello"}],
    "model": "default",
    "prompt": "Hello",
    "texts": "Hello",
    "query": "Hello",
    "documents": ["Hello"],
    "text": "Hello",
    "token_ids": [1, 2],
    "arguments": {},
    "name": "tool",
    "requests": [[{"role": "user", "content": "Hello"}]],
    "request": [{"role": "user", "content": "Hello"}],
    "which": Which.Plain("no/such/directory/here"),
    "answer": "Hello",
    "function": has_no_parameters,
    "tools": [has_no_parameters],
    "kind": "regex",
    "source": "a",
    "type_": Place,
    "layer": LayerTopology(),
    "layers": range(1),
    "pattern": "proj",
    "target_builder": TextModelBuilder("no/such/directory/here"),
    "draft_builder": TextModelBuilder("no/such/directory/here"),
    "text_builder": TextModelBuilder("no/such/directory/here"),
    "adapters": ["no/such/directory/here"],
    "images": [b"the bytes of a file"],
    "data": b"the bytes of a file",
}
# Where a parameter must not be None, though it may be left out, or where only some roles may have it.
BESIDE: dict[str, dict[str, Any]] = {
    "tool_calls": {"role": "assistant"},
    "reasoning_content": {"role": "assistant"},
    "tool_call_id": {"role": "tool"},
}
# What errors call a parameter that has another name where it is checked.
ALSO: dict[str, tuple[str, ...]] = {
    "n": (
        "prefix_cache_n",
        "max_num_seqs",
        "max_queue",
        "max_num_batched_tokens",
        "max_model_len",
        "num_threads",
        "tensor_parallel",
    ),
    "factor": ("max_slowdown",),
    "model_id_or_dir": ("model",),
    "dir_or_repo": ("model",),
    "model_id": ("model",),
    "quantized_model_id": ("model",),
    "quantized_filename": ("filenames",),
    "seconds": ("timeout",),
    "salt": ("cache_salt",),
    "enable": ("enable_thinking",),
    "top_n": ("logprobs",),
    "images": ("image",),
    "limits": ("images",),
    "adapters": ("with_adapter",),
    "meta": ("_meta", "PagedAttentionMeta"),
    "requests": ("messages", "message", "role"),
    "request": ("messages", "message", "role"),
    "messages": ("message", "role", "content"),
    "arguments": ("tool_calls",),
    "value": ("message", "role", "content", "tool_calls", "tools"),
    "processors": ("logits_processors",),
    "function": ("tools",),
    "tools": ("tools",),
    "choice": ("tool_choice",),
    "effort": ("reasoning_effort",),
    "tokens": ("thinking_budget",),
    "system": ("content",),
    "text": ("content", "prompt"),
    "answer": ("content",),
    "prompt": ("text",),
    # The drop-in's.
    "logit_bias": ("logits_bias",),
    "max_tokens": ("max_len",),
    "stop_seqs": ("stop",),
    "dry_multiplier": ("multiplier",),
    "dry_base": ("base", "dry_multiplier"),
    "dry_allowed_length": ("allowed_length", "dry_multiplier"),
    "dry_sequence_breakers": ("sequence_breakers", "dry_multiplier"),
    "top_logprobs": ("top_n_logprobs", "logprobs"),
    "max_seqs": ("max_num_seqs",),
    "chat_template": ("template",),
    "jinja_explicit": ("template",),
    "in_situ_quant": ("isq",),
    "path": ("topology",),
    "selectors": ("topology",),
    "pa_gpu_mem": ("megabytes",),
    "pa_gpu_mem_usage": ("fraction",),
    "pa_ctxt_len": ("tokens",),
    "pa_blk_size": ("block_size",),
    "pa_cache_type": ("cache_type",),
    "tok_model_id": ("with_tok_model_id",),
    "mmproj": ("with_mmproj",),
    "mmproj_filename": ("with_mmproj",),
    "hf_revision": ("revision",),
}


# Parameters that take more than their type says: paths, a single string, messages of this package's own.
LENIENT: dict[str, tuple[str, ...]] = {
    "model_id": ("path",),
    "quantized_model_id": ("path",),
    "tokenizer_json": ("path",),
    "tok_model_id": ("path",),
    "mmproj": ("path",),
    "mmproj_filename": ("path",),
    "chat_template": ("path",),
    "imatrix": ("path",),
    "calibration_file": ("path",),
    "isq_cache": ("path",),
    "jinja_explicit": ("path",),
    "stop_seqs": ("text", "NUL", "long"),
    "messages": ("messages",),
    "text": ("list",),  # of no parts
    "answer": ("list",),
}


@frozen(eq=False)
class Parameter:
    """Names one parameter of something that can be called.

    :ivar hint: its type
    """

    owner: str
    call: Callable[..., Any]
    name: str
    hint: Any
    required: Collection[str]
    is_star: bool = False

    def __str__(self) -> str:
        return f"{self.owner}({self.name})"

    def give(self, value: Any) -> Any:
        if self.is_star:
            return self.call(value)
        beside = BESIDE.get(self.name, {})
        given = {name: beside.get(name, GOOD.get(name)) for name in self.required}
        return self.call(**given | {self.name: value})

    @property
    def names(self) -> tuple[str, ...]:
        method = self.owner.rpartition(".")[2].removeprefix("with_").removeprefix("without_")
        return (self.name.lstrip("_"), *ALSO.get(self.name, ()), method)


def parameters(owner: str, call: Callable[..., Any], function: Any) -> Iterator[Parameter]:
    """Return the parameters of a function, or of a class's constructor."""
    initializer = function.__init__ if inspect.isclass(function) else function
    hints = resolved_hints(initializer, function)
    signature = inspect.signature(call)
    required = [
        each.name
        for each in signature.parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    for each in signature.parameters.values():
        hint = hints.get(each.name, Any)
        if each.kind is each.VAR_KEYWORD:
            for name, option in typing.get_type_hints(get_args(hint)[0]).items() if get_args(hint) else ():
                yield Parameter(owner, call, name, option, required)
        else:
            yield Parameter(owner, call, each.name, hint, required, is_star=each.kind is each.VAR_POSITIONAL)


def resolved_hints(initializer: Any, owner: Any) -> dict[str, Any]:
    module = inspect.getmodule(owner)
    names = {**vars(typing), **vars(request_module), **(vars(module) if module else {})}
    hints = {}
    for name, hint in getattr(initializer, "__annotations__", {}).items():
        try:
            hints[name] = eval(hint, dict(names)) if isinstance(hint, str) else hint
        except NameError:
            hints[name] = Any
    return hints


NEED_A_MODEL = ("BlockingConversation", "BlockingModel", "Conversation", "Model")
RESULTS = (
    "paged_sdk.build.machine",
    "paged_sdk.types.adapter",
    "paged_sdk.types.memory_plan",
    "paged_sdk.types.response",
    "paged_sdk.types.embedding",
    "paged_sdk.types.rank",
    "paged_sdk.types.score",
    "paged_sdk.types.logprobs",
    "paged_sdk.types.stats",
    "paged_sdk.calls.tool_loop",
)
NOT_SETTINGS = (*RESULTS, "paged_sdk.errors")
INSTANCES: dict[str, Any] = {
    "TextModelBuilder": TextModelBuilder("no/such/directory/here"),
    "GgufModelBuilder": GgufModelBuilder("no/such/directory/here"),
    "VisionModelBuilder": VisionModelBuilder("no/such/directory/here"),
    "Message": Message("user", "Hello"),
}
MAKING = ("with_", "without_", "add_", "from_", "parse")


def settings_parameters() -> Iterator[Parameter]:
    """Return the parameters of what needs no model: values, builders, and their methods."""
    public = {name: getattr(paged_sdk, name) for name in paged_sdk.__all__} | {"ToolCall": ToolCall}
    public |= {f"MemoryGpuConfig.{each}": getattr(MemoryGpuConfig, each) for each in ("ContextSize", "Fraction", "MB")}
    for name, kind in public.items():
        if not inspect.isclass(kind) or kind.__module__ in NOT_SETTINGS or name in NEED_A_MODEL:
            continue
        if attrs.has(kind):
            yield from parameters(name, kind, kind)
        for method in dir(kind):
            if not method.startswith(MAKING):
                continue
            is_bound = isinstance(inspect.getattr_static(kind, method), classmethod)
            holder = kind if is_bound else INSTANCES[name] if name in INSTANCES else kind()
            yield from parameters(f"{name}.{method}", getattr(holder, method), getattr(kind, method))


def drop_in_parameters() -> Iterator[Parameter]:
    """Return those of the classes of mistral.rs. Their requests are checked when they are sent."""

    def built(kind: Callable[..., Any], method: str, **arguments: Any) -> Callable[..., Any]:
        def make(**fields: Any) -> Any:
            return getattr(kind(**fields), method)(**arguments)

        make.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]
        return make

    sending: dict[str, Any] = {"seed": None, "default_temperature": None}
    yield from parameters("Plain", built(Which.Plain, "builder"), Which.Plain)
    yield from parameters("Embedding", built(Which.Embedding, "builder"), Which.Embedding)
    yield from parameters("Multimodal", built(Which.MultimodalPlain, "builder"), Which.MultimodalPlain)
    yield from parameters("Lora", built(Which.Lora, "builder"), Which.Lora)
    yield from parameters("GGUF", built(Which.GGUF, "builder"), Which.GGUF)
    yield from parameters("Chat", built(ChatCompletionRequest, "build", **sending), ChatCompletionRequest)
    yield from parameters("Completion", built(CompletionRequest, "sampling", **sending), CompletionRequest)
    yield from parameters("Runner", Runner, Runner)


def fits(value: Any, hint: Any) -> bool:
    """Tell whether a value is of a type, for as much of typing as the public API uses. numpy's numbers are numbers."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is None or hint is types.NoneType:
        return value is None
    if hint is Any or hint is object or isinstance(hint, typing.TypeVar):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if hint is bool:
        return isinstance(value, bool)
    if hint in (int, float):
        numbers: Any = (int, np.integer) if hint is int else (int, float, np.integer, np.floating, Fraction)
        return isinstance(value, numbers) and not isinstance(value, bool)
    if hint in (str, bytes, bytearray):
        return isinstance(value, hint)
    kind = origin or hint
    if isinstance(value, str | bytes | bytearray) and kind is not PathLike:
        return False
    if (inspect.isclass(kind) and issubclass(kind, Mapping)) or typing.is_typeddict(kind):
        return isinstance(value, Mapping)
    if (inspect.isclass(kind) and issubclass(kind, Sequence | Collection)) or kind.__name__ in ("Iterable", "Sequence"):
        return isinstance(value, Collection | np.ndarray) and (not isinstance(value, Mapping))
    if kind is type(lambda: None) or kind is Callable or kind.__name__ in ("Callable", "LogitsProcessor"):
        return callable(value)
    return isinstance(value, kind)


def judge(parameter: Parameter, kind: str, outcome: Any) -> str | None:
    """Return what is wrong with an outcome: a result, or an exception."""
    if isinstance(outcome, PagedError):
        text = str(outcome)
        if len(text) > MAX_TEXT:
            return f"the error has {len(text)} characters"
        if not any(name in text for name in parameter.names):
            return f"the error does not name it: {text}"
        return None
    if isinstance(outcome, BaseException):
        return f"it is not typed: {outcome!r}"[:200]
    if not fits(VALUES[kind], parameter.hint) and kind not in LENIENT.get(parameter.name, ()):
        return f"it is taken for {parameter.hint}"
    return None


def outcome_of(parameter: Parameter, value: Any) -> Any:
    try:
        return parameter.give(value)
    except Exception as error:
        return error


PARAMETERS = [*settings_parameters(), *drop_in_parameters()]


def test_everything_is_swept() -> None:
    owners = {parameter.owner for parameter in PARAMETERS}
    assert {"SamplingParams", "DryParams", "PagedAttentionMeta", "RequestBuilder", "Runner", "ToolCall"} <= owners
    for builder in (TextModelBuilder, GgufModelBuilder, RequestBuilder, PagedAttentionMetaBuilder, TextMessages):
        for method in vars(builder):
            if method.startswith("with_") and inspect.signature(getattr(builder, method)).parameters.keys() - {"self"}:
                assert f"{builder.__name__}.{method}" in owners
    assert len(PARAMETERS) > 200
    unknown = [str(parameter) for parameter in PARAMETERS if parameter.hint is Any]
    assert not unknown, "of these only the errors could be judged"


def test_odd_values_are_taken_as_what_they_are_or_refused_by_name() -> None:
    wrong = []
    for parameter in PARAMETERS:
        for kind, value in VALUES.items():
            if parameter.owner == "Runner" and parameter.name != "which":
                # What is taken is followed by a model that is not there.
                outcome = outcome_of(parameter, value)
                if isinstance(outcome, paged_sdk.ModelLoadError):
                    outcome = None
            else:
                outcome = outcome_of(parameter, value)
            problem = judge(parameter, kind, outcome)
            if problem is not None:
                wrong.append(f"{parameter} = {kind}: {problem}")
    assert not wrong, "\n".join(wrong)


async def outcome_of_call(parameter: Parameter, value: Any) -> Any:
    """Return what comes of a call that may have to be awaited, or of a stream that has to be read."""
    outcome = outcome_of(parameter, value)
    try:
        if isinstance(outcome, ResponseStream):
            return await outcome.collect()
        return await outcome if inspect.isawaitable(outcome) else outcome
    except ConstraintError as error:
        return error if error.partial_response is None else None  # what the fake model says is no instance
    except Exception as error:
        return error


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_odd_values_in_the_calls_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Conversation.save writes wherever it can
    wrong = []
    async with fake_model(*["Hello!"] * 10**4) as model:
        chat = Conversation(model)
        calls = {
            f"{type(owner).__name__}.{name}": getattr(owner, name)
            for owner in (model, chat)
            for name in dir(type(owner))
            if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(type(owner), name))
        }
        calls.pop("FakeModel.aclose")
        calls.pop("FakeModel.rank")  # of a model that ranks, below
        assert {"FakeModel.send_chat_request", "FakeModel.stream_completion_request", "Conversation.send"} <= set(calls)
        for owner, call in calls.items():
            for parameter in parameters(owner, call, call.__func__):
                for kind, value in VALUES.items():
                    problem = judge(parameter, kind, await outcome_of_call(parameter, value))
                    if problem is not None:
                        wrong.append(f"{parameter} = {kind}: {problem}")
        assert model.stats().blocks_used == 0
    assert not wrong, "\n".join(wrong)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_odd_values_of_what_is_ranked(tmp_path: Path) -> None:
    make_ranker("bert", tmp_path)
    wrong = []
    async with TextModelBuilder(tmp_path).with_dtype("float32").with_force_cpu().build() as model:
        for parameter in parameters("Model.rank", model.rank, Model.rank):
            for kind, value in VALUES.items():
                problem = judge(parameter, kind, await outcome_of_call(parameter, value))
                if problem is not None:
                    wrong.append(f"{parameter} = {kind}: {problem}")
        assert model.stats().blocks_used == 0
    assert not wrong, "\n".join(wrong)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_odd_settings_that_are_taken_can_be_sampled_by(model: Model) -> None:
    """On a real model, where a number too large for float32 would show: warnings are errors here."""
    taken = []
    for parameter in PARAMETERS:
        if parameter.owner in ("SamplingParams", "DryParams") and parameter.name not in (
            "max_len",
            "max_tokens",
            "min_tokens",
        ):
            made = [outcome_of(parameter, value) for value in VALUES.values()]
            for settings in made:
                if isinstance(settings, DryParams):
                    settings = SamplingParams(dry_params=attrs.evolve(settings, multiplier=settings.multiplier or 1.0))
                if isinstance(settings, SamplingParams) and settings not in taken:
                    taken.append(settings)
    assert len(taken) > 50

    async def ask(settings: SamplingParams) -> None:
        sampled = attrs.evolve(settings, max_len=2, temperature=settings.temperature or 1.0)
        try:
            await model.send_completion_request("again and again and again", sampled)
        except InvalidRequestError as error:
            assert error.field in ("n_choices", "stop_token_ids", "logits_bias", "prompt_logprobs", "top_n_logprobs")

    async with anyio.create_task_group() as tasks:
        for settings in taken:
            tasks.start_soon(ask, settings)
