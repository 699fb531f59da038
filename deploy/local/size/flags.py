"""Reads the numbers that flags of `estimate`, `profile` and `plan` list. Pure."""

from __future__ import annotations

from shared.errors import ConfigError

NUMBERS_LIMIT = 64
"""The most numbers that one flag lists."""


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
