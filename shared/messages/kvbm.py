"""The messages between a worker and kvbm, the block store of its machine, and kvbm's reports to everyone. Pure.

    engine → its kvbm    Attach → Attached | KvbmRefused         request and reply
                         Store → Granted | KvbmRefused           request and reply
                         Commit, Abort, Release → Settled | …    request and reply
                         Discard → Settled | KvbmRefused         request and reply
                         Fetch → Fetched … | KvbmRefused         request, streamed replies
    kvbm → everyone      KvbmReport                              published every 250 ms
    people → kvbm        nothing → KvbmState                     request and reply, JSON

Every subject belongs to one kvbm (`subjects.kvbm`). A worker finds its kvbm in the pool's directory: the lock file
there names the instance (`shared.pool.lock`). Blocks are named by (layout digest, content key); their bytes never
travel: engines copy between their own memory and the pool that both map. The rules of encoding are those of
`shared.messages`.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec
from msgspec import Struct

from shared.messages.cards import KvLayout
from shared.messages.codec import Codec

# --- attaching


class StoreLayout(Struct, frozen=True):
    """Everything that must agree, in addition to the content key, before an engine may use another engine's block."""

    model: str
    weights: str
    """A digest of the weights: the same model name may stand for other weights tomorrow."""
    kv: KvLayout
    rank: int = 0
    """The rank of the tensor-parallel shard."""

    @property
    def digest(self) -> str:
        """The name of the layout, its arena and its files: 16 hex digits."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class Attach(Struct, frozen=True, tag="attach"):
    """Announce an engine process that will store and fetch blocks of one layout.

    Nothing of its own is under way: every ticket that it had before has ended. Idempotent."""

    worker: str
    """The instance id of the worker; its tickets end with its lease."""
    owner: str
    """The name of the engine process. It holds the kernel lock on the file `owners/OWNER` of the pool's directory."""
    layout: StoreLayout
    reply_s: float = 0.0
    """Seconds that the engine waits for each reply, after which it takes kvbm for lost. 0 if it does not say."""


class Attached(Struct, frozen=True, tag="attached"):
    """The place of the layout's slots in the pool file, with the fields of `shared.pool.format.Arena`."""

    kvbm: str
    layout: str
    """The digest of the layout."""
    pool_bytes: int
    """The size of the pool file."""
    offset: int
    slot_bytes: int
    slots: int
    generations: int
    blocks_per_request: int
    """The maximum number of blocks in one Store, Fetch or Discard."""
    takes_discards: bool = False
    """Whether kvbm answers a Discard."""


# --- storing


class StoreBlock(Struct, frozen=True, array_like=True):
    """One full block that an engine offers to store."""

    key: bytes
    """The content key."""
    parent: bytes | None
    tokens: bytes
    """The block's token ids, packed u32."""
    lora: str = ""
    salt: str = ""
    extra: bytes = b""
    """`Content.extra`: what names the images in the block."""


class Store(Struct, frozen=True, tag="store"):
    """Ask for slots for those of the blocks that are not stored yet and are worth keeping; parents before children."""

    owner: str
    blocks: list[StoreBlock]


class Granted(Struct, frozen=True, tag="granted"):
    """Slots to write to. After `time_left_s` without a commit, the engine must not begin another write."""

    ticket: int
    """The ticket to commit. 0 if nothing was granted."""
    time_left_s: float
    blocks: list[int]
    """The indices of the granted blocks in the request. The others are stored already, come from another worker, or are
    not worth keeping."""
    slots: bytes
    """The slots of these blocks, packed u32."""


class Commit(Struct, frozen=True, tag="commit"):
    """Report which slots of a store ticket are written. The others never will be: the ticket ends."""

    owner: str
    ticket: int
    slots: bytes
    """The written slots, packed u32."""
    checksums: bytes = b""
    """The XXH3-64 of the block in each of these slots, packed u64, 0 for one without a checksum. Empty if none has
    one."""


class Abort(Struct, frozen=True, tag="abort"):
    """End a store ticket: nothing writes to its slots any longer, and nothing is published. Idempotent."""

    owner: str
    ticket: int


# --- fetching


class Fetch(Struct, frozen=True, tag="fetch"):
    """Ask for the longest stored prefix of these blocks, pinned for reading."""

    owner: str
    keys: bytes
    """The content keys in order, 16 bytes each."""
    awaits: bool = False
    """Whether to wait for blocks after the prefix that are not there yet, because another engine is about to store
    them. They come in later replies, each as soon as it is committed."""


class Fetched(Struct, frozen=True, tag="fetched"):
    """The next blocks of the prefix can be read, in order.

    After the engine has copied a slot, it must read the slot's generation again: if that has changed, the copy is
    worthless. The last reply has the LAST header."""

    ticket: int
    """The ticket to release. 0 if nothing was found."""
    time_left_s: float
    first: int
    """The index of the first of these blocks in the request."""
    slots: bytes
    """The slots of these blocks, packed u32."""
    generations: bytes
    """The generations of these slots, packed u64."""
    disk: bool
    """Whether these blocks came from disk."""
    found: int
    """The length of the prefix as known now, in blocks. The missing blocks come in later replies, or the prefix
    shrinks."""
    checksums: bytes = b""
    """The checksums of these slots, as in Commit."""


class Release(Struct, frozen=True, tag="release"):
    """End a fetch ticket: its slots are no longer read. Idempotent."""

    owner: str
    ticket: int


# --- wrong blocks


class Discard(Struct, frozen=True, tag="discard"):
    """Forget blocks whose bytes may be wrong, in memory and on disk.

    Writes and reads of them that are under way are not kept. Unknown blocks are ignored. Idempotent."""

    owner: str
    keys: bytes
    """The content keys, 16 bytes each."""


# --- answers without content


class Settled(Struct, frozen=True, tag="settled"):
    """The request was carried out."""


class KvbmRefused(Struct, frozen=True, tag="refused"):
    """The request was refused, and nothing was done."""

    code: Literal[
        "bad_request", "unknown_owner", "unknown_ticket", "expired", "wrong_layout", "no_arena", "full", "not_ready"
    ]
    reason: str


# --- kvbm → everyone


class LayoutReport(Struct, frozen=True, array_like=True):
    """The position of one layout's KV events."""

    layout: str
    sequence: int
    """The sequence of the last published batch. -1 if there is none yet."""
    host_digest: int
    """The XOR of the event hashes of the blocks that can be found in host memory, as of `sequence`."""
    disk_digest: int
    """The XOR of the event hashes of the blocks that can be found on disk, as of `sequence`."""


class PeerRates(Struct, frozen=True):
    """Which kvbms of other machines a kvbm asks for missing blocks, and how much a Fetch gets from them."""

    wait_s: float
    """The longest that a Fetch waits for them, in seconds."""
    least_blocks: int
    """Fewer blocks than these are not read."""
    bytes_per_s: dict[str, float]
    """Instance id of a kvbm → the rate at which blocks came from it, or an assumed one before the first read."""


class KvbmReport(Struct, frozen=True):
    """The state of a kvbm, as it reports it. Its events have epoch 1, since a kvbm that starts again is another
    instance."""

    instance: str
    layouts: list[LayoutReport]
    peers: PeerRates | None = None
    """How it reads other kvbms. None if it reads none."""


# --- kvbm → people


class TierState(Struct, frozen=True):
    """One tier of one layout."""

    state: str
    """The state: on; off or scanning (disk); quarantined (host, while engines of an earlier kvbm may still write)."""
    reason: str
    """The reason why it is not on, or does not grow."""
    capacity_blocks: int
    blocks: int
    """The number of blocks that can be found."""
    hit_rate: float | None
    """Blocks found here ÷ blocks requested, within the window. None if none were requested."""


class LayoutState(Struct, frozen=True):
    """One layout: its blocks and the engines that use them."""

    layout: str
    model: str
    kv: KvLayout
    host: TierState
    disk: TierState | None
    """The disk tier. None if there is none."""
    owners: int
    """The number of attached engine processes."""
    tickets: dict[str, int]
    """The number of open tickets by kind: store, fetch, and expired ones, which wait for their owners."""


class KvbmState(Struct, frozen=True):
    """The state of a kvbm, for people."""

    instance: str
    pool: str
    """The pool's directory."""
    pool_bytes: int
    reserved: float
    """The share of the pool's memory that is reserved; nothing is granted before it is 1."""
    window_s: float
    """The window of the hit rates, in seconds."""
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
