"""What one kvbm has to do with those of other machines: it lends at a port, and reads by a road.

layouts open and close ──▶ sync ──▶ the road           stop: no read, then no connection, then the pool is unmapped
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

from services.kvbm.config import PeersConfig
from services.kvbm.layout.layout import LayoutStore
from services.kvbm.metrics import StoreMetrics
from services.kvbm.peers.cache import PeerCache
from services.kvbm.peers.connections import PeerConnections
from services.kvbm.peers.imports import PeerImports
from services.kvbm.peers.lender import KvbmLender
from services.kvbm.peers.messages import PeerAddress
from services.kvbm.peers.nixl_lender import NixlLender
from services.kvbm.peers.nixl_messages import NixlRole
from services.kvbm.peers.nixl_process import NixlProcess, nixl_environment, require_nixl
from services.kvbm.peers.nixl_reader import NixlReader
from services.kvbm.peers.road import PeerBlockReader, PeerRoad
from services.kvbm.peers.server import PeerServer
from services.kvbm.peers.sockets import SocketReader
from services.kvbm.peers.stream import peer_tls
from shared.discovery.directory import DirectoryChange, InstanceDown, InstanceUp
from shared.messages.kvbm import PeerRates
from shared.runtime.observe import advertised, check_host
from shared.runtime.runtime import Runtime

_EPOCH_BITS = 63
_LOAN_BITS = 48


def check_peers(config: PeersConfig) -> None:
    """Check what `KvbmPeers` needs of this machine. Raise ConfigError."""
    peer_tls(config)
    if config.backend == "nixl":
        require_nixl()
        nixl_environment(config)
    if config.listen:
        check_host("peers.listen", config.address[0])


class KvbmPeers:
    """The peers of one kvbm, if `peers.listen` is set."""

    def __init__(
        self,
        runtime: Runtime,
        config: PeersConfig,
        pool: int,
        layouts: Mapping[str, LayoutStore],
        metrics: StoreMetrics,
    ) -> None:
        """`pool` is the descriptor of the pool's file. Raise ConfigError if a certificate cannot be read."""
        tls = peer_tls(config)
        epoch = 1 + runtime.draw.getrandbits(_EPOCH_BITS)
        first_loan = 1 + runtime.draw.getrandbits(_LOAN_BITS)
        self._config = config
        self._layouts = layouts
        self._metrics = metrics
        self._registered: set[str] = set()
        self._agents = count(1)
        self._agent = f"{runtime.instance}:{epoch}"
        self._pool = pool
        self._environment: dict[str, str] = {}
        self.nixl: NixlLender | None = None
        """The process that peers read from, with the back end nixl."""
        if config.backend == "nixl":
            require_nixl()
            self._environment = nixl_environment(config)
            self.nixl = NixlLender(lambda: self._start("lend"), lambda: self.server.lender.cut_loans())
        self.server = PeerServer(
            config,
            tls,
            pool,
            metrics,
            lambda cut: KvbmLender(
                runtime.instance,
                epoch,
                config,
                layouts,
                metrics,
                cut,
                first_loan=first_loan,
                agent=lambda: None if self.nixl is None else self.nixl.ready,
                lending=lambda on: None if self.nixl is None else self.nixl.set_lending(on),
            ),
        )
        connections = PeerConnections(config, tls, self.server.lender.hello)
        self.nixl_reader: NixlReader | None = None
        """The processes that read from peers, with the back end nixl."""
        if config.backend == "nixl":
            self.nixl_reader = NixlReader(connections, lambda: self._start("read"))
        reader: PeerBlockReader = self.nixl_reader or SocketReader(connections, config)
        self.road = PeerRoad(connections, reader)
        self.imports = PeerImports(self.road, config, metrics)
        self.cache = PeerCache(self.imports, config, metrics)
        self._instance = runtime.instance
        runtime.directory.subscribe(self._directory_changed)

    def open(self) -> None:
        """Listen. Raise ConfigError."""
        self.server.open()
        if self.nixl is not None:
            self.nixl.open()
        if self.nixl_reader is not None:
            self.nixl_reader.open()

    async def close(self) -> bool:
        """End all reads and loans. Return False if a thread may still read slots."""
        await self.cache.close()
        await self.imports.close()
        if self.nixl_reader is not None:
            await self.nixl_reader.close()
        self.road.close()
        closed = await self.server.close()
        if self.nixl is not None:
            await self.nixl.close()
        return closed

    def _start(self, role: NixlRole) -> NixlProcess:
        return NixlProcess(role, f"{self._agent}:{role}{next(self._agents)}", self._pool, self._environment)

    @property
    def address(self) -> str:
        """HOST:PORT for the address book."""
        host = self._config.advertise or advertised(self._config.address[0])
        return f"[{host}]:{self.server.port}" if ":" in host else f"{host}:{self.server.port}"

    @property
    def rates(self) -> PeerRates:
        """What routers need to know to count on the blocks of peers."""
        config = self._config
        return PeerRates(config.wait_s, config.least_blocks, self.cache.rates(self._layouts.keys()))

    def sync(self) -> None:
        """Register the layouts that are open now, and no others."""
        for digest in self._registered - self._layouts.keys():
            self.road.unregister(digest)
        for layout in self._layouts.values():
            self.road.register(layout.layout, layout.slots)
        self._registered = set(self._layouts)

    def _directory_changed(self, change: DirectoryChange) -> None:
        if isinstance(change, InstanceUp | InstanceDown) and change.instance.service == "kvbm":
            peer = change.instance
            address = parse_address(peer.instance, peer.peers)
            if isinstance(change, InstanceDown) or address is None:
                if self.cache.choice.forget(peer.instance):
                    self.road.gone(peer.instance)
            elif peer.instance != self._instance:
                self.cache.choice.learn(address, peer.layouts.keys())

    def tick(self) -> None:
        """Do what is due: end loans whose time is over, and show how many there are."""
        self.server.lender.expire()
        loans = self.server.lender.loans
        self._metrics.peer_loans.set(len(loans))
        self._metrics.peer_lent_bytes.set(loans.size_bytes)

    def validate(self) -> None:
        """Raise AssertionError if anything contradicts itself."""
        self.server.lender.validate()
        self.imports.validate()
        self.cache.choice.validate()
        assert self.cache.under_way <= self._config.reads, "too many fetches wait"


def parse_address(instance: str, text: str) -> PeerAddress | None:
    """Return what an address book entry says; None if it is no HOST:PORT."""
    try:
        host, port = PeersConfig(listen=text).address
    except ValueError:
        return None
    return PeerAddress(instance, host, port) if port > 0 else None
