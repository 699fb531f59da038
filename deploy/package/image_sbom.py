"""Prints the SBOM (CycloneDX) of the container image in which it runs.

    docker run --rm --network none headrace:local deploy.package.image_sbom > headrace-image.cdx.json

It lists the packages of Debian or Ubuntu, those of every Python environment, a Python that is no package, and models
with their digests. Two runs of one image print the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

from shared.version import VERSION

STATUS = Path("/var/lib/dpkg/status")
MODELS = Path("/models")
KERNELS = {"/proc", "/sys", "/dev"}
"""Directories that are no part of an image."""
SYSTEMS = Path("/usr/lib/python3")
"""Where a system's own packages of Python lie, which the list of its packages has already."""

Component = dict[str, Any]


def system_packages(status: str, system: str, release: str) -> Iterator[Component]:
    """Yield the packages that are installed, by the text of dpkg's status file. `system` and `release` are ID and
    VERSION_ID of /etc/os-release. *Pure.*"""
    for stanza in status.split("\n\n"):
        lines = (line.partition(": ")[::2] for line in stanza.splitlines() if not line.startswith(" "))
        fields = dict(lines)
        if fields.get("Status") == "install ok installed":
            place = f"?arch={fields['Architecture']}&distro={system}-{release}"
            yield _library(f"deb/{system}", fields["Package"], fields["Version"], place)


def _library(kind: str, name: str, version: str, place: str = "") -> Component:
    purl = f"pkg:{kind}/{quote(name, safe='')}@{quote(version, safe=':')}{place}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _python_packages() -> Iterator[Component]:
    if sys.base_prefix != "/usr":  # Debian's own is there
        yield _library("generic", "python", platform.python_version())
    for place, directories, _ in os.walk("/"):
        directories[:] = [each for each in directories if str(Path(place, each)) not in KERNELS]
        if place.endswith(("/site-packages", "/dist-packages")) and not Path(place).is_relative_to(SYSTEMS):
            directories.clear()
            for each in distributions(path=[place]):
                yield _library("pypi", re.sub(r"[-_.]+", "-", each.name).lower(), each.version)


def _models() -> Iterator[Component]:
    for file in MODELS.glob("*.gguf"):
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        hashes = [{"alg": "SHA-256", "content": digest}]
        yield {"type": "machine-learning-model", "bom-ref": f"model/{file.name}", "name": file.name, "hashes": hashes}


def image_sbom() -> dict[str, Any]:
    """Return the SBOM of this image. Raise OSError if the image is of no Debian."""
    system = platform.freedesktop_os_release()
    status = STATUS.read_text(encoding="utf-8")
    found = [*system_packages(status, system["ID"], system["VERSION_ID"]), *_python_packages(), *_models()]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {"type": "container", "bom-ref": "headrace", "name": "headrace", "version": VERSION},
            "properties": [{"name": "headrace:system", "value": system["PRETTY_NAME"]}],
        },
        "components": sorted({each["bom-ref"]: each for each in found}.values(), key=lambda each: str(each["bom-ref"])),
    }


if __name__ == "__main__":
    print(json.dumps(image_sbom(), indent=1))
