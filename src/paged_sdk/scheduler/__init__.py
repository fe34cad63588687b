"""Decides which sequences compute how many tokens in the next step. It is pure Python, without tensors."""
