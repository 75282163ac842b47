"""The protocol of a pair as a small model, every interleaving of which is tried."""
