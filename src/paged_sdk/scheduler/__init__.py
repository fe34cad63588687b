"""Decides how many tokens each sequence computes in the next step. Pure Python, without tensors."""
