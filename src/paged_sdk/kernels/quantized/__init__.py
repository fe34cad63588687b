"""Holds matrices in fewer bits: how numbers are coded, packed, multiplied as they lie, and chosen."""
