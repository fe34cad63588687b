"""Where a scheduler's output meets tensors."""
