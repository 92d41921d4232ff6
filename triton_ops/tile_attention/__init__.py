"""Causal attention of a prefill in tiles of fixed shape."""
