"""Linear layers, one file per form of weight."""
