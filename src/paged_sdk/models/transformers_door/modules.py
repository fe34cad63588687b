"""Define the modules that replace those of transformers' classes, over this package's weight forms."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from paged_sdk.errors import PagedError
from paged_sdk.kernels.step import StepContext
from paged_sdk.quant.adapted import AdaptableLinear
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.linear import Linear

__all__ = ["Body", "CurrentStep", "OwnEmbedding", "OwnLinear", "apart", "apart_by_adapter"]


class CurrentStep:
    """Holds the step that a model computes now, since transformers' classes cannot pass it to their modules.

    :ivar context: the step; None: the rows computed now are no step's tokens
    :ivar num_tokens: number of the step's tokens
    """

    def __init__(self) -> None:
        self.context: StepContext | None = None
        self.num_tokens: int = 0


class OwnLinear(nn.Module):
    """Replaces ``nn.Linear`` by a linear layer in any weight form.

    :param step: the current step, if the layer's rows are the step's tokens; None: they are not, for example tokens
        routed to an expert
    :param bias: bias to add; None: ``linear`` adds its own bias, or there is none
    """

    def __init__(self, linear: Linear, step: CurrentStep | None, bias: Tensor | None = None) -> None:
        super().__init__()
        self.linear: Linear = linear
        self.in_features: int = linear.in_features
        self.out_features: int = linear.out_features
        self._step = step
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``[..., in_features]``."""
        rows = x.reshape(-1, self.in_features)
        if not len(rows):
            return x.new_empty(*x.shape[:-1], self.out_features)
        context = None if self._step is None else self._step.context
        # Each row's adapter is found by its index in the step.
        assert context is None or self._step is None or len(rows) == self._step.num_tokens, (len(rows), self.linear)
        product = self.linear.forward(rows, context)
        if self._bias is not None:
            product += self._bias
        return product.view(*x.shape[:-1], self.out_features)

    def take(self, other: OwnLinear) -> None:
        """Take another layer's weights in place of these."""
        self.linear, self._bias = other.linear, other._bias

    def apart(self, x: Tensor) -> Tensor:
        """Apply the layer, without adapters, to rows ``[num_rows, in_features]`` that are no tokens of a step."""
        product = self.linear.forward(x, None)
        return product if self._bias is None else product + self._bias

    def apart_by_adapter(self, x: Tensor, product: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the same with each of the step's adapters that change the layer, beside the indices of its tokens.

        :param product: the result of :meth:`apart`
        """
        context = None if self._step is None else self._step.context
        if context is None or not isinstance(self.linear, AdaptableLinear):
            return []
        return self.linear.apart_by_adapter(x, product, context)


def apart(layer: nn.Module, x: Tensor) -> Tensor:
    """Apply a linear layer to rows that are no tokens of a step, such as embeddings of distances; see
    :meth:`OwnLinear.apart`. Other calls with such rows keep adapters from changing the layer.
    """
    product: Tensor = getattr(layer, "apart", layer)(x)
    return product


def apart_by_adapter(layer: nn.Module, x: Tensor, product: Tensor) -> list[tuple[Tensor, Tensor]]:
    """See :meth:`OwnLinear.apart_by_adapter`."""
    return layer.apart_by_adapter(x, product) if isinstance(layer, OwnLinear) else []


class OwnEmbedding(nn.Module):
    """Replaces ``nn.Embedding`` by token embeddings in any weight form."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up ``[1, num_tokens]``."""
        return self.embedding.forward(token_ids.flatten()).view(*token_ids.shape, -1)


class Body(nn.Module):
    """Wraps a class's body, so that body and output projection can run separately.

    The class itself still applies scales, softcaps and biases to the logits.

    :param layers: the body, which computes hidden states
    """

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self._output: type[Any] | None = None
        self._hidden: Tensor | None = None
        self._given: Tensor | None = None

    def take(self) -> Tensor:
        """Return the hidden states of the last run, ``[num_tokens, hidden_size]``."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise PagedError("the model's class has computed no hidden states")
        return hidden[0]

    def give(self, hidden: Tensor | None) -> None:
        """Make the next runs return these hidden states, ``[num_texts, num_tokens, hidden_size]``, instead of computing
        theirs; None: compute again.
        """
        self._given = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute and keep hidden states, and return none of them, so that the class computes no logits; or return the
        given hidden states.
        """
        if self._given is not None and self._output is not None:
            return self._output(last_hidden_state=self._given, **self._pooled(self._given))
        output = self.layers(*args, **kwargs)
        self._output = type(output)
        self._hidden = output.last_hidden_state
        return self._output(last_hidden_state=output.last_hidden_state[:, :0])

    def _pooled(self, hidden: Tensor) -> dict[str, Tensor]:
        """Return the body's pooled output, if it has one."""
        pooler: Any = getattr(self.layers, "pooler", None)
        if pooler is None:
            return {}
        # ALBERT's pooler is only the linear layer of one.
        activation: Any = getattr(self.layers, "pooler_activation", None)
        return {"pooler_output": pooler(hidden) if activation is None else activation(pooler(hidden[:, 0]))}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layers"), name)
