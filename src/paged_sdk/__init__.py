"""paged_sdk: an embeddable, async, fully typed LLM inference SDK on a paged-attention engine."""
