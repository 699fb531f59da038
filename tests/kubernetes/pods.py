"""The pods of rendered manifests as processes of this machine.

Every pod has an address of its own, 127.X.Y.Z, so that all keep the chart's ports. What a container sees is rewritten:
the paths of its mounts become directories below a folder, names of Services the addresses of their pods, 0.0.0.0 and
127.0.0.1 the pod's own address, and user 10001 this user.

    Cluster.apply ──▶ Pod.start: directories of volumes, init containers, containers ──▶ ready, by its readiness probes
                      Pod.stop: SIGTERM, and no more than terminationGracePeriodSeconds
    Cluster.roll      as the kind's controller does: a Deployment's next pod is ready before its former one ends
"""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.local.stack import servers
from tests.integration.stack import eventually
from tests.kubernetes.helm import ROOT, Manifest

READY_LIMIT_S = 120.0
ENTRYPOINT = ("python", "-m")
VARIABLES = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "GRPC_ENABLE_FORK_SUPPORT": "0"}
"""Those of our images, as ENTRYPOINT is."""
SERVERS = ("-nats", "-etcd")
"""The ends of names of workloads whose Services have one address for good."""
PROGRAMS = {
    "python": lambda: Path(sys.executable),
    "nats-server": servers.nats_server,
    "/usr/local/bin/etcd": servers.etcd,
}
USER = "10001"


class Container:
    """One process of a pod."""

    def __init__(self, spec: Manifest, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.spec = spec
        self.environment = environment
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)


class Pod:
    """One pod. `template` is that of its workload."""

    def __init__(self, cluster: Cluster, name: str, template: Manifest, index: int) -> None:
        self.name = name
        self.labels: Mapping[str, str] = template["metadata"]["labels"]
        self.address = cluster.address_of(name)
        self.containers: list[Container] = []
        self.was_ready = False
        self.ended_s = math.inf
        """When it was asked to end, by the monotonic clock."""
        self.template = template
        self._cluster = cluster
        self._fields = {
            "status.podIP": self.address,
            "metadata.labels['apps.kubernetes.io/pod-index']": str(index),
        }

    def start(self) -> None:
        spec = self.template["spec"]
        places = {each["name"]: self._volume(each) for each in spec.get("volumes", [])}
        for each in spec.get("initContainers", []):
            command, environment, _ = self._made(each, places)
            subprocess.run(command, env=environment, check=True)
        for each in spec["containers"]:
            command, environment, log = self._made(each, places)
            self.containers.append(Container(each, command, environment, log))

    @property
    def ready(self) -> bool:
        """Whether the readiness probes of all containers succeed. A container that has ended fails the test."""
        for container in self.containers:
            status = container.process.poll()
            assert status is None, f"{self.name} ended with {status}:\n{container.log.read_text()[-4000:]}"
        return all(self.probed(each.spec, "readinessProbe") for each in self.containers)

    def probed(self, container: Manifest, probe: str) -> bool:
        """Whether a container's probe succeeds; one that it does not have does."""
        if probe not in container:
            return True
        asked = container[probe]["httpGet"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        url = f"http://{self.address}:{ports.get(asked['port'], asked['port'])}{asked['path']}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_ready(self) -> None:
        try:
            eventually(lambda: self.ready, limit_s=READY_LIMIT_S, what=f"{self.name} is ready")
        except AssertionError as wrong:
            raise AssertionError(f"{wrong}\n{self.logs()}") from None
        self.was_ready = True

    def stop(self) -> None:
        """As the kubelet ends a pod; each container must end by itself, with status 0."""
        grace_s = self.template["spec"].get("terminationGracePeriodSeconds", 30)
        self.ended_s = time.monotonic()
        for each in self.containers:
            assert "lifecycle" not in each.spec, "a hook that this does not run"
            each.process.send_signal(signal.SIGTERM)
        for each in self.containers:
            try:
                status = each.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{self.name} outlived {grace_s} s:\n{self.logs()}") from None
            ours = each.spec["args"][0].startswith("services.") if "args" in each.spec else False
            assert status == 0 or not ours, f"{self.name} ended with {status}:\n{self.logs()}"

    def exec(self, *command: str) -> str:
        """Return what a command prints in the pod's first container, as `kubectl exec` runs it."""
        words = [str(PROGRAMS[command[0]]()), *(self._rewritten(word, {}) for word in command[1:])]
        environment = self.containers[0].environment
        return subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    def kill(self) -> None:
        for each in self.containers:
            if each.process.poll() is None:
                each.process.kill()
                each.process.wait()

    def logs(self) -> str:
        return "\n".join(f"== {each.log.name}\n{each.log.read_text()[-4000:]}" for each in self.containers)

    def _made(self, container: Manifest, places: Mapping[str, Path]) -> tuple[list[str], dict[str, str], Path]:
        """Return a container's command, environment and log, rewritten for this machine."""
        mounts = {each["mountPath"]: places[each["name"]] for each in container.get("volumeMounts", [])}
        for place, content in self._cluster.files(self.template, container):
            for name, text in content.items():
                (places[place] / name).write_text(self._rewritten(text, mounts), encoding="utf-8")
        words = [*container.get("command", ENTRYPOINT), *container.get("args", [])]
        own: dict[str, str] = {}
        for each in container.get("env", []):
            value = each["value"] if "value" in each else self._value_from(each["valueFrom"])
            own[each["name"]] = self._rewritten(re.sub(r"\$\((\w+)\)", lambda found: own[found[1]], value), mounts)
        links = {**self._cluster.links(self.template), **self._cluster.api}
        environment = {"PATH": os.environ["PATH"], **VARIABLES, **links, **own}
        program = PROGRAMS[words[0]]() if words[0] in PROGRAMS else words[0]
        command = [str(program), *(self._rewritten(word, mounts) for word in words[1:])]
        log = self._cluster.folder / f"{self.name}.{container['name']}.log"
        return command, environment, log

    def _value_from(self, source: Manifest) -> str:
        if "fieldRef" in source:
            return self._fields[source["fieldRef"]["fieldPath"]]
        return self._cluster.secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]

    def _rewritten(self, text: str, mounts: Mapping[str, Path]) -> str:
        """Return a text of the manifests for this machine; what was put in is not looked at again."""
        changes = {rf"(?<![\w.-]){re.escape(path)}(?![\w-])": str(place) for path, place in mounts.items()}
        changes |= {r"/app(?=/)": str(ROOT), rf"\b{USER}:{USER}\b": f"{os.getuid()}:{os.getgid()}"}
        changes |= {rf"\b{re.escape(name)}\b": each for name, each in self._cluster.hosts().items()}
        changes |= dict.fromkeys((r"\b0\.0\.0\.0\b", r"\b127\.0\.0\.1\b"), self.address)
        ordered = sorted(changes.items(), key=lambda change: -len(change[0]))
        every = "|".join(f"({pattern})" for pattern, _ in ordered)
        return re.sub(every, lambda found: ordered[(found.lastindex or 1) - 1][1], text)

    def _volume(self, volume: Manifest) -> Path:
        """Return the directory of a volume: of this pod, or shared by all that name it."""
        shared = volume.get("hostPath", {}).get("path") or volume.get("persistentVolumeClaim", {}).get("claimName")
        place = self._cluster.folder / (f"shared/{shared.strip('/')}" if shared else f"{self.name}/{volume['name']}")
        place.mkdir(parents=True, exist_ok=True)
        return place


class Cluster:
    """All pods, and the state that they share. `secrets` are those that the manifests name."""

    def __init__(
        self, manifests: Mapping[str, Manifest], folder: Path, secrets: Mapping[str, Mapping[str, str]]
    ) -> None:
        self.manifests = manifests
        self.folder = folder
        self.secrets = secrets
        self.api: dict[str, str] = {}
        """The variables by which the kubelet names the API server to each pod; `account` is what pods show it."""
        self.account: dict[str, str] = {}
        """The token of service accounts by `token`, and the authority of the API server by `ca.crt`."""
        self._started: list[Pod] = []
        self._kept: dict[str, str] = {}
        """The addresses of servers by the names of their pods."""
        self.pods: dict[str, list[Pod]] = {}
        """The pods of each workload by its kind and name."""

    def apply(self) -> None:
        """Start every workload, servers first, and run every Job to its end."""
        order = sorted(self.manifests, key=lambda key: not key.endswith(SERVERS))
        for key in order:
            kind, spec = self.manifests[key]["kind"], self.manifests[key].get("spec", {})
            if kind in ("Deployment", "StatefulSet", "DaemonSet"):
                self.pods[key] = [self._start(key, index) for index in range(spec.get("replicas", 1))]
                if key.endswith(SERVERS):
                    self.pods[key][0].wait_ready()
        for key in order:
            if self.manifests[key]["kind"] == "Job":
                self.run(key)

    def run(self, key: str) -> None:
        """Run a Job to its end."""
        job = self._start(key, 0)
        assert [each.process.wait(READY_LIMIT_S) for each in job.containers] == [0], job.logs()

    def wait_ready(self) -> None:
        """Wait for all. Workers come first: no frontend is ready while none serves, and a worker's log says why."""
        for pod in sorted(itertools.chain(*self.pods.values()), key=lambda pod: "-frontend-" in pod.name):
            pod.wait_ready()

    def roll(self, key: str, steady: Callable[[Pod], bool] = lambda _: True) -> None:
        """Put a new pod in the place of each pod of a workload. `steady` stands for its minReadySeconds: whether they
        are over for a pod."""
        surges = self.manifests[key]["kind"] == "Deployment"
        for index, former in enumerate(list(self.pods[key])):
            if not surges:
                former.stop()
                self.pods[key].remove(former)
            added = self._start(key, index)
            self.pods[key].append(added)
            added.wait_ready()
            eventually(lambda pod=added: steady(pod), limit_s=READY_LIMIT_S, what=f"{added.name} is steady")  # type: ignore[misc]
            if surges:
                former.stop()
                self.pods[key].remove(former)

    def address_of(self, pod: str) -> str:
        """Return a new address for a pod, or that of its predecessor if a Service keeps it."""
        if not pod.removesuffix("-0").endswith(SERVERS):
            return next(_unused)
        return self._kept.setdefault(pod, next(_unused))

    def served(self, service: str, noticed_s: float) -> list[str]:
        """Return the addresses to which a Service sends requests: of its pods that are ready, and for `noticed_s` more
        of those that end."""
        long_ago_s = time.monotonic() - noticed_s
        return [pod.address for pod in self.backends(service) if pod.was_ready and pod.ended_s > long_ago_s]

    def backends(self, service: str) -> list[Pod]:
        """Return the pods of a Service."""
        selector = self.manifests[f"Service/{service}"]["spec"]["selector"].items()
        return [pod for pod in itertools.chain(*self.pods.values()) if selector <= pod.labels.items()]

    def hosts(self) -> dict[str, str]:
        """Return the names of Services that have a pod, and the address of the first."""
        names = [key.partition("/")[2] for key in self.manifests if key.startswith("Service/")]
        return {f"{name}.serving.svc": found[0].address for name in names if (found := self.backends(name))}

    def links(self, template: Manifest) -> dict[str, str]:
        """Return the variables that the kubelet gives a pod for each Service, unless the pod wants none."""
        if not template["spec"].get("enableServiceLinks", True):
            return {}
        names = [key.partition("/")[2] for key in self.manifests if key.startswith("Service/")]
        return {f"{name.upper().replace('-', '_')}_SERVICE_HOST": "10.0.0.1" for name in names}

    def files(self, template: Manifest, container: Manifest) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield the volumes of ConfigMaps and Secrets that a container mounts, with the text of each file."""
        mounted = {each["name"] for each in container.get("volumeMounts", [])}
        for volume in template["spec"].get("volumes", []):
            if volume["name"] not in mounted:
                continue
            if "configMap" in volume:
                yield volume["name"], self.manifests[f"ConfigMap/{volume['configMap']['name']}"]["data"]
            elif "secret" in volume:
                content = self.secrets[volume["secret"]["secretName"]]
                items = volume["secret"].get("items") or [{"key": name, "path": name} for name in content]
                yield volume["name"], {each["path"]: content[each["key"]] for each in items}
            elif "projected" in volume:
                yield volume["name"], self._projected(volume["projected"]["sources"])

    def _projected(self, sources: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the files of a token and of the authority."""
        found: dict[str, str] = {}
        for source in sources:
            if token := source.get("serviceAccountToken"):
                found[token["path"]] = self.account["token"]
            else:
                assert source["configMap"]["name"] == "kube-root-ca.crt", source
                found |= {each["path"]: self.account[each["key"]] for each in source["configMap"]["items"]}
        return found

    def close(self) -> None:
        for pod in self._started:
            pod.kill()

    def _start(self, key: str, index: int) -> Pod:
        spec = self.manifests[key]["spec"]
        name = f"{self.manifests[key]['metadata']['name']}-{index}"
        claims = [
            {
                "name": each["metadata"]["name"],
                "persistentVolumeClaim": {"claimName": f"{each['metadata']['name']}-{name}"},
            }
            for each in spec.get("volumeClaimTemplates", [])
        ]
        template = dict(spec["template"])
        template["spec"] = {**template["spec"], "volumes": [*template["spec"].get("volumes", []), *claims]}
        if self.manifests[key]["kind"] != "StatefulSet":
            name += f"-{next(_numbers)}"
        pod = Pod(self, name, template, index)
        self._started.append(pod)
        pod.start()
        return pod


_numbers = itertools.count()


def _addresses() -> Iterator[str]:
    """Yield loopback addresses that no other test process has. One at which a chart's port is taken fails at its start,
    as a program that listens everywhere takes it at all of them."""
    for number in range(2, 250):
        yield f"127.{64 + os.getpid() // 250 % 64}.{os.getpid() % 250 + 1}.{number}"
    raise AssertionError("no address is left")


_unused = _addresses()
