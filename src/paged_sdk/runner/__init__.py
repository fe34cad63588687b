"""Runs the steps of the scheduler on tensors."""
