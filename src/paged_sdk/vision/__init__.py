"""Images: decoding, image tokens in prompts, and encoders."""
