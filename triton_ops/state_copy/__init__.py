"""Copies of whole checkpoints between pages and a contiguous arena."""
