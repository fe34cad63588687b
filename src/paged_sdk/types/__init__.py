"""Define the values that cross the public boundary: messages and requests in, responses and snapshots out."""
