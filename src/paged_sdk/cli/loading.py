"""Turns groups of options into a model's builder."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

import typer
from attrs import evolve

from paged_sdk import (
    GgufModelBuilder,
    ImageLimits,
    IsqType,
    MemoryGpuConfig,
    Model,
    PagedAttentionMeta,
    PagedAttentionMetaBuilder,
    ReplicaSet,
    SpeculativeConfig,
    TextModelBuilder,
    TextSpeculativeBuilder,
    Topology,
    VisionModelBuilder,
    embedded_model_path,
)
from paged_sdk.cli.flags import excluding, exclusive
from paged_sdk.cli.groups import apply_settings
from paged_sdk.cli.options import EngineOptions, ModelFormat, ModelOptions, PagedAttnMode, PagedOptions

__all__ = ["AnyBuilder", "Builder", "builder_of", "check_arch", "load", "with_excluded"]

Builder: TypeAlias = TextModelBuilder | GgufModelBuilder | VisionModelBuilder
AnyBuilder: TypeAlias = Builder | TextSpeculativeBuilder

POOL_SIZES: Final = (
    "pa_context_len",
    "pa_ctxt_len",
    "pa_memory_mb",
    "pa_gpu_mem",
    "pa_memory_fraction",
    "pa_gpu_mem_usage",
)
BLOCK_SIZES: Final = ("pa_block_size", "pa_blk_size")
EXCLUSIVE: Final = (
    POOL_SIZES,
    BLOCK_SIZES,
    ("paged_attn", "no_paged_attn"),
    ("cpu", "device"),
    ("imatrix", "calibration_file"),
)
"""Groups of options, by name, of which at most one may be given: they are synonyms or exclude each other."""

FAMILIES_OF_MISTRALRS: Final[Mapping[str, str]] = MappingProxyType({"phi2": "phi", "phi3.5moe": "phimoe"})
"""mistral.rs's names of families that differ from their ``model_type`` by more than underscores."""


def with_excluded(given: Collection[str]) -> set[str]:
    """Return names of options, plus the names of the options that they exclude."""
    return {*given, *(name for group in EXCLUSIVE if not set(group).isdisjoint(given) for name in group)}


def builder_of(
    model_id: str | None,
    model: ModelOptions,
    paged: PagedOptions,
    engine: EngineOptions,
    *others: object,
    images_by: str | None = None,
    adapters: Iterable[str] = (),
    topology: Topology | None = None,
    ranking_tokens: Iterable[str] = (),
) -> AnyBuilder:
    """Return the builder that a command line describes.

    :param model_id: a directory, a file or a Hub id; None: the embedded model
    :param others: other groups with options marked with :class:`BuilderSetting`
    :param images_by: the option that requires image input, if any
    :param adapters: ``[NAME=]PATH`` of each adapter
    :param topology: a topology from a service file, which the option ``--topology`` overrides
    :param ranking_tokens: the answers for relevant and for irrelevant documents, or only the first; empty: what the
        checkpoint names
    :raises typer.BadParameter: options that contradict each other
    :raises PagedError: invalid value, or no embedded model
    """
    location = str(embedded_model_path()) if model_id is None else model_id
    builder = _paged(_model(location, model, images_by), paged)
    for group in (model, engine, *others):
        builder = apply_settings(builder, group)
    builder = _prefix_cache(builder, engine)
    if model.topology is not None:
        topology = Topology.from_yaml(model.topology)
    if topology is not None:
        builder = builder.with_topology(topology)
    if answers := tuple(ranking_tokens):
        builder = builder.with_ranking_tokens(*answers)
    for adapter in adapters:
        name, found, path = adapter.partition("=")
        # A path may contain "=" too.
        is_named = bool(found) and not os.path.exists(os.path.expanduser(adapter))
        builder = builder.with_adapter(path, name=name) if is_named else builder.with_adapter(adapter)
    return _speculating(builder, engine)


async def load(builder: AnyBuilder, *, replicas: int) -> Model:
    """Load a model.

    :param replicas: number of processes that hold the model; 1: this process
    :raises PagedError: the model cannot be loaded
    """
    if replicas == 1:
        return await builder.build()
    return await ReplicaSet([builder] * replicas, in_processes=True)


def check_arch(loaded: str, arch: str | None) -> None:
    """Check that a model is of the expected family.

    :param loaded: the model's ``model_type``
    :param arch: the expected family; None: any
    :raises typer.BadParameter: the model is of another family
    """
    if arch is None:
        return
    family = FAMILIES_OF_MISTRALRS.get(arch.lower(), arch.lower())
    if family.replace("_", "") != loaded.removesuffix("_text").replace("_", ""):
        raise typer.BadParameter(f"the model is of the family {loaded}, not {arch}", param_hint="--arch")


def _model(location: str, options: ModelOptions, images_by: str | None) -> Builder:
    """Return a model's builder, with the settings that are not passed on unchanged (see :class:`BuilderSetting`)."""
    is_plain = options.format is ModelFormat.PLAIN
    exclusive({"--imatrix": options.imatrix, "--calibration-file": options.calibration_file})
    excluding("--format plain", is_plain, {"--quantized-file": options.quantized_file, "--mmproj": options.mmproj})
    exclusive({"--cpu": options.cpu, "--device": options.device})
    if is_plain and os.path.isfile(os.path.expanduser(location)):
        raise typer.BadParameter(
            f"{location} is a file: a plain checkpoint is a directory or a hub id", param_hint="--format plain"
        )
    builder: Builder = TextModelBuilder(location) if images_by is None else VisionModelBuilder(location)
    if _is_gguf(location, options):
        builder = GgufModelBuilder(location, options.quantized_file)
        if options.mmproj is not None:
            builder = builder.with_mmproj(options.mmproj)
        if images_by is not None:
            builder = builder.with_image_limits(ImageLimits())
    if (ranks := options.tensor_parallel) is not None:
        builder = builder.with_tensor_parallel("auto" if ranks == "auto" else _number(ranks))
    return builder if options.isq is None else builder.with_isq(IsqType.parse(options.isq, setting="--isq"))


def _number(text: str | int) -> int:
    """Return the number of ranks, given as text or, in a file, as a number."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor auto", param_hint="--tensor-parallel") from None


def _is_gguf(location: str, options: ModelOptions) -> bool:
    if options.format is not None:
        return options.format is ModelFormat.GGUF
    return bool(options.quantized_file) or options.mmproj is not None or _holds_gguf(location)


def _holds_gguf(location: str) -> bool:
    """Tell whether a path is a GGUF file or a directory of GGUF files, or a Hub id names a quantization."""
    path = Path(os.path.expanduser(location))
    if os.path.isdir(path):  # unlike Path.is_dir, raises for no name
        return not os.path.exists(path / "config.json")
    # A path that does not exist is a Hub id, in which a colon precedes a quantization.
    return path.suffix == ".gguf" if os.path.exists(path) else ":" in location


def _paged(builder: Builder, options: PagedOptions) -> Builder:
    pool_sizes = _flags_of(options, POOL_SIZES)
    block_sizes = _flags_of(options, BLOCK_SIZES)
    settings = {**pool_sizes, **block_sizes, "--pa-cache-type": options.pa_cache_type}
    exclusive(pool_sizes)
    exclusive(block_sizes)
    is_on = options.paged_attn is PagedAttnMode.ON
    is_off = options.paged_attn is PagedAttnMode.OFF
    exclusive({"--paged-attn on": is_on, "--no-paged-attn": options.no_paged_attn})
    if is_off or options.no_paged_attn:
        excluding("--paged-attn off" if is_off else "--no-paged-attn", True, settings)
        return builder.without_paged_attn()
    if is_on or any(value is not None for value in settings.values()):
        return builder.with_paged_attn(_meta(options))
    return builder


def _flags_of(options: PagedOptions, names: Iterable[str]) -> dict[str, object]:
    return {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}


def _meta(options: PagedOptions) -> PagedAttentionMeta:
    meta = PagedAttentionMetaBuilder()
    for tokens in (options.pa_context_len, options.pa_ctxt_len):
        if tokens is not None:
            meta = meta.with_gpu_memory(MemoryGpuConfig.ContextSize(tokens))
    for megabytes in (options.pa_memory_mb, options.pa_gpu_mem):
        if megabytes is not None:
            meta = meta.with_gpu_memory(MemoryGpuConfig.MB(megabytes))
    for fraction in (options.pa_memory_fraction, options.pa_gpu_mem_usage):
        if fraction is not None:
            meta = meta.with_gpu_memory(MemoryGpuConfig.Fraction(fraction))
    for block_size in (options.pa_block_size, options.pa_blk_size):
        if block_size is not None:
            meta = meta.with_block_size(block_size)
    if options.pa_cache_type is not None:
        meta = meta.with_cache_type(options.pa_cache_type)
    return meta.build()


def _prefix_cache(builder: Builder, options: EngineOptions) -> Builder:
    """Return the builder with a directory for the prefix cache, if requested."""
    if options.prefix_cache_dir is None:
        if options.prefix_cache_dir_mb is not None:
            raise typer.BadParameter("it needs --prefix-cache-dir", param_hint="--prefix-cache-dir-mb")
        return builder
    if options.prefix_cache_dir_mb is None:
        return builder.with_prefix_cache_dir(options.prefix_cache_dir)
    return builder.with_prefix_cache_dir(options.prefix_cache_dir, options.prefix_cache_dir_mb << 20)


def _speculating(builder: Builder, options: EngineOptions) -> AnyBuilder:
    """Return the builder with speculative decoding, if requested."""
    config = SpeculativeConfig() if options.speculate is None else SpeculativeConfig(options.speculate)
    if options.draft_model is None:
        is_asked = options.speculate is not None or options.mtp
        return builder.with_speculation(evolve(config, mtp=options.mtp)) if is_asked else builder
    if options.mtp:
        raise typer.BadParameter("--mtp and --draft-model exclude each other")
    is_gguf = options.draft_model.lower().endswith("gguf") or _holds_gguf(options.draft_model)
    draft = GgufModelBuilder(options.draft_model) if is_gguf else TextModelBuilder(options.draft_model)
    return TextSpeculativeBuilder(builder, draft, config)
