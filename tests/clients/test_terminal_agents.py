"""Coding agents at a terminal, unchanged, against a frontend and the echo engine: Codex, Qwen Code, OpenCode, `cn` of
Continue, and Claude Code. What the model says stands in the question. The agents run its calls in a folder of their
own.

The test fails for a new field without effect, a request that is refused, and an address that is not the frontend's.
"""

from __future__ import annotations

import asyncio
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import environment
from tests.clients.recorder import Recorder, recorder
from tests.clients.terminal_agents import AGENTS, CONTEXT, MODEL, SCRIPTED, Agent, make_home, script
from tests.integration.fleet import fleet
from tests.integration.stack import eventually
from tests.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="agents/ is for x86-64"),
]

LIMIT_S = 600.0
STEPS = 6
FOUND = "The word is plover."
END = "It is plover. " * 40
"""An answer that is long enough to be cut."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[str]:
    """A frontend, and a worker that says what questions tell it to say."""
    folder = tmp_path_factory.mktemp("agents")
    model = write_tiny_model(folder / MODEL, context_length=CONTEXT)
    (model / "chat_template.jinja").write_text(SCRIPTED)
    where = ("--namespace", folder.name, "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    with fleet(folder, nats_url, *where) as one:
        router = one.start("router", "router")
        one.start("worker", "worker", "--model", str(model), "--model-name", MODEL, "--engine", "echo")
        frontend = one.start("frontend", "frontend")
        one.wait_ready()
        eventually(lambda: router.metric("headrace_kv_sources") == 1, limit_s=180, what="the router knows the worker")
        yield frontend.url


@pytest.fixture(scope="module")
def node() -> list[str]:
    """The command of Node.js; the agents are made once a checkout."""
    return environment.node(Path(sys.executable), environment.AGENTS_PLACE, environment.AGENTS)


def call(name: str, arguments: dict[str, object]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
async def test_an_agent_calls_tools_survives_a_cut_stream_and_goes_on_in_a_second_turn(
    agent: Agent, url: str, node: list[str], tmp_path: Path
) -> None:
    async with recorder(url) as proxy:
        variables = make_home(agent, tmp_path, proxy.url)
        folder = tmp_path / "work"
        folder.mkdir()
        (folder / "secret.txt").write_text(FOUND)

        async def ask(question: str, *more: str) -> str:
            command = agent.command(environment.AGENTS_PLACE / "node_modules", node, more)
            return await _said(command, question, folder, variables)

        calls = [call(agent.tool, agent.arguments(f"echo step {at}")) for at in range(STEPS)]
        calls += [call(*one) for one in agent.more_calls]
        first = "I look. " + call(agent.tool, agent.arguments("cat secret.txt"))
        proxy.cuts = 1
        said = await ask("Find the word. " + script(first, *calls, END))
        assert END.strip() in said
        assert proxy.cuts == 0, "a stream was cut"
        history = json.dumps(proxy.asked[-1].body)
        assert FOUND in history, "the result of the first call went back"
        assert agent.history in history
        assert all(f"step {at}" in history for at in range(STEPS))
        asked = len(proxy.asked)
        assert asked >= len(calls) + 3, "each answer was asked for, the one that was cut twice"
        assert "And so on." in await ask("Go on. " + script("And so on."), *agent.continues)
        assert len(proxy.asked) > asked
        assert END.strip() in json.dumps(proxy.asked[-1].body), "the second turn has the first one's answer"
        _check(agent, proxy)


def _check(agent: Agent, proxy: Recorder) -> None:
    refused = [(one.path, one.status, one.error) for one in proxy.exchanges if one.status != 200]
    assert not refused
    assert {field for one in proxy.exchanges for field in one.ignored} == agent.ignored
    assert not proxy.strangers


async def _said(command: list[str], question: str, folder: Path, variables: dict[str, str]) -> str:
    """Run an agent to its end with a question; return its stdout. Fails with all that it said if it fails."""
    program = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=variables,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            said, complained = await program.communicate(question.encode())
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    shown = f"{said.decode(errors='replace')[-2000:]}{complained.decode(errors='replace')[-4000:]}"
    assert program.returncode == 0, f"{command} ended with {program.returncode}:\n{shown}"
    return said.decode(errors="replace")
