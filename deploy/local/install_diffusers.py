"""Makes the environment of the diffusers engine: `diffusers` in the state directory, `.headrace` in a checkout.

no GPU    torch for a CPU, as the package index has it, and diffusers with what its pipelines need
a GPU     the same, but a torch that the machine's Python has stays: the environment sees its packages

diffusers/headrace.json   what was installed; written last, so that it is there only if all of it is there
diffusers.lock            held (flock) by the processes that install, pip included, until the last has ended
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from deploy.local.install import exclusive, run
from deploy.local.state import DEFAULT_HOME
from shared.errors import ConfigError
from shared.installation import COMMAND

ENVIRONMENT = DEFAULT_HOME / "diffusers"
VERSION = "0.42.1"
"""The version of diffusers that is installed."""
NEEDED = (
    f"diffusers=={VERSION}",
    "transformers>=5,<6",
    "accelerate>=1.10",
    "safetensors>=0.6",
    "pillow>=11",
    "ftfy>=6",
    "imageio>=2.37",
    "imageio-ffmpeg>=0.6",
    "msgspec>=0.19",
    "pyzmq>=26",
    "xxhash>=3.5",
)
"""What is installed next to torch: what pipelines need, and what the engine's program does."""
DISK_BYTES = 4 << 30
"""Room that the installation needs for a CPU; 1.5 GB stay."""
STAMP = "headrace.json"
CPU_TORCH = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")
"""Where torch is without CUDA, if the package index has it only with."""

DiffusersDevice = Literal["cpu", "cuda"]


def python_of(environment: Path = ENVIRONMENT) -> Path:
    """Return the Python of the environment."""
    return environment / "bin" / "python"


def require(environment: Path = ENVIRONMENT) -> Path:
    """Return the environment's Python. Raise ConfigError if it is not installed."""
    if not (python_of(environment).exists() and (environment / STAMP).exists()):
        raise ConfigError(
            f"--engine diffusers needs diffusers, which is not installed: {COMMAND} install-diffusers ({environment})"
        )
    return python_of(environment)


def device_of(environment: Path = ENVIRONMENT) -> str:
    """Return what it was installed for: cpu or cuda. Raise ConfigError if that cannot be read."""
    try:
        return str(json.loads((environment / STAMP).read_text(encoding="utf-8"))["device"])
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise ConfigError(
            f"{environment / STAMP} cannot be read ({wrong}): remove {environment}, install again"
        ) from None


def install(device: DiffusersDevice, say: Callable[[str], None], environment: Path = ENVIRONMENT) -> bool:
    """Install diffusers unless it is there. Return whether it was installed now. Raise InstallError, ConfigError."""
    lock = environment.with_name(f"{environment.name}.lock")
    try:
        environment.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as wrong:
        raise ConfigError(f"{wrong.filename}: {wrong.strerror}; diffusers is installed there") from None
    with exclusive(lock, lambda: say("waiting for another process that installs diffusers")) as held:
        if (environment / STAMP).exists():
            return False
        free_bytes = shutil.disk_usage(environment.parent).free
        if free_bytes < DISK_BYTES:
            free, needed = free_bytes >> 30, DISK_BYTES >> 30
            raise ConfigError(f"{environment.parent}: {free} GiB are free; diffusers needs {needed} GiB to install")
        shutil.rmtree(environment, ignore_errors=True)  # what an installation that was killed has left
        try:
            _build(environment, device, say, held)
        except BaseException:
            shutil.rmtree(environment, ignore_errors=True)
            raise
    return True


def _build(environment: Path, device: DiffusersDevice, say: Callable[[str], None], lock: int) -> None:
    def step(what: str, *command: str) -> None:
        say(what)
        run(command, what, lock)

    python = str(python_of(environment))
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    seen = ("--system-site-packages",) if device == "cuda" else ()
    step("making the environment", sys.executable, "-m", "venv", *seen, str(environment))
    if device == "cpu":
        step("installing torch", *pip, "torch>=2.6", *CPU_TORCH)
    elif subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode:
        step("installing torch for GPUs", *pip, "torch>=2.6")
    step(f"installing diffusers {VERSION}", *pip, *NEEDED)
    step("loading diffusers once", python, "-c", "import diffusers, transformers, torch, imageio, msgspec, zmq, xxhash")
    stamp = {"diffusers": VERSION, "device": device}
    (environment / STAMP).write_text(json.dumps(stamp) + "\n", encoding="utf-8")
