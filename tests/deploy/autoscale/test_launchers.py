"""deploy/local/autoscale/launchers.py: what an `up` and Compose are asked, and what is said if they refuse.

Compose is a program of the test that writes its arguments down; a real `up` is in tests/integration/test_autoscale.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deploy.local.autoscale import launchers
from deploy.local.autoscale.launchers import scale_compose, scale_up


async def test_compose_is_run_with_the_numbers_of_all_services(tmp_path: Path) -> None:
    script = f'printf "%s\\n" "$@" >{tmp_path}/words'
    command = ("/bin/sh", "-c", script, "docker")
    assert await scale_compose(["a.yaml", "b.yaml"], {"prefill": 1, "decode": 3}, command) == ""
    words = (tmp_path / "words").read_text().split()
    assert words[:5] == ["-f", "a.yaml", "-f", "b.yaml", "up"]
    assert words[-6:] == ["--scale", "prefill=1", "--scale", "worker=3", "prefill", "worker"]
    assert {"--detach", "--no-recreate", "--no-deps"} <= {*words}


async def test_compose_that_fails_is_a_refusal_with_its_last_line() -> None:
    refused = await scale_compose([], {"aggregated": 2}, ("/bin/sh", "-c", "echo first; echo no room >&2; exit 3"))
    assert refused.endswith("status 3: no room")
    assert await scale_compose([], {"aggregated": 2}, ("/no/docker",)) == "/no/docker: No such file or directory"


async def test_compose_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "COMPOSE_LIMIT_S", 0.2)
    refused = await scale_compose([], {"aggregated": 2}, ("/bin/sleep", "600", ";"))
    assert "no end within" in refused or "status 1" in refused


@pytest.mark.parametrize("answer", [b'{"failed": "no"}\n', b"not JSON\n", b""])
async def test_an_up_that_refuses_or_answers_nonsense_is_a_refusal(answer: bytes, tmp_path: Path) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(say, tmp_path / "s"):
        assert await scale_up(tmp_path / "s", {"aggregated": 1}, [1]) != ""


async def test_an_up_that_is_silent_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "UP_LIMIT_S", 0.1)
    ended = asyncio.Event()

    async def wait(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    async with await asyncio.start_unix_server(wait, tmp_path / "s"):
        assert "did not answer within" in await scale_up(tmp_path / "s", {"aggregated": 1}, [])
        ended.set()
    assert "does not answer" in await scale_up(tmp_path / "none", {"aggregated": 1}, [])
