"""Depthwise causal convolution of a packed batch, cut at the checkpoint grid."""
