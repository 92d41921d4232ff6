"""Depthwise causal convolution decode step on conv lines or slots."""
