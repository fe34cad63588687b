"""Export checkpoints: as GGUF, as GGUF files of image encoders, as safetensors."""
