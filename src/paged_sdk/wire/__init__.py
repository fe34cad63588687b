"""Converts HTTP bodies to the SDK's types and back: one file per API, without any I/O."""
