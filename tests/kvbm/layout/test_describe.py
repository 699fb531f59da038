"""What a block store tells of a block: where it is, and what happened to it, over its wire."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.kvbm.layout.describe import BLOCK_NOTES, LayoutNotes
from shared.blocks import ContentStored
from tests.kvbm.chains import chain
from tests.kvbm.store_rig import serving


async def test_a_block_is_stored_and_evicted_and_an_unknown_one_is_nowhere(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        engine = await store.world.attached("a")
        contents = chain(1, 2)
        assert await engine.store(contents) == 2
        find = store.runtime.notes.find_block
        assert find is not None
        places, notes = await find(contents[0].key[8:])
        assert [place.partition(": ")[2] for place in places] == [
            "in host memory, until the policy gives its place to another block",
            "offered or asked for 1 times",
        ]
        assert [note.text.partition(": ")[2] for note in notes] == ["stored in host memory"]
        asked = 0
        while (await find(contents[0].key))[0][0].endswith("to another block"):
            asked += 1
            assert await engine.store(chain(*range(100 * asked, 100 * asked + 8))) <= 8
            await asyncio.sleep(0)
        assert [note.text.partition(": ")[2] for note in (await find(contents[0].key))[1]][-1] == (
            "evicted from host memory: the policy chose it to make room"
        )
        (unknown,), notes = await find(b"\0" * 8)
        assert "in no tier" in unknown
        assert not notes


def test_the_notes_are_bounded() -> None:
    notes = LayoutNotes()
    contents = chain(*range(64))
    for turn in range(2 * BLOCK_NOTES // 64):
        notes.changed([("host", ContentStored(content)) for content in contents], "room", float(turn))
    assert len(notes.find(contents[0].key, 1e6)) == 100, "the most of one answer"
    notes.declined(contents, [3], "no slot is free", 1e6)
    assert notes.find(contents[3].key, 1e6)[-1].text == "offered by an engine and not taken: no slot is free"
