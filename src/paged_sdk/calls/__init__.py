"""Turn a model's calls into requests for the engine, and the engine's output into responses."""
