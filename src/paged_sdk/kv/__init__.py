"""Manage KV memory: who holds which block or slot, and what can be shared. Pure Python: ids of blocks, never their
content.
"""
