"""Ranges, lists of numbers and targets, as flags of several commands give them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from shared.errors import ConfigError

NUMBERS_LIMIT = 64
"""The most numbers that one flag lists."""
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
TARGETS = tuple(f"{figure}_{share}" for figure in ("ttft", "itl") for share in SHARES)
"""The names of targets, those of higher percentiles last."""


def check_ranges(flags: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raise ConfigError for a number that is out of its range."""
    for name, (least, most) in ranges.items():
        if not least <= getattr(flags, name) <= most:
            raise ConfigError(f"--{name.replace('_', '-')} is {least:.7g} to {most:.7g}")


def numbers(text: str, flag: str, *, least: int = 1, most: int = 1 << 24) -> list[int]:
    """Return the whole numbers that a flag lists, without repetitions and in order. Raise ConfigError."""
    words = text.split(",")
    if len(words) > NUMBERS_LIMIT:
        raise ConfigError(f"{flag} lists at most {NUMBERS_LIMIT} numbers")
    found = set()
    for word in words:
        if not word.strip().isdecimal() or not least <= int(word) <= most:
            raise ConfigError(f"{flag}: {word!r}: must be whole numbers from {least} to {most}, separated by commas")
        found.add(int(word))
    return sorted(found)


def positives(text: str, flag: str) -> list[float]:
    """Return the numbers, 0 or more, that a flag lists, in its order. Raise ConfigError."""
    words = text.split(",")
    if len(words) > NUMBERS_LIMIT:
        raise ConfigError(f"{flag} lists at most {NUMBERS_LIMIT} numbers")
    found = list[float]()
    for word in words:
        try:
            number = float(word)
        except ValueError:
            number = -1.0
        if not 0 <= number <= 1e9:
            raise ConfigError(f"{flag}: {word!r}: must be numbers from 0, separated by commas")
        found.append(number)
    return list(dict.fromkeys(found))
