"""Lists one prefix of etcd page by page, as of one revision.

A listing in one message has no bound of size or time: a single key too many, and it could never be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from etcd3 import MultiEndpointEtcd3Client, etcdrpc
from etcd3.utils import prefix_range_end

from shared.discovery.intake import Intake

_RPC: Any = etcdrpc  # generated code; its types are not written down


def list_prefix(etcd: MultiEndpointEtcd3Client, prefix: str, intake: Intake, page: int) -> int:
    """Load everything below `prefix` into `intake`, `page` keys at a time. Return the revision of the listing.

    Raise grpc.RpcError.
    """
    pages = _Pages(etcd, prefix, page)
    intake.load_pages(pages)
    return pages.revision


def text(key: bytes) -> str:
    """Decode a key; bytes that are not UTF-8 are escaped."""
    return key.decode(errors="backslashreplace")


class _Pages:
    """The pages of one listing, iterated once. Each has a call's deadline. A page too large for a message is halved."""

    def __init__(self, etcd: MultiEndpointEtcd3Client, prefix: str, page: int) -> None:
        self._etcd = etcd
        self._first = prefix.encode()
        self._end = prefix_range_end(self._first)
        self._page = page
        self.revision = 0
        """The revision of the first page; 0: no page has come yet."""

    def __iter__(self) -> Iterator[list[tuple[int, str, bytes]]]:
        first, more = self._first, True
        while more:
            try:
                listed = self._ask(first)
            except grpc.RpcError as wrong:
                if self._page == 1 or _code(wrong) is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                self._page //= 2
                continue
            self.revision = self.revision or listed.header.revision
            yield [(entry.create_revision, text(entry.key), entry.value) for entry in listed.kvs]
            more = listed.more
            if more:
                first = listed.kvs[-1].key + b"\0"

    def _ask(self, first: bytes) -> Any:
        etcd = self._etcd
        asked = _RPC.RangeRequest(key=first, range_end=self._end, limit=self._page, revision=self.revision)
        return _RPC.KVStub(etcd.channel).Range(asked, etcd.timeout, metadata=etcd.metadata)


def _code(wrong: grpc.RpcError) -> grpc.StatusCode | None:
    return wrong.code() if isinstance(wrong, grpc.Call) else None
