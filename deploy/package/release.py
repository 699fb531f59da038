"""Builds what a release publishes: sources, wheel, their SBOM and SHA-256 digests.

    .venv/bin/python -m deploy.package.release [DIRECTORY]         after ./check; the directory is dist

The SBOM (CycloneDX) lists the packages of requirements.lock, which are those that were tested, with their hashes.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from shared.installation import TREE
from shared.version import VERSION

UV = str(Path(sys.executable).with_name("uv"))
LOCK = "requirements.lock"
SUMS = "SHA256SUMS"
_PIN = re.compile(r"^([a-z0-9][^\\\n]*==[^\\\n]*?) *\\?$", re.MULTILINE)


def pins(lock: str) -> list[str]:
    """Return the requirements of a lock file's text, with their markers and without hashes. *Pure.*"""
    return _PIN.findall(lock)


def release(directory: Path) -> list[Path]:
    """Build into a directory, and return the files. Raise CalledProcessError if uv fails, which has said why."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run([UV, "build", "--python", sys.executable, "--out-dir", str(directory), str(TREE)], check=True)
    start = f"headrace-{VERSION}"
    sbom = directory / f"{start}.cdx.json"
    sbom.write_bytes(_sbom(pins((TREE / LOCK).read_text(encoding="utf-8"))))
    files = [directory / f"{start}-py3-none-any.whl", directory / f"{start}.tar.gz", sbom]
    sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (directory / SUMS).write_text(sums, encoding="utf-8")
    return [*files, directory / SUMS]


def _sbom(requirements: list[str]) -> bytes:
    """Return the SBOM of a project that needs exactly these packages: uv writes one only of a lock file of its own."""
    with tempfile.TemporaryDirectory(prefix="headrace-sbom-") as aside:
        # JSON's array of strings is TOML too
        text = f'[project]\nname = "headrace"\nversion = "{VERSION}"\nrequires-python = ">=3.11"\n'
        text += f"dependencies = {json.dumps(requirements)}\n[tool.uv]\npackage = false\n"
        (Path(aside) / "pyproject.toml").write_text(text, encoding="utf-8")
        export = [UV, "export", "--python", sys.executable, "--preview-features", "sbom-export"]
        export += ["--format", "cyclonedx1.5", "--quiet", "--project", aside]
        return subprocess.run(export, check=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    for built in release(Path(sys.argv[1] if len(sys.argv) > 1 else "dist").absolute()):
        print(built)
