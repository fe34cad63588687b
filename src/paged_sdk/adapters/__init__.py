"""Reads LoRA adapters and fits them to a model; each row of a step may use another one."""
