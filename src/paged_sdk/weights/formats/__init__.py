"""Holds the formats of quantized weights, one module each; :mod:`paged_sdk.weights.quantized.format` discovers them."""
