"""Turn the command line's flags into settings of the public API. None is a flag that was not given."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import typer
from attrs import evolve, field, fields_dict, frozen

from paged_sdk import (
    ConfigError,
    GgufModelBuilder,
    IsqType,
    MemoryGpuConfig,
    PagedAttentionMeta,
    PagedAttentionMetaBuilder,
    PagedCacheType,
    SamplingParams,
    SpeculativeConfig,
    TextModelBuilder,
    TextSpeculativeBuilder,
    Topology,
    VisionModelBuilder,
    embedded_model_path,
)
from paged_sdk.cli.options import ModelFormat, PagedAttnMode
from paged_sdk.wire.sampling import SamplingFields, read_sampling

__all__ = [
    "AnyBuilder",
    "Builder",
    "EngineFlags",
    "ModelFlags",
    "PagedFlags",
    "PromptFlags",
    "SamplingFlags",
    "builder_of",
    "check_arch",
    "exclusive",
    "naming_flags",
]

Builder: TypeAlias = TextModelBuilder | GgufModelBuilder | VisionModelBuilder
AnyBuilder: TypeAlias = Builder | TextSpeculativeBuilder
_FlagsT = TypeVar("_FlagsT")

FLAG_OF = {
    "adapter_folder": "--adapter-folder",
    "api_keys": "--api-key",
    "block_size": "--pa-block-size",
    "calibrate": "--calibrate",
    "chat_template": "--chat-template",
    "cors_origins": "--cors-origin",
    "device": "--device",
    "draft": "--draft-model",
    "drain_timeout": "--drain-timeout",
    "dtype": "--dtype",
    "filenames": "--quantized-file",
    "fraction": "--pa-memory-fraction",
    "gamma": "--speculate",
    "--isq": "--isq",
    "imatrix_out": "--imatrix-out",
    "image_hosts": "--image-host",
    "isq": "--isq",
    "max_len": "--max-tokens",
    "max_model_len": "--max-seq-len",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_seqs": "--max-seqs",
    "megabytes": "--pa-memory-mb",
    "min_p": "--min-p",
    "model": "--model-id",
    "num_threads": "--num-threads",
    "overrides": "--override",
    "prefix_cache_n": "--prefix-cache-n",
    "seed": "--seed",
    "temperature": "--temperature",
    "timeout": "--timeout",
    "tokens": "--pa-context-len",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "topology": "--topology",
    "max_queue": "--max-queue",
    "with_adapter": "--adapter",
    "with_calibration_file": "--calibration-file",
    "with_isq_cache": "--isq-cache",
    "with_chat_template": "--chat-template",
    "with_tokenizer_json": "--tok-model-id",
}
"""Maps the settings of the public API to the flags by which they are given here."""


@contextmanager
def naming_flags() -> Iterator[None]:
    """Show a setting that cannot be used as what the person typed: a flag.

    :raises typer.BadParameter: in place of a ConfigError that concerns a flag
    """
    try:
        yield
    except ConfigError as error:
        flag = FLAG_OF.get(error.setting.rpartition(".")[2])
        if flag is None:  # an environment variable, say
            raise
        _, _, why = str(error).partition(" = ")
        raise typer.BadParameter(why or str(error), param_hint=flag) from error


def exclusive(flags: Mapping[str, object]) -> None:
    """Check that at most one of these flags was given.

    :param flags: values by spelling; None and False are not given
    :raises typer.BadParameter: naming those that were
    """
    given = [flag for flag, value in flags.items() if value is not None and value is not False]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} exclude each other")


def _names(value: Iterable[str] | None) -> tuple[str, ...]:
    return tuple(value or ())


def _files(value: Iterable[Path] | None) -> tuple[Path, ...]:
    return tuple(value or ())


@frozen(kw_only=True)
class PromptFlags:
    """Says what the prompt is, and in which form it is sent.

    :ivar image: the images that the first message shows
    """

    prompt: str | None = None
    interactive: bool = False
    system: str | None = None
    raw: bool = False
    image: tuple[Path, ...] = field(default=(), converter=_files)

    def read(self) -> str | None:
        """Return the prompt: the one that was given, or what is piped in; None for a chat that begins at the terminal.

        :raises typer.BadParameter: there is none, or flags contradict each other
        """
        exclusive({"--raw": self.raw, "--interactive": self.interactive})
        exclusive({"--raw": self.raw, "--system": self.system})
        exclusive({"--raw": self.raw, "--image": self.image or None})
        if self.prompt is not None or self.interactive:
            return self.prompt
        try:
            text = "" if sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"what is piped in is no text in {error.encoding}") from None
        if text:
            return text
        if self.raw or not sys.stdin.isatty():
            raise typer.BadParameter("there is no prompt: give one, or pipe one in")
        return None


@frozen(kw_only=True)
class ModelFlags:
    """Says which model to load, and from which files."""

    model_id: str | None = None
    format: ModelFormat | None = None
    quantized_file: tuple[str, ...] = field(default=(), converter=_names)
    tok_model_id: Path | None = None
    chat_template: str | None = None
    dtype: str | None = None
    isq: str | None = None
    topology: Path | Topology | None = None
    vision: bool = False
    imatrix: Path | None = None
    calibration_file: Path | None = None
    isq_cache: Path | None = None
    image: tuple[Path, ...] = field(default=(), converter=_files)

    def builder(self) -> Builder:
        """Return the builder of the model.

        :raises typer.BadParameter: flags that contradict each other
        :raises PagedError: a value that cannot be used, or no embedded model
        """
        is_plain = self.format is ModelFormat.PLAIN
        exclusive({"--imatrix": self.imatrix, "--calibration-file": self.calibration_file})
        exclusive({"--format plain": is_plain, "--quantized-file": self.quantized_file or None})
        location = str(embedded_model_path()) if self.model_id is None else self.model_id
        if is_plain and os.path.isfile(os.path.expanduser(location)):
            raise typer.BadParameter(
                f"{location} is a file: a plain checkpoint is a directory or a hub id", param_hint="--format plain"
            )
        takes_images = self.vision or bool(self.image)
        builder: Builder = VisionModelBuilder(location) if takes_images else TextModelBuilder(location)
        if self._is_gguf(location):
            exclusive({"--vision": self.vision, "--image": self.image or None, "a GGUF file": True})
            builder = GgufModelBuilder(location, self.quantized_file)
        if self.tok_model_id is not None:
            path = self.tok_model_id
            builder = builder.with_tokenizer_json(path / "tokenizer.json" if os.path.isdir(path) else path)
        if self.chat_template is not None:
            builder = builder.with_chat_template(self.chat_template)
        if self.isq is not None:
            builder = builder.with_isq(IsqType.parse(self.isq, setting="--isq"))
        if self.topology is not None:
            builder = builder.with_topology(
                self.topology if isinstance(self.topology, Topology) else Topology.from_yaml(self.topology)
            )
        if self.imatrix is not None:
            builder = builder.with_imatrix(self.imatrix)
        if self.calibration_file is not None:
            builder = builder.with_calibration_file(self.calibration_file)
        if self.isq_cache is not None:
            builder = builder.with_isq_cache(self.isq_cache)
        return builder if self.dtype is None else builder.with_dtype(self.dtype)

    def _is_gguf(self, location: str) -> bool:
        if self.format is not None:
            return self.format is ModelFormat.GGUF
        if self.quantized_file:
            return True
        path = Path(os.path.expanduser(location))
        if os.path.isdir(path):  # which raises nothing, whatever the name, as Path.is_dir does
            return not os.path.exists(path / "config.json")
        # A path that does not exist is a hub id, in which a colon can only be followed by a quantization.
        return path.suffix == ".gguf" if os.path.exists(path) else ":" in location


@frozen(kw_only=True)
class PagedFlags:
    """Says whether the KV cache is paged, and how, in today's spellings and in earlier ones of mistral.rs."""

    paged_attn: PagedAttnMode = PagedAttnMode.AUTO
    no_paged_attn: bool = False
    pa_context_len: int | None = None
    pa_ctxt_len: int | None = None
    pa_memory_mb: int | None = None
    pa_gpu_mem: int | None = None
    pa_memory_fraction: float | None = None
    pa_gpu_mem_usage: float | None = None
    pa_block_size: int | None = None
    pa_blk_size: int | None = None
    pa_cache_type: PagedCacheType | None = None

    def apply(self, builder: Builder) -> Builder:
        """Return the builder with these flags applied.

        :raises typer.BadParameter: flags that contradict each other
        :raises ConfigError: a value that cannot be used
        """
        pool_sizes = {
            "--pa-context-len": self.pa_context_len,
            "--pa-ctxt-len": self.pa_ctxt_len,
            "--pa-memory-mb": self.pa_memory_mb,
            "--pa-gpu-mem": self.pa_gpu_mem,
            "--pa-memory-fraction": self.pa_memory_fraction,
            "--pa-gpu-mem-usage": self.pa_gpu_mem_usage,
        }
        block_sizes = {"--pa-block-size": self.pa_block_size, "--pa-blk-size": self.pa_blk_size}
        settings = {**pool_sizes, **block_sizes, "--pa-cache-type": self.pa_cache_type}
        exclusive(pool_sizes)
        exclusive(block_sizes)
        is_on = self.paged_attn is PagedAttnMode.ON
        is_off = self.paged_attn is PagedAttnMode.OFF
        exclusive({"--paged-attn on": is_on, "--no-paged-attn": self.no_paged_attn})
        if is_off or self.no_paged_attn:
            off = "--paged-attn off" if is_off else "--no-paged-attn"
            for flag, value in settings.items():
                exclusive({off: True, flag: value})
            return builder.without_paged_attn()
        if is_on or any(value is not None for value in settings.values()):
            return builder.with_paged_attn(self._meta())
        return builder

    def _meta(self) -> PagedAttentionMeta:
        meta = PagedAttentionMetaBuilder()
        for tokens in (self.pa_context_len, self.pa_ctxt_len):
            if tokens is not None:
                meta = meta.with_gpu_memory(MemoryGpuConfig.ContextSize(tokens))
        for megabytes in (self.pa_memory_mb, self.pa_gpu_mem):
            if megabytes is not None:
                meta = meta.with_gpu_memory(MemoryGpuConfig.MB(megabytes))
        for fraction in (self.pa_memory_fraction, self.pa_gpu_mem_usage):
            if fraction is not None:
                meta = meta.with_gpu_memory(MemoryGpuConfig.Fraction(fraction))
        for block_size in (self.pa_block_size, self.pa_blk_size):
            if block_size is not None:
                meta = meta.with_block_size(block_size)
        if self.pa_cache_type is not None:
            meta = meta.with_cache_type(self.pa_cache_type)
        return meta.build()


@frozen(kw_only=True)
class EngineFlags:
    """Says where the model runs, and how much it computes at once."""

    cpu: bool = False
    device: str | None = None
    num_threads: int | None = None
    max_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefix_cache_n: int | None = None
    max_seq_len: int | None = None
    speculate: int | None = None
    draft_model: str | None = None
    adapters: tuple[str, ...] = ()
    max_queue: int | None = None
    verbose: bool = False

    def apply(self, builder: Builder) -> Builder:
        """Return the builder with these flags applied.

        :raises typer.BadParameter: flags that contradict each other
        :raises ConfigError: a value that cannot be used
        """
        exclusive({"--cpu": self.cpu, "--device": self.device})
        if self.cpu:
            builder = builder.with_force_cpu()
        if self.device is not None:
            builder = builder.with_device(self.device)
        if self.num_threads is not None:
            builder = builder.with_num_threads(self.num_threads)
        if self.max_seqs is not None:
            builder = builder.with_max_num_seqs(self.max_seqs)
        if self.max_num_batched_tokens is not None:
            builder = builder.with_max_num_batched_tokens(self.max_num_batched_tokens)
        if self.prefix_cache_n is not None:
            builder = builder.with_prefix_cache_n(self.prefix_cache_n)
        if self.max_seq_len is not None:
            builder = builder.with_max_model_len(self.max_seq_len)
        if self.speculate is not None:
            builder = builder.with_speculation(SpeculativeConfig(self.speculate))
        if self.max_queue is not None:
            builder = builder.with_max_queue(self.max_queue)
        for adapter in self.adapters:
            name, found, path = adapter.partition("=")
            # A path may hold the sign too.
            is_named = bool(found) and not os.path.exists(os.path.expanduser(adapter))
            builder = builder.with_adapter(path, name=name) if is_named else builder.with_adapter(adapter)
        return builder.with_logging() if self.verbose else builder

    def add_draft(self, builder: Builder) -> AnyBuilder:
        """Return a builder with the model that is to guess tokens for it, if there is one.

        :raises typer.BadParameter: flags that contradict each other
        :raises ConfigError: a value that cannot be used
        """
        if self.draft_model is None:
            return builder
        if isinstance(builder, VisionModelBuilder):
            raise typer.BadParameter("a model that takes images and --draft-model exclude each other")
        is_gguf = self.draft_model.lower().endswith("gguf")
        draft = GgufModelBuilder(self.draft_model) if is_gguf else TextModelBuilder(self.draft_model)
        config = SpeculativeConfig() if self.speculate is None else SpeculativeConfig(self.speculate)
        return TextSpeculativeBuilder(builder, draft, config)


def check_arch(loaded: str, arch: str | None) -> None:
    """Check that a model is of the family that was named.

    :param loaded: its own
    :param arch: None: none was
    :raises typer.BadParameter: it is of another
    """
    if arch is not None and arch.lower().replace("_", "") != loaded.removesuffix("_text").replace("_", ""):
        raise typer.BadParameter(f"the model is of the family {loaded}, not {arch}", param_hint="--arch")


def builder_of(flags: Mapping[str, Any]) -> AnyBuilder:
    """Return the builder that a command line describes.

    :param flags: its options, by the names of the fields here; others are left alone
    :raises typer.BadParameter: flags that contradict each other
    :raises PagedError: a value that cannot be used, or no embedded model
    """

    def pick(kind: type[_FlagsT]) -> _FlagsT:
        return kind(**{name: flags[name] for name in fields_dict(kind) if name in flags})  # type: ignore[arg-type]  # they are attrs classes

    engine = pick(EngineFlags)
    return engine.add_draft(engine.apply(pick(PagedFlags).apply(pick(ModelFlags).builder())))


@frozen(kw_only=True)
class SamplingFlags:
    """Says how the next token is chosen: greedy, unless any flag but ``max_tokens`` is given."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None

    def sampling(self) -> SamplingParams:
        """Return the sampling settings; once any is given, the others come from the checkpoint.

        :raises ConfigError: a value out of its range
        """
        said: SamplingFields = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
        }
        sampling = evolve(read_sampling(said, max_len=None, top_n=None), seed=self.seed)
        if sampling == SamplingParams():
            sampling = SamplingParams.deterministic()
        return evolve(sampling, max_len=self.max_tokens)
