"""One file per family of vision models, named after Hugging Face's ``model_type``."""
