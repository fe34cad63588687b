"""Assembles a ready engine from settings."""
