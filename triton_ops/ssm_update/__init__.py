"""Mamba2 decode step on paged or slotted states."""
