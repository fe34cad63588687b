"""Reads adapters and fits them to a model, whose rows they change one request at a time."""
