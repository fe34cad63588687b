"""The background thread that drives an engine, and its bridge to any number of event loops."""
