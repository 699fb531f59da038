"""Makes the environment of the diffusers engine: `diffusers` in the state directory, `.headrace` in a checkout.

no GPU    torch for a CPU, and diffusers with what its pipelines need
a GPU     the same, but a torch that the machine's Python has stays: the environment sees its packages
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from deploy.local.engine_environment import EngineEnvironment, Steps, python_of, stamped
from deploy.local.state import DEFAULT_HOME

ENVIRONMENT = DEFAULT_HOME / "diffusers"
VERSION = "0.42.1"
"""The version of diffusers that is installed."""
TORCH = "torch==2.13.0"
"""The torch that is installed, unless the machine has one for its GPUs."""
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
CPU_TORCH = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")
"""Where torch is without CUDA, which counts as newer than the same version with it: that takes 4 GB more."""

DiffusersDevice = Literal["cpu", "cuda"]


_DIFFUSERS = EngineEnvironment("diffusers", "diffusers", DISK_BYTES)


def require(environment: Path = ENVIRONMENT) -> Path:
    """Return the environment's Python. Raise ConfigError if it is not installed."""
    return _DIFFUSERS.require(environment)


def device_of(environment: Path = ENVIRONMENT) -> str:
    """Return what it was installed for: cpu or cuda. Raise ConfigError if that cannot be read."""
    return stamped(environment, "device")


def install(device: DiffusersDevice, say: Callable[[str], None], environment: Path = ENVIRONMENT) -> bool:
    """Install diffusers unless it is there. Return whether it was installed now. Raise InstallError, ConfigError."""
    return _DIFFUSERS.install(environment, say, lambda steps: _build(environment, device, steps))


def _build(environment: Path, device: DiffusersDevice, steps: Steps) -> dict[str, str]:
    python = str(python_of(environment))
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    seen = ("--system-site-packages",) if device == "cuda" else ()
    steps.run((sys.executable, "-m", "venv", *seen, str(environment)), "making the environment")
    if device == "cpu":
        steps.run((*pip, TORCH, *CPU_TORCH), f"installing {TORCH}")
    elif subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode:
        steps.run((*pip, TORCH), f"installing {TORCH} for GPUs")
    steps.run((*pip, *NEEDED), f"installing diffusers {VERSION}")
    load = "import diffusers, transformers, torch, imageio, msgspec, zmq, xxhash"
    steps.run((python, "-c", load), "loading diffusers once")
    return {"diffusers": VERSION, "device": device}
