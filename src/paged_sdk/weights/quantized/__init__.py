"""Reads what the formats of quantized checkpoints have in common; each of :mod:`paged_sdk.weights.formats` is one."""
