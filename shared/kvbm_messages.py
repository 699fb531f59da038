"""What a worker and its machine's block store say to each other, and what the store tells everyone.

    engine → its kvbm    Attach → Attached | KvbmRefused         request and reply
                         Store → Granted | KvbmRefused           request and reply
                         Commit, Abort, Release → Settled | …    request and reply
                         Discard → Settled | KvbmRefused         request and reply
                         Fetch → Fetched … | KvbmRefused         request, streamed replies
    kvbm → everyone      KvbmReport                              published every 250 ms
    people → kvbm        nothing → KvbmState                     request and reply, JSON

Every subject is one kvbm's own (`subjects.kvbm`). A worker finds its kvbm in the pool's directory: the lock file there
names the instance (`shared.pool.lock`). Blocks are named by (layout digest, content key); their bytes never travel:
engines copy between their own memory and the pool that both map. Rules of encoding are those of `shared.messages`.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec
from msgspec import Struct

from shared.messages import Codec, KvLayout

# --- attaching


class StoreLayout(Struct, frozen=True):
    """All that must agree for one engine to use a block that another one computed, beside the content key."""

    model: str
    weights: str
    """A digest of what the model computes with: one name may stand for other weights tomorrow."""
    kv: KvLayout
    rank: int = 0
    """Of the tensor-parallel shard."""

    @property
    def digest(self) -> str:
        """16 hex digits that name the layout, its arena and its files."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class Attach(Struct, frozen=True, tag="attach"):
    """This engine process will store and fetch blocks of one layout. Nothing of its own is under way, whatever was
    before: all its tickets have ended. Asked again it is the same."""

    worker: str
    """Instance id; what it holds ends with its lease."""
    owner: str
    """Names the engine process: it holds the kernel's lock on the file `owners/OWNER` of the pool's directory."""
    layout: StoreLayout


class Attached(Struct, frozen=True, tag="attached"):
    """Where the layout's slots lie in the pool file, as `shared.pool.format.Arena` has it."""

    kvbm: str
    layout: str
    """Its digest."""
    pool_bytes: int
    """The file's size."""
    offset: int
    slot_bytes: int
    slots: int
    generations: int
    blocks_per_request: int
    """At most so many in one Store, Fetch or Discard."""
    takes_discards: bool = False
    """Whether there is an answer to a Discard."""


# --- storing


class StoreBlock(Struct, frozen=True, array_like=True):
    """One full block that an engine could store."""

    key: bytes
    """Content key."""
    parent: bytes | None
    tokens: bytes
    """Packed u32."""
    lora: str = ""
    salt: str = ""


class Store(Struct, frozen=True, tag="store"):
    """Slots for those of the blocks that are not there yet and are worth keeping, please; parents before children."""

    owner: str
    blocks: list[StoreBlock]


class Granted(Struct, frozen=True, tag="granted"):
    """Slots to write to. Who has not committed after `time_left_s` begins no write any more."""

    ticket: int
    """0: nothing was granted, and nothing is to be committed."""
    time_left_s: float
    blocks: list[int]
    """Indices into the request's; those that are missing are there already, come from another worker, or are not
    worth keeping."""
    slots: bytes
    """Of these, packed u32."""


class Commit(Struct, frozen=True, tag="commit"):
    """These of a store ticket's slots are written, the others never will be: the ticket ends."""

    owner: str
    ticket: int
    slots: bytes
    """Packed u32."""
    checksums: bytes = b""
    """Of the blocks in these slots: XXH3-64, packed u64, 0 where none was made. Empty: none was."""


class Abort(Struct, frozen=True, tag="abort"):
    """Nobody writes to a store ticket's slots any more, and nothing is to be published. Idempotent."""

    owner: str
    ticket: int


# --- fetching


class Fetch(Struct, frozen=True, tag="fetch"):
    """The longest prefix of these blocks, held for reading, please."""

    owner: str
    keys: bytes
    """Content keys, one behind the other, 16 bytes each."""


class Fetched(Struct, frozen=True, tag="fetched"):
    """More of the prefix can be read, in order. After a slot's bytes were copied its generation must be looked at
    again: another one, and the copy is worth nothing. The last reply has the LAST header."""

    ticket: int
    """0: nothing was found, and nothing is to be released."""
    time_left_s: float
    first: int
    """Index of the first of these blocks."""
    slots: bytes
    """Packed u32."""
    generations: bytes
    """Of these, packed u64."""
    disk: bool
    """Whether these came from disk."""
    found: int
    """Length of the prefix as far as it is known now; what is missing comes in later replies, or it shrinks."""
    checksums: bytes = b""
    """As in Commit, of these slots."""


class Release(Struct, frozen=True, tag="release"):
    """A fetch ticket's slots are not read any more. Idempotent."""

    owner: str
    ticket: int


# --- wrong blocks


class Discard(Struct, frozen=True, tag="discard"):
    """These blocks may be wrong: they are not to be found any more, in memory or on disk, and what is being written or
    read of them is not to be kept. Those that are not there are ignored. Idempotent."""

    owner: str
    keys: bytes
    """Content keys, one behind the other, 16 bytes each."""


# --- answers without content


class Settled(Struct, frozen=True, tag="settled"):
    """Done."""


class KvbmRefused(Struct, frozen=True, tag="refused"):
    """Nothing was done."""

    code: Literal[
        "bad_request", "unknown_owner", "unknown_ticket", "expired", "wrong_layout", "no_arena", "full", "not_ready"
    ]
    reason: str


# --- kvbm → everyone


class LayoutReport(Struct, frozen=True, array_like=True):
    """How far the KV events of one layout are."""

    layout: str
    sequence: int
    """Of the last batch published; -1: none yet."""
    host_digest: int
    """XOR of the event hashes of the blocks that can be found in host memory, as of `sequence` …"""
    disk_digest: int
    """… and on disk."""


class KvbmReport(Struct, frozen=True):
    """A kvbm's own account. Its events have epoch 1: a kvbm that starts again is another instance."""

    instance: str
    layouts: list[LayoutReport]


# --- kvbm → people


class TierState(Struct, frozen=True):
    """One tier of one layout."""

    state: str
    """on; off, scanning (disk); quarantined (host, while engines of before may still write)."""
    reason: str
    """Why it is not on, or why it does not grow."""
    capacity_blocks: int
    blocks: int
    """That can be found."""
    hit_rate: float | None
    """Blocks found here ÷ blocks asked for, over the window; None: nothing was asked."""


class LayoutState(Struct, frozen=True):
    """One layout's blocks and who uses them."""

    layout: str
    model: str
    kv: KvLayout
    host: TierState
    disk: TierState | None
    """None: there is no disk tier."""
    owners: int
    """Engine processes attached."""
    tickets: dict[str, int]
    """Open ones: store, fetch, and expired, which wait for their owners."""


class KvbmState(Struct, frozen=True):
    """A kvbm's account for people."""

    instance: str
    pool: str
    """The pool's directory."""
    pool_bytes: int
    reserved: float
    """Share of the pool's memory that is there; nothing is granted before it is 1."""
    window_s: float
    """Of the hit rates."""
    layouts: list[LayoutState]


# --- codecs

ATTACH: Codec[Attach] = Codec(Attach, "attach")
ATTACH_REPLY: Codec[Attached | KvbmRefused] = Codec(Attached | KvbmRefused, "attach reply")
STORE: Codec[Store] = Codec(Store, "store")
STORE_REPLY: Codec[Granted | KvbmRefused] = Codec(Granted | KvbmRefused, "store reply")
COMMIT: Codec[Commit] = Codec(Commit, "commit")
ABORT: Codec[Abort] = Codec(Abort, "abort")
FETCH: Codec[Fetch] = Codec(Fetch, "fetch")
FETCH_REPLY: Codec[Fetched | KvbmRefused] = Codec(Fetched | KvbmRefused, "fetch reply")
RELEASE: Codec[Release] = Codec(Release, "release")
DISCARD: Codec[Discard] = Codec(Discard, "discard")
SETTLED: Codec[Settled | KvbmRefused] = Codec(Settled | KvbmRefused, "settled")
KVBM_REPORT: Codec[KvbmReport] = Codec(KvbmReport, "kvbm report")
KVBM_STATE: Codec[KvbmState] = Codec(KvbmState, "kvbm state")
