"""Which fleets a bench compares: flags of `up` for each combination of settings.

--compare policy=round-robin,kv --compare simulated.speed=1,2     4 variants, each with flags of `up`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import get_args

from msgspec import Struct
from msgspec.structs import fields

from deploy.local.stack.stack import ServiceName
from deploy.local.usage import UpFlags, flag_value
from shared.errors import ConfigError

VARIANTS_LIMIT = 16
SIMULATED = ("--engine", "simulated")
"""The engine of own fleets, unless flags name another."""
WORKERS = 2
"""The workers of a topology whose number is not given."""
_OURS = ("port", "state", "on", "ray-address", "nats", "etcd")
"""Flags of `up` that a bench chooses itself."""
_PAIRS = ("simulated", "cuda")


class Variant(Struct, frozen=True):
    """One fleet of a comparison."""

    name: str
    """The settings in which it differs, such as `policy=kv`. Empty if there is one fleet."""
    words: Sequence[str]
    """The flags of its `up`."""


def variants(compared: Sequence[str], words: Sequence[str]) -> list[Variant]:
    """Return the fleets that `--compare` asks for, each with the flags of its `up`; one if nothing is compared. Raise
    ConfigError."""
    _check_words(words)
    common = list(words) if _value(words, "--engine") else [*SIMULATED, *words]
    choices = [_choices(text) for text in compared]
    found = list(product(*choices))
    if len(found) > VARIANTS_LIMIT:
        raise ConfigError(f"--compare: {len(found)} fleets are more than {VARIANTS_LIMIT}")
    return [Variant(" ".join(f"{name}={value}" for name, value in chosen), _words(chosen, common)) for chosen in found]


def _check_words(words: Sequence[str]) -> None:
    for word in words:
        name = word.split("=")[0]
        if name.startswith("--") and name[2:] in _OURS:
            raise ConfigError(f"{name}: `bench` starts fleets of its own, and chooses this flag itself")


def _choices(text: str) -> list[tuple[str, str]]:
    """Return the settings of one `--compare`."""
    name, equals, values = text.partition("=")
    found = [(name, value) for value in values.split(",")]
    if not equals or not name or len(set(found)) < 2 or not all(value for _, value in found):
        raise ConfigError(f"--compare {text}: not NAME=VALUE,VALUE with two values or more")
    if name != "topology":
        _flag(name, "")  # an unknown one is refused before anything starts
    return found


def _words(chosen: Sequence[tuple[str, str]], common: Sequence[str]) -> list[str]:
    words = list(common)
    for name, value in chosen:
        words = _topology(value, words) if name == "topology" else [*words, *_flag(name, value)]
    return words


def _flag(name: str, value: str) -> tuple[str, str]:
    """Return the flag of `up` for a setting. Raise ConfigError."""
    head, dot, rest = name.partition(".")
    if dot and rest and head in _PAIRS:
        return f"--{head}", f"{rest}={value}"
    if dot and rest and head in get_args(ServiceName):
        return "--set", f"{name}={value}"
    known = {each.name.replace("_", "-"): flag_value(each.type)[0] for each in fields(UpFlags)}
    takes_one = [flag for flag, kind in known.items() if kind is not bool and flag not in (*_OURS, *_PAIRS, "set")]
    flag = name.replace("_", "-")
    if flag not in takes_one:
        raise ConfigError(
            f"--compare {name}: no setting; there are topology, SERVICE.SETTING, simulated.KEY, cuda.KEY, "
            f"and of `up` {', '.join(takes_one)}"
        )
    return f"--{flag}", value


def _topology(value: str, words: Sequence[str]) -> list[str]:
    """Return the flags of a topology: aggregated (no block store), store, split, or P+D (workers of each role)."""
    workers = int(given) if (given := _value(words, "--workers")) and given.isdecimal() else WORKERS
    if value == "aggregated":
        return [*_without(words, "--kvbm-bytes"), "--kvbm-bytes", "0"]
    if value == "store":
        return list(words)
    roles = re.fullmatch(r"([1-9]\d?)\+([1-9]\d?)", value)
    if value == "split" and workers > 1:
        prefill, decode = workers // 2, workers - workers // 2
    elif roles:
        prefill, decode = int(roles[1]), int(roles[2])
    else:
        few = "; split needs two --workers or more" if value == "split" else ""
        raise ConfigError(f"--compare topology={value}: must be aggregated, store, split or P+D, such as 1+3{few}")
    return [*_without(words, "--workers"), "--prefill", str(prefill), "--decode", str(decode)]


def _value(words: Sequence[str], flag: str) -> str:
    """Return the value of a flag, its last one; empty if it is not there."""
    found = ""
    for word, after in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else after
    return found


def _without(words: Sequence[str], flag: str) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and word.partition("=")[0] != flag:
            kept.append(word)
        skip = not skip and word == flag
    return kept
