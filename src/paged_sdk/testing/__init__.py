"""Provide models without weights, for applications' own tests."""
