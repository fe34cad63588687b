"""Start, connect and watch the ranks of a tensor-parallel model."""
