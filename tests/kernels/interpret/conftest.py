"""Make Triton's interpreter compute what the hardware computes, and watch what it cannot (see `interpreter`)."""

from __future__ import annotations

import os

if os.environ.get("KERNEL_TESTS") == "interpret":
    from tests.kernels.interpret import interpreter

    interpreter.install()
