"""Carry a call of a model from what an application says to the engine's requests, and from its output to a response."""
