"""Read weights from Hugging Face directories, GGUF files, the Hub and the embedded model."""
