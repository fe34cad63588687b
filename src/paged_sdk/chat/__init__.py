"""Text in, text out: chat templates, tokenizers, incremental detokenisation, stop strings. No torch."""
