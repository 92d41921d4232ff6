"""Errors of the package.

A user's mistake is a `SettingError`: one line that says what was expected, what was given and the nearest valid value.
Command-line programs print it and exit with status 2. A shortage of memory is a `CapacityError`; a broken ledger is an
`InvariantError`, raised by `check()` methods and debug checks only.
"""

from __future__ import annotations


class SettingError(ValueError):
    """A setting, flag, file or geometry given by the user cannot be used. The message is one line."""


class CapacityError(RuntimeError):
    """Not enough free units. Nothing was taken; `required` and `available` are counts of `unit`."""

    def __init__(self, unit: str, *, required: int, available: int) -> None:
        super().__init__(f"expected {required} free {unit}, got {available}")
        self.unit = unit
        self.required = required
        self.available = available


class InvariantError(AssertionError):
    """A ledger, a tree or a published checkpoint is inconsistent. Raised by `check()` methods and debug checks only."""
