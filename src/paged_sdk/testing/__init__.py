"""For applications' own tests: models that need no weights."""
