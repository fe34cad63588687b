"""Run the background thread that drives an engine, and bridge it to any number of event loops."""
