"""The NIXL process that lends: killed when it is silent, and harmless to what is lent no more."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from services.kvbm.peers import nixl_lender
from services.kvbm.peers.nixl_lender import NixlLender
from services.kvbm.peers.nixl_process import NixlProcess
from tests.kvbm.chains import chain
from tests.kvbm.peer_rig import (
    ONLY_WITH_NIXL,
    PEERS,
    address,
    faults,
    lending,
    loans_are_over,
    machines,
    of,
    read,
    ready,
)
from tests.kvbm.store_rig import LAYOUT, Store, until

NIXL = replace(PEERS, backend="nixl")
CONTENTS = chain(*range(1, 13))
OTHERS = chain(*range(101, 113))
pytestmark = ONLY_WITH_NIXL


def lender_of(store: Store) -> tuple[NixlLender, NixlProcess]:
    nixl = of(store).nixl
    assert nixl is not None
    assert nixl.process is not None
    return nixl, nixl.process


async def test_a_process_that_is_silent_while_it_lends_is_killed_which_ends_the_read_from_it(tmp_path: Path) -> None:
    async with machines(tmp_path, lender=NIXL, reader=NIXL) as (one, a, two, b):
        await ready(one)
        await a.store(CONTENTS)
        nixl, silent = lender_of(one)
        os.kill(silent.pid, signal.SIGSTOP)
        done = await read(two, address(one), CONTENTS)
        assert not done.written
        assert faults(two, "closed") == 1, "nothing else ended it"
        await until(lambda: silent.ended)
        await until(lambda: nixl.ready is not None and nixl.process is not silent)
        while not (
            await read(two, address(one), CONTENTS)
        ).written:  # on a busy machine the next one may look silent too
            await ready(one)
        assert await b.load(CONTENTS) == (12, 0)


async def test_blocks_that_are_read_after_their_loan_has_ended_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_lender, "SILENT_S", 600.0)  # the process is frozen here, and must not be killed for it
    async with machines(tmp_path, lender=NIXL, reader=NIXL) as (one, a, two, b):
        await ready(one)
        await a.store(CONTENTS)
        await a.store(OTHERS)
        _, frozen = lender_of(one)
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            late = asyncio.create_task(read(two, address(one), CONTENTS, 60.0))
            loans = of(one).server.lender.loans
            await until(lambda: bool(loans.sending))
            slots = loans_are_over(one)
            assert len(slots) == 12
            await until(lambda: not lending(one))
            for slot in slots:  # they may have another owner now
                with one.service.layouts.open[LAYOUT.digest].slots.slot(slot) as memory:
                    memory[:] = bytes(memory.nbytes)
            others = asyncio.create_task(read(two, address(one), OTHERS, 60.0))  # the process serves again for it
            await until(lambda: bool(loans.sending))
        finally:
            with suppress(ProcessLookupError):
                os.kill(frozen.pid, signal.SIGCONT)
        done = await late
        assert not done.written
        assert done.fault is not None
        await others
        assert await b.load(CONTENTS) == (0, 0)
