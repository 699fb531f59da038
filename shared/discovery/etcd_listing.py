"""Lists one prefix of etcd page by page, as of one revision.

A listing in one message has no bound of size or time: a single key too many, and it could never be read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio
from etcd3.utils import prefix_range_end

from shared.discovery.etcd_client import EtcdConnection, rpc
from shared.discovery.intake import Intake

_FIRST_PAGE = 8
_PAGE_BYTES = 1 << 20
"""A page of this size is not followed by a larger one: the event loop stands still while it reads a page."""


async def list_prefix(etcd: EtcdConnection, prefix: str, intake: Intake, page: int) -> int:
    """Load everything below `prefix` into `intake`, at most `page` keys at a time. Return the revision of the listing.

    Each page has a call's deadline. Raise grpc.RpcError.
    """
    size, revision = min(page, _FIRST_PAGE), 0

    async def pages() -> AsyncIterator[list[tuple[int, str, bytes]]]:
        nonlocal size, revision
        first, more = prefix.encode(), True
        end = prefix_range_end(first)
        while more:
            asked = rpc.RangeRequest(key=first, range_end=end, limit=size, revision=revision)
            try:
                listed = await etcd.ask(etcd.kv.Range, asked)
            except grpc.aio.AioRpcError as wrong:
                if size == 1 or wrong.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                size //= 2
                continue
            size = min(page, 2 * size) if listed.ByteSize() < _PAGE_BYTES else max(1, size // 2)
            revision = revision or listed.header.revision
            yield [(entry.create_revision, text(entry.key), entry.value) for entry in listed.kvs]
            more = listed.more
            if more:
                first = listed.kvs[-1].key + b"\0"

    await intake.load_pages(pages())
    return revision


def text(key: bytes) -> str:
    """Decode a key; bytes that are not UTF-8 are escaped."""
    return key.decode(errors="backslashreplace")
