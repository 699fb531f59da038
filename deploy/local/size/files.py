"""Reads files that flags name: profiles, traces, measurements."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from deploy.local.size.profile_file import FILE_LIMIT_BYTES, Profile, decode_profile
from deploy.local.size.servegen import ServeGenClient, drawn_requests
from deploy.local.size.traffic import Traffic, read_traffic
from shared.errors import ConfigError
from shared.installation import COMMAND

TRACE_LIMIT_BYTES = 1 << 30
CLIENTS_LIMIT = 4096
"""The most clients of a directory of ServeGen's."""


def check_parent(flag: str, file: str | Path) -> None:
    """Raise ConfigError if there is no directory for a file."""
    if not Path(file).absolute().parent.is_dir():
        raise ConfigError(f"{flag} {file}: no such directory: {Path(file).parent}")


def read_given(file: Path, limit_bytes: int, flag: str = "") -> bytes:
    """Return the content of a file that was given. Raise ConfigError, also if it has more than `limit_bytes`."""
    name = f"{flag} {file}".lstrip()
    try:
        with file.open("rb") as opened:  # it may be a pipe
            content = opened.read(limit_bytes + 1)
    except OSError as wrong:
        raise ConfigError(f"{name}: {wrong.strerror}") from None
    if len(content) > limit_bytes:
        raise ConfigError(f"{name}: larger than {limit_bytes} bytes")
    return content


def read_trace(file: Path, requests: int) -> Traffic:
    """Return the first `requests` requests of the flag --trace: a file, or a directory of ServeGen's. Raise
    ConfigError."""
    if not file.is_dir():
        return read_traffic(
            read_given(file, TRACE_LIMIT_BYTES, "--trace").decode(errors="replace"), str(file), requests
        )
    names = sorted(str(each).removesuffix("-trace.csv") for each in file.glob("chunk-*-trace.csv"))
    if not 1 <= len(names) <= CLIENTS_LIMIT:
        limits = f"1 to {CLIENTS_LIMIT} clients of ServeGen, each with chunk-N-trace.csv and chunk-N-dataset.json"
        raise ConfigError(f"--trace {file}: a directory has {limits}; this one has {len(names)}")
    left, clients = TRACE_LIMIT_BYTES, list[ServeGenClient]()
    for name in names:
        trace, dataset = (read_given(Path(name + end), left, "--trace") for end in ("-trace.csv", "-dataset.json"))
        left -= len(trace) + len(dataset)
        clients.append(ServeGenClient(trace, dataset, name))
    return drawn_requests(clients, str(file), requests)


def read_profile(file: Path, flag: str = "") -> Profile:
    """Return a profile of which all times between its corners are known. Raise ConfigError."""
    name = f"{flag} {file}".lstrip()
    if not file.exists():
        raise ConfigError(
            f"{name}: no such file; a profile has the times of one worker: `{COMMAND} profile` measures them, "
            f"`{COMMAND} estimate MODEL --gpu NAME --out {file}` estimates them (docs/sizing.md)"
        )
    profile = decode_profile(read_given(file, FILE_LIMIT_BYTES, flag), name)
    if len(profile.prefill) < 2 or len(profile.decode) < 2:
        raise ConfigError(f"{name}: too few points: let `profile` go on with it")
    if (profile.busy is None) != (profile.subject.workers < 2):
        raise ConfigError(f"{name}: a profile of {profile.subject.workers} workers without times of all: measure again")
    tables = [("prefill", profile.prefill), ("decode", profile.decode)]
    if profile.busy is not None:
        tables += [("prefill", profile.busy.prefill), ("decode", profile.busy.decode)]
    for kind, rows in tables:
        xs, ys = ({row[axis] for row in rows} for axis in (0, 1))
        if {row[:2] for row in rows} != set(product(xs, ys)) or min(row[2] for row in rows) <= 0:
            raise ConfigError(f"{name}: {kind} is no complete grid of times above 0: measure again")
    if not (profile.subject.model + profile.subject.server).isprintable():
        raise ConfigError(f"{name}: the names in it have characters that cannot be printed")
    return profile
