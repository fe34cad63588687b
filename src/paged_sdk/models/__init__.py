"""Define decoder-only models: one file per family, named after its ``model_type``, over shared blocks."""
