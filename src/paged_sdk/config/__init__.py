"""Define settings as values: frozen attrs classes that validate themselves when they are made."""
