"""Images: decoding, the tokens that stand for them, and the encoders that make vectors of them."""
