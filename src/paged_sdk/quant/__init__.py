"""Store and multiply weights: linear layers, experts and embeddings, one file per form of weight."""
