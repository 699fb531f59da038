"""The part of vLLM's block pool that the connector uses, as protocols."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class PoolBlock(Protocol):
    """A block of vLLM's pool, which calls it KVCacheBlock."""

    block_id: int
    ref_cnt: int
    is_null: bool

    @property
    def block_hash(self) -> object | None: ...


class VllmPool(Protocol):
    """The pool of blocks of vLLM's scheduler, its BlockPool."""

    blocks: Sequence[PoolBlock]
    """All blocks; the first one is null."""

    def touch(self, blocks: Sequence[PoolBlock], /) -> None: ...

    def free_blocks(self, ordered_blocks: Iterable[PoolBlock], /) -> None: ...

    def get_num_free_blocks(self) -> int: ...

    def get_new_blocks(self, num_blocks: int, /) -> list[PoolBlock]: ...

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[PoolBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        /,
    ) -> None: ...
