"""Write checkpoints that load as other files: GGUF, image encoders in GGUF, safetensors."""
