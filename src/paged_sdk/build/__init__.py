"""Assembly: from settings to an engine that is ready to run."""
