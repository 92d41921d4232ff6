"""SGLang is imported on the CPU reference platform, as a server on this machine would."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest

os.environ["SGLANG_PLATFORM"] = "sgl_hybrid_cpu"

with warnings.catch_warnings():
    # SGLang and its dependencies warn about missing accelerators while they are imported.
    warnings.simplefilter("ignore")
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler  # noqa: F401

from tests.seams.shadow import Serve, ShadowedServer
from tests.seams.tree_fixture import published_arguments, tiny_plan


@pytest.fixture(scope="module")
def published() -> Iterator[None]:
    """Publish SGLang's arguments as a server does, for the tests of a file."""
    with published_arguments():
        yield


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers, and check each at the end."""
    started = []

    def start(org: str, *, pages: int = 48, checkpoints: int = 12, **options: object) -> ShadowedServer:
        started.append(ShadowedServer(tiny_plan(org, pages=pages, checkpoints=checkpoints, **options)))
        return started[-1]

    yield start
    for server in started:
        server.check()
