"""Checks the flags of `headrace bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import asdict, replace

from deploy.local.bench import plan
from deploy.local.bench.images import MOST_IMAGES, parse_size
from deploy.local.bench.options import BenchOptions
from deploy.local.bench.plan import Point
from deploy.local.bench.variants import variants
from deploy.local.size.files import check_parent, read_trace
from deploy.local.size.flags import TARGETS, check_ranges
from deploy.local.size.traffic import REQUESTS_LIMIT, Traffic
from deploy.local.usage import BenchFlags
from shared.errors import ConfigError

LIMIT = 1_000_000
"""Upper limit of numbers that have none of their own."""
LIMITS = {
    "words": (1, LIMIT),
    "images": (0, MOST_IMAGES),
    "output_tokens": (1, LIMIT),
    "shared_words": (0, LIMIT),
    "warmup": (0, LIMIT),
    "timeout_s": (0.001, LIMIT),
    "spread": (0, 10),
    "prefixes": (1, LIMIT),
    "rounds": (1, 100),
    "agentic": (0, 10),
    "gpus": (1, 65_536),
    "price": (0, LIMIT),
    "watts_per_gpu": (0, LIMIT),
    **dict.fromkeys(TARGETS, (0, LIMIT)),
}
NOT_WITH_TRACE = ("concurrency", "rate", "prefix_ratio", "shared_words", "prompts", "agentic", "images")
NOT_WITH_AGENTS = ("prefix_ratio", "shared_words", "prompts", "spread", "images")
"""Flags of the requests that a trace, or agents' sessions, have themselves."""


def bench_options(flags: BenchFlags, words: Sequence[str], url: str, key: str, prompts: str) -> BenchOptions:
    """Return the options of a bench. `words` is its command line, `prompts` the text of the file with prompts. Raise
    ConfigError."""
    check_ranges(flags, LIMITS)
    if flags.shared_words > flags.words:
        raise ConfigError("--shared-words must not exceed --words")
    if flags.shared_words and flags.prefix_ratio:
        raise ConfigError("--shared-words and --prefix-ratio say the same: give one of the two")
    flags = replace(flags, out=prefix_of(flags.out))
    check_parent("--out", flags.out)
    parse_size(flags.image_size)
    if flags.images and (flags.tokens or flags.driver == "aiperf"):
        raise ConfigError("--images: only the chats of the own driver have images; leave out --tokens and --driver")
    own = bool(flags.compare or flags.up)
    if own and flags.url:
        raise ConfigError("--url measures an endpoint, --compare and flags after -- start fleets: give one of the two")
    if own and flags.driver == "aiperf":
        raise ConfigError("--driver aiperf measures an endpoint: leave out --compare and flags after --")
    if flags.saturate and (flags.concurrency or flags.trace is not None or "," in flags.rate):
        raise ConfigError("--saturate searches a rate, from one --rate on: leave out --concurrency and --trace")
    traffic = None if flags.trace is None else _traffic(flags, flags.trace)
    return BenchOptions(
        **asdict(replace(flags, url=url)),
        points=_points(flags, traffic),
        traffic=traffic,
        command=" ".join(("headrace", *words)),
        fleets=variants(flags.compare, flags.up) if own else (),
        given=plan.lines(prompts, str(flags.prompts)) if flags.prompts is not None else (),
        key=key,
    )


def prefix_of(out: str) -> str:
    """Return what the names of the files begin with, if `--out` gives the whole name of one of them, too."""
    return out.removesuffix(".json").removesuffix(".png")


def _points(flags: BenchFlags, traffic: Traffic | None) -> list[Point]:
    scenarios = plan.scenarios_of(flags.scenarios)
    if traffic is not None:
        if scenarios != ["mixed"]:
            raise ConfigError("--scenarios: a trace has lengths of its own")
        return plan.trace_points(flags.speed, len(traffic.rows))
    if flags.speed != BenchFlags().speed and not flags.agentic:
        raise ConfigError("--speed needs --trace or --agentic")
    if flags.agentic:
        _check_agentic(flags)
    return plan.points(
        flags.concurrency or ("" if flags.rate or flags.saturate else "1,8,32"),
        flags.rate or ("1" if flags.saturate else ""),
        flags.requests,
        prefix_ratios=plan.prefix_ratios_of(flags.prefix_ratio),
        scenarios=scenarios,
    )


def _traffic(flags: BenchFlags, file: Path) -> Traffic:
    """Read a trace. Raise ConfigError."""
    if given := next((name for name in NOT_WITH_TRACE if getattr(flags, name)), None):
        raise ConfigError(f"--{given.replace('_', '-')}: a trace has requests and times of its own")
    return read_trace(file, flags.requests or REQUESTS_LIMIT)


def _check_agentic(flags: BenchFlags) -> None:
    if given := next((name for name in NOT_WITH_AGENTS if getattr(flags, name)), None):
        raise ConfigError(f"--{given.replace('_', '-')}: agents have prompts of their own")
    if flags.scenarios != BenchFlags().scenarios:
        raise ConfigError("--scenarios: agents have answers of their own")
    if len(plan.trace_points(flags.speed, 1)) > 1:
        raise ConfigError("--speed: with --agentic, one number")
