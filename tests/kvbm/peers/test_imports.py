"""Blocks that one kvbm reads from another one's pool, over real connections."""

from __future__ import annotations

from pathlib import Path

from tests.kvbm.chains import chain
from tests.kvbm.peer_rig import address, machines, read


async def test_blocks_of_another_machine_are_found_in_this_ones_pool(tmp_path: Path) -> None:
    async with machines(tmp_path) as (one, a, two, b):
        contents = chain(*range(1, 21))
        assert await a.store(contents) == 20
        done = await read(two, address(one), contents)
        assert done is not None
        assert done.fault is None
        assert (len(done.written), done.lent) == (20, 20)
        assert await b.load(contents) == (20, 0)
        assert two.metric("headrace_kvbm_peer_read_blocks_total") == 20
        assert one.metric("headrace_kvbm_peer_sent_bytes_total") == 20 * 8000
        again = await read(two, address(one), contents)
        assert again is not None
        assert again.written == {}, "they are here"
