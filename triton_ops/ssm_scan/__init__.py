"""Mamba2 scan of a packed batch, cut at the checkpoint grid."""
