"""EngineBlocks: the blocks that vLLM has cached, as its KV events say, in the form that a worker publishes. Pure.

    vLLM's events                                        ours
    BlockStored of a group, a tier, extra keys   ──▶     BlockStored of blocks that are new, with LoRA, images and salt
    BlockRemoved, one for each copy              ──▶     BlockRemoved when the last copy has gone
    AllBlocksCleared                             ──▶     AllBlocksCleared, unless nothing was cached

vLLM may store one block twice, when two requests compute it at once, and then removes it twice; so copies are counted.
Left out is what cannot serve a prompt by its tokens, images, LoRA and salt alone: blocks of sliding windows and of
state space layers, blocks of another size, and blocks in other tiers. So are all blocks of a chain from one with other
extra keys on, such as images that are named in another way than frontends name them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

from msgspec import Struct

from services.worker.contracts.messages import BlockExplained
from services.worker.scheduler.block_notes import EVERY_BLOCK, BlockNotes
from shared.hashing import pack_tokens
from shared.kv_events import extra_keys, read_images
from shared.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, SnapshotBlock

MEDIUM = "GPU"
"""vLLM's word for the device's memory, on a CPU too."""
_WHOLE_PREFIX = frozenset((None, "full_attention", "mla_attention", "sink_full_attention"))
"""The kinds of groups whose blocks hold the KV of all tokens."""
_MASK = (1 << 64) - 1


class _Entry(Struct):
    block: SnapshotBlock
    copies: int


class EngineBlocks:
    """The cached blocks of one engine, by hash."""

    def __init__(self, block_size: int, *, orphans: bool = True, engine: str = "vllm") -> None:
        """`block_size` is in tokens; blocks of another size are left out. `orphans` False: so are blocks that follow an
        unknown one, for a reader that may not have seen all events. `engine` is whose cache it is, for explanations."""
        self._block_size, self._engine = block_size, {"vllm": "vLLM", "sglang": "SGLang"}[engine]
        self.notes = BlockNotes()
        """What vLLM said of blocks; the caller keeps its time."""
        self._orphans = orphans
        self._entries: dict[int, _Entry] = {}
        self._group: int | None = None
        """The group of layers whose blocks are counted: the first one that holds the KV of all tokens."""
        self.digest = 0
        """The XOR of the hashes of all blocks."""
        self.left_out = 0
        """Number of stored blocks that were left out."""

    def __len__(self) -> int:
        return len(self._entries)

    def apply(self, events: Iterable[KvEvent]) -> list[KvEvent]:
        """Take up events in vLLM's order. Return what to publish."""
        published: list[KvEvent] = []
        for event in events:
            match event:
                case BlockStored():
                    published.extend(self._store(event))
                case BlockRemoved():
                    removed = self._remove(event)
                    if removed:
                        published.append(BlockRemoved(block_hashes=list(removed), medium=MEDIUM))
                case AllBlocksCleared():
                    published.extend(self.clear())
                case _:
                    assert_never(event)
        return published

    def clear(self) -> list[KvEvent]:
        """Forget all blocks. Return what to publish."""
        if not self._entries:
            return []
        self._entries.clear()
        self.notes.add(EVERY_BLOCK, f"forgotten with all other blocks: {self._engine}'s cache was cleared")
        self.digest = 0
        return [AllBlocksCleared()]

    def explain(self, key_end: bytes, ticket: int, now_s: float) -> BlockExplained:
        """Return what is known of a block, by the last 8 bytes of its hash or by all of a content key."""
        name = key_end[-8:]
        entry = self._entries.get(int.from_bytes(name, "big"))
        cache = f"in {self._engine}'s cache"
        there = f"not {cache}" if entry is None else f"{cache}, {entry.copies} times"
        place = (
            f"{there}, as its events say; {self._engine} does not say what holds a block or which one is evicted next"
        )
        return BlockExplained(ticket, [place], self.notes.find(name, now_s))

    def snapshot(self) -> list[SnapshotBlock]:
        """Return all blocks, parents first."""
        ordered: dict[int, SnapshotBlock] = {}
        for key in self._entries:
            chain: dict[int, None] = {}  # a dict, since events may name parents in a circle
            following: int | None = key
            while following in self._entries and following not in ordered and following not in chain:
                chain[following] = None
                following = self._entries[following].block.parent
            for name in reversed(chain):
                ordered[name] = self._entries[name].block
        return list(ordered.values())

    def _store(self, event: BlockStored) -> Iterator[BlockStored]:
        if not self._counts(event):
            self.left_out += len(event.block_hashes)
            return
        salt, routable, extras = _read_keys(event)
        self.left_out += len(event.block_hashes) - routable
        parent = None if event.parent_block_hash is None else _number(event.parent_block_hash)
        if not self._orphans and parent is not None and parent not in self._entries:
            self.left_out += routable
            return
        run: list[SnapshotBlock] = []
        for index, name in enumerate(event.block_hashes[:routable]):
            key = _number(name)
            start = index * self._block_size
            tokens = event.token_ids[start : start + self._block_size]
            entry = self._entries.get(key)
            if entry is not None:
                entry.copies += 1
                if run:
                    yield self._stored(run)
                    run = []
            else:
                block = SnapshotBlock(
                    key, parent, pack_tokens(tokens), event.lora_name or "", salt, extras.get(index, b"")
                )
                self._entries[key] = _Entry(block, 1)
                self.notes.add(key.to_bytes(8, "big"), f"stored by {self._engine}")
                self.digest ^= key
                run.append(block)
            parent = key
        if run:
            yield self._stored(run)

    def _counts(self, event: BlockStored) -> bool:
        if event.medium not in (None, MEDIUM) or event.kv_cache_spec_kind not in _WHOLE_PREFIX:
            return False
        if event.block_size != self._block_size:
            return False
        if len(event.token_ids) != len(event.block_hashes) * self._block_size:
            return False
        if self._group is None:
            self._group = event.group_idx
        return event.group_idx == self._group

    def _stored(self, run: Sequence[SnapshotBlock]) -> BlockStored:
        first = run[0]
        tokens: list[int] = []
        for block in run:
            tokens.extend(memoryview(block.tokens).cast("I"))
        return BlockStored(
            block_hashes=[block.hash for block in run],
            parent_block_hash=first.parent,
            token_ids=tokens,
            block_size=self._block_size,
            medium=MEDIUM,
            lora_name=first.lora or None,
            extra_keys=extra_keys([block.extra for block in run], first.salt if first.parent is None else ""),
        )

    def _remove(self, event: BlockRemoved) -> list[int]:
        if event.medium not in (None, MEDIUM) or event.group_idx != self._group:
            return []
        removed: list[int] = []
        for name in event.block_hashes:
            key = _number(name)
            entry = self._entries.get(key)
            if entry is None:  # it was left out
                continue
            entry.copies -= 1
            if not entry.copies:
                del self._entries[key]
                self.digest ^= key
                removed.append(key)
                self.notes.add(key.to_bytes(8, "big"), f"removed by {self._engine}, which gives no reason")
        return removed

    def validate(self) -> None:
        """Raise AssertionError if the parts contradict each other."""
        digest = 0
        for key, entry in self._entries.items():
            assert entry.copies >= 1
            assert entry.block.hash == key
            digest ^= key
        assert digest == self.digest


def _number(name: int | bytes) -> int:
    """Return a block's hash as a u64: vLLM sends the low 64 bits, or all bytes, of a big-endian digest."""
    return name & _MASK if isinstance(name, int) else int.from_bytes(name[-8:], "big")


def _read_keys(event: BlockStored) -> tuple[str, int, dict[int, bytes]]:
    """Return the tenant salt, how many leading blocks tokens, images, LoRA and salt alone decide, and what these blocks
    have of images, as `image_extras` has it.

    vLLM's extra keys of a block are the LoRA's name, the images in it, then whatever else its content depends on; those
    of a chain's first block end with the salt.
    """
    lora = event.lora_name or ""
    extras: dict[int, bytes] = {}
    if event.lora_id is not None and not lora:
        return "", 0, extras
    salt = ""
    for number, keys in enumerate(event.extra_keys or ()):
        foreign = list(keys or ())
        if lora and lora in foreign:  # a salt may be the same word
            foreign.remove(lora)
        last = foreign[-1] if foreign else None
        if number == 0 and event.parent_block_hash is None and isinstance(last, str):
            salt = last
            foreign.pop()
        if foreign:
            images = read_images(foreign)
            if images is None:
                return salt, number, extras
            extras[number] = images
    return salt, len(event.block_hashes), extras
