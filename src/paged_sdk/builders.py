"""Defines the builders, with which an application chooses a model and its settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self

from attrs import evolve, field, frozen

from paged_sdk.building import Building
from paged_sdk.config.build import AdapterSource, BuildSettings, ModelSource, is_encoder_name
from paged_sdk.config.checks import IsA, as_tuple, is_unicode, path_text, plain
from paged_sdk.config.images import ImageLimits
from paged_sdk.config.isq import IsqType
from paged_sdk.config.paged import PagedAttentionMeta
from paged_sdk.config.prefix_cache_dir import DEFAULT_MAX_BYTES, PrefixCacheDir
from paged_sdk.config.speculative import SpeculativeConfig
from paged_sdk.config.topology import Topology
from paged_sdk.errors import ConfigError
from paged_sdk.weights.gguf.split import split_parts

__all__ = [
    "GgufModelBuilder",
    "TextModelBuilder",
    "VisionModelBuilder",
]

AUTO_ISQ_BITS = (2, 3, 4, 5, 6, 8)


def _location(value: str | PathLike[str]) -> str:
    return path_text("model", value, "a path or a hub id")


def _filenames(value: str | Iterable[str]) -> tuple[str, ...]:
    given = as_tuple(value)
    if not isinstance(given, tuple):
        raise ConfigError.of("filenames", value, "names of files")
    names = tuple(path_text("filenames", name, "names of files") for name in given)
    for files in _models_and_encoders(names):
        if not set(files) <= set(split_parts(files[0]) if files else ()):
            raise ConfigError.of("filenames", names, "one model (all its parts, if it is split) and one image encoder")
    return names


def _models_and_encoders(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Divide GGUF files, by their names, into those of models and those of image encoders."""
    encoders = [name for name in names if is_encoder_name(name)]
    return [name for name in names if name not in encoders], encoders


def _encoder(value: str | PathLike[str] | None) -> str | None:
    return None if value is None else path_text("with_mmproj", value, "a path")


@frozen
class _ModelBuilder(ABC):
    """Holds the settings that all builders share. It is immutable: each ``with_*`` returns a new builder."""

    settings: BuildSettings = field(factory=BuildSettings, validator=IsA(BuildSettings), kw_only=True)

    @property
    @abstractmethod
    def source(self) -> ModelSource:
        """Return which model to load."""

    def with_dtype(self, dtype: str) -> Self:
        """Set the dtype of weights and activations: "auto", "bfloat16", "float16", "float32" or "float64" ("bf16" and
        so on).

        "auto" is bfloat16 where the hardware computes in it, and on CPUs with AVX2, where the native kernels lose
        nothing by it; otherwise float32.
        """
        return self._with(dtype=dtype)

    def with_isq(self, isq: IsqType) -> Self:
        """Quantize the weights while loading, layer by layer, so that peak memory stays near their final size.

        :raises ConfigError: for anything but an :class:`IsqType`
        """
        return self._with(isq=isq)

    def with_auto_isq(self, bits: int) -> Self:
        """Quantize while loading to the best type for the device with this number of bits: 2, 3, 4, 5, 6 or 8.

        :raises ConfigError: another number of bits; the error names the allowed ones
        """
        number = plain(bits)
        if isinstance(number, bool) or not isinstance(number, int) or number not in AUTO_ISQ_BITS:
            raise ConfigError.of("with_auto_isq", bits, "a number of bits: 2, 3, 4, 5, 6 or 8")
        return self._with(isq=IsqType.parse(str(number)))

    def with_topology(self, topology: Topology) -> Self:
        """Set the quantization and device of single layers or matrices. It wins over :meth:`with_isq` and
        :meth:`with_device`.

        :raises ConfigError: for anything but a :class:`Topology`
        """
        return self._with(topology=topology)

    def with_imatrix(self, path: str | PathLike[str]) -> Self:
        """Weight quantization errors by an importance matrix: a file of llama.cpp's llama-imatrix, GGUF or .dat.

        Errors in columns that are multiplied by larger activations then count for more. The GGUF block types, Q2K to
        Q8_1, use it, also in :meth:`Model.re_isq_model`. Building raises a ``CheckpointError`` if it belongs to another
        model.

        :raises ConfigError: for anything but a path, or together with :meth:`with_calibration_file`
        """
        return self._with(imatrix=Path(path_text("with_imatrix", path, "a path")))

    def with_calibration_file(self, path: str | PathLike[str]) -> Self:
        """Compute an importance matrix, as for :meth:`with_imatrix`, by running a text file through the unquantized
        model.

        :raises ConfigError: for anything but a path, or together with :meth:`with_imatrix`
        """
        return self._with(calibration_file=Path(path_text("with_calibration_file", path, "a path")))

    def with_isq_cache(self, directory: str | PathLike[str]) -> Self:
        """Cache the weights that are quantized while loading in a directory, which is created if missing: the next
        start with the same checkpoint and settings reads them instead of quantizing again.

        A changed checkpoint, other settings, another version of this package and damaged files are quantized again. A
        file is as large as the quantized weights. A warning says if nothing is quantized.

        :raises ConfigError: for anything but a path; when building, on a device other than the CPU
        """
        return self._with(isq_cache=Path(path_text("with_isq_cache", directory, "a path")))

    def with_device(self, device: str) -> Self:
        """Choose where the model runs: "auto", "cpu", "cuda", "cuda:1", "mps"."""
        return self._with(device=device)

    def with_force_cpu(self) -> Self:
        """Run on the CPU, even if there is another device."""
        return self._with(device="cpu")

    def with_paged_attn(self, paged_attn: PagedAttentionMeta | Callable[[], PagedAttentionMeta]) -> Self:
        """Use paged attention with these settings, whatever the environment says.

        :raises ConfigError: for anything but :class:`PagedAttentionMeta` or a callable that returns one
        """
        meta: object = paged_attn
        if callable(paged_attn) and not isinstance(paged_attn, PagedAttentionMeta):
            meta = paged_attn()
        if not isinstance(meta, PagedAttentionMeta):
            raise ConfigError.of("with_paged_attn", meta, "PagedAttentionMeta or a callable that returns one")
        return self._with(paged_attn=True, paged_meta=meta)

    def without_paged_attn(self) -> Self:
        """Use contiguous KV that grows with each sequence instead of paged attention."""
        return self._with(paged_attn=False, paged_meta=None)

    def with_prefix_cache_n(self, n: int | None) -> Self:
        """Turn the prefix cache off with 0 or None. Any other number turns it on; without paged attention, it is the
        number of finished sequences to keep.
        """
        return self._with(prefix_cache_n=0 if n is None else n)

    def with_prefix_cache_dir(self, path: str | PathLike[str], max_bytes: int = DEFAULT_MAX_BYTES) -> Self:
        """Keep the prefix cache in a directory, too, which is created if missing: prompts whose KV has left the pool,
        or was computed by an earlier process, are read from there instead of being computed again.

        Several processes and models may share a directory. Its files hold the KV of prompts, from which their text can
        be inferred: only its owner can read them.

        :param max_bytes: the size of the directory, from which on the blocks that were unused for longest are removed;
            default: 8 GiB
        :raises ConfigError: for anything but a path and a positive number; when building, without paged attention or
            prefix cache, for encoders, with tensor parallelism, and for a directory that cannot be written to
        """
        directory = Path(path_text("with_prefix_cache_dir", path, "a path"))
        return self._with(prefix_cache_dir=PrefixCacheDir(directory, max_bytes))

    def with_max_num_seqs(self, n: int) -> Self:
        """Set how many sequences are computed at once; others wait."""
        return self._with(max_num_seqs=n)

    def with_max_queue(self, n: int) -> Self:
        """Set how many requests may wait; further ones raise :class:`QueueFullError`."""
        return self._with(max_queue=n)

    def with_max_num_batched_tokens(self, n: int) -> Self:
        """Set the maximum number of tokens per step. More tokens take more memory per step and may speed up long
        prompts.
        """
        return self._with(max_num_batched_tokens=n)

    def with_max_slowdown(self, factor: float) -> Self:
        """Set how many times longer a sequence's tokens may take while a prompt is prefilled beside it.

        The larger the factor, the sooner the prompt has its first token: with 3, a token takes three times as long as
        without the prompt, and the prompt one and a half times as long as alone; with 2, each takes twice as long. 0
        sets no limit: each step computes as much of the prompt as :meth:`with_max_num_batched_tokens` allows.

        :raises ConfigError: for anything but 0 and finite numbers above 1
        """
        return self._with(max_slowdown=factor)

    def with_speculation(self, speculation: SpeculativeConfig | None) -> Self:
        """Turn on speculative decoding: draft tokens from earlier text, and verify several of them in one step. None
        turns it off.

        The output does not change. Text that repeats parts of its prompt, such as edited code, is generated several
        times as fast; where drafts do not pay, none are made.

        :raises ConfigError: for anything but :class:`SpeculativeConfig` or None
        """
        if speculation is not None and not isinstance(speculation, SpeculativeConfig):
            raise ConfigError.of("with_speculation", speculation, "SpeculativeConfig or None")
        if speculation is None:
            return self._with(gamma=0, mtp=False)
        return self._with(gamma=speculation.gamma, mtp=speculation.mtp)

    def with_max_model_len(self, n: int) -> Self:
        """Set the maximum number of tokens per sequence, prompt and output together; at most the model's context."""
        return self._with(max_model_len=n)

    def with_logging(self) -> Self:
        """Show log lines and a progress bar on stderr."""
        return self._with(logging=True)

    def with_throughput_logging(self) -> Self:
        """Log tokens per second and the state of the KV pool every few seconds of work."""
        return self._with(logging=True, throughput_logging=True)

    def with_chat_template(self, template: str | PathLike[str]) -> Self:
        """Use a Jinja chat template, given as text or as the path of a file, instead of the checkpoint's.

        :raises ConfigError: for anything else
        """
        if isinstance(template, str) and ("{%" in template or "{{" in template) and is_unicode(template):
            return self._with(chat_template=template)
        return self._with(chat_template=Path(path_text("with_chat_template", template, "a template or a path")))

    def with_tokenizer_json(self, path: str | PathLike[str]) -> Self:
        """Use a tokenizer.json instead of the checkpoint's tokenizer.

        :raises ConfigError: for anything but a path
        """
        return self._with(tokenizer_json=Path(path_text("with_tokenizer_json", path, "a path")))

    def with_tok_model_id(self, model_id_or_dir: str | PathLike[str]) -> Self:
        """Use the tokenizer of another model instead of the checkpoint's, and its chat template if a GGUF file has
        none.

        :param model_id_or_dir: a directory or Hub id with a tokenizer.json, or that file
        :raises ConfigError: for anything else, or together with :meth:`with_tokenizer_json`
        """
        return self._with(tok_model_id=path_text("with_tok_model_id", model_id_or_dir, "a path or a hub id"))

    def with_hf_revision(self, revision: str) -> Self:
        """Load a branch, tag or commit of the Hub repository."""
        return self._with(revision=revision)

    def with_token_source(self, source: str) -> Self:
        """Set where the Hub's access token comes from: "cache" (the default), "none", "literal:...", "env:NAME" or
        "path:FILE".
        """
        return self._with(token_source=source)

    def with_num_threads(self, n: int) -> Self:
        """Set how many CPU threads compute a step; all models of a process share them."""
        return self._with(num_threads=n)

    def with_tensor_parallel(self, n: int | Literal["auto"]) -> Self:
        """Divide the model among ``n`` processes, each with a part of every matrix and of the KV cache. Those on one
        machine share the CPU threads that one process would use (docs/parallel.md).

        :param n: "auto": one per GPU; on the CPU, one per NUMA node whose processors this process may use
        """
        return self._with(tensor_parallel=n)

    def with_batch_invariance(self) -> Self:
        """Make a sequence's results independent of the batch around it, by the same arithmetic for every number of
        rows.

        It requires the native CPU kernels. Long prompts take longer, without int8 products of quantized weights and
        without attention in int8 or bfloat16.
        """
        return self._with(batch_invariance=True)

    def with_lean_memory(self) -> Self:
        """Hold each quantized weight only once. Every model does so anyway: this has no effect, and is kept for
        programs that call it.
        """
        return self._with(lean_memory=True)

    def with_adapter(self, path: str | PathLike[str], *, name: str | None = None) -> Self:
        """Load a LoRA adapter with the model, for requests to choose; see :meth:`Model.load_adapter`.

        :param path: a PEFT directory, a GGUF file, or a Hub id
        :param name: its name for requests; None: the last part of the path, without ``.gguf``
        :raises ConfigError: another adapter has that name
        """
        source = AdapterSource.of("with_adapter", path, name)
        return self._with(adapters=(*self.settings.adapters, source))

    def with_token_healing(self) -> Self:
        """Regenerate the last tokens of a plain-text prompt together with what follows them.

        A prompt that ends in the middle of what the model knows as one token, such as "http:", is then continued as a
        whole text would be. The completion does not repeat the prompt. Chats and prompts of token ids are not changed.
        """
        return self._with(token_healing=True)

    def with_ranking_tokens(self, true: str, false: str | None = None) -> Self:
        """Rerank documents with a model that generates text (:meth:`paged_sdk.Model.rank`): ``("yes", "no")`` for
        Qwen3-Reranker. A document's logit is the logit of the one token minus that of the other, after the prompt that
        the chat template renders from a message with the role "query" and one with the role "document".

        Checkpoints written by sentence-transformers name the tokens themselves.

        :param true: the answer for a relevant document; has to be one token
        :param false: the answer for an irrelevant one; None: the logit of ``true`` alone counts
        :raises ConfigError: one that is not a text; :meth:`build` raises it where one is not a single token, or the
            chat template does not render these two roles (see :meth:`with_chat_template`)
        """
        return self._with(ranking_tokens=(true, false))

    def build(self) -> Building:
        """Load the model: ``await`` it, or ``async with`` it.

        Weights are loaded in a helper thread.

        :raises ConfigError: a setting or an environment variable is invalid
        :raises ModelLoadError: the model cannot be loaded
        """
        return Building(self.source, self.settings)

    def _with(self, **changes: Any) -> Self:
        for name, value in changes.items():
            if value is None and name != "paged_meta":  # without_paged_attn() sets it to None
                raise ConfigError.of(name, value, "a value: leave the call out for the default")
        return evolve(self, settings=evolve(self.settings, **changes))


@frozen
class TextModelBuilder(_ModelBuilder):
    """Builds a text model from a Hugging Face checkpoint.

    :param model_id_or_dir: a directory with config.json and safetensors, a GGUF file, or a Hub id
    :raises ConfigError: for anything but a path or an id
    """

    model_id_or_dir: str = field(converter=_location)

    @property
    def source(self) -> ModelSource:
        return ModelSource(location=self.model_id_or_dir, gguf=False)


@frozen
class GgufModelBuilder(_ModelBuilder):
    """Builds a model from GGUF files.

    It takes images if it has an image encoder, a separate file with "mmproj" in its name: named by :meth:`with_mmproj`
    or in ``filenames``, or the only one in the directory. Images need ``pip install 'paged-sdk[vision]'``.

    :param dir_or_repo: a GGUF file, a directory with GGUF files, or a Hub id, such as ``repo:Q4_K_M``
    :param filenames: the model's file in the directory or repository, or parts of a split model (one is enough), and
        perhaps its image encoder's file; empty: the only model there
    :param mmproj: the image encoder's file, as for :meth:`with_mmproj`; it takes precedence over one in ``filenames``
    :raises ConfigError: for anything but a path or an id, or if ``filenames`` name more than one model or encoder
    """

    dir_or_repo: str = field(converter=_location)
    filenames: tuple[str, ...] = field(default=(), converter=_filenames)
    mmproj: str | None = field(default=None, converter=_encoder, kw_only=True)

    @property
    def source(self) -> ModelSource:
        models, encoders = _models_and_encoders(self.filenames)
        return ModelSource(
            location=self.dir_or_repo,
            filename=next(iter(models), None),
            gguf=True,
            mmproj=self.mmproj or next(iter(encoders), None),
        )

    def with_mmproj(self, path: str | PathLike[str]) -> Self:
        """Take images, with the image encoder in this file, as llama.cpp's tools write it (mmproj).

        :param path: a file, or its name in the model's directory or repository
        :raises ConfigError: for anything but a path
        """
        return evolve(self, mmproj=path_text("with_mmproj", path, "a path"))

    def with_image_limits(self, limits: ImageLimits) -> Self:
        """Limit the number and size of images.

        :raises ConfigError: for anything but :class:`ImageLimits`
        """
        return self._with(images=limits)


@frozen
class VisionModelBuilder(_ModelBuilder):
    """Builds a model that takes images as well as text, from a Hugging Face checkpoint with an image encoder.

    It needs ``pip install 'paged-sdk[vision]'``: transformers computes the encoder, and Pillow reads images.

    :param model_id_or_dir: a directory with config.json, safetensors and the image processor's settings, or a Hub id
    :raises ConfigError: for anything but a path or an id
    """

    model_id_or_dir: str = field(converter=_location)
    settings: BuildSettings = field(
        factory=partial(BuildSettings, images=ImageLimits()), validator=IsA(BuildSettings), kw_only=True
    )

    @property
    def source(self) -> ModelSource:
        return ModelSource(location=self.model_id_or_dir, gguf=False)

    def with_image_limits(self, limits: ImageLimits) -> Self:
        """Limit the number and size of images.

        :raises ConfigError: for anything but :class:`ImageLimits`
        """
        return self._with(images=limits)
