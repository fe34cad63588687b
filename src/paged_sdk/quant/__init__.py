"""Define linear layers, one file per form of weight."""
