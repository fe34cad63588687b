"""Rewrite modules of older classes of transformers that compute attention themselves, as calls of its attention
interface.

A file is named after the ``model_type``, with underscores for hyphens, and its ``REWRITTEN`` maps each class of modules
to the subclass that takes its place.
"""
