"""Attention over a KV cache: what a step needs to know, and where keys and values are kept."""
