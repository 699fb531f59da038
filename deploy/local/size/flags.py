"""Ranges, lists of numbers and targets, as flags of several commands give them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan

from shared.errors import ConfigError
from shared.percentiles import SHARES

NUMBERS_LIMIT = 64
"""The most numbers that one flag lists."""
TARGETS = tuple(f"{figure}_{share}" for figure in ("ttft", "itl") for share in SHARES)
"""The names of targets, those of higher percentiles last."""


def check_ranges(flags: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raise ConfigError for a number that is out of its range."""
    for name, (least, most) in ranges.items():
        if not least <= getattr(flags, name) <= most:
            raise ConfigError(f"--{name.replace('_', '-')} is {least:.15g} to {most:.15g}")


def numbers(text: str, flag: str, *, least: float = 0, most: float = 1e9, whole: bool = False) -> list[float]:
    """Return the numbers that a flag lists, in its order and without repetitions. Raise ConfigError."""
    words = text.split(",")
    if len(words) > NUMBERS_LIMIT:
        raise ConfigError(f"{flag} lists at most {NUMBERS_LIMIT} numbers")
    found = list[float]()
    for word in words:
        try:
            number = float(word)
        except ValueError:
            number = nan
        if not least <= number <= most or (whole and number != int(number)):
            kind = "whole numbers" if whole else "numbers"
            raise ConfigError(f"{flag}: {word!r}: must be {kind} from {least:.15g} to {most:.15g}, separated by commas")
        found.append(number)
    return list(dict.fromkeys(found))


def whole_numbers(text: str, flag: str, *, most: int = 1 << 24) -> list[int]:
    """Return the whole numbers from 1 that a flag lists, in their order. Raise ConfigError."""
    return sorted(map(int, numbers(text, flag, least=1, most=most, whole=True)))
