"""Maps what comes over a wire to the SDK's types and back: one file per API, no input or output of its own."""
