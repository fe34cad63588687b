"""Holds what the formats of quantized checkpoints share; each module of :mod:`paged_sdk.weights.formats` is one."""
