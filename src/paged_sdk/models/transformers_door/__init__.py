"""Run decoders that have no family here by transformers' own classes, with this package's attention and weights.

Nothing here is imported before a model needs it: transformers takes 1.8 s to import, and is an extra.
"""
