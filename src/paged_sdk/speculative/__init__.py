"""Proposes draft tokens for speculative decoding."""
