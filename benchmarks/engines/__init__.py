"""Holds one file per measured engine, named after the engine. There is no other list of engines."""
