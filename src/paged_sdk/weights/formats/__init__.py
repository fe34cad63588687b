"""Hold the formats of quantized weights, one file each, which :mod:`paged_sdk.weights.quantized.format` finds by
listing this package.
"""
