"""Defines the builders, by which an application says which model it wants and how it is to run."""

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
from paged_sdk.config.speculative import SpeculativeConfig
from paged_sdk.config.topology import Topology
from paged_sdk.errors import ConfigError

__all__ = [
    "GgufModelBuilder",
    "TextModelBuilder",
    "VisionModelBuilder",
]

AUTO_ISQ_BITS = (2, 3, 4, 5, 6, 8)


def _location(value: str | PathLike[str]) -> str:
    return path_text("model", value, "a path or a hub id")


def _filenames(value: str | Iterable[str]) -> tuple[str, ...]:
    names = as_tuple(value)
    if not isinstance(names, tuple):
        raise ConfigError.of("filenames", value, "names of files")
    return tuple(path_text("filenames", name, "names of files") for name in names)


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

        "auto" is bfloat16 where the hardware computes in it or, as on CPUs with AVX2, the native kernels lose nothing
        by it, else float32.
        """
        return self._with(dtype=dtype)

    def with_isq(self, isq: IsqType) -> Self:
        """Quantize the weights while loading, layer by layer, so that the peak of memory stays near their final size.

        :raises ConfigError: for anything but an :class:`IsqType`
        """
        return self._with(isq=isq)

    def with_auto_isq(self, bits: int) -> Self:
        """Quantize to the best format of so many bits for the device: 2, 3, 4, 5, 6 or 8.

        :raises ConfigError: another number of bits; the error names the allowed ones
        """
        number = plain(bits)
        if isinstance(number, bool) or not isinstance(number, int) or number not in AUTO_ISQ_BITS:
            raise ConfigError.of("with_auto_isq", bits, "a number of bits: 2, 3, 4, 5, 6 or 8")
        return self._with(isq=IsqType.parse(str(number)))

    def with_topology(self, topology: Topology) -> Self:
        """Say what single layers are to be, and on which device; where it says something, it counts before
        :meth:`with_isq` and :meth:`with_device`.

        :raises ConfigError: for anything but a :class:`Topology`
        """
        return self._with(topology=topology)

    def with_imatrix(self, path: str | PathLike[str]) -> Self:
        """Weigh errors of quantized weights by an importance matrix, a file of llama.cpp's llama-imatrix of either
        form: those of columns that are multiplied by larger numbers count for more. Types of GGUF's blocks, Q2K to
        Q8_1, use it, here and in :meth:`Model.re_isq_model`; building raises a ``CheckpointError`` where it is of
        another model.

        :raises ConfigError: for anything but a path, or beside :meth:`with_calibration_file`
        """
        return self._with(imatrix=Path(path_text("with_imatrix", path, "a path")))

    def with_calibration_file(self, path: str | PathLike[str]) -> Self:
        """Collect an importance matrix, as :meth:`with_imatrix` reads one, by running a file of text through the model
        as it is stored, before its weights are quantized.

        :raises ConfigError: for anything but a path, or beside :meth:`with_imatrix`
        """
        return self._with(calibration_file=Path(path_text("with_calibration_file", path, "a path")))

    def with_isq_cache(self, directory: str | PathLike[str]) -> Self:
        """Keep weights that are quantized while loading in a directory, which is made if it is missing: the next start
        with the same checkpoint and settings reads them instead of quantizing again.

        A checkpoint that has changed, other settings and other versions are quantized anew, as is what is damaged. A
        file takes as many bytes as the quantized weights. Where none are quantized, a warning says so.

        :raises ConfigError: for anything but a path; when building, on another device than the CPU
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
        """Use contiguous KV that grows with each sequence, without paged attention."""
        return self._with(paged_attn=False, paged_meta=None)

    def with_prefix_cache_n(self, n: int | None) -> Self:
        """Turn the prefix cache off with 0 or None. With paged attention any other number turns it on; without it that
        many finished sequences are kept."""
        return self._with(prefix_cache_n=0 if n is None else n)

    def with_max_num_seqs(self, n: int) -> Self:
        """Set how many sequences are computed at once; others wait."""
        return self._with(max_num_seqs=n)

    def with_max_queue(self, n: int) -> Self:
        """Set how many requests may wait; more get :class:`QueueFullError`."""
        return self._with(max_queue=n)

    def with_max_num_batched_tokens(self, n: int) -> Self:
        """Set the most tokens of one step: with more, the memory of a step grows, and long prompts may be faster."""
        return self._with(max_num_batched_tokens=n)

    def with_max_slowdown(self, factor: float) -> Self:
        """Set by what factor the tokens of a text may take longer while a prompt is computed beside it.

        The more, the sooner the prompt has its first token: with 3, a token takes three times as long as without the
        prompt, and the prompt one and a half times as long as without the text; with 2, each takes twice as long. 0
        computes as much of the prompt in each step as :meth:`with_max_num_batched_tokens` allows.

        :raises ConfigError: for anything but 0 and finite numbers above 1
        """
        return self._with(max_slowdown=factor)

    def with_speculation(self, speculation: SpeculativeConfig | None) -> Self:
        """Guess tokens ahead from what was written before, and verify several of them in one step; None: do not.

        Texts stay as they are. Those that repeat parts of their prompt, such as edited code, come several times as
        fast; where nothing is gained, nothing is guessed.

        :raises ConfigError: for anything but :class:`SpeculativeConfig` or None
        """
        if speculation is not None and not isinstance(speculation, SpeculativeConfig):
            raise ConfigError.of("with_speculation", speculation, "SpeculativeConfig or None")
        return self._with(gamma=0 if speculation is None else speculation.gamma)

    def with_max_model_len(self, n: int) -> Self:
        """Set the most tokens of a sequence, prompt and output together; at most the model's own context."""
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
        """Use the tokenizer of another model instead of the checkpoint's, and its chat template where a GGUF file has
        none.

        :param model_id_or_dir: a directory or hub id with a tokenizer.json, or that file
        :raises ConfigError: for anything else, or beside :meth:`with_tokenizer_json`
        """
        return self._with(tok_model_id=path_text("with_tok_model_id", model_id_or_dir, "a path or a hub id"))

    def with_hf_revision(self, revision: str) -> Self:
        """Load a branch, tag or commit of the hub's repository."""
        return self._with(revision=revision)

    def with_token_source(self, source: str) -> Self:
        """Set where the hub's access token comes from: "cache" (the default), "none", "literal:...", "env:NAME" or
        "path:FILE"."""
        return self._with(token_source=source)

    def with_num_threads(self, n: int) -> Self:
        """Set how many CPU threads compute a step; all models of a process share them."""
        return self._with(num_threads=n)

    def with_tensor_parallel(self, n: int | Literal["auto"]) -> Self:
        """Have ``n`` processes compute the model together, each with a part of every matrix and of the KV cache; those
        of one machine use the CPU threads that one would (docs/parallel.md).

        :param n: "auto": one for each GPU; on the CPU, one for each NUMA node whose processors this process may use
        """
        return self._with(tensor_parallel=n)

    def with_batch_invariance(self) -> Self:
        """Use the same arithmetic for every row count, so that a text does not depend on the batch around it.

        It requires the CPU's native kernels. Long prompts take longer: they do without the int8 products of quantized
        weights, and without attention in int8 or bfloat16.
        """
        return self._with(batch_invariance=True)

    def with_lean_memory(self) -> Self:
        """Hold each quantized weight once. Every model does by now, so this changes nothing; it is kept for programs
        that ask for it.
        """
        return self._with(lean_memory=True)

    def with_adapter(self, path: str | PathLike[str], *, name: str | None = None) -> Self:
        """Load an adapter with the model, for requests to name; see :meth:`Model.load_adapter`.

        :param path: a directory as PEFT saves it, a GGUF file, or a hub id
        :param name: what requests call it; None: the last part of the path, without ``.gguf``
        :raises ConfigError: another adapter has that name
        """
        source = AdapterSource.of("with_adapter", path, name)
        return self._with(adapters=(*self.settings.adapters, source))

    def with_token_healing(self) -> Self:
        """Let the last tokens of a plain-text prompt be chosen anew, together with what follows them.

        A prompt that ends within what the model knows as one token, such as "http:", is then continued as a whole
        text would be. What was in the prompt is not repeated in the completion. Chats are not changed, and neither
        are prompts of token ids.
        """
        return self._with(token_healing=True)

    def with_ranking_tokens(self, true: str, false: str | None = None) -> Self:
        """Rank texts by how the model answers: ``("yes", "no")`` for Qwen3-Reranker. The number of a document is the
        logit of the one token less that of the other, after what the chat template makes of a message of the role
        "query" and one of the role "document".

        Checkpoints that sentence-transformers has written name the tokens themselves.

        :param true: what it answers where a document goes with a query: a text that is one token
        :param false: what it answers where it does not; None: the logit of ``true`` is the number
        :raises ConfigError: one that is no text; :meth:`build` raises it where one is not one token, or the chat
            template leaves such messages out (see :meth:`with_chat_template`)
        """
        return self._with(ranking_tokens=(true, false))

    def build(self) -> Building:
        """Load the model: ``await`` it, or ``async with`` it.

        Weights are loaded in a helper thread.

        :raises ConfigError: a setting or an environment variable cannot be used
        :raises ModelLoadError: the model cannot be loaded
        """
        return Building(self.source, self.settings)

    def _with(self, **changes: Any) -> Self:
        for name, value in changes.items():
            if value is None and name != "paged_meta":  # which without_paged_attn() takes away
                raise ConfigError.of(name, value, "a value: leave the call out to say nothing")
        return evolve(self, settings=evolve(self.settings, **changes))


@frozen
class TextModelBuilder(_ModelBuilder):
    """Builds a text model from a Hugging Face checkpoint.

    :param model_id_or_dir: a directory with config.json and safetensors, a GGUF file, or a hub id
    :raises ConfigError: for anything but a path or an id
    """

    model_id_or_dir: str = field(converter=_location)

    @property
    def source(self) -> ModelSource:
        return ModelSource(location=self.model_id_or_dir, gguf=False)


@frozen
class GgufModelBuilder(_ModelBuilder):
    """Builds a model from GGUF files.

    It takes images, if it has an image encoder, which is in a file of its own with "mmproj" in its name:
    :meth:`with_mmproj` names it, or ``filenames`` do, or it is the only one in the directory. Images need
    ``pip install 'paged-sdk[vision]'``.

    :param dir_or_repo: a GGUF file, a directory with GGUF files, or a hub id, also as ``repo:Q4_K_M``
    :param filenames: which files of the directory or repository; empty: the only model in it
    :param mmproj: the image encoder's file, as :meth:`with_mmproj` takes it
    :raises ConfigError: for anything but a path or an id
    """

    dir_or_repo: str = field(converter=_location)
    filenames: tuple[str, ...] = field(default=(), converter=_filenames)
    mmproj: str | None = field(default=None, converter=_encoder, kw_only=True)

    @property
    def source(self) -> ModelSource:
        named = [name for name in self.filenames if is_encoder_name(name)]
        return ModelSource(
            location=self.dir_or_repo,
            filenames=tuple(name for name in self.filenames if name not in named),
            gguf=True,
            mmproj=self.mmproj or next(iter(named), None),
        )

    def with_mmproj(self, path: str | PathLike[str]) -> Self:
        """Take images by the encoder of this file, as llama.cpp's tools write it (mmproj).

        :param path: a file, or its name in the model's directory or repository
        :raises ConfigError: for anything but a path
        """
        return evolve(self, mmproj=path_text("with_mmproj", path, "a path"))

    def with_image_limits(self, limits: ImageLimits) -> Self:
        """Set how large and how many images may be, of a model that takes some.

        :raises ConfigError: for anything but :class:`ImageLimits`
        """
        return self._with(images=limits)


@frozen
class VisionModelBuilder(_ModelBuilder):
    """Builds a model that takes images beside text, from a Hugging Face checkpoint with an image encoder.

    It needs ``pip install 'paged-sdk[vision]'``: transformers computes the encoder, and Pillow reads images.

    :param model_id_or_dir: a directory with config.json, safetensors and the image processor's settings, or a hub id
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
        """Set how large and how many images may be.

        :raises ConfigError: for anything but :class:`ImageLimits`
        """
        return self._with(images=limits)
