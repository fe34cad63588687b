"""Guesses the tokens that follow a text."""
