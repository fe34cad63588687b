"""Holds the formats in which models write answers, one per file."""
