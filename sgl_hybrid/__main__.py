"""`python -m sgl_hybrid plan ...`: what a model's state costs and what a byte budget buys, before a start."""

from __future__ import annotations

import sys

from sgl_hybrid.plan.cli import main

if __name__ == "__main__":
    sys.exit(main())
