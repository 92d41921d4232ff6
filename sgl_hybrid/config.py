"""Settings of the plugin: what the flags and environment variables of one server process say.

Each flag has an environment form, `SGLANG_HYBRID_` + its name in capitals (`--memory-org`: `SGLANG_HYBRID_MEMORY_ORG`).
The process that parses the flags writes the environment form, so every process it starts reads the same values, and
an in-process engine can be configured without a command line.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

import msgspec

from sgl_hybrid.errors import SettingError

ORGANIZATION_NAMES = ("s0", "s1", "s2", "d0")
SLAB_RECLAIM = ("invalidate", "migrate")
CHECKPOINT_LIFETIMES = ("transient", "cached", "retained")
CHECKPOINT_EVICTION = ("lru", "value")
PREEMPT_PIN_K = ("off", "3", "2", "1")
CHECKPOINT_PLACEMENTS = ("all", "last", "branch")
ENVIRONMENT_PREFIX = "SGLANG_HYBRID_"
CPU_PLATFORM = "sgl_hybrid_cpu"
"""Value of `SGLANG_PLATFORM` that asks for the CPU reference platform."""


class Flag(NamedTuple):
    """One command-line flag of the plugin: `name` without dashes, its metavariable and its help text.

    A switch has an empty metavariable and takes no value on the command line.
    """

    name: str
    metavar: str
    help: str

    @property
    def option(self) -> str:
        return "--" + self.name

    @property
    def usage(self) -> str:
        return f"{self.option} {self.metavar}".rstrip()

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    @property
    def environment(self) -> str:
        return ENVIRONMENT_PREFIX + self.field.upper()


FLAGS: tuple[Flag, ...] = (
    Flag(
        "memory-org",
        "{s0,s1,s2,d0}",
        "Memory organization of attention KV, recurrent and convolution state: s0 coarse shared pages, s1 recurrent "
        "paging, s2 paging with conv slots packed in slabs, d0 native static dual pools. Without it, stock SGLang.",
    ),
    Flag(
        "memory-budget",
        "SIZE",
        "State memory over all layers of this rank: a size (4GiB, 512MiB, or a plain number of bytes), a size per "
        "plane (100MiB/layer), or a planner label such as b63. Default: what --mem-fraction-static leaves.",
    ),
    Flag(
        "d0-attention-fraction",
        "FRACTION",
        "Share of the budget that d0 gives to attention, between 0 and 1, or 'auto' for the split with the least "
        "worst-case stranded bytes. Default: the paper's for its models (Falcon-H1 0.527383, Granite-4.0-H 0.199699), "
        "'auto' for others.",
    ),
    Flag("page-tokens", "N", "Tokens of attention KV in one page. Default: 512 (s0, s1, s2) or 16 (d0)."),
    Flag(
        "checkpoint-interval",
        "N",
        "Tokens between the positions where recurrent state may be saved. Default: 512 (s0, s1, s2) or 1792 (d0).",
    ),
    Flag(
        "slab-reclaim",
        "{invalidate,migrate}",
        "How s2 takes back a slab of conv slots that no request uses: with the last of its cached checkpoints in "
        "recency order (invalidate, default), or by moving their conv states into other slabs with room (migrate).",
    ),
    Flag(
        "admission-headroom",
        "FRACTION",
        "Share of a pool's units, from 0 to below 1, that must stay free or reclaimable beyond the need when a waiting "
        "or retracted request is admitted while others run, or 'auto' to follow what is computed again and what "
        "waits. Default: auto.",
    ),
    Flag(
        "checkpoint-lifetime",
        "{transient,cached,retained}",
        "What happens to a running request's checkpoint when the request passes the next boundary: transient frees it; "
        "cached (default) keeps it until eviction reaches it; retained also protects it from eviction while the "
        "request runs, if --retention-k requests want it.",
    ),
    Flag(
        "retention-k",
        "N",
        "Distinct requests that must want a boundary for --checkpoint-lifetime retained. Default: 2.",
    ),
    Flag(
        "preempt-pin-k",
        "{off,3,2,1}",
        "Protect the deepest boundary of a retracted request that at least this many distinct requests have used, "
        "until the request resumes; with 1 the boundaries that it published itself count. Default: off.",
    ),
    Flag(
        "protection-budget",
        "FRACTION",
        "Share of each pool's units, above 0 and up to 1, that retained and pinned boundaries may hold together. "
        "Default: 0.25.",
    ),
    Flag(
        "checkpoint-eviction",
        "{lru,value}",
        "Which cached unit is evicted first: the least recent (lru, default), or the one whose loss is expected to "
        "cost the least recomputation per byte (value).",
    ),
    Flag(
        "checkpoint-placement",
        "{all,last,branch}",
        "Boundaries of a prompt whose state is kept: all, the last, or branch points of the prefix tree and the last "
        "(branch, default).",
    ),
    Flag(
        "no-exact-continuation",
        "",
        "Give up equal bits of found, resumed and recomputed prefixes: prompts are cut where SGLang cuts them, states "
        "that decoding wrote are cached too, and a retracted request resumes by one prefill.",
    ),
)


class MemorySettings(msgspec.Struct, frozen=True):
    """The plugin's flags, checked. A `None` field was not given.

    budget: text of `--memory-budget`; it is turned into units once the model's geometry is known.
    d0_attention_fraction: a number in (0, 1), or "auto".
    page_tokens, checkpoint_interval: tokens.
    admission_headroom: a number in [0, 1), or "auto". preempt_pin_k: None pins nothing.
    """

    memory_org: str
    memory_budget: str | None = None
    d0_attention_fraction: float | str | None = None
    page_tokens: int | None = None
    checkpoint_interval: int | None = None
    slab_reclaim: str | None = None
    admission_headroom: float | str | None = None
    checkpoint_lifetime: str | None = None
    retention_k: int | None = None
    preempt_pin_k: int | None = None
    protection_budget: float | None = None
    checkpoint_eviction: str | None = None
    checkpoint_placement: str | None = None
    no_exact_continuation: bool | None = None

    @property
    def placement(self) -> str:
        """`checkpoint_placement`, or its default."""
        return self.checkpoint_placement or "branch"

    @property
    def exact_continuation(self) -> bool:
        """Whether a cached prefix must give the bits of a recomputed one."""
        return not self.no_exact_continuation

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> MemorySettings | None:
        """Check the raw values of the flags; `None` if no organization was asked for.

        values: flag field name -> text or number; missing, `None` and empty text all mean "not given".

        Raises:
            SettingError: a value is outside its range, or a flag needs `--memory-org` and it was not given.
        """
        given = {flag.field: values[flag.field] for flag in FLAGS if values.get(flag.field) not in (None, "")}
        organization = given.pop("memory_org", None)
        if organization is None:
            if given:
                option = next(flag.option for flag in FLAGS if flag.field in given)
                raise SettingError(f"{option}: expected --memory-org with it, got none")
            return None
        name = str(organization).lower()
        if name not in ORGANIZATION_NAMES:
            nearest = difflib.get_close_matches(name, ORGANIZATION_NAMES, n=1, cutoff=0.0)[0]
            raise SettingError(
                f"--memory-org: expected one of {', '.join(ORGANIZATION_NAMES)}, got {organization!r}; "
                f"nearest: {nearest}"
            )
        if "d0_attention_fraction" in given and name != "d0":
            raise SettingError(f"--d0-attention-fraction: expected --memory-org d0 with it, got {name}")
        reclaim = given.get("slab_reclaim")
        if reclaim is not None and (name != "s2" or reclaim not in SLAB_RECLAIM):
            raise SettingError(
                f"--slab-reclaim: expected {' or '.join(SLAB_RECLAIM)} with --memory-org s2, "
                f"got {reclaim!r} with {name}"
            )
        lifetime = _choice("--checkpoint-lifetime", given.get("checkpoint_lifetime"), CHECKPOINT_LIFETIMES)
        pin_k = _choice("--preempt-pin-k", given.get("preempt_pin_k"), PREEMPT_PIN_K)
        if "retention_k" in given and lifetime != "retained":
            raise SettingError(
                f"--retention-k: expected --checkpoint-lifetime retained with it, got {lifetime or 'cached (default)'}"
            )
        if "protection_budget" in given and lifetime != "retained" and pin_k in (None, "off"):
            raise SettingError(
                "--protection-budget: expected --checkpoint-lifetime retained or --preempt-pin-k 3, 2 or 1 with it, "
                f"got lifetime {lifetime or 'cached (default)'} and pins {pin_k or 'off (default)'}"
            )
        budget = given.get("memory_budget")
        return cls(
            memory_org=name,
            memory_budget=None if budget is None else str(budget),
            d0_attention_fraction=_fraction(given.get("d0_attention_fraction")),
            page_tokens=_tokens("--page-tokens", given.get("page_tokens")),
            checkpoint_interval=_tokens("--checkpoint-interval", given.get("checkpoint_interval")),
            slab_reclaim=None if reclaim is None else str(reclaim),
            admission_headroom=_headroom(given.get("admission_headroom")),
            checkpoint_lifetime=lifetime,
            retention_k=_count("--retention-k", given.get("retention_k")),
            preempt_pin_k=None if pin_k in (None, "off") else int(pin_k),
            protection_budget=_protection(given.get("protection_budget")),
            checkpoint_eviction=_choice("--checkpoint-eviction", given.get("checkpoint_eviction"), CHECKPOINT_EVICTION),
            checkpoint_placement=_choice(
                "--checkpoint-placement", given.get("checkpoint_placement"), CHECKPOINT_PLACEMENTS
            ),
            no_exact_continuation=_switch("--no-exact-continuation", given.get("no_exact_continuation")),
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> MemorySettings | None:
        """Read the environment forms of the flags.

        Raises:
            SettingError: as `from_values`.
        """
        return cls.from_values({flag.field: environment.get(flag.environment) for flag in FLAGS})

    def to_environment(self, environment: MutableMapping[str, str]) -> None:
        """Write the environment forms, removing those of flags that were not given."""
        for flag in FLAGS:
            value = getattr(self, flag.field)
            if value is None:
                environment.pop(flag.environment, None)
            else:
                environment[flag.environment] = str(value)


def _fraction(value: object) -> float | str | None:
    if value is None or value == "auto":
        return None if value is None else "auto"
    number = _number(value)
    if not 0.0 < number < 1.0:
        raise SettingError(f"--d0-attention-fraction: expected a number between 0 and 1 or 'auto', got {value!r}")
    return number


def _switch(option: str, value: object) -> bool | None:
    """True if a switch was given; a false value is the same as leaving it out."""
    text = str(value).lower()
    if value is None or text in ("0", "false"):
        return None
    if text in ("1", "true"):
        return True
    raise SettingError(f"{option}: expected it without a value, or 1 in its environment form, got {value!r}")


def _tokens(option: str, value: object) -> int | None:
    return _count(option, value, "a whole number of tokens")


def _count(option: str, value: object, expected: str = "a whole number") -> int | None:
    if value is None:
        return None
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise SettingError(f"{option}: expected {expected} from 1 on, got {value!r}")
    return number


def _headroom(value: object) -> float | str | None:
    if value is None or value == "auto":
        return None if value is None else "auto"
    number = _number(value)
    if not 0.0 <= number < 1.0:
        raise SettingError(f"--admission-headroom: expected 0 <= f < 1 or 'auto', got {value!r}")
    return number


def _protection(value: object) -> float | None:
    if value is None:
        return None
    number = _number(value)
    if not 0.0 < number <= 1.0:
        raise SettingError(
            f"--protection-budget: expected a share of the pool, above 0 and up to 1 (all of it), got {value!r}"
        )
    return number


def _number(value: object) -> float:
    """The number, or not-a-number for any other text, which is in no range."""
    try:
        return float(str(value))
    except ValueError:
        return float("nan")


def _choice(option: str, value: object, choices: tuple[str, ...]) -> str | None:
    if value is None:
        return None
    text = str(value).lower()
    if text not in choices:
        nearest = difflib.get_close_matches(text, choices, n=1, cutoff=0.0)[0]
        raise SettingError(f"{option}: expected one of {', '.join(choices)}, got {value!r}; nearest: {nearest}")
    return text
