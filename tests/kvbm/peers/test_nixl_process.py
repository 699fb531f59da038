"""What a kvbm with NIXL needs before it starts a process: the package, and one network device."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from services.kvbm.config import KvbmConfig, PeersConfig
from services.kvbm.peers import nixl_process
from services.kvbm.peers.nixl_process import device_with, nixl_environment, require_nixl
from shared.config import load
from shared.errors import ConfigError
from tests.kvbm.peer_rig import ONLY_WITH_NIXL, PEERS
from tests.kvbm.store_rig import serving

NIXL = replace(PEERS, backend="nixl")
WITHOUT_NIXL = pytest.mark.skipif(importlib.util.find_spec(nixl_process.MODULE) is not None, reason="NIXL is installed")


def test_a_loopback_address_is_that_of_the_device_lo() -> None:
    assert device_with("127.0.0.1") == "lo"
    assert device_with("127.9.9.9") == "lo"


def test_a_machines_address_is_that_of_one_of_its_devices() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no route but loopback")
        address = asked.getsockname()[0]
    assert device_with(address) in {name for _, name in socket.if_nameindex()}


def test_an_address_that_no_device_has_is_refused_with_the_setting_to_make() -> None:
    with pytest.raises(ConfigError, match=r"peers\.nixl_device: no network device has the address of 192\.0\.2\.1"):
        device_with("192.0.2.1")


def test_a_host_without_an_ipv4_address_is_refused_with_the_setting_to_make() -> None:
    with pytest.raises(ConfigError, match=r"no IPv4 address of ::1.*set peers\.nixl_device"):
        device_with("::1")


def test_a_process_uses_the_devices_and_transports_of_the_settings_and_no_others() -> None:
    made = nixl_environment(replace(NIXL, nixl_device="mlx5_0:1", nixl_transports="rc"))
    assert (made["UCX_NET_DEVICES"], made["UCX_TLS"]) == ("mlx5_0:1", "rc")
    made = nixl_environment(NIXL)
    assert (made["UCX_NET_DEVICES"], made["UCX_TLS"]) == ("lo", "tcp")


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_process, "MODULE", "no_such_package")
    with pytest.raises(ConfigError, match=r"needs NIXL, which is not installed: \./headrace install-nixl"):
        require_nixl()


@WITHOUT_NIXL
async def test_a_kvbm_does_not_start_without_the_package_that_it_is_to_use(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ExceptionGroup)) as caught:
        async with serving(tmp_path, peers=NIXL):
            pass
    wrong: BaseException = caught.value
    while isinstance(wrong, ExceptionGroup):  # of the services' task groups
        [wrong] = wrong.exceptions
    assert isinstance(wrong, ConfigError)
    assert "install-nixl" in str(wrong)


@ONLY_WITH_NIXL
def test_the_package_is_found_where_it_is_installed() -> None:
    require_nixl()


def test_nixl_with_certificates_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="backend nixl has no TLS"):
        PeersConfig(backend="nixl", tls_cert="c", tls_key="k", tls_ca="a")
    flags = ["--pool-directory", str(tmp_path), "--pool-size-bytes", "1", "--peers-backend", "nixl"]
    for name in ("cert", "key", "ca"):
        flags += [f"--peers-tls-{name}", str(tmp_path / name)]
    with pytest.raises(ConfigError, match="backend nixl has no TLS: remove tls_cert, tls_key and tls_ca"):
        load(KvbmConfig, flags=flags, environ={})
