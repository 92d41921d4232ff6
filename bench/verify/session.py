"""One verification from end to end: start or find the servers, walk the paths, keep every answer, come to a verdict."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.environment import describe_environment
from bench.server import ServerError
from bench.session import probe
from bench.verify import loaded, paths
from bench.verify.arms import DEVICES, Arm, make_arm, start_arm
from bench.verify.client import Client
from bench.verify.compare import worst
from bench.verify.paths import FULL, QUICK, Effort
from bench.verify.prompts import boundaries, generate_prompts, read_prompts
from bench.verify.records import COLD, COLD_CONCURRENT, ArmResult, VerifyResult, summarize_path
from bench.verify.subject import Journal, read_facts
from sgl_hybrid.errors import SettingError

READY_TIMEOUT_S = 300.0

Path_ = Callable[[Journal, Sequence[list[int]], Effort], Awaitable[None]]

PATHS: dict[str, Path_] = {
    COLD: paths.cold,
    paths.WARM: paths.warm,
    paths.EVICTION: paths.eviction,
    paths.DECODE: paths.decode_boundary,
    paths.RESTORE: paths.restore,
    paths.RESUME: paths.resume,
    paths.CONCURRENT: lambda journal, _, effort: loaded.concurrent(journal, effort),
    paths.RETRACTION: lambda journal, _, effort: loaded.retraction(journal, effort),
}
"""Every path by its name, in the order in which they are walked."""


class VerifySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is verified and how thoroughly. Either `url` or `serve`. None: as the effort says. only: names of paths."""

    url: str | None = None
    serve: list[str] = []
    stock: bool = False
    quick: bool = False
    model: str = "falcon-h1-nano"
    dtype: str = "float32"
    device: str = "cpu"
    grid_tokens: int | None = None
    prompts: Path | None = None
    vocab_tokens: int | None = None
    concurrent: int | None = None
    restores: int | None = None
    only: list[str] = []
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.url is None) == (not self.serve):
            raise SettingError("expected either --url or --serve, got " + ("none" if self.url is None else "both"))
        if self.stock and self.url is not None:
            raise SettingError("expected --stock with --serve, got it with --url: a second server must be started")
        if self.device not in DEVICES:
            raise SettingError(f"expected --device {' or '.join(DEVICES)}, got {self.device}")
        if self.device == "cuda" and self.dtype == "float32":
            # The kernel of its norms, `sgl_kernel.rmsnorm`, is compiled for half precision only.
            raise SettingError("expected --dtype bfloat16 with --device cuda (SGLang's norms there), got float32")
        unknown = sorted(set(self.only) - set(PATHS))
        if unknown:
            raise SettingError(f"expected paths out of {', '.join(PATHS)}, got {', '.join(unknown)}")
        for name, least in (("concurrent", 2), ("restores", 2), ("vocab_tokens", 16)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise SettingError(f"expected --{name.replace('_', '-')} of at least {least}, got {value}")

    def effort(self) -> Effort:
        """Return how much is asked."""
        changes = {
            "vocab_tokens": self.vocab_tokens,
            "concurrent": self.concurrent,
            "restores": self.restores,
            "seed": self.seed,
        }
        given = {name: value for name, value in changes.items() if value is not None}
        return msgspec.structs.replace(QUICK if self.quick else FULL, **given)

    def walked(self) -> list[str]:
        """Return the names of the paths to walk, in order."""
        return [name for name in PATHS if not self.only or name in self.only]


def run_verify(
    settings: VerifySettings, *, command: Sequence[str], models_folder: Path, logs: Path, console: Console
) -> VerifyResult:
    """Walk all paths on every server and return the result; nothing is written but the servers' logs under `logs`.

    Empties the prefix cache of the server over and over. Raises: SettingError for a mistake in the settings,
    ServerError if a server ends, does not come up or does not answer as SGLang does.
    """
    begun = time.monotonic()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    own_prompts = None if settings.prompts is None else read_prompts(settings.prompts)
    results, beside = [], []
    if settings.url is not None:
        results.append(asyncio.run(_verify_url(settings, settings.url, own_prompts, console)))
    else:
        arms = [make_arm(given, settings.dtype) for given in settings.serve]
        if settings.stock:
            arms.append(make_arm("stock", settings.dtype))
            beside.append("stock")
        for index, arm in enumerate(arms):
            log = logs.with_name(f"{logs.name}-{index}-{arm.name}.log")
            results.append(_verify_served(settings, arm, own_prompts, models_folder, log, console))
    counted = results[: len(results) - len(beside)]
    return VerifyResult(
        command=list(command),
        started_utc=started,
        seconds=round(time.monotonic() - begun, 1),
        environment={**describe_environment(), "device": results[0].server.get("device")},
        settings=msgspec.to_builtins(settings, enc_hook=str),
        verdict=worst(arm.verdict for arm in counted),
        beside=beside,
        arms=results,
    )


def _verify_served(
    settings: VerifySettings,
    arm: Arm,
    own_prompts: list[list[int]] | None,
    models_folder: Path,
    log: Path,
    console: Console,
) -> ArmResult:
    server = start_arm(
        arm,
        model=settings.model,
        dtype=settings.dtype,
        models_folder=models_folder,
        log=log,
        device=settings.device,
    )
    console.print(f"starting SGLang for arm {arm.name}; its log is {log}")
    with server:
        with console.status("waiting for the server") as status:
            server.wait_ready(READY_TIMEOUT_S, lambda s: status.update(f"waiting for the server: {s:.0f} s"))
        try:
            return asyncio.run(_verify(settings, server.url, arm.name, own_prompts, console))
        except ServerError:
            server.check_alive()  # says why
            raise


async def _verify_url(
    settings: VerifySettings, url: str, own_prompts: list[list[int]] | None, console: Console
) -> ArmResult:
    await probe(url)
    return await _verify(settings, url, None, own_prompts, console)


async def _verify(
    settings: VerifySettings, url: str, name: str | None, own_prompts: list[list[int]] | None, console: Console
) -> ArmResult:
    effort = settings.effort()
    async with Client(url) as client:
        info = await client.info()
        facts = read_facts(info, grid_tokens=settings.grid_tokens)
        prompts = own_prompts or generate_prompts(
            effort.num_prompts,
            grid_tokens=facts.grid_tokens,
            num_boundaries=effort.num_boundaries,
            seed=effort.seed,
            vocab_tokens=effort.vocab_tokens,
        )
        if not any(boundaries(len(prompt), facts.grid_tokens) for prompt in prompts):
            longest = max(len(prompt) for prompt in prompts)
            raise SettingError(
                f"expected a prompt of more than {facts.grid_tokens} tokens (the grid of this server), "
                f"got none above {longest}"
            )
        arm = name or facts.organization or "stock"
        with _progress(console, arm, client, len(settings.walked())) as (start, tick):
            journal = Journal(client, facts, tick)
            for path in settings.walked():
                start(path)
                await PATHS[path](journal, prompts, effort)
    walked = [path for name in settings.walked() for path in _reported(name)]
    return ArmResult(
        arm=arm,
        organization=facts.organization,
        grid_tokens=facts.grid_tokens,
        batch_bound=facts.batch_bound,
        server=info,
        paths=[summarize_path(path, [f for f in journal.findings if f.path == path]) for path in walked],
        findings=journal.findings,
        requests=journal.requests,
        runs=journal.runs,
    )


def _reported(path: str) -> list[str]:
    """Return the names under which a path reports: with its own reference, where it makes one."""
    return [COLD_CONCURRENT, path] if path == paths.CONCURRENT else [path]


@contextlib.contextmanager
def _progress(
    console: Console, arm: str, client: Client, num_paths: int
) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Show a bar of the paths; yields what to call when one begins and when a step of it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task, name = progress.add_task(arm, total=num_paths), ""

        def start(path: str) -> None:
            nonlocal name
            progress.advance(task, 0 if name == "" else 1)
            name = path
            tick()

        def tick() -> None:
            progress.update(task, description=f"{arm}: {name}, {client.num_requests} requests")

        yield start, tick
