"""Tests of `benchmarks/cut_streams.py`: its goals, and that each client leaves in the way that it says."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.cut_streams import READ_EVENTS, WAYS, CutRow, Way, cut, goals, line, request_of
from tests.servers import free_port

LIMIT_S = 60.0


def row(cut_so_far: int, *, mb: float = 100.0, files: int = 10, running: int = 0, refused: int = 0) -> CutRow:
    return CutRow(cut_so_far, refused, running, {"frontend": mb, "router": 50.0}, {"frontend": files, "router": 5})


def test_what_the_first_half_takes_is_no_leak() -> None:
    sizes = [90.0, 100.0, 105.0, 110.0, 110.0, 111.0]
    found = goals([row(number, mb=mb, files=9 + min(number, 1)) for number, mb in enumerate(sizes)])
    assert [goal.met for goal in found] == [True] * 4
    assert found[0].value == pytest.approx(0.0091)


def test_growth_files_and_requests_that_stay_miss_their_goals() -> None:
    rows = [row(0), row(1), row(2), row(3), row(4), row(5, mb=106.0, files=11, running=1, refused=2)]
    assert [goal.value for goal in goals(rows)] == [0.06, 1, 1, 2]
    assert not any(goal.met for goal in goals(rows))
    assert "2 refused, 1 running" in line(rows[-1])


@pytest.mark.parametrize("way", WAYS)
async def test_a_client_leaves_in_the_way_that_it_says(way: Way) -> None:
    got, left = bytearray(), asyncio.get_running_loop().create_future()
    request = request_of(7, 200)
    whole = len(request)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                got.extend(data)
                if len(got) == whole:
                    writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"data: x\n\n" * READ_EVENTS)
            left.set_result("closed")
        except ConnectionResetError:
            left.set_result("reset")
        finally:
            writer.close()

    port = free_port()
    async with await asyncio.start_server(serve, "127.0.0.1", port), asyncio.timeout(LIMIT_S):
        assert await cut(port, way, request)
        how = await left
    assert len(got) == (whole // 2 if way == "body" else whole)
    assert how == "reset" if way == "reset" else how in ("closed", "reset")


async def test_a_refusal_is_counted() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 no\r\n\r\n")
        writer.close()

    port = free_port()
    async with await asyncio.start_server(serve, "127.0.0.1", port), asyncio.timeout(LIMIT_S):
        assert not await cut(port, "close", request_of(7, 1))
