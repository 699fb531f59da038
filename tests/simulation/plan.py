"""What a seed decides before anything runs: who is there, what is asked, and what goes wrong.

Each seed takes some kinds of trouble and leaves out the others, so that a common one does not always
hide a rare one. Some seeds have clear skies, and one fault or none: of them more is asked.
"""

from __future__ import annotations

from random import Random
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from shared.messages.cards import Role
from shared.messages.generate import Sampling

BLOCK_SIZE = 4
CONTEXT_LENGTH = 96
VOCABULARY = 64
EOS = 0
EMBEDDING_SIZE = 4
SHARED_TOKENS = 24
"""Tokens of the longest common prefix."""
STARTED_S = 0.1
"""Seconds until every process is there, under clear skies; earlier requests may be refused with 503."""

FaultKind = Literal[
    "kill",  # SIGKILL; its lease ends by its TTL; another one starts after `for_s`
    "stop",  # SIGTERM; it drains; another one starts after `for_s`
    "freeze",  # SIGSTOP for `for_s`
    "kill engine",
    "freeze engine",
    "lose NATS",  # of one process
    "lose all NATS",
    "lose discovery",  # for everyone
    "wipe discovery",
    "expire lease",  # though its owner lives
    "mute events",  # of one worker: they are lost on their way
    "part",  # nothing gets through between the process and everyone else, though both seem connected
    "set the clock",  # the wall clock jumps by `for_s`, back or forth
]


NEVER_MISSED: frozenset[FaultKind] = frozenset(
    ("freeze engine", "lose discovery", "wipe discovery", "expire lease", "mute events", "set the clock")
)
"""However many of them happen, some worker can serve, as long as not every worker's lease expires."""
UNNOTICED: frozenset[FaultKind] = NEVER_MISSED | frozenset[FaultKind](("kill engine", "lose all NATS"))
"""One of them, also if there is one router only; of the other kinds one, where another router can take over."""


OF_HALVES: tuple[FaultKind, ...] = (
    *("kill", "stop", "freeze", "part", "lose NATS"),
    *("kill engine", "freeze engine", "mute events", "expire lease"),
)
"""What befalls the halves of a hand-over; the first five also a kvbm."""
AGGREGATED: tuple[Role, ...] = ("aggregated",)
ROLES_SHARE = 0.3
"""Share of the seeds in which workers have roles."""
AIMED_SHARE = 0.7
"""Share of the faults of these seeds."""
FLEETS: tuple[tuple[Role, ...], ...] = (
    ("decode", "prefill"),
    ("decode", "decode", "prefill"),
    ("decode", "prefill", "prefill"),
    ("aggregated", "decode", "prefill"),
    ("decode", "decode", "prefill", "prefill"),
)

Moment = Literal[
    "prompt",  # the prompt is computed
    "first token",  # the prompt's worker has the first token, and stores blocks before it hands over
    "taken over",  # the request was dispatched to the worker that decodes
]
"""Moments of a request that is handed over."""
Half = Literal["prefill", "decode", "kvbm"]
"""Which of the processes that such a request needs."""


class Aim(Struct, frozen=True):
    """A fault that waits for a moment of a request that is handed over, and befalls one that it needs then."""

    moment: Moment
    half: Half


class Fault(Struct, frozen=True):
    """One thing that goes wrong."""

    at_s: float
    kind: FaultKind
    target: int
    """Picks among those it can befall when its time comes."""
    for_s: float
    aim: Aim | None = None


class Skies(Struct, frozen=True):
    """How messages travel during the storm."""

    lost: float
    """Share of messages that never arrive."""
    repeated: float
    """Share that arrive twice."""
    overtaken: float
    """Share that do not keep the order of their link."""
    slow: float
    """Share that take up to `delay_s`."""
    delay_s: float
    torn: float
    """Share of step frames that are cut short."""


CLEAR = Skies(lost=0.0, repeated=0.0, overtaken=0.0, slow=0.0, delay_s=0.0, torn=0.0)


Plane = Literal["zmq", "nats", "jetstream"]


class Sizes(Struct, frozen=True):
    """Sizes of what every process has; small enough to be reached."""

    capacity_blocks: int
    """Blocks of a worker's pool."""
    max_waiting: int
    """At a worker. Under a clear sky there is room for all requests: being refused is no excuse there."""
    speed: float
    """Speed of an engine; 1 is some 20 ms a step."""
    ring_batches: int
    """That a worker keeps for replay."""
    held_batches: int
    """That a router keeps while a replay is on its way."""
    index_bytes: int
    """Bytes of a router's index, which drops blocks beyond."""
    pool_slots: int
    """Slots of the kvbm's pool. 0 if there is no kvbm."""
    offload: Literal["filled", "evicted"]
    """What the kvbm is offered."""
    copy_s: float
    """Seconds of copying a block between an engine of speed 1 and the pool."""
    policy: Literal["kv", "round-robin"]
    """The routers'. `kv` sends a prompt to who has its blocks: who has not, and fetches them, is rare then."""
    wait_s: float
    """That a request may wait to begin: longer than all deadlines under a clear sky, and where engines are slow."""
    plane: Plane = "zmq"
    """The way of KV events."""
    hands_over: bool = False
    """Whether a pair of workers is taken wherever there is one. Prompts here are so short that it seldom pays."""


class Request(Struct, frozen=True):
    """What one client asks."""

    name: str
    at_s: float
    frontend: int
    tokens: tuple[int, ...]
    sampling: Sampling
    salt: str
    stops: tuple[str, ...]
    deadline_s: float
    patience_s: float
    """After that the client leaves."""
    others: tuple[tuple[int, ...], ...] = ()
    """Further prompts."""
    choices: int = 1
    """Choices of each prompt."""


class Plan(Struct, frozen=True):
    """A seed's world. Faults and requests in order of time."""

    seed: int
    frontends: int
    routers: int
    roles: tuple[Role, ...]
    """Roles of the workers at the beginning; the first one and its replacements always decode."""
    sizes: Sizes
    storm_s: float
    """Until then requests come and things go wrong."""
    skies: Skies
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]

    @property
    def apart(self) -> bool:
        """Whether prompts can be handed over."""
        return "prefill" in self.roles

    @property
    def clear(self) -> bool:
        """Nothing goes wrong: nothing may have to heal."""
        return self.skies == CLEAR and not self.faults

    @property
    def survived(self) -> bool:
        """Not more goes wrong than clients may notice as a pause: no request may fail."""
        if self.skies != CLEAR:
            return False
        kinds = {fault.kind for fault in self.faults}
        decoding = sum(role != "prefill" for role in self.roles)
        if decoding < 2 and self.faults:
            return False  # there is no other worker to go on at
        if sum(fault.kind == "expire lease" for fault in self.faults) >= decoding:
            return False  # all workers may be out of discovery for the half a second until they have registered anew
        return kinds <= NEVER_MISSED or (len(self.faults) == 1 and (kinds <= UNNOTICED or self.routers > 1))


def plan(seed: int) -> Plan:
    """The same plan for the same seed, always."""
    draw = Random(f"plan {seed}")
    storm_s = draw.choice((1.0, 2.0, 4.0))
    clear = draw.random() < 0.2
    wait_s = 60.0 if clear else Random(f"wait {seed}").choice((0.5, 60.0))  # so that the rest is what it was
    chosen = Plan(
        seed=seed,
        frontends=draw.randint(1, 2),
        routers=draw.randint(1, 3),
        roles=draw.randint(2, 3) * AGGREGATED,
        sizes=_sizes(draw, max_waiting=64 if clear else 4, wait_s=wait_s, plane=_plane(seed)),
        storm_s=storm_s,
        skies=CLEAR if clear else _skies(draw),
        requests=_requests(draw, STARTED_S if clear else 0.0, storm_s),
        faults=_faults(draw, storm_s, draw.choice((0, 1, 1, 1, 3) if clear else (0, 1, 2, 4, 8))),
    )
    apart = Random(f"roles {seed}")
    return _with_roles(chosen, apart) if apart.random() < ROLES_SHARE else chosen


def _with_roles(whole: Plan, draw: Random) -> Plan:
    """The same world with roles, a kvbm that hands blocks over, and faults in the middle of that where it has any."""
    sizes = msgspec.structs.replace(
        whole.sizes,
        pool_slots=whole.sizes.pool_slots or draw.choice((16, 256)),
        hands_over=draw.random() < 0.8,
        max_waiting=max(whole.sizes.max_waiting, 16),  # there may be one worker for all choices of a request
        speed=1.0,  # and for all requests
    )
    faults = [_aimed(fault, draw) if draw.random() < AIMED_SHARE else fault for fault in whole.faults]
    return msgspec.structs.replace(whole, roles=draw.choice(FLEETS), sizes=sizes, faults=tuple(faults))


def _aimed(fault: Fault, draw: Random) -> Fault:
    half: Half = draw.choice(get_args(Half))
    kind = draw.choice(OF_HALVES[: 5 if half == "kvbm" else None])
    return msgspec.structs.replace(fault, kind=kind, aim=Aim(draw.choice(get_args(Moment)), half))


def role_of_replacement(seed: int, number: int, ended: Role, *, decodes: bool) -> Role:
    """The role of the worker `number` of a seed, in place of one that had the role `ended`. `decodes`: it has to."""
    draw = Random(f"role {seed} {number}")
    if draw.random() < 0.5:
        return ended
    return draw.choice(("aggregated", "decode") if decodes else ("aggregated", "decode", "prefill", "prefill"))


def _plane(seed: int) -> Plane:
    """A third of the seeds has each plane, in turns of six, by which the seeds that once found a fault have ZMQ. The
    rest of a seed's world does not depend on it."""
    planes: tuple[Plane, ...] = get_args(Plane)
    return planes[seed // 6 % len(planes)]


def _sizes(draw: Random, *, max_waiting: int, wait_s: float, plane: Plane) -> Sizes:
    capacity_blocks, speed = draw.randint(CONTEXT_LENGTH // BLOCK_SIZE, 48), draw.choice((0.2, 1.0, 1.0))
    return Sizes(
        capacity_blocks=capacity_blocks,
        max_waiting=max_waiting,
        speed=speed,
        ring_batches=draw.choice((1, 5, 1000)),
        held_batches=draw.choice((2, 1000, 1000)),
        index_bytes=draw.choice((3000, 1 << 20, 1 << 20, 1 << 20)),
        pool_slots=draw.choice((0, 0, 16, 256)),
        offload=draw.choice(("filled", "evicted")),
        copy_s=draw.choice((0.0001, 0.005, 0.1)),
        policy=draw.choice(("kv", "round-robin")),
        wait_s=wait_s if speed == 1.0 else 60.0,
        plane=plane,
    )


def _skies(draw: Random) -> Skies:
    return Skies(
        lost=draw.choice((0.0, 0.0, 0.01, 0.05, 0.2)),
        repeated=draw.choice((0.0, 0.0, 0.02, 0.1)),
        overtaken=draw.choice((0.0, 0.0, 0.05)),
        slow=draw.choice((0.0, 0.02, 0.2)),
        delay_s=draw.choice((0.005, 0.05, 0.5)),
        torn=draw.choice((0.0, 0.0, 0.02, 0.2)),
    )


def _faults(draw: Random, storm_s: float, count: int) -> tuple[Fault, ...]:
    kinds = draw.sample(get_args(FaultKind), draw.randint(1, 4))
    faults = [
        Fault(
            at_s=draw.uniform(0.0, storm_s),
            kind=draw.choice(kinds),
            target=draw.randrange(1 << 16),
            for_s=draw.choice((0.1, 0.5, 2.0, 5.0)),
        )
        for _ in range(count)
    ]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _requests(draw: Random, from_s: float, until_s: float) -> tuple[Request, ...]:
    prefixes = [_tokens(draw, SHARED_TOKENS) for _ in range(draw.randint(1, 4))]
    times = sorted(draw.uniform(from_s, until_s) for _ in range(draw.randint(4, 16)))
    return tuple(request(draw, f"r{number}", at_s, prefixes) for number, at_s in enumerate(times))


def request(draw: Random, name: str, at_s: float, prefixes: list[tuple[int, ...]]) -> Request:
    """One that begins as one of `prefixes` does."""
    shared = draw.choice(prefixes)[: draw.choice((0, 8, 15, SHARED_TOKENS))]
    frontend = draw.randrange(1 << 16)
    tokens = shared + _tokens(draw, draw.randint(1, 30))
    apart = Random(f"choices {name} {tokens}")  # so that the rest of a seed's world is what it was without them
    others = tuple(shared + _tokens(apart, apart.randint(1, 30)) for _ in range(apart.choice((0, 0, 0, 1, 2))))
    return Request(
        name=name,
        at_s=at_s,
        frontend=frontend,
        tokens=tokens,
        others=others,
        choices=apart.choice((1, 1, 1, 2, 4)),
        sampling=Sampling(
            max_tokens=draw.choice((1, 3, 12, 30)),
            ignore_eos=draw.random() < 0.5,
            logprobs=draw.choice((-1, -1, 0)),
            pooling=draw.choice(("", "", "", "", "mean", "last")),
        ),
        salt=draw.choice(("", "", "", "tenant")),
        stops=draw.choice(((), (), (), (letter(draw.randrange(1, VOCABULARY)),))),
        deadline_s=draw.choice((1.0, 4.0, 8.0)),
        patience_s=draw.choice((0.05, 0.4, 30.0, 30.0, 30.0, 30.0)),
    )


def letter(token: int) -> str:
    """What a token id stands for."""
    return chr(ord("0") + token)


def _tokens(draw: Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(1, VOCABULARY) for _ in range(count))
