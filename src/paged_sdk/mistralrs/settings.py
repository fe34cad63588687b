"""Turns a runner's parameters into settings of the SDK's builders."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import Final

from attrs import evolve

from paged_sdk import (
    BlockingModel,
    ConfigError,
    GgufModelBuilder,
    IsqType,
    LayerTopology,
    MemoryGpuConfig,
    PagedAttentionMeta,
    SpeculativeConfig,
    TextModelBuilder,
    TextSpeculativeBuilder,
    Topology,
    VisionModelBuilder,
)
from paged_sdk import PagedCacheType as CacheType
from paged_sdk.mistralrs.enums import (
    Architecture,
    EmbeddingArchitecture,
    IsqOrganization,
    MultimodalArchitecture,
    PagedCacheType,
    cache_type,
)
from paged_sdk.mistralrs.generations import AdapterLimits
from paged_sdk.mistralrs.which import Builder, Which

__all__ = [
    "DEFAULT_PREFIX_CACHE_N",
    "adapter_limits",
    "check_architecture",
    "configured",
    "paged_settings",
    "quantized",
    "template_of",
    "with_speculation",
]

_GOAL: Final = re.compile(r"(?P<number>[0-9]+) ?(?P<unit>GiB|MiB|tokens)", re.ASCII)
DEFAULT_PREFIX_CACHE_N: Final = 16
MAX_GOAL: Final = 32
"""Maximum length of a goal's text; no real size is written with more characters."""


def configured(
    builder: Builder,
    *,
    template: str | Path | None,
    meta: PagedAttentionMeta | None,
    no_paged_attn: bool,
    prefix_cache_n: int | None,
) -> Builder:
    """Return the builder with settings of the chat template and the KV cache.

    :raises ConfigError: invalid value
    """
    if template is not None:
        builder = builder.with_chat_template(template)
    if meta is not None:
        builder = builder.with_paged_attn(meta)
    elif no_paged_attn:
        builder = builder.without_paged_attn()
    if type(prefix_cache_n) is int and prefix_cache_n == DEFAULT_PREFIX_CACHE_N:  # leave it to the environment
        return builder
    return builder.with_prefix_cache_n(prefix_cache_n)


def quantized(builder: Builder, which: Which, in_situ_quant: str | None) -> Builder:
    """Return the builder with in-situ quantization.

    :raises ConfigError: unknown type, or ``IsqOrganization.MoQE`` without a type or beside a topology
    """
    isq = None if in_situ_quant is None else IsqType.parse(in_situ_quant, setting="in_situ_quant")
    if getattr(which, "organization", None) is not IsqOrganization.MoQE:
        return builder if isq is None else builder.with_isq(isq)
    if isq is None or builder.settings.topology is not None:
        raise ConfigError.of("organization", IsqOrganization.MoQE, "in_situ_quant beside it, and no topology")
    return builder.with_topology(Topology.empty().with_regex(r"\.experts\.", LayerTopology(isq=isq)))


def with_speculation(
    builder: Builder,
    draft: Which | None,
    gamma: int | None,
    mtp_n_predict: int | None = None,
    mtp_model: str | PathLike[str] | None = None,
) -> Builder | TextSpeculativeBuilder:
    """Return the builder with speculative decoding.

    :param mtp_n_predict: most drafts of an assistant, or else of the model's own layer for multi-token prediction;
        None: such a layer does not draft
    :param mtp_model: directory, GGUF file or Hub id of an assistant; None: there is none
    :raises ConfigError: ``draft`` is not a model, or one of the two models takes images; or settings that contradict
        each other
    """
    for setting, value in (("mtp_n_predict", mtp_n_predict), ("mtp_model", mtp_model)):
        if value is not None and (draft is not None or gamma is not None):
            raise ConfigError.of(setting, value, "None beside which_draft or speculative_gamma")
    if mtp_model is not None:
        most = SpeculativeConfig().gamma if mtp_n_predict is None else mtp_n_predict
        assistant = _assistant(mtp_model).with_token_source(builder.settings.token_source)
        return TextSpeculativeBuilder(builder, assistant, _speculation(most, "mtp_n_predict"))
    if mtp_n_predict is not None:
        return builder.with_speculation(_speculation(mtp_n_predict, "mtp_n_predict", mtp=True))
    if draft is None:
        return builder if gamma is None else builder.with_speculation(_speculation(gamma))
    if not isinstance(draft, Which):
        raise ConfigError.of("which_draft", draft, "Which.Plain(...), Which.GGUF(...) or None")
    other = draft.builder().with_token_source(builder.settings.token_source)
    if isinstance(builder, VisionModelBuilder) or isinstance(other, VisionModelBuilder):
        raise ConfigError.of("which_draft", draft, "None beside a model that takes images, and no such model itself")
    return TextSpeculativeBuilder(builder, other, _speculation(32 if gamma is None else gamma))


def _assistant(location: str | PathLike[str]) -> TextModelBuilder | GgufModelBuilder:
    try:
        builder = TextModelBuilder(location)
    except ConfigError as error:
        raise ConfigError.of("mtp_model", location, error.allowed) from None
    return GgufModelBuilder(location) if builder.source.location.lower().endswith("gguf") else builder


def _speculation(gamma: int, setting: str = "speculative_gamma", *, mtp: bool = False) -> SpeculativeConfig:
    try:
        return SpeculativeConfig(gamma=gamma, mtp=mtp)
    except ConfigError as error:
        raise ConfigError.of(setting, gamma, error.allowed) from None


def check_architecture(which: Which, model: BlockingModel) -> None:
    """Compare the family that a program names with that of the loaded model.

    :raises ConfigError: the model is of another family
    """
    arch = getattr(which, "arch", None)
    match arch:
        case MultimodalArchitecture():
            arch.check(model.model_type)
        case Architecture() | EmbeddingArchitecture():
            arch.check(model.architecture)


def paged_settings(
    *,
    pa_gpu_mem: int | None,
    pa_gpu_mem_usage: float | None,
    pa_ctxt_len: int | None,
    pa_blk_size: int | None,
    pa_cache_type: PagedCacheType | CacheType | None,
    no_paged_attn: bool,
    paged_attn: bool,
    memory_goal: str | float | None,
) -> PagedAttentionMeta | None:
    """Return the settings of the KV pool; None if none was given.

    :raises ConfigError: settings that contradict each other, which are named
    """
    memory = {
        "pa_gpu_mem": pa_gpu_mem,
        "pa_gpu_mem_usage": pa_gpu_mem_usage,
        "pa_ctxt_len": pa_ctxt_len,
        "memory_goal": memory_goal,
    }
    sizes = [name for name, value in memory.items() if value is not None]
    if len(sizes) > 1:
        raise _conflict(sizes, "the KV pool's size is given in one way at most")
    others = {"pa_blk_size": pa_blk_size, "pa_cache_type": pa_cache_type, "paged_attn": paged_attn or None}
    given = sizes + [name for name, value in others.items() if value is not None]
    if not given:
        return None
    if no_paged_attn:
        raise _conflict(["no_paged_attn", *given], "without paged attention there is no KV pool")
    meta = PagedAttentionMeta(gpu_memory=_gpu_memory(pa_gpu_mem, pa_gpu_mem_usage, pa_ctxt_len, memory_goal))
    if pa_blk_size is not None:
        meta = evolve(meta, block_size=pa_blk_size)
    return meta if pa_cache_type is None else evolve(meta, cache_type=cache_type(pa_cache_type))


def _gpu_memory(
    megabytes: int | None, fraction: float | None, tokens: int | None, goal: str | float | None
) -> MemoryGpuConfig | None:
    if goal is not None:
        return _goal(goal)
    if megabytes is not None:
        return MemoryGpuConfig.MB(megabytes)
    if fraction is not None:
        return MemoryGpuConfig.Fraction(fraction)
    return None if tokens is None else MemoryGpuConfig.ContextSize(tokens)


def _goal(goal: str | float) -> MemoryGpuConfig:
    """Parse a ``memory_goal`` in the form of mistral.rs from 0.9.5 on."""
    said = _GOAL.fullmatch(goal) if isinstance(goal, str) and len(goal) < MAX_GOAL else None
    try:
        if isinstance(goal, float):
            return MemoryGpuConfig.Fraction(goal)
        if said is not None and said["unit"] == "tokens":
            return MemoryGpuConfig.ContextSize(int(said["number"]))
        if said is not None:
            return MemoryGpuConfig.MB(int(said["number"]) << (10 if said["unit"] == "GiB" else 0))
    except ConfigError:  # a number out of range
        pass
    raise ConfigError.of("memory_goal", goal, 'a fraction such as 0.9, "4GiB", "512MiB", "65536tokens", or None')


def adapter_limits(which: Which) -> AdapterLimits:
    """Return the limits on a model's adapters."""
    match which:
        case Which.Lora() | Which.GGUF():
            return AdapterLimits(which.max_adapters, which.max_rank, which.max_bytes)
    return AdapterLimits()


def template_of(chat_template: str | None, jinja_explicit: str | None) -> str | Path | None:
    """Return the chat template, as text or as a path; None: the checkpoint's.

    :raises ConfigError: both are given, or ``jinja_explicit`` is not a path
    """
    if jinja_explicit is None:
        return chat_template
    if chat_template is not None:
        raise _conflict(["chat_template", "jinja_explicit"], "there is one chat template")
    if not isinstance(jinja_explicit, str | Path):
        raise ConfigError.of("jinja_explicit", jinja_explicit, "the path of a Jinja file")
    return Path(jinja_explicit)


def _conflict(names: list[str], why: str) -> ConfigError:
    return ConfigError(f"{' and '.join(names)} are given together: {why}", setting=names[-1])
