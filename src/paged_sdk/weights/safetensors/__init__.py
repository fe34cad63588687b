"""Reads and writes safetensors files, and directories of them."""
