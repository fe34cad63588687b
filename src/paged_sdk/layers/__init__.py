"""Hold the building blocks of a decoder that have no matrix: norms, rotary embedding, token embedding, gated
activation.
"""
