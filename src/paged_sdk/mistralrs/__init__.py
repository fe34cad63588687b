"""Provide the Python API of mistral.rs on this engine: programs written for it run with only the import changed.

    from paged_sdk.mistralrs import Architecture, ChatCompletionRequest, Runner, Which

    runner = Runner(which=Which.Plain(model_id="path/or/hub-id", arch=Architecture.Mistral), pa_gpu_mem=4096)
    response = runner.send_chat_completion_request(
        ChatCompletionRequest(model="default", messages=[{"role": "user", "content": "Hello!"}], max_tokens=256)
    )

Unlike there, several threads may use a runner at once, and contradictory settings are an error, as are parameters of
unsupported features. No parameter is ignored, except a request's ``model``, which is a label in mistral.rs too: a
runner holds one model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from paged_sdk import CalledFunction, Usage
from paged_sdk.mistralrs.absent import NAMES, AbsentNameError
from paged_sdk.mistralrs.adapters import (
    LoraAdapter,
    LoraAdapterError,
    LoraAdapterGeneration,
    LoraAdapterInfo,
    LoraResidentGenerationInfo,
    LoraRuntimeStatus,
)
from paged_sdk.mistralrs.chunks import ChatCompletionChunkResponse, ChunkChoice, Delta
from paged_sdk.mistralrs.enums import (
    Architecture,
    EmbeddingArchitecture,
    IsqOrganization,
    ModelDType,
    MultimodalArchitecture,
    PagedCacheType,
    ToolCallType,
    ToolChoice,
)
from paged_sdk.mistralrs.logprobs import Logprobs, ResponseLogprob, TopLogprob
from paged_sdk.mistralrs.requests import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from paged_sdk.mistralrs.responses import (
    AgenticToolCallRecord,
    ChatCompletionResponse,
    Choice,
    CompletionChoice,
    CompletionResponse,
    ResponseMessage,
    ToolCallResponse,
)
from paged_sdk.mistralrs.runner import Runner
from paged_sdk.mistralrs.stream import ChatCompletionStream
from paged_sdk.mistralrs.which import Which

VisionArchitecture = MultimodalArchitecture

__all__ = [
    "AgenticToolCallRecord",
    "Architecture",
    "CalledFunction",
    "ChatCompletionChunkResponse",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatCompletionStream",
    "Choice",
    "ChunkChoice",
    "CompletionChoice",
    "CompletionRequest",
    "CompletionResponse",
    "Delta",
    "EmbeddingArchitecture",
    "EmbeddingRequest",
    "IsqOrganization",
    "Logprobs",
    "LoraAdapter",
    "LoraAdapterError",
    "LoraAdapterGeneration",
    "LoraAdapterInfo",
    "LoraResidentGenerationInfo",
    "LoraRuntimeStatus",
    "ModelDType",
    "MultimodalArchitecture",
    "PagedCacheType",
    "ResponseLogprob",
    "ResponseMessage",
    "Runner",
    "ToolCallResponse",
    "ToolCallType",
    "ToolChoice",
    "TopLogprob",
    "Usage",
    "VisionArchitecture",
    "Which",
]


if not TYPE_CHECKING:  # hidden from type checkers, which would accept any name

    def __getattr__(name: str) -> NoReturn:
        if name in NAMES:
            raise AbsentNameError(f"{name} does not exist in paged_sdk.mistralrs: {NAMES[name]}", setting=name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
