"""Building blocks of a decoder that hold no matrix: norms, rotary embedding, token embedding, gated activation."""
