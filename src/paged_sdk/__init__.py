"""paged_sdk: an embeddable, async, fully typed LLM inference SDK on a paged-attention engine.

    async with TextModelBuilder("path/or/hub-id").with_logging().build() as model:
        response = await model.send_chat_request(TextMessages().add_message(TextMessageRole.USER, "Hello!"))
        print(response.choices[0].message.content)

Importing the package is light: every name below is loaded when it is first used, and the tensor library only when a
model is built.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_sdk.blocking import BlockingModel as BlockingModel
    from paged_sdk.blocking_conversation import BlockingConversation as BlockingConversation
    from paged_sdk.blocking_pin import BlockingPin as BlockingPin
    from paged_sdk.blocking_stream import BlockingChatStream as BlockingChatStream
    from paged_sdk.blocking_stream import BlockingCompletionStream as BlockingCompletionStream
    from paged_sdk.build.export.gguf import write_gguf as write_gguf
    from paged_sdk.build.export.image_encoder import write_mmproj as write_mmproj
    from paged_sdk.build.export.safetensors import write_safetensors as write_safetensors
    from paged_sdk.build.machine import GpuReport as GpuReport
    from paged_sdk.build.machine import MachineReport as MachineReport
    from paged_sdk.build.machine import describe_machine as describe_machine
    from paged_sdk.build.memory_plan import plan_memory as plan_memory
    from paged_sdk.builders import GgufModelBuilder as GgufModelBuilder
    from paged_sdk.builders import TextModelBuilder as TextModelBuilder
    from paged_sdk.builders import VisionModelBuilder as VisionModelBuilder
    from paged_sdk.calls.pin import Pin as Pin
    from paged_sdk.calls.tool_loop import ToolRun as ToolRun
    from paged_sdk.composed_builders import LoraModelBuilder as LoraModelBuilder
    from paged_sdk.composed_builders import TextSpeculativeBuilder as TextSpeculativeBuilder
    from paged_sdk.config.hang_limits import HangLimits as HangLimits
    from paged_sdk.config.images import ImageLimits as ImageLimits
    from paged_sdk.config.isq import IsqType as IsqType
    from paged_sdk.config.memory import MemoryGpuConfig as MemoryGpuConfig
    from paged_sdk.config.paged import PagedAttentionMeta as PagedAttentionMeta
    from paged_sdk.config.paged import PagedAttentionMetaBuilder as PagedAttentionMetaBuilder
    from paged_sdk.config.paged import PagedCacheType as PagedCacheType
    from paged_sdk.config.sampling import DryParams as DryParams
    from paged_sdk.config.sampling import SamplingParams as SamplingParams
    from paged_sdk.config.speculative import SpeculativeConfig as SpeculativeConfig
    from paged_sdk.config.topology import LayerTopology as LayerTopology
    from paged_sdk.config.topology import Topology as Topology
    from paged_sdk.conversation import Conversation as Conversation
    from paged_sdk.errors import AdapterError as AdapterError
    from paged_sdk.errors import CheckpointError as CheckpointError
    from paged_sdk.errors import ConfigError as ConfigError
    from paged_sdk.errors import ConstraintError as ConstraintError
    from paged_sdk.errors import ContextLengthError as ContextLengthError
    from paged_sdk.errors import EngineDeadError as EngineDeadError
    from paged_sdk.errors import EngineError as EngineError
    from paged_sdk.errors import InvalidRequestError as InvalidRequestError
    from paged_sdk.errors import LogitsProcessorError as LogitsProcessorError
    from paged_sdk.errors import ModelClosedError as ModelClosedError
    from paged_sdk.errors import ModelLoadError as ModelLoadError
    from paged_sdk.errors import NumericalError as NumericalError
    from paged_sdk.errors import OutOfMemoryError as OutOfMemoryError
    from paged_sdk.errors import PagedError as PagedError
    from paged_sdk.errors import PinLimitError as PinLimitError
    from paged_sdk.errors import QueueFullError as QueueFullError
    from paged_sdk.errors import RequestError as RequestError
    from paged_sdk.errors import RequestFailedError as RequestFailedError
    from paged_sdk.errors import RequestTimeoutError as RequestTimeoutError
    from paged_sdk.errors import ToolError as ToolError
    from paged_sdk.errors import ToolRoundsError as ToolRoundsError
    from paged_sdk.errors import UnsupportedArchitectureError as UnsupportedArchitectureError
    from paged_sdk.errors import UnsupportedQuantizationError as UnsupportedQuantizationError
    from paged_sdk.model import ChatStream as ChatStream
    from paged_sdk.model import CompletionStream as CompletionStream
    from paged_sdk.model import Model as Model
    from paged_sdk.routing.replica_set import ReplicaSet as ReplicaSet
    from paged_sdk.types.adapter import AdapterInfo as AdapterInfo
    from paged_sdk.types.constraint import Constraint as Constraint
    from paged_sdk.types.embedding import EmbeddingResponse as EmbeddingResponse
    from paged_sdk.types.image import Image as Image
    from paged_sdk.types.logits_processor import BatchLogitsProcessor as BatchLogitsProcessor
    from paged_sdk.types.logits_processor import LogitsProcessor as LogitsProcessor
    from paged_sdk.types.logprobs import Logprobs as Logprobs
    from paged_sdk.types.logprobs import TextOffsets as TextOffsets
    from paged_sdk.types.logprobs import TokenLogprob as TokenLogprob
    from paged_sdk.types.logprobs import TopLogprob as TopLogprob
    from paged_sdk.types.memory_plan import MemoryPlan as MemoryPlan
    from paged_sdk.types.messages import Message as Message
    from paged_sdk.types.messages import TextMessageRole as TextMessageRole
    from paged_sdk.types.messages import TextMessages as TextMessages
    from paged_sdk.types.messages import VisionMessages as VisionMessages
    from paged_sdk.types.rank import RankedDocument as RankedDocument
    from paged_sdk.types.rank import RankResponse as RankResponse
    from paged_sdk.types.request import RequestBuilder as RequestBuilder
    from paged_sdk.types.request_options import CompletionOptions as CompletionOptions
    from paged_sdk.types.request_options import ReadingOptions as ReadingOptions
    from paged_sdk.types.response import CalledFunction as CalledFunction
    from paged_sdk.types.response import ChatCompletionChunkResponse as ChatCompletionChunkResponse
    from paged_sdk.types.response import ChatCompletionResponse as ChatCompletionResponse
    from paged_sdk.types.response import Choice as Choice
    from paged_sdk.types.response import ChunkChoice as ChunkChoice
    from paged_sdk.types.response import CompletionChoice as CompletionChoice
    from paged_sdk.types.response import CompletionChunkChoice as CompletionChunkChoice
    from paged_sdk.types.response import CompletionChunkResponse as CompletionChunkResponse
    from paged_sdk.types.response import CompletionResponse as CompletionResponse
    from paged_sdk.types.response import CompletionTokensDetails as CompletionTokensDetails
    from paged_sdk.types.response import Delta as Delta
    from paged_sdk.types.response import PromptTokensDetails as PromptTokensDetails
    from paged_sdk.types.response import ResponseMessage as ResponseMessage
    from paged_sdk.types.response import ToolCallDelta as ToolCallDelta
    from paged_sdk.types.response import ToolCallResponse as ToolCallResponse
    from paged_sdk.types.response import Usage as Usage
    from paged_sdk.types.score import ScoreResponse as ScoreResponse
    from paged_sdk.types.score import TextScore as TextScore
    from paged_sdk.types.stats import ModelStats as ModelStats
    from paged_sdk.types.tool import Tool as Tool
    from paged_sdk.types.tool_call import ToolCall as ToolCall
    from paged_sdk.weights.embedded import embedded_model_path as embedded_model_path

_HOME = {
    "blocking": ("BlockingModel",),
    "blocking_conversation": ("BlockingConversation",),
    "blocking_pin": ("BlockingPin",),
    "blocking_stream": ("BlockingChatStream", "BlockingCompletionStream"),
    "builders": ("GgufModelBuilder", "TextModelBuilder", "VisionModelBuilder"),
    "composed_builders": ("LoraModelBuilder", "TextSpeculativeBuilder"),
    "build.export.image_encoder": ("write_mmproj",),
    "build.export.gguf": ("write_gguf",),
    "build.machine": ("GpuReport", "MachineReport", "describe_machine"),
    "build.memory_plan": ("plan_memory",),
    "build.export.safetensors": ("write_safetensors",),
    "config.hang_limits": ("HangLimits",),
    "config.images": ("ImageLimits",),
    "config.isq": ("IsqType",),
    "config.memory": ("MemoryGpuConfig",),
    "config.paged": ("PagedAttentionMeta", "PagedAttentionMetaBuilder", "PagedCacheType"),
    "config.sampling": ("DryParams", "SamplingParams"),
    "config.speculative": ("SpeculativeConfig",),
    "config.topology": ("LayerTopology", "Topology"),
    "conversation": ("Conversation",),
    "errors": (
        "AdapterError",
        "CheckpointError",
        "ConfigError",
        "ConstraintError",
        "ContextLengthError",
        "EngineDeadError",
        "EngineError",
        "InvalidRequestError",
        "LogitsProcessorError",
        "ModelClosedError",
        "ModelLoadError",
        "NumericalError",
        "OutOfMemoryError",
        "PagedError",
        "PinLimitError",
        "QueueFullError",
        "RequestError",
        "RequestFailedError",
        "RequestTimeoutError",
        "ToolError",
        "ToolRoundsError",
        "UnsupportedArchitectureError",
        "UnsupportedQuantizationError",
    ),
    "model": ("ChatStream", "CompletionStream", "Model"),
    "routing.replica_set": ("ReplicaSet",),
    "calls.pin": ("Pin",),
    "calls.tool_loop": ("ToolRun",),
    "types.adapter": ("AdapterInfo",),
    "types.constraint": ("Constraint",),
    "types.embedding": ("EmbeddingResponse",),
    "types.image": ("Image",),
    "types.logits_processor": ("BatchLogitsProcessor", "LogitsProcessor"),
    "types.logprobs": ("Logprobs", "TextOffsets", "TokenLogprob", "TopLogprob"),
    "types.memory_plan": ("MemoryPlan",),
    "types.messages": ("Message", "TextMessageRole", "TextMessages", "VisionMessages"),
    "types.request": ("RequestBuilder",),
    "types.request_options": ("CompletionOptions", "ReadingOptions"),
    "types.response": (
        "CalledFunction",
        "ChatCompletionChunkResponse",
        "ChatCompletionResponse",
        "Choice",
        "ChunkChoice",
        "CompletionChoice",
        "CompletionChunkChoice",
        "CompletionChunkResponse",
        "CompletionResponse",
        "CompletionTokensDetails",
        "Delta",
        "PromptTokensDetails",
        "ResponseMessage",
        "ToolCallDelta",
        "ToolCallResponse",
        "Usage",
    ),
    "types.rank": ("RankResponse", "RankedDocument"),
    "types.score": ("ScoreResponse", "TextScore"),
    "types.stats": ("ModelStats",),
    "types.tool": ("Tool",),
    "types.tool_call": ("ToolCall",),
    "weights.embedded": ("embedded_model_path",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)
__version__: str


if not TYPE_CHECKING:  # a type checker that saw it would let any name pass

    def __getattr__(name: str) -> object:
        value: object
        if name in _MODULE_OF:
            value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        elif name == "__version__":
            value = import_module("importlib.metadata").version("paged-sdk")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
