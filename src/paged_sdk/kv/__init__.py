"""KV memory: who holds which block or slot, and what can be shared. Pure Python: numbers of blocks, never their content."""
