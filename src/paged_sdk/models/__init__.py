"""Define decoder-only models: shared blocks, and one file per family, named after its ``model_type``."""
