"""Compile constraints into grammars, and say which tokens a text may go on with. No tensors are used here."""
