"""What carries a decision out: the `up` of this machine, or Docker Compose. Each returns why it refuses; empty if it
does not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from deploy.local.autoscale.capacity import WorkerRole, Workers
from deploy.local.stack.scale import LINE_BYTES, ScaleAnswer, WantedWorkers
from shared.socket_path import reachable

UP_LIMIT_S = 5.0
COMPOSE_LIMIT_S = 300.0
SERVICES: dict[WorkerRole, str] = {"aggregated": "worker", "decode": "worker", "prefill": "prefill"}
"""Role → its service in deploy/compose."""


async def scale_up(socket: Path, workers: Workers, first: Sequence[int]) -> str:
    """Ask the `up` that listens at a socket for a number of workers. Those that are too many drain, then stop, in the
    order of the process ids `first`."""
    question = msgspec.json.encode(WantedWorkers({str(role): number for role, number in workers.items()}, [*first]))
    try:
        with ExitStack() as opened:
            async with asyncio.timeout(UP_LIMIT_S):
                path = reachable(str(socket), opened)
                reader, writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES)
                with closing(writer):
                    writer.write(question + b"\n")
                    line = await reader.readline()
        return msgspec.json.decode(line, type=ScaleAnswer).failed
    except TimeoutError:
        return f"`up` did not answer within {UP_LIMIT_S:g} s"
    except (OSError, ValueError) as wrong:
        return f"`up` does not answer at {socket}: {getattr(wrong, 'strerror', None) or wrong}"


async def scale_compose(files: Sequence[str], workers: Workers, command: Sequence[str] = ("docker", "compose")) -> str:
    """Run `docker compose up --scale`. Compose chooses the containers that it stops, with SIGTERM, so that they
    drain."""
    counts = {SERVICES[role]: number for role, number in workers.items()}
    named = [word for file in files for word in ("-f", file)]
    scales = [word for name, number in counts.items() for word in ("--scale", f"{name}={number}")]
    words = [*command, *named, "up", "--detach", "--no-recreate", "--no-deps", *scales, *counts]
    out, err, none = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(*words, stdin=none, stdout=out, stderr=err)
    except OSError as wrong:
        return f"{words[0]}: {wrong.strerror}"
    try:
        async with asyncio.timeout(COMPOSE_LIMIT_S):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"{' '.join(words)}: no end within {COMPOSE_LIMIT_S:g} s"
    last = "".join(said.decode(errors="replace").strip().splitlines()[-1:])
    return f"{' '.join(words)}: status {process.returncode}: {last}" if process.returncode else ""
