"""Reads and writes GGUF files, and says what their names and fields mean."""
