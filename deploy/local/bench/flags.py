"""Checks the flags of `headrace bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import asdict, replace

from deploy.local.bench import plan
from deploy.local.bench.sweep import BenchOptions
from deploy.local.bench.variants import variants
from deploy.local.usage import BenchFlags
from shared.errors import ConfigError

LIMIT = 1_000_000
"""Upper limit of numbers that have none of their own."""
LIMITS = {
    "words": (1, LIMIT),
    "output_tokens": (1, LIMIT),
    "shared_words": (0, LIMIT),
    "warmup": (0, LIMIT),
    "timeout_s": (0.001, LIMIT),
    "spread": (0, 10),
    "prefixes": (1, LIMIT),
    "rounds": (1, 100),
}


def bench_options(flags: BenchFlags, words: Sequence[str], url: str, key: str, prompts: str) -> BenchOptions:
    """Return the options of a bench. `words` is its command line, `prompts` the text of the file with prompts. Raise
    ConfigError."""
    for name, (least, most) in LIMITS.items():
        if not least <= getattr(flags, name) <= most:
            raise ConfigError(f"--{name.replace('_', '-')} is {least} to {most}")
    if flags.shared_words > flags.words:
        raise ConfigError("--shared-words must not exceed --words")
    if flags.shared_words and flags.prefix_ratio:
        raise ConfigError("--shared-words and --prefix-ratio say the same: give one of the two")
    if not Path(flags.out).parent.is_dir():
        raise ConfigError(f"--out {flags.out}: no such directory: {Path(flags.out).parent}")
    own = bool(flags.compare or flags.up)
    if own and flags.url:
        raise ConfigError("--url measures an endpoint, --compare and flags after -- start fleets: give one of the two")
    if own and flags.driver == "aiperf":
        raise ConfigError("--driver aiperf measures an endpoint: leave out --compare and flags after --")
    points = plan.points(
        flags.concurrency or ("" if flags.rate else "1,8,32"),
        flags.rate,
        flags.requests,
        prefix_ratios=plan.prefix_ratios_of(flags.prefix_ratio),
        scenarios=plan.scenarios_of(flags.scenarios),
    )
    return BenchOptions(
        **asdict(replace(flags, url=url)),
        points=points,
        command=" ".join(("headrace", *words)),
        fleets=variants(flags.compare, flags.up) if own else (),
        given=plan.lines(prompts, str(flags.prompts)) if flags.prompts is not None else (),
        key=key,
    )
