"""Which sequences get how many tokens in the next step. Pure Python."""
