"""Manage KV memory: who holds which block or slot, and what can be shared. Pure Python: block ids, never contents."""
