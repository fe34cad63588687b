"""Replace the modules of transformers' classes that hold matrices by this package's forms of weight."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from paged_sdk.errors import PagedError
from paged_sdk.kernels.step import StepContext
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.linear import Linear

__all__ = ["Body", "CurrentStep", "OwnEmbedding", "OwnLinear"]


class CurrentStep:
    """Holds the step that a model computes now: classes of transformers hand nothing of the kind to their modules.

    :ivar context: the step; None: rows that are no tokens of a step, or none at all
    :ivar num_tokens: how many tokens it has
    """

    def __init__(self) -> None:
        self.context: StepContext | None = None
        self.num_tokens: int = 0


class OwnLinear(nn.Module):
    """Multiplies by a matrix in any form.

    :param step: the step whose tokens are its rows; None: its rows are others, such as those that have chosen an expert
    :param bias: what is added to the product, where the form itself does not
    """

    def __init__(self, linear: Linear, step: CurrentStep | None, bias: Tensor | None = None) -> None:
        super().__init__()
        self.linear = linear
        self.in_features: int = linear.in_features
        self.out_features: int = linear.out_features
        self._step = step
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``[..., in_features]``."""
        rows = x.reshape(-1, self.in_features)
        if not len(rows):
            return x.new_empty(*x.shape[:-1], self.out_features)
        context = None if self._step is None else self._step.context
        # Adapters are chosen by the places of tokens.
        assert context is None or self._step is None or len(rows) == self._step.num_tokens, (len(rows), self.linear)
        product = self.linear.forward(rows, context)
        if self._bias is not None:
            product += self._bias
        return product.view(*x.shape[:-1], self.out_features)


class OwnEmbedding(nn.Module):
    """Looks up token embeddings in any form."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up ``[1, num_tokens]``."""
        return self.embedding.forward(token_ids.flatten()).view(*token_ids.shape, -1)


class Body(nn.Module):
    """Stands between a class's layers and its output projection, so that one runs without the other.

    Whatever the class does to scores (scaling, caps, biases) it goes on doing itself.

    :param layers: what computes hidden states
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
        """Let the next runs compute nothing and return these hidden states, ``[num_texts, num_tokens, hidden_size]``;
        None: they compute again.
        """
        self._given = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute hidden states and keep them: who called gets none, or those that were given."""
        if self._given is not None and self._output is not None:
            pooler: Any = getattr(self.layers, "pooler", None)
            pooled = {} if pooler is None else {"pooler_output": pooler(self._given)}
            return self._output(last_hidden_state=self._given, **pooled)
        output = self.layers(*args, **kwargs)
        self._output = type(output)
        self._hidden = output.last_hidden_state
        return self._output(last_hidden_state=output.last_hidden_state[:, :0])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layers"), name)
