"""Hold one file per engine that is measured, named after the engine. There is no other list."""
