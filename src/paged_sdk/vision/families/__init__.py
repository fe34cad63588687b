"""One file per family of models that take images, by Hugging Face's ``model_type``."""
