"""Defines the layers of a decoder that have no weight matrix: norms, rotary embeddings, activation functions."""
