"""Describe the sizes of one decoder layer, for models whose layers differ."""

from __future__ import annotations

from attrs import frozen

__all__ = ["LayerInputConfig", "LayerShape"]


@frozen(kw_only=True)
class LayerShape:
    """Describes the sizes of one layer, and whose keys and values it attends to.

    :ivar num_kv_heads: number of heads of keys and of values
    :ivar head_dim: elements per head of queries, keys and values
    :ivar intermediate_size: intermediate size of its dense MLP
    :ivar kv_layer: an earlier layer, to whose keys and values it attends: it has no projections to keys and values, and
        takes no KV memory (Brandon et al., 2024, arXiv 2405.12981); None: it attends to its own
    :ivar kv_elsewhere: whether keys and values in its place are another model's: it has none of its own
    :ivar keys_as_values: whether values are what its projection to keys computes, before the norm and rotation of keys;
        it has no projection to values
    """

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    kv_layer: int | None = None
    kv_elsewhere: bool = False
    keys_as_values: bool = False

    @property
    def keeps_kv(self) -> bool:
        """Return whether it has keys and values of its own."""
        return self.kv_layer is None and not self.kv_elsewhere

    @property
    def num_kv_projections(self) -> int:
        """Return how many projections to keys and values it has: 0, 1 or 2."""
        if not self.keeps_kv:
            return 0
        return 1 if self.keys_as_values else 2


@frozen(kw_only=True)
class LayerInputConfig:
    """Describes what each layer adds of a token besides its embedding (Gemma 3n's per-layer embeddings).

    For each token and layer there is a vector: a row of a second table of embeddings, plus a projection of the token's
    first embedding. After its MLP, a layer gates this vector by the residual stream and adds a projection of it.

    :ivar size: elements of a vector
    :ivar vocab_size: rows of the second table
    :ivar image_token: the token whose row stands for a token that an image vector replaces
    """

    size: int
    vocab_size: int
    image_token: int
