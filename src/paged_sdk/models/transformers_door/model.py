"""Run a class of transformers over the tokens of a step, with this package's attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.attention_inputs import LearnedScores
from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.kernels.placement import Placement
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.transformers_door.class_weights import OwnParts
from paged_sdk.models.transformers_door.modules import Body, CurrentStep, OwnLinear
from paged_sdk.models.transformers_door.probe import Findings, inputs
from paged_sdk.models.transformers_door.rank_head import ClassRankHead
from paged_sdk.models.transformers_door.seam import POSITION_BIAS, SINKS, AttentionCall, Seam
from paged_sdk.quant.adapted import AdaptableLinear, AdaptableShape
from paged_sdk.quant.linear import Linear

__all__ = ["TransformersModel"]


class TransformersModel:
    """Computes logits from token ids. To the class, all rows of a step are one sequence; only attention separates them.

    :param model: the class with its weights, whose body is ``body``; for encoders and rankers, ``body`` itself
    :param findings: the results of the trial run
    :param blocks: names of the layers' modules, to whose outputs image vectors may be added
    :param first_position: the class's number of the first position, 0 except for RoBERTa and its like
    :param ranker: the class around the body, if it computes a text's score
    :ivar is_encoder: whether the class has no output projection
    :ivar rank_head: computes a text's score; None: the class computes none
    :ivar blocks: the layers' modules; empty if not known
    :ivar step: the current step
    :ivar parts: the parts whose weights are in this package's forms
    :ivar adaptable: the linear layers that adapters may change
    :ivar dtype: dtype of activations, keys and values
    """

    def __init__(
        self,
        model: PreTrainedModel | Body,
        body: Body,
        seam: Seam,
        step: CurrentStep,
        findings: Findings,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        adaptable: Sequence[AdaptableShape] = (),
        blocks: Sequence[str] = (),
        first_position: int = 0,
        ranker: PreTrainedModel | None = None,
        parts: OwnParts,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.placement: Placement = Placement.on(device, config.num_layers)
        self.adaptable: tuple[AdaptableShape, ...] = tuple(adaptable)
        self.transformers_model: Any = model
        self.seam = seam
        self.is_encoder: bool = model is body
        self.rank_head: ClassRankHead | None = None if ranker is None else ClassRankHead(ranker, body, dtype)
        self._first_position = first_position
        self._body = body
        self.findings = findings
        self.parts = parts
        self.step = step
        self._layers = findings.layers
        self._next_layer = 0
        seam.attend = self.attend
        table: nn.Module = model.get_input_embeddings()
        table.register_forward_hook(self._insert)
        self.blocks: tuple[nn.Module, ...] = tuple(map(model.get_submodule, blocks))
        for index, block in enumerate(self.blocks):
            block.register_forward_hook(partial(self._add, index))

    def adaptable_linear(self, name: str) -> Linear:
        """Return one of the linear layers that adapters may change."""
        own = (module.linear for module in self.transformers_model.modules() if isinstance(module, OwnLinear))
        return next(linear for linear in own if isinstance(linear, AdaptableLinear) and linear.name == name)

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Run all layers over the tokens of a step.

        :param token_ids: ``[num_tokens]`` int64, of all rows in order
        :param positions: ``[num_tokens]`` int64, the position of each token within its sequence; ``[3, num_tokens]``:
            its rotary positions in time, height and width
        :returns: ``[num_tokens, hidden_size]`` after the last norm, as :meth:`logits` takes them
        """
        given = self.inputs(token_ids, positions)
        if ctx.parts is not None:
            given["token_type_ids"] = ctx.parts[None]
        return self.run(given, len(token_ids), ctx)

    def inputs(self, token_ids: Tensor, positions: Tensor) -> dict[str, Any]:
        """Return the class's arguments.

        :param positions: positions counted from 0
        """
        return inputs(token_ids, positions + self._first_position if self._first_position else positions)

    def run(self, given: Mapping[str, Any], num_tokens: int, ctx: StepContext) -> Tensor:
        """Run all layers over the tokens of a step.

        :param given: the class's arguments
        """
        self.step.context, self.step.num_tokens, self._next_layer = ctx, num_tokens, 0
        try:
            return self.hidden(given)
        finally:
            self.step.context = None

    def hidden(self, given: Mapping[str, Any]) -> Tensor:
        """Run all layers, without setting the current step.

        :param given: the class's arguments
        """
        self.transformers_model(**given)
        return self._body.take()

    def normed(self, hidden: Tensor) -> Tensor:
        """Return rows of :meth:`forward`'s result in float32: the last norm is already applied."""
        return hidden.float()

    def logits(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """Compute logits.

        :param hidden: some rows of :meth:`forward`'s result, ``[num_rows, hidden_size]``
        :param adapted: must be None: adapters cannot change the class's output projection
        :returns: ``[num_rows, vocab_size]`` float32, which the caller may change; of an encoder, ``[num_rows, 0]``
        """
        if self.is_encoder:
            return hidden.new_empty(len(hidden), 0, dtype=torch.float32)
        assert adapted is None, "an adapter of the output projection was let in"
        nothing = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        self._body.give(hidden[None])
        try:
            scores = self.transformers_model(**inputs(nothing, nothing)).logits
        finally:
            self._body.give(None)
        return cast(Tensor, scores[0].float())

    def _insert(self, table: nn.Module, args: object, embedded: Tensor) -> None:
        """Replace the embeddings of image tokens by image vectors."""
        step = self.step.context
        if step is not None and step.inserted is not None:
            step.inserted.put_into(embedded.view(-1, embedded.shape[-1]))

    def _add(self, index: int, layer: nn.Module, args: object, given: Any) -> None:
        """Add image vectors to the output of one of the first layers."""
        step = self.step.context
        if step is not None and step.inserted is not None and index < len(step.inserted.later):
            rows: Tensor = given if isinstance(given, Tensor) else given[0]
            step.inserted.add_to(rows.view(-1, rows.shape[-1]), index)

    def attend(self, call: AttentionCall) -> Tensor:
        """Write one layer's keys and values to the KV cache, and compute attention."""
        index = self._next_layer
        layer = self._layers[index]
        self._next_layer = index + 1
        query, key, value = (each[0].transpose(0, 1) for each in (call.query, call.key, call.value))
        if layer.scale != self.config.attention_scale:
            query = query * (layer.scale / self.config.attention_scale)
        size = self.config.head_dim
        query, key, value = (_padded(each, size) for each in (query, key, value))
        step = self.step.context
        assert step is not None, "attention is computed in a step"
        sinks, relative = call.options.get(SINKS), call.options.get(POSITION_BIAS)
        learned = None
        if sinks is not None or relative is not None:
            learned = LearnedScores(sinks=None if sinks is None else sinks.float(), relative=relative)
        attended = step.attention.forward(index, query, key, value, learned)
        return attended[None, ..., : layer.value_dim].contiguous()


def _padded(heads: Tensor, size: int) -> Tensor:
    """Return ``[num_tokens, num_heads, size]``, contiguous, with zeros beyond the heads' own elements."""
    missing = size - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads.contiguous()
