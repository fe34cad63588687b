"""Stores the KV cache and computes attention over it."""
