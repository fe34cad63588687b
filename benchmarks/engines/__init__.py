"""One file per engine that is measured; its name is the engine's. There is no other list."""
