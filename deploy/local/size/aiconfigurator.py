"""Asks NVIDIA's aiconfigurator, where it is installed, for the time a token: a second opinion for `headrace estimate`.

It has tables of single operations that were measured on each kind of GPU. It lives in an environment of its own, since
it brings many packages: `python -m venv aic && aic/bin/pip install aiconfigurator==0.12.0` (0.85 GB on the disk).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from deploy.local.size.roofline import Roofline
from shared.errors import ConfigError

SYSTEMS = {
    "H200": "h200_sxm",
    "H100": "h100_sxm",
    "H100-PCIe": "h100_pcie",
    "A100": "a100_sxm",
    "L40S": "l40s",
    "L4": "l4",
    "B200": "b200_sxm",
}
"""Its names of our GPUs."""
LIMIT_S = 300.0
_TIME = re.compile(r"^\s*TPOT:\s+([0-9.]+) ms", re.MULTILINE)


def decode_s(program: Path, model: Path, roofline: Roofline, batch: int, prompt: int, output: int) -> float:
    """Return its time a token of `batch` answers that decode together. Raise ConfigError if it gives none."""
    system = SYSTEMS.get(roofline.gpu.name)
    if system is None:
        raise ConfigError(f"--aiconfigurator: it has no {roofline.gpu.name}; it has {', '.join(SYSTEMS)}")
    eight = roofline.weight_bits == 8
    words = [str(program), "cli", "estimate", "--estimate-mode", "static_gen", "--log-level", "ERROR", "--no-color"]
    words += ["--model-path", str(model if model.is_dir() else model.parent), "--system", system, "--backend", "vllm"]
    words += ["--isl", str(prompt), "--osl", str(output), "--batch-size", str(batch)]
    words += ["--tp-size", str(roofline.split.tensor), "--pp-size", str(roofline.split.pipeline)]
    words += ["--gemm-quant-mode", "fp8" if eight else "bfloat16"]
    words += ["--kvcache-quant-mode", "fp8" if roofline.kv_bits == 8 else "bfloat16"]
    if roofline.weight_bits not in (8, 16):
        raise ConfigError(f"--aiconfigurator: weights of {roofline.weight_bits:g} bits are not asked for: use 8 or 16")
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except OSError as wrong:
        raise ConfigError(f"--aiconfigurator {program}: {wrong.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--aiconfigurator {program}: no answer within {LIMIT_S:g} s") from None
    found = _TIME.search(ended.stdout)
    if found is None:
        said = [line for line in (ended.stderr + ended.stdout).splitlines() if line.strip()]
        raise ConfigError(f"--aiconfigurator {program}: {said[-1][:300] if said else 'it said nothing'}")
    return float(found[1]) / 1000
