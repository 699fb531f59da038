"""Runs the suite against any picker: `python -m tests.picker --picker HOST:PORT --server HOST:PORT …`.

The picker must know the servers, at least two, as its endpoints, and a model of the name. The suite listens at these
addresses itself, with simulated servers, and starts an Envoy of its own. Without --picker it runs our own picker.

--kill and --start are commands that end the picker at once and start it again, --restart one that does both as an
operator does. Without them the cases that need them are not run. The exit status is 1 if a case does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from tests.picker import envoy, ours
from tests.picker.cases import PickerControl, Rig, run_cases
from tests.picker.environment import envoy as envoy_program
from tests.picker.servers import serving
from tests.tiny_model import write_tiny_model


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.picker", description=__doc__, allow_abbrev=False)
    parser.add_argument("--picker", metavar="HOST:PORT", help="the picker; without it, our own is started")
    parser.add_argument("--server", metavar="HOST:PORT", action="append", default=[], help="an endpoint that it knows")
    parser.add_argument("--model", default="tiny", help="the model that requests name")
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="a case, by how its name begins")
    for name in ("kill", "start", "restart"):
        parser.add_argument(f"--{name}", metavar="COMMAND")
    given = parser.parse_args(arguments)
    if given.picker and len(given.server) < 2:
        parser.error("--picker needs two or more --server")
    if any((given.kill, given.start, given.restart)) and not all((given.kill, given.start, given.restart)):
        parser.error("--kill, --start and --restart need each other")
    return given


def _command(words: str) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        process = await asyncio.create_subprocess_exec(*shlex.split(words))
        assert await process.wait() == 0, f"{words} ended with {process.returncode}"

    return run


@asynccontextmanager
async def theirs(given: argparse.Namespace, directory: Path) -> AsyncIterator[Rig]:
    """Yield what the cases need for a picker that runs already."""
    commands = [_command(words) for words in (given.kill, given.start, given.restart) if words]
    async with AsyncExitStack() as stack:
        model = write_tiny_model(directory / "tiny", context_length=512)
        servers = await stack.enter_async_context(serving(given.server, model))
        ports = await stack.enter_async_context(envoy.running(envoy_program(), given.picker, given.server, directory))
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        yield Rig(given.picker, servers, ports, http, given.model, PickerControl(*commands) if commands else None)


async def run(given: argparse.Namespace) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as place:
        if given.picker:
            async with theirs(given, Path(place)) as rig:
                return await run_cases(rig, given.only)
        async with ours.rig(Path(place)) as (rig, _):
            return await run_cases(rig, given.only)


def table(outcomes: dict[str, str]) -> str:
    """Return the outcomes as a table in Markdown."""
    lines = ["| case | outcome |", "| --- | --- |"]
    for what, wrong in outcomes.items():
        said = "holds" if not wrong else wrong if wrong.startswith("(not run") else f"**fails**: {wrong}"
        lines.append(f"| {what} | {' '.join(said.replace('|', '/').split())} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    outcomes = asyncio.run(run(parsed(arguments)))
    print(table(outcomes))
    return int(not outcomes or any(wrong and not wrong.startswith("(not run") for wrong in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
