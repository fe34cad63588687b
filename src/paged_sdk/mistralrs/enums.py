"""Defines mistral.rs's enumerations: families of models, dtypes, types of KV elements, and tool choices."""

from __future__ import annotations

from enum import Enum

from paged_sdk import ConfigError, InvalidRequestError
from paged_sdk import PagedCacheType as CacheType

__all__ = [
    "Architecture",
    "EmbeddingArchitecture",
    "IsqOrganization",
    "ModelDType",
    "MultimodalArchitecture",
    "PagedCacheType",
    "ToolCallType",
    "ToolChoice",
    "cache_type",
    "dtype_name",
]


class _Family(Enum):
    """Names a family of models. It is optional everywhere, since the checkpoint names its family."""

    def check(self, loaded: str) -> None:
        """Compare with the family of the loaded model.

        :param loaded: the model's ``model_type``
        :raises ConfigError: the model is of another family
        """
        # SmolVLM's first checkpoints have the model_type idefics3, later ones smolvlm; the model is the same.
        own = ("idefics3", "smolvlm") if self.value == "idefics3" else (self.value,)
        if loaded.removesuffix("_text") not in own:
            raise ConfigError.of("arch", self, f"the checkpoint's own, {loaded}, or None")


class Architecture(_Family):
    """Names a family of models that generate text. It is optional everywhere, since the checkpoint names its family."""

    DeepseekV2 = "deepseek_v2"
    DeepseekV3 = "deepseek_v3"
    GLM4 = "glm4"
    GLM4Moe = "glm4_moe"
    GLM4MoeLite = "glm4_moe_lite"
    Gemma = "gemma"
    Gemma2 = "gemma2"
    Gemma3 = "gemma3"
    GptOss = "gpt_oss"
    GraniteMoeHybrid = "granitemoehybrid"
    HunYuanDenseV1 = "hunyuan_v1_dense"
    HunYuanMoEV1 = "hunyuan_v1_moe"
    Lfm2 = "lfm2"
    Lfm2Moe = "lfm2_moe"
    Llama = "llama"
    Mistral = "mistral"
    Mixtral = "mixtral"
    Phi2 = "phi"
    Phi3 = "phi3"
    Phi3_5MoE = "phimoe"
    Qwen2 = "qwen2"
    Qwen3 = "qwen3"
    Qwen3Moe = "qwen3_moe"
    Qwen3Next = "qwen3_next"
    SmolLm3 = "smollm3"
    Starcoder2 = "starcoder2"


class MultimodalArchitecture(_Family):
    """Names a family of models with image input."""

    DiffusionGemma = "diffusion_gemma"
    Gemma3 = "gemma3"
    Gemma3n = "gemma3n"
    Gemma4 = "gemma4"
    Idefics2 = "idefics2"
    Idefics3 = "idefics3"
    LLaVA = "llava"
    LLaVANext = "llava_next"
    Lfm2Vl = "lfm2_vl"
    Llama4 = "llama4"
    MiniCpmO = "minicpmo"
    Mistral3 = "mistral3"
    MuseGlimmer = "muse_glimmer"
    Phi3V = "phi3_v"
    Phi4MM = "phi4mm"
    Qwen2VL = "qwen2_vl"
    Qwen2_5VL = "qwen2_5_vl"
    Qwen3VL = "qwen3_vl"
    Qwen3VLMoE = "qwen3_vl_moe"
    Qwen3_5 = "qwen3_5"
    Qwen3_5Moe = "qwen3_5_moe"
    Qwen4Exp = "qwen4_exp"
    VLlama = "mllama"
    Voxtral = "voxtral"


class EmbeddingArchitecture(_Family):
    """Names a family of embedding models."""

    EmbeddingGemma = "gemma3"
    Qwen3Embedding = "qwen3"


class ModelDType(Enum):
    """Names the dtype of activations and unquantized weights."""

    Auto = "auto"
    BF16 = "bfloat16"
    F16 = "float16"
    F32 = "float32"


def dtype_name(value: ModelDType | str) -> str:
    """Return the name of a dtype, given as an enumeration's member or as a name."""
    return value.value if isinstance(value, ModelDType) else value


class IsqOrganization(Enum):
    """Names the matrices that ``in_situ_quant`` quantizes."""

    Default = "default"
    MoQE = "moqe"
    """Only those of a mixture's experts."""


class PagedCacheType(Enum):
    """Names the types of KV elements. ``AUTO`` is this SDK's spelling of ``Auto``."""

    Auto = CacheType.AUTO
    F8E4M3 = CacheType.F8E4M3
    AUTO = CacheType.AUTO  # noqa: PIE796  # a second spelling


def cache_type(value: PagedCacheType | CacheType) -> CacheType:
    """Return the SDK's type of KV elements.

    :raises ConfigError: ``value`` is not a type of KV elements
    """
    if isinstance(value, CacheType):
        return value
    if not isinstance(value, PagedCacheType):
        raise ConfigError.of("pa_cache_type", value, "PagedCacheType.Auto, PagedCacheType.F8E4M3 or None")
    return value.value


class ToolChoice(Enum):
    """Names whether a model may call tools."""

    NoTools = "none"
    Auto = "auto"

    @classmethod
    def parse(cls, value: object) -> str:
        """Return the SDK's word for a choice; None means "auto".

        :raises InvalidRequestError: ``value`` is not a choice
        """
        if value is not None and not isinstance(value, cls):
            raise InvalidRequestError.of("tool_choice", value, "ToolChoice.Auto, ToolChoice.NoTools or None")
        return "auto" if value is None else value.value


class ToolCallType(Enum):
    """Names the type of a call."""

    Function = "function"
