"""Reads and writes the GGUF files (mmproj) that hold an image encoder alone."""
