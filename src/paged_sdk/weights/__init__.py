"""Where weights come from: Hugging Face directories, GGUF files, the Hub and the embedded model."""
