"""Compiles constraints into grammars, and computes which tokens they allow next. Uses no tensors."""
