"""Reads and writes GGUF files, and maps their names and metadata to those of Hugging Face checkpoints."""
