"""Text in, text out: chat templates, tokenizers, incremental detokenization, stop strings. No torch."""
