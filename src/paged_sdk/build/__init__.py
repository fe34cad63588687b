"""Assembles an engine that is ready to run from settings."""
