"""Fixtures: what clients ask, the environments of other people's clients, and one of their programs run to its end.

The first test of a checkout that asks for one waits until 700 MB are there: such tests say `pytest.mark.timeout(1200)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.clients import environment
from tests.clients.served import Served, served

LIMIT_S = 3600.0
Run = Callable[..., Awaitable[str]]


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Served]:
    """Frontends that every test here may ask."""
    with served(tmp_path_factory.mktemp("clients"), nats_url) as one:
        yield one


@pytest.fixture(scope="session")
def clients_python() -> Path:
    """The Python of requirements.in; made once a checkout."""
    return environment.python()


@pytest.fixture(scope="session")
def clients_node(clients_python: Path) -> list[str]:
    """The command of Node.js with npm/package.json; made once a checkout."""
    return environment.node(clients_python)


@pytest.fixture
def run_program(clients_python: Path) -> Run:
    """`await run_program("name.py", "argument", …, VARIABLE="value")` runs tests/clients/programs/name.py to its end
    and gives its stdout; where it fails, or takes longer than LIMIT_S, the test fails with what it said."""

    async def run(name: str, *arguments: str, **variables: str) -> str:
        return await run_to_its_end([str(clients_python), str(environment.PROGRAMS / name), *arguments], variables)

    return run


@pytest.fixture
def run_node_program(clients_node: list[str]) -> Run:
    """The same for a program of Node.js, `name.mjs`."""

    async def run(name: str, *arguments: str, **variables: str) -> str:
        program = environment.NPM_PLACE / "programs" / name
        return await run_to_its_end([*clients_node, str(program), *arguments], variables)

    return run


async def run_to_its_end(command: list[str], variables: dict[str, str]) -> str:
    program = await asyncio.create_subprocess_exec(
        *command,
        env=environment.variables(**variables),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            said, complained = await program.communicate()
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    text = said.decode(errors="replace")
    shown = f"{text}{complained.decode(errors='replace')[-4000:]}"
    assert program.returncode == 0, f"{command} ended with {program.returncode}:\n{shown}"
    return text
