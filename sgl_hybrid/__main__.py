"""`python -m sgl_hybrid plan ...`: what a model's state costs and what a byte budget buys, before a start."""

from __future__ import annotations

import os
import sys

from sgl_hybrid.plan.cli import main


def run() -> int:
    """Run the command line; a reader that goes away (`... | head`) ends it quietly with status 1."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at exit: what is left goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(run())
