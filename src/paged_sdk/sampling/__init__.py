"""Chooses tokens: logits processors in order, then temperature, top-k, top-p, min-p; on the host or on a device."""
