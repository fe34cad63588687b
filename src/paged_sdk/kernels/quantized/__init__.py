"""Defines quantized matrices: their formats, and how they are decoded, repacked and made from dense weights."""
