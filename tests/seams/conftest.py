"""SGLang is imported on the CPU reference platform, as a server on this machine would."""

from __future__ import annotations

import os
import warnings

os.environ["SGLANG_PLATFORM"] = "sgl_hybrid_cpu"

with warnings.catch_warnings():
    # SGLang and its dependencies warn about missing accelerators while they are imported.
    warnings.simplefilter("ignore")
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler  # noqa: F401
