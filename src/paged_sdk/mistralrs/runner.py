"""Provides mistral.rs's ``Runner``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from paged_sdk import (
    BlockingModel,
    ConfigError,
    InvalidRequestError,
    IsqType,
    SamplingParams,
)
from paged_sdk import PagedCacheType as CacheType
from paged_sdk.mistralrs.absent import METHODS, AbsentMethodError
from paged_sdk.mistralrs.adapters import LoraAdapterError, LoraAdapterGeneration, LoraAdapterInfo, LoraRuntimeStatus
from paged_sdk.mistralrs.answers import Answers
from paged_sdk.mistralrs.callbacks import checked_callbacks
from paged_sdk.mistralrs.enums import IsqOrganization, PagedCacheType
from paged_sdk.mistralrs.generations import Generations
from paged_sdk.mistralrs.requests import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, StreamT
from paged_sdk.mistralrs.residence import Residence, Status
from paged_sdk.mistralrs.responses import ChatCompletionResponse, CompletionResponse
from paged_sdk.mistralrs.settings import (
    DEFAULT_PREFIX_CACHE_N,
    adapter_limits,
    check_architecture,
    configured,
    paged_settings,
    quantized,
    template_of,
    with_speculation,
)
from paged_sdk.mistralrs.stream import ChatCompletionStream
from paged_sdk.mistralrs.unsupported import check_switches, refuse_settings
from paged_sdk.mistralrs.which import Which

__all__ = ["Runner"]


class Runner:
    """Holds a loaded model. Several threads may use it at once: their requests are batched.

    :param which: the model
    :param max_seqs: sequences computed at once; others wait
    :param prefix_cache_n: 0 or None turns the prefix cache off; the environment can change the default
    :param token_source: the Hub's access token: "cache", "none", "literal:...", "env:NAME" or "path:FILE"
    :param chat_template: another Jinja chat template: its text, or a path
    :param jinja_explicit: the path of a Jinja file, as ``chat_template``
    :param in_situ_quant: quantize the weights while loading: "4", "Q4K", "Q8_0" ...
    :param pa_gpu_mem: size of the KV pool in MiB; at most one of the three sizes may be given
    :param pa_gpu_mem_usage: the same, as a fraction of the device's memory
    :param pa_ctxt_len: the same, in tokens
    :param pa_blk_size: tokens per block
    :param pa_cache_type: the type of KV elements
    :param no_paged_attn: use contiguous KV that grows with each sequence
    :param paged_attn: use paged attention, or raise an error where that is not possible
    :param seed: the seed of every request that samples: the same request draws the same random numbers, and gives the
        same text unless more than 12 are generated at a time (see ``with_batch_invariance`` of the builders). None
        draws a seed for each request
    :param tool_callbacks: functions that run tools, by name: each gets the tool's name and arguments, and returns a
        text for the model, in the thread that waits for the answer. The answer comes once the model calls none of them
        any more; calls of tools without a callback are returned to the program
    :param mtp_model: directory, GGUF file or Hub id of an assistant that drafts for this model (Gemma 4)
    :param mtp_n_predict: maximum number of draft tokens at a time from the assistant, default 16; without one, from the
        model's own layer for multi-token prediction
    :param which_draft: a draft model: a smaller one with the same vocabulary; mistral.rs had it before 0.7
    :param speculative_gamma: maximum number of draft tokens at a time; default 32 with a draft model. Without one,
        drafts come from the text itself
    :param memory_goal: the size of the KV pool as in mistral.rs from 0.9.5 on: 0.9 of the device's memory, "4GiB" or
        "65536tokens"
    :raises ConfigError: contradictory settings, or a parameter of an unsupported feature
    :raises ModelLoadError: a model that cannot be loaded
    """

    def __init__(
        self,
        which: Which,
        max_seqs: int = 16,
        no_kv_cache: bool = False,
        prefix_cache_n: int | None = DEFAULT_PREFIX_CACHE_N,
        token_source: str = "cache",
        mtp_model: str | PathLike[str] | None = None,
        mtp_n_predict: int | None = None,
        chat_template: str | None = None,
        jinja_explicit: str | None = None,
        num_device_layers: None = None,
        in_situ_quant: str | None = None,
        anymoe_config: None = None,
        pa_gpu_mem: int | None = None,
        pa_gpu_mem_usage: float | None = None,
        pa_ctxt_len: int | None = None,
        pa_blk_size: int | None = None,
        pa_cache_type: PagedCacheType | CacheType | None = None,
        no_paged_attn: bool = False,
        paged_attn: bool = False,
        seed: int | None = None,
        enable_search: bool = False,
        search_embedding_model: None = None,
        search_callback: None = None,
        tool_callbacks: Mapping[str, Callable[[str, dict[str, Any]], str]] | None = None,
        mcp_client_config: None = None,
        code_execution_config: None = None,
        shell_config: None = None,
        *,
        which_draft: Which | None = None,
        speculative_gamma: int | None = None,
        memory_goal: str | float | None = None,
    ) -> None:
        check_switches(no_paged_attn=no_paged_attn, paged_attn=paged_attn)
        refuse_settings(default=False, no_kv_cache=no_kv_cache, enable_search=enable_search)
        refuse_settings(
            num_device_layers=num_device_layers,
            anymoe_config=anymoe_config,
            search_embedding_model=search_embedding_model,
            search_callback=search_callback,
            mcp_client_config=mcp_client_config,
            code_execution_config=code_execution_config,
            shell_config=shell_config,
        )
        if not isinstance(which, Which):
            raise ConfigError.of("which", which, "Which.Plain(...), Which.Lora(...) or Which.GGUF(...)")
        meta = paged_settings(
            pa_gpu_mem=pa_gpu_mem,
            pa_gpu_mem_usage=pa_gpu_mem_usage,
            pa_ctxt_len=pa_ctxt_len,
            pa_blk_size=pa_blk_size,
            pa_cache_type=pa_cache_type,
            no_paged_attn=no_paged_attn,
            paged_attn=paged_attn,
            memory_goal=memory_goal,
        )
        builder = configured(
            which.builder().with_max_num_seqs(max_seqs).with_token_source(token_source),
            template=template_of(chat_template, jinja_explicit),
            meta=meta,
            no_paged_attn=no_paged_attn,
            prefix_cache_n=prefix_cache_n,
        )
        builder = quantized(builder, which, in_situ_quant)
        sources = {source.name: source.location for source in builder.settings.adapters}
        self._generations = Generations(sources, adapter_limits(which))
        callbacks, seed = checked_callbacks(tool_callbacks), SamplingParams(seed=seed).seed
        self._which = which
        whole = with_speculation(builder, which_draft, speculative_gamma, mtp_n_predict, mtp_model)
        self._residence = Residence(lambda: BlockingModel(whole.build()), when_reloaded=self._generations.reset)
        self._answers = Answers(self._residence.model, self._generations, callbacks, seed=seed)
        try:
            check_architecture(which, self._model)
            self._generations.check_limits(self._model)
        except ConfigError:
            self.close()
            raise

    if not TYPE_CHECKING:  # hidden from type checkers, which would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            if name in METHODS:
                raise AbsentMethodError(f"Runner.{name} does not exist: {METHODS[name]}", setting=name)
            raise AttributeError(f"'Runner' object has no attribute {name!r}", name=name, obj=self)

    @property
    def _model(self) -> BlockingModel:
        return self._residence.model()

    @overload
    def send_chat_completion_request(
        self, request: ChatCompletionRequest[Literal[False]], model_id: str | None = None
    ) -> ChatCompletionResponse: ...

    @overload
    def send_chat_completion_request(
        self, request: ChatCompletionRequest[Literal[True]], model_id: str | None = None
    ) -> ChatCompletionStream: ...

    @overload
    def send_chat_completion_request(
        self, request: ChatCompletionRequest[bool], model_id: str | None = None
    ) -> ChatCompletionResponse | ChatCompletionStream: ...

    def send_chat_completion_request(
        self, request: ChatCompletionRequest[StreamT], model_id: str | None = None
    ) -> ChatCompletionResponse | ChatCompletionStream:
        """Answer a conversation.

        :returns: the response; with ``stream=True`` an iterator of chunks, which ends the request when it is closed
            or dropped
        :raises ConfigError: sampling value out of range, or an unknown ``model_id``
        :raises RequestError: malformed or unsupported request
        """
        self._check_model(model_id)
        if not isinstance(request, ChatCompletionRequest):
            raise InvalidRequestError.of("request", request, "a ChatCompletionRequest")
        return self._answers.chat(request)

    def send_completion_request(self, request: CompletionRequest, model_id: str | None = None) -> CompletionResponse:
        """Continue a text.

        :raises ConfigError: sampling value out of range, or an unknown ``model_id``
        :raises RequestError: malformed or unsupported request
        """
        self._check_model(model_id)
        if not isinstance(request, CompletionRequest):
            raise InvalidRequestError.of("request", request, "a CompletionRequest")
        return self._answers.completion(request)

    def send_embedding_request(self, request: EmbeddingRequest, model_id: str | None = None) -> list[list[float]]:
        """Return an embedding of each text, as the checkpoint says.

        :raises ConfigError: an unknown ``model_id``
        :raises RequestError: malformed or unsupported request
        """
        self._check_model(model_id)
        if not isinstance(request, EmbeddingRequest):
            raise InvalidRequestError.of("request", request, "an EmbeddingRequest")
        vectors: list[list[float]] = self._model.embed(
            request.input, truncation=request.truncate_sequence
        ).embeddings.tolist()
        return vectors

    @overload
    def send_chat_completion_request_to_model(
        self, request: ChatCompletionRequest[Literal[False]], model_id: str
    ) -> ChatCompletionResponse: ...

    @overload
    def send_chat_completion_request_to_model(
        self, request: ChatCompletionRequest[Literal[True]], model_id: str
    ) -> ChatCompletionStream: ...

    @overload
    def send_chat_completion_request_to_model(
        self, request: ChatCompletionRequest[bool], model_id: str
    ) -> ChatCompletionResponse | ChatCompletionStream: ...

    def send_chat_completion_request_to_model(
        self, request: ChatCompletionRequest[Any], model_id: str
    ) -> ChatCompletionResponse | ChatCompletionStream:
        """Answer a conversation; see :meth:`send_chat_completion_request`."""
        answer: ChatCompletionResponse | ChatCompletionStream = self.send_chat_completion_request(request, model_id)
        return answer

    def send_completion_request_to_model(self, request: CompletionRequest, model_id: str) -> CompletionResponse:
        """Continue a text; see :meth:`send_completion_request`."""
        return self.send_completion_request(request, model_id)

    def tokenize_text(
        self, text: str, add_special_tokens: bool, enable_thinking: bool | None = None, model_id: str | None = None
    ) -> list[int]:
        """Return the token ids of a text.

        :param add_special_tokens: add the special tokens that the tokenizer puts around a text
        :param enable_thinking: has no effect, as in mistral.rs: a plain text has no template
        :raises ConfigError: an unknown ``model_id``
        :raises InvalidRequestError: a text that is not Unicode
        """
        self._check_model(model_id)
        return self._model.tokenize(text, add_special_tokens=add_special_tokens)

    def detokenize_text(self, tokens: Sequence[int], skip_special_tokens: bool, model_id: str | None = None) -> str:
        """Return the text of token ids.

        :param skip_special_tokens: leave out special tokens
        :raises ConfigError: an unknown ``model_id``
        :raises InvalidRequestError: an id outside the vocabulary
        """
        self._check_model(model_id)
        return self._model.detokenize(tokens, skip_special_tokens=skip_special_tokens)

    def send_re_isq(self, dtype: str, model_id: str | None = None) -> None:
        """Quantize the weights to another type ("Q4K", "Q8_0", "4" ...), those of a GGUF file too, once running
        requests have ended; others wait.

        :raises ConfigError: unknown type, or one without kernels for the device; or an unknown ``model_id``
        :raises ModelLoadError: the model's files are missing or have changed: it continues with its old weights
        """
        self._check_model(model_id)
        if getattr(self._which, "organization", None) is IsqOrganization.MoQE:
            raise ConfigError.of("organization", IsqOrganization.MoQE, "Default, for weights to be quantized again")
        self._model.re_isq_model(IsqType.parse(dtype, setting="dtype"))

    def load_lora_adapter(
        self,
        alias: str,
        adapter_dir: str | PathLike[str],
        model_id: str | None = None,
        load_inplace: bool = False,
        expected_generation: str | None = None,
    ) -> LoraAdapterInfo:
        """Load another adapter, or replace one; running requests are not affected.

        :param alias: its name for requests
        :param adapter_dir: a PEFT directory, or a GGUF file
        :param load_inplace: whether it may replace the alias's current content. The call waits until the requests that
            use that content have ended, and frees it. It does not wait for streams that run tools, nor for a request
            whose tool made this call
        :param expected_generation: replace this content only
        :raises ConfigError: an unknown ``model_id``
        :raises LoraAdapterError: another adapter has the alias, or another content; it cannot be read, was made for
            another model, or exceeds a limit
        """
        self._check_model(model_id)
        check_switches(load_inplace=load_inplace)
        if not isinstance(alias, str):
            raise ConfigError.of("alias", alias, "a string")
        if expected_generation is not None and not load_inplace:
            text = "expected_generation is given without load_inplace=True: there is nothing to compare it with"
            raise LoraAdapterError(text, code="invalid_lora_load_policy", setting="expected_generation")
        _check_generation(expected_generation)
        return self._generations.load(
            self._model, alias, adapter_dir, is_replaced=load_inplace, expected=expected_generation
        )

    def unload_lora_adapter(
        self, alias: str, model_id: str | None = None, expected_generation: str | None = None
    ) -> LoraAdapterInfo:
        """Refuse new requests of an adapter, wait for running ones, and free its memory.

        :param expected_generation: unload this content only
        :raises ConfigError: an unknown ``model_id``
        :raises LoraAdapterError: no loaded adapter has the alias, or another content has it
        """
        self._check_model(model_id)
        _check_generation(expected_generation)
        return self._generations.unload(self._model, alias, expected_generation)

    def list_lora_adapters(self, model_id: str | None = None) -> list[LoraAdapterInfo]:
        """Return the loaded adapters.

        :raises ConfigError: an unknown ``model_id``
        """
        self._check_model(model_id)
        return self._generations.infos(self._model)

    def lora_adapter_status(self, model_id: str | None = None) -> LoraRuntimeStatus:
        """Return the loaded adapters, their memory, and their limits.

        :raises ConfigError: an unknown ``model_id``
        """
        self._check_model(model_id)
        return self._generations.status(self._model)

    def max_sequence_length(self, model_id: str | None = None) -> int:
        """Return the maximum number of tokens in a sequence, prompt and output together.

        :raises ConfigError: an unknown ``model_id``
        """
        self._check_model(model_id)
        return self._model.max_sequence_length

    def list_models(self) -> list[str]:
        """Return the name of the runner's only model: its ``model_id``."""
        return [self._which.name]

    def get_default_model_id(self) -> str | None:
        """Return the model for requests that name none."""
        return self._which.name

    def set_default_model_id(self, model_id: str) -> None:
        """Set the model for requests that name none.

        :raises ConfigError: unknown model
        """
        self._check_model(model_id, is_needed=True)

    def is_model_loaded(self, model_id: str) -> bool:
        """Return whether the model is in memory.

        :raises ConfigError: unknown model
        """
        self._check_model(model_id, is_needed=True)
        return self._residence.status == "loaded"

    def get_model_status(self, model_id: str) -> Status | None:
        """Return "loaded", "unloaded" or "reloading"; None for an unknown model."""
        return self._residence.status if model_id == self._which.name else None

    def list_models_with_status(self) -> list[tuple[str, Status]]:
        """Return the runner's model, with its status."""
        return [(self._which.name, self._residence.status)]

    def list_unloaded_models(self) -> list[str]:
        """Return the runner's model, if it is unloaded."""
        return [name for name, status in self.list_models_with_status() if status == "unloaded"]

    def unload_model(self, model_id: str) -> None:
        """Free the model's memory; running requests end. The next request, or :meth:`reload_model`, loads it again,
        with the adapters that ``which`` names.

        :raises ConfigError: unknown model, or it is unloaded already
        :raises ModelClosedError: the runner is closed
        """
        self._check_model(model_id, is_needed=True)
        self._residence.unload()

    def reload_model(self, model_id: str) -> None:
        """Load an unloaded model again.

        :raises ConfigError: unknown model, or it is loaded
        :raises ModelClosedError: the runner is closed
        :raises ModelLoadError: the model can no longer be loaded
        """
        self._check_model(model_id, is_needed=True)
        self._residence.reload()

    def remove_model(self, model_id: str) -> None:
        """Refuse to remove the last model, as mistral.rs does; :meth:`close` releases it.

        :raises ConfigError: always, since a runner holds one model
        """
        self._check_model(model_id, is_needed=True)
        raise ConfigError.of("model_id", model_id, "a model beside others: close the runner, or unload the model")

    def close(self) -> None:
        """End running requests and release everything. Idempotent; also done when the interpreter exits."""
        self._residence.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_model(self, model_id: object, *, is_needed: bool = False) -> None:
        if model_id != self._which.name and (is_needed or model_id is not None):
            raise ConfigError.of("model_id", model_id, f"the runner's only model, {self._which.name}")


def _check_generation(generation: object) -> None:
    try:
        if generation is not None:
            LoraAdapterGeneration(generation)  # type: ignore[arg-type]  # it validates its argument
    except ConfigError as error:
        code = "invalid_lora_generation"
        raise LoraAdapterError(str(error), code=code, setting="expected_generation", value=generation) from None
