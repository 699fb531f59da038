"""What a seed decides before anything runs: which faults, in which order, and what is asked meanwhile. Pure.

Faults come one at a time, the next when all is whole again, so that a healthy instance of each service is always there.
A deck holds every kind of fault once; it is shuffled, played to its end, and shuffled again.

    kill     SIGKILL, down for `for_s`, then started again        restart   SIGTERM, its drain, then started again
    freeze   SIGSTOP for `for_s`, then SIGCONT; of etcd's freezes all but the shortest outlast the leases
    wipe     etcd ends, loses its data, and starts again
    sever    a process's connections to NATS or etcd break, and new ones are refused, for `for_s`
    hang     nothing passes on them for `for_s`, and then all that was sent meanwhile
    kill with kvbm   the block store dies in the same moment, in the middle of what both are copying
    damage disk      kvbm is killed, bits of its files on disk change, and it starts again
    damage pool      kvbm is killed, its pool is no pool any more, and it starts again
    damage memory    bits of the blocks in kvbm's memory change while everything runs; engines compare checksums
    with roles       workers are prefill and decode ones, and what befalls a worker or an engine befalls either
    damage keys      a frontend's file of API keys is no such file for `for_s`, and then what it was
    partition        nothing passes from or to the machine of a server or a worker for `for_s`

With clusters there are three servers of NATS and three members of etcd, and the deck has only what befalls them and
the machines of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from random import Random
from typing import Literal

from msgspec import Struct

Target = Literal[
    "worker",
    "engine",
    "router",
    "frontend",
    "kvbm",
    "nats",
    "etcd",
    "prefill",
    "decode",
    "prefill engine",
    "decode engine",
    "nats server",
    "etcd member",
]
Kind = Literal[
    "kill",
    "kill with kvbm",
    "restart",
    "freeze",
    "wipe",
    "sever nats",
    "hang nats",
    "sever etcd",
    "hang etcd",
    "damage disk",
    "damage pool",
    "damage memory",
    "damage keys",
    "partition",
]

SERVICES: tuple[Target, ...] = ("worker", "router", "frontend")
ALONE: tuple[Target, ...] = ("kvbm", "nats", "etcd")
"""Targets of which there is one."""
_OF_SERVICES: tuple[Kind, ...] = ("kill", "restart", "freeze", "sever nats", "hang nats", "sever etcd", "hang etcd")
_OF_MEMBERS: tuple[Kind, ...] = ("kill", "restart", "freeze", "partition")
_OF_ROLES: Mapping[Target, tuple[Target, ...]] = {
    "worker": ("prefill", "decode"),
    "engine": ("prefill engine", "decode engine"),
}
DECK: tuple[tuple[Kind, Target], ...] = (
    *((kind, service) for service in (*SERVICES, "kvbm") for kind in _OF_SERVICES),
    ("kill", "engine"),
    ("kill with kvbm", "engine"),
    ("freeze", "engine"),
    ("damage disk", "kvbm"),
    ("damage pool", "kvbm"),
    ("damage memory", "kvbm"),
    ("damage keys", "frontend"),
    ("kill", "nats"),
    ("restart", "nats"),
    ("freeze", "nats"),
    ("kill", "etcd"),
    ("restart", "etcd"),
    ("freeze", "etcd"),
    ("wipe", "etcd"),
)
"""Every fault there is."""
ROLES: tuple[Target, ...] = ("prefill", "decode")
"""The workers of a stack with roles, instead of `worker`; faults of a worker befall either."""
ROLES_DECK: tuple[tuple[Kind, Target], ...] = tuple(
    (kind, half) for kind, target in DECK for half in _OF_ROLES.get(target, (target,))
)
"""Every fault of a stack with roles."""

MEMBERS = 3
"""The number of servers in a cluster of NATS, or of etcd."""
CLUSTERED: tuple[Target, ...] = ("nats server", "etcd member")
CLUSTERS_DECK: tuple[tuple[Kind, Target], ...] = (
    *((kind, target) for target in CLUSTERED for kind in _OF_MEMBERS),
    ("partition", "worker"),
)
"""Every fault of a stack with clusters that others have not."""
PARTITIONS_S = (1.0, 30.0)
"""Durations of partitions, in seconds."""

NATS_AWAY_S = (2.0, 10.0)
"""NATS is there once for all: longer than this, and clients see it."""


class Fault(Struct, frozen=True):
    """One thing that goes wrong."""

    kind: Kind
    target: Target
    number: int
    """Which of the target's instances, from 0."""
    for_s: float
    pause_s: float
    """Seconds of quiet before it."""

    @property
    def name(self) -> str:
        """As people read it."""
        which = self.target if self.target in ALONE else f"{self.target} {self.number}"
        lasting = "" if self.kind in ("restart", "wipe", "damage memory") else f" for {self.for_s:g} s"
        if self.kind == "kill with kvbm":
            return f"kill {which} and kvbm{lasting}"
        kind, _, of = self.kind.partition(" ")
        return f"{kind} {of} of {which}{lasting}" if of else f"{kind} {which}{lasting}"


def faults(
    seed: int,
    instances: int,
    durations_s: tuple[float, ...],
    deck: Sequence[tuple[Kind, Target]] = DECK,
    *,
    lease_s: float = 0.0,
    partitions_s: tuple[float, ...] = PARTITIONS_S,
) -> Iterator[Fault]:
    """Without end. Each service has `instances`; NATS is never away for longer than the longest of NATS_AWAY_S.

    A freeze of etcd lasts for a lease, `lease_s`, more, but where it has the shortest of `durations_s`. `partitions_s`
    are the durations of partitions.
    """
    draw = Random(f"faults {seed}")
    while True:
        for kind, target in draw.sample(deck, len(deck)):
            lasting_s = partitions_s if kind == "partition" else durations_s
            if target == "nats":
                lasting_s = tuple(one for one in durations_s if one <= max(NATS_AWAY_S))
            members = 1 if target in ALONE else MEMBERS if target in CLUSTERED else instances
            number = draw.randrange(members)
            for_s = draw.choice(lasting_s)
            if (kind, target) == ("freeze", "etcd") and for_s > min(durations_s):
                for_s += lease_s
            yield Fault(
                kind=kind,
                target=target,
                number=number,
                for_s=for_s,
                pause_s=draw.uniform(0.2, 0.8),
            )


# --- what is asked


class Question(Struct, frozen=True):
    """One thing to ask. Its answer is known from before the faults."""

    prompt: str
    chat: bool
    """Else a completion."""
    max_tokens: int
    temperature: float
    seed: int
    frequency_penalty: float
    ignore_eos: bool


class Ask(Struct, frozen=True):
    """One request."""

    after_s: float
    """Since the one before."""
    question: int
    frontend: int
    """Where its client tries first. -1 means over NATS, any frontend."""
    streamed: bool
    salt: str = ""
    """Requests with another one find nothing of this one in a cache."""


_WORDS = "water mill wheel river stone gate race head fall spring rain cloud sluice turbine power grain"


def questions(number_of: int) -> tuple[Question, ...]:
    """The same ones for every seed. Half are greedy, half sampled; most share the beginning of their prompt."""
    draw = Random("questions")
    beginnings = [_text(draw, 30) for _ in range(3)]
    return tuple(
        Question(
            prompt=f"{draw.choice(beginnings)} {number} {_text(draw, draw.randint(3, 20))}",
            chat=draw.random() < 0.7,
            max_tokens=draw.choice((1, 40, 120, 240)),
            temperature=0.0 if number % 2 == 0 else draw.choice((0.7, 1.0)),
            seed=draw.randrange(1 << 32),
            frequency_penalty=draw.choice((0.0, 0.0, 0.5)),
            ignore_eos=draw.random() < 0.8,
        )
        for number in range(number_of)
    )


def asks(seed: int, *, per_s: float, questions: int, frontends: int, salted: bool = False) -> Iterator[Ask]:
    """Yield arrivals without end, at random intervals: no arrival waits for those before it. `salted`: two of three
    find nothing in a cache, so that their prompts may be handed over."""
    draw = Random(f"asks {seed}")
    for number in count():
        yield Ask(
            after_s=draw.expovariate(per_s),
            question=draw.randrange(questions),
            frontend=draw.randrange(-1, frontends),
            streamed=draw.random() < 0.6,
            salt=f"{seed} {number}" if salted and number % 3 else "",
        )


def _text(draw: Random, words: int) -> str:
    return " ".join(draw.choices(_WORDS.split(), k=words))
