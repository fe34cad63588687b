"""Computes attention over a KV cache, and keeps the keys and values."""
