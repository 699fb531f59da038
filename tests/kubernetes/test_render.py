"""deploy/kubernetes/: what the real Helm renders fits the schemas and the services, and bad values are refused."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from services.frontend.__main__ import drain_limit_s as frontend_limit_s
from services.frontend.config import FrontendConfig
from services.kvbm.__main__ import DRAIN_LIMIT_S as KVBM_LIMIT_S
from services.kvbm.config import KvbmConfig
from services.router.__main__ import DRAIN_LIMIT_S as ROUTER_LIMIT_S
from services.router.config import RouterConfig
from services.worker.__main__ import drain_limit_s as worker_limit_s
from services.worker.config import WorkerConfig
from shared.config import ServiceConfig, load
from shared.runtime.lifecycle import FORCED_LIMIT_S
from shared.version import VERSION
from tests import chart_schema
from tests.kubernetes.helm import CHART, ROOT, VALUES, Manifest, Refused, faults, named, render

CPU = VALUES["cpu"]
COMPOSE = ROOT / "deploy" / "compose"
SCHEMAS: Mapping[str, type[ServiceConfig]] = {
    "frontend": FrontendConfig,
    "router": RouterConfig,
    "kvbm": KvbmConfig,
    "worker": WorkerConfig,
}
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "Job")
TAINTED = [{"key": "reserved", "operator": "Exists"}]
ON: Mapping[str, Any] = {
    "imagePullSecrets": ["registry"],
    "settings": {"discovery": {"lease_ttl_s": 5}, "trace": {"endpoint": "http://otel:4318/v1/traces"}},
    "frontend": {
        "keysSecret": "keys",
        "tlsSecret": "tls",
        "autoscaling": {"enabled": True},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "drainDelaySeconds": 12.5,
        "settings": {"limits": {"drain_s": 45}, "tool_parser": {"a/model <b>": "auto"}},
    },
    "kvbm": {"diskHostPath": "/var/lib/headrace/blocks", "peers": True, "settings": {"disk": {"limit_bytes": 1 << 40}}},
    "workerDefaults": {"autoscaling": {"enabled": True}, "settings": {"drain_s": 60.5}, "runtimeClassName": "nvidia"},
    "models": {
        "pull": [f"org/name@{40 * 'a'}"],
        "env": [{"name": "HF_ENDPOINT", "value": "http://mirror"}],
        "tolerations": TAINTED,
    },
    **{part: {"tolerations": TAINTED, "nodeSelector": {"pool": "system"}} for part in ("nats", "etcd", "router")},
    "picker": {
        "enabled": True,
        "tlsSecret": "picker",
        "caSecret": "gateways",
        "pool": {"enabled": True, "selector": {"app": "vllm"}, "targetPorts": [8000, 8001]},
        "follow": {"enabled": True, "model": "/var/lib/headrace/hub/a", "modelName": "org/name"},
    },
    "monitoring": {"podMonitor": True, "rules": True, "boards": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {key: [{"namespaceSelector": {}}] for key in ("clients", "monitoring", "gateway", "nats")},
}
OFF: Mapping[str, Any] = {
    "nats": {"deploy": False, "url": "tls://nats.example:4222", "secret": ""},
    "etcd": {"deploy": False, "endpoints": ["etcd.example:2379"], "secret": ""},
    "kvbm": {"enabled": False},
    "models": {"volume": {"hostPath": {"path": "/models"}}},
    "networkPolicy": {"enabled": False},
}


def pod_of(manifest: Manifest) -> Mapping[str, Any]:
    spec: Mapping[str, Any] = manifest["spec"]["template"]["spec"]
    return spec


def settings_of(manifests: Mapping[str, Manifest], workload: Manifest, folder: Path) -> ServiceConfig:
    """Return what a service of ours reads, as it reads it."""
    [container] = pod_of(workload)["containers"]
    service = container["args"][0].removeprefix("services.")
    file = folder / "settings.toml"
    file.write_text(manifests[f"ConfigMap/{workload['metadata']['name']}"]["data"]["settings.toml"], encoding="utf-8")
    given = {each["name"]: each.get("value", "10.0.0.1") for each in container["env"]}
    own = {name: text for name, text in given.items() if name.startswith("HEADRACE_") and not name.endswith("_FILE")}
    return load(SCHEMAS[service], file=file, environ=own)


def ours(manifests: Mapping[str, Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield our services' workloads, each with its service."""
    for manifest in manifests.values():
        component = manifest["metadata"]["labels"]["app.kubernetes.io/component"]
        if manifest["kind"] in WORKLOADS and component in SCHEMAS:
            yield component, manifest


@pytest.mark.parametrize(
    ("name", "more"),
    [*((name, {}) for name in VALUES), ("cpu", ON), ("cpu", OFF), ("disaggregated", ON)],
    ids=[*VALUES, "cpu-on", "cpu-off", "disaggregated-on"],
)
def test_what_is_rendered_fits_the_schemas_and_the_services(name: str, more: Mapping[str, Any], tmp_path: Path) -> None:
    manifests = render(VALUES[name], values=more)
    assert faults(manifests) == ""
    by_name = named(manifests)
    assert len(by_name) == len(manifests), "two of one name"
    for service, workload in ours(by_name):
        config = settings_of(by_name, workload, tmp_path)
        limits = {"router": ROUTER_LIMIT_S, "kvbm": KVBM_LIMIT_S}
        if isinstance(config, FrontendConfig):
            limits["frontend"] = frontend_limit_s(config)
        if isinstance(config, WorkerConfig):
            limits["worker"] = worker_limit_s(config)
        grace_s = pod_of(workload)["terminationGracePeriodSeconds"]
        assert limits[service] + FORCED_LIMIT_S < grace_s < limits[service] + 10


def test_the_schemas_refuse_what_does_not_fit() -> None:
    manifests = named(render(CPU, values=ON))
    ours: Any = manifests["Deployment/headrace-frontend"]
    ours["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    pool: Any = manifests["InferencePool/headrace-pool"]
    pool["spec"]["endpointPickerRef"]["failureMode"] = "FailNever"
    monitor: Any = manifests["PodMonitor/headrace-nats"]
    monitor["spec"]["podMetricsEndpoints"] = {"port": "metrics"}
    scaled: Any = manifests["ScaledObject/headrace-worker-cpu"]
    scaled["spec"]["triggers"][0]["metadata"]["threshold"] = 16
    said = faults([ours, pool, monitor, scaled])
    assert [line.partition(":")[0] for line in said.splitlines()] == [
        "Deployment headrace-frontend",
        "InferencePool headrace-pool",
        "PodMonitor headrace-nats",
        "ScaledObject headrace-worker-cpu",
    ], said


def test_flags_add_what_they_name_and_nothing_is_there_without_them() -> None:
    def kinds(more: Mapping[str, Any]) -> set[str]:
        return {each["kind"] for each in render(CPU, values=more)}

    added = {"HorizontalPodAutoscaler", "ScaledObject", "InferencePool", "PodMonitor", "PrometheusRule"}
    added |= {"ServiceAccount", "Role", "RoleBinding"}
    assert kinds(ON) - kinds({}) == added
    assert kinds({}) - kinds(OFF) == {"DaemonSet", "Job", "NetworkPolicy"}
    on = named(render(CPU, values=ON))
    rules = yaml.safe_load((ROOT / "deploy" / "monitoring" / "alerts.yml").read_text(encoding="utf-8"))
    assert on["PrometheusRule/headrace-alerts"]["spec"] == rules
    boards = {key for key in on if key.startswith("ConfigMap/headrace-board-")}
    assert len(boards) == len(list((ROOT / "deploy" / "monitoring" / "boards").glob("*.json")))
    for autoscaled in ("Deployment/headrace-frontend", "StatefulSet/headrace-worker-cpu"):
        assert "replicas" not in on[autoscaled]["spec"], "an upgrade would set back what was scaled"


def test_a_set_of_workers_scales_by_its_own_pods_or_by_what_autoscale_shows_for_its_role() -> None:
    scaled = {"role": "prefill", "autoscaling": {"enabled": True, "planned": True}}
    manifests = render(CPU, values={"workers": {"prompts": scaled}})
    [trigger] = named(manifests)["ScaledObject/headrace-worker-prompts"]["spec"]["triggers"]
    query = 'max(headrace_desired_workers{namespace="serving",role="prefill"})'
    assert trigger["metadata"]["query"] == query, "other namespaces may have fleets, and planners, of their own"
    assert trigger["metadata"]["threshold"] == "1"
    assert not faults(manifests)
    scaled["autoscaling"] = {"enabled": True}
    [trigger] = named(render(CPU, values={"workers": {"prompts": scaled}}))["ScaledObject/headrace-worker-prompts"][
        "spec"
    ]["triggers"]
    pods = '{namespace="serving",pod=~"headrace-worker-prompts-[0-9]+"}'
    summed = f"(sum(headrace_inflight_requests{pods}) + sum(headrace_queued_requests{pods})) or vector(0)"
    assert trigger["metadata"]["query"] == summed


@pytest.mark.parametrize("service", SCHEMAS)
def test_what_compose_sets_the_chart_sets_too(service: str, tmp_path: Path) -> None:
    manifests = named(render(CPU))
    [workload] = [each for name, each in ours(manifests) if name == service]
    compose: dict[str, Any] = tomllib.loads((COMPOSE / f"{service}.toml").read_text(encoding="utf-8"))
    compose["observe"].pop("url_file")  # the port is fixed
    compose.pop("disk", None)  # a flag here, since not all nodes have a disk for it
    if service == "worker":
        compose["model_name"] = "SmolLM2-135M-Instruct"
    chart = msgspec.to_builtins(settings_of(manifests, workload, tmp_path))
    for table, value in compose.items():
        elsewhere = {"host", "url", "endpoints", "drain_delay_s"}
        for key, each in value.items() if isinstance(value, dict) else [("", value)]:
            found = chart[table][key] if key else chart[table]
            assert found == each or key in elsewhere, f"{table}.{key}"


def test_a_pod_may_do_little_and_is_reached_by_its_address() -> None:
    manifests = named(render(CPU, values=ON))
    for manifest in manifests.values():
        if manifest["kind"] not in WORKLOADS:
            continue
        pod = pod_of(manifest)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["enableServiceLinks"] is False, "HEADRACE_ variables of Services are unknown settings"
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        for container in pod["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert "memory" in container["resources"]["requests"]
        roots = [each["name"] for each in pod.get("initContainers", [])]
        assert roots == (["owner"] if manifest["kind"] == "DaemonSet" else [])
    for _, workload in ours(manifests):
        [container] = pod_of(workload)["containers"]
        assert {each["name"] for each in container["env"]} >= {"HEADRACE_OBSERVE_HOST", "HEADRACE_NATS_PASSWORD_FILE"}
        probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
        assert {name: each["path"] for name, each in probes.items()} == {
            "startup": "/live",
            "liveness": "/live",
            "readiness": "/health",
        }


def test_the_block_store_and_the_workers_of_a_node_share_one_directory_of_its_memory(tmp_path: Path) -> None:
    manifests = named(render(CPU))
    store, worker = manifests["DaemonSet/headrace-kvbm"], manifests["StatefulSet/headrace-worker-cpu"]
    shared = [
        each["hostPath"] for part in (store, worker) for each in pod_of(part)["volumes"] if each["name"] == "pool"
    ]
    assert shared == 2 * [{"path": "/dev/shm/headrace-serving-headrace", "type": "DirectoryOrCreate"}]
    pool = msgspec.to_builtins(settings_of(manifests, store, tmp_path))["pool"]
    assert msgspec.to_builtins(settings_of(manifests, worker, tmp_path))["kvbm"]["pool"] == pool["directory"]
    [container] = pod_of(store)["containers"]
    assert int(container["resources"]["limits"]["memory"]) >= pool["size_bytes"] + (256 << 20)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replicas": 3}, "at '': additional properties 'replicas' not allowed"),
        ({"frontend": {"replica": 3}}, "at '/frontend': additional properties 'replica' not allowed"),
        ({"router": {"replicas": -1}}, "at '/router/replicas': minimum: got -1, want 0"),
        ({"workers": {"cpu": {"replicas": "2"}}}, "at '/workers/cpu/replicas': got string, want integer"),
        ({"workers": {"cpu": {"engine": "sglang"}}}, "at '/workers/cpu/engine': value must be one of 'native'"),
        ({"workers": {"Big Model": {}}}, "'Big Model' does not match pattern"),
        ({"frontend": {"settings": {"limits": {"request": 1}}}}, "properties 'request' not allowed"),
        ({"frontend": {"settings": {"limits": {"drain_s": -1}}}}, "at '/frontend/settings/limits/drain_s': minimum"),
        ({"router": {"settings": {"observe": {"port": 1}}}}, "additional properties 'port' not allowed"),
        ({"nats": {"deploy": False}}, "at '/nats/url': minLength: got 0, want 1"),
        ({"etcd": {"secret": ""}}, "at '/etcd/secret': minLength: got 0, want 1"),
        (
            {"kvbm": {"enabled": False}, "workers": {"cpu": {"role": "decode"}}},
            "at '/workers/cpu/role': value must be 'aggregated'",
        ),
        ({"workers": {"cpu": {"role": "prefill", "kvbm": False}}}, "at '/workers/cpu/kvbm': value must be true"),
        (
            {"workerDefaults": {"kvbm": False}, "workers": {"cpu": {"role": "prefill"}}},
            "workers.cpu.role is prefill, but workers.cpu.kvbm is false: prompts are handed over through",
        ),
        ({"picker": {"enabled": True, "caSecret": "ca"}}, "at '/picker/tlsSecret': minLength: got 0, want 1"),
        ({"picker": {"pool": {"targetPorts": []}}}, "at '/picker/pool/targetPorts': minItems: got 0, want 1"),
        ({"picker": {"follow": {"enabled": True}}}, "picker.follow.enabled: there is no InferencePool to follow: set"),
        ({"picker": {"tls": "secret"}}, "at '/picker': additional properties 'tls' not allowed"),
    ],
    ids=str,
)
def test_bad_values_are_refused_with_a_line_that_names_them(values: Mapping[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=re.escape(said)):
        render(CPU, values=values)


def test_the_picker_has_the_files_of_its_secrets_and_no_others(tmp_path: Path) -> None:
    for secrets, files in (
        ({}, {}),
        ({"tlsSecret": "own"}, {"tls_cert": "picker/tls.crt", "tls_key": "picker/tls.key"}),
        (
            {"tlsSecret": "own", "caSecret": "gateways"},
            {"tls_cert": "picker/tls.crt", "tls_key": "picker/tls.key", "tls_ca": "picker-ca/ca.crt"},
        ),
    ):
        manifests = named(render(CPU, values={"picker": {"enabled": True, **secrets}}))
        frontend = manifests["Deployment/headrace-frontend"]
        config = settings_of(manifests, frontend, tmp_path)
        assert isinstance(config, FrontendConfig)
        assert config.picker.tls_files == {f"picker.{name}": f"/etc/headrace/{file}" for name, file in files.items()}
        mounted = {each["mountPath"] for each in pod_of(frontend)["containers"][0]["volumeMounts"]}
        assert {f"/etc/headrace/{file.partition('/')[0]}" for file in files.values()} <= mounted
        named_secrets = {each["secret"]["secretName"] for each in pod_of(frontend)["volumes"] if "secret" in each} - {
            "headrace-passwords"
        }
        assert named_secrets == set(secrets.values())
        [port] = manifests["Service/headrace-picker"]["spec"]["ports"]
        assert port["appProtocol"] == ("https" if secrets else "kubernetes.io/h2c")


def test_who_follows_a_pool_may_list_and_watch_it_and_pods_and_has_the_only_token() -> None:
    manifests = named(render(CPU, values=ON))
    follower = "Deployment/headrace-pool-workers"
    [name] = [key for key in manifests if key.startswith("ServiceAccount/")]
    rules = {tuple(rule["resources"]): rule for rule in manifests["Role/headrace-pool-workers"]["rules"]}
    assert {tuple(rule["verbs"]) for rule in rules.values()} == {("list", "watch")}
    assert rules["inferencepools",]["resourceNames"] == ["headrace-pool"]
    assert rules.keys() == {("inferencepools",), ("pods",)}
    bound = manifests["RoleBinding/headrace-pool-workers"]
    assert bound["subjects"] == [{"kind": "ServiceAccount", "name": name.partition("/")[2], "namespace": "serving"}]
    for key, manifest in manifests.items():
        if manifest["kind"] in WORKLOADS:
            pod = pod_of(manifest)
            assert pod["automountServiceAccountToken"] is False
            follows = key == follower
            assert pod.get("serviceAccountName") == (name.partition("/")[2] if follows else None)
            assert any("projected" in each for each in pod.get("volumes", [])) is follows
    [container] = pod_of(manifests[follower])["containers"]
    set_by = {each["name"]: each.get("value") for each in container["env"]}
    assert (set_by["HEADRACE_NAMESPACE"], set_by["HEADRACE_DISCOVERY_LEASE_TTL_S"]) == ("default", "5")
    assert set_by["HEADRACE_TRACE_ENDPOINT"] == "http://otel:4318/v1/traces"
    assert "--inference-pool=serving/headrace-pool" in container["args"]
    egress = [each for each in manifests.values() if each["kind"] == "NetworkPolicy" and "egress" in each["spec"]]
    assert [each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for each in egress] == [
        "pool-workers"
    ]
    own = {"enabled": True, "pool": "theirs", "modelName": "a: b # c"}
    other = named(render(CPU, values={"picker": {"follow": own}}))
    assert pod_of(other[follower])["containers"][0]["args"][-1] == "--model-name=a: b # c"
    assert other["Role/headrace-pool-workers"]["rules"][0]["resourceNames"] == ["theirs"]
    assert not [key for key in other if key.startswith("InferencePool/")]
    leaves = {each["key"]: each["tolerationSeconds"] for each in pod_of(other[follower])["tolerations"]}
    assert leaves == {"node.kubernetes.io/unreachable": 10, "node.kubernetes.io/not-ready": 10}


def test_each_part_can_be_put_on_nodes_that_are_tainted() -> None:
    """One project's router, another's operator and servers could not: their charts dropped or lacked the value."""
    parts = ("frontend", "router", "kvbm", "workerDefaults", "nats", "etcd", "models")
    placed: dict[str, Any] = {part: {"tolerations": TAINTED, "nodeSelector": {"pool": "system"}} for part in parts}
    placed["models"] |= ON["models"]
    placed["picker"] = {"follow": {"enabled": True, "pool": "theirs", **placed["router"]}}
    for manifest in render(CPU, values=placed):
        if manifest["kind"] in WORKLOADS:
            assert pod_of(manifest)["tolerations"][:1] == TAINTED, manifest["metadata"]["name"]
            assert pod_of(manifest)["nodeSelector"] == {"pool": "system"}, manifest["metadata"]["name"]


def test_what_names_something_else_in_the_release_finds_it() -> None:
    """Selectors that match no pod, ports that no container has, and names of no object fail in silence."""
    manifests = named(render(CPU, values=ON))
    pods = [each["spec"]["template"] for each in manifests.values() if each["kind"] in WORKLOADS]

    def selected(labels: Mapping[str, str]) -> list[Mapping[str, Any]]:
        return [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]

    def ports(found: list[Mapping[str, Any]]) -> set[str]:
        return {port["name"] for pod in found for each in pod["spec"]["containers"] for port in each.get("ports", [])}

    for key, manifest in manifests.items():
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "Service":
                found = ports(selected(spec["selector"]))
                assert found >= {each["targetPort"] for each in spec.get("ports", [])}, key
                assert selected(spec["selector"]), key
            case "PodDisruptionBudget" | "Deployment" | "StatefulSet" | "DaemonSet":
                assert selected(spec["selector"]["matchLabels"]), key
                assert f"Service/{spec.get('serviceName', 'headrace-frontend')}" in manifests, key
            case "PodMonitor":
                assert ports(selected(spec["selector"]["matchLabels"])) >= {
                    each["port"] for each in spec["podMetricsEndpoints"]
                }, key
            case "NetworkPolicy":
                found = ports(selected(spec["podSelector"]["matchLabels"]))
                named_ports = {port["port"] for each in spec.get("ingress", []) for port in each.get("ports", [])}
                assert found >= named_ports, key
            case "HorizontalPodAutoscaler" | "ScaledObject":
                assert f"{spec['scaleTargetRef']['kind']}/{spec['scaleTargetRef']['name']}" in manifests, key
            case "InferencePool":
                service = manifests[f"Service/{spec['endpointPickerRef']['name']}"]
                assert spec["endpointPickerRef"]["port"]["number"] in [
                    each["port"] for each in service["spec"]["ports"]
                ]
            case "RoleBinding":
                assert f"Role/{manifest['roleRef']['name']}" in manifests, key
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    scaled = [each for each in manifests.values() if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    for name in re.findall(r"headrace_\w+", str([each["spec"] for each in scaled])):
        assert f"`{name}" in metrics, name


def test_an_upgrade_changes_nothing_that_kubernetes_forbids_to_change() -> None:
    """Selectors, claims of StatefulSets and pods of Jobs never change under one name."""
    others: Mapping[str, Any] = {
        "image": {"tag": "9.9.9"},
        "imagePullSecrets": ["another"],
        "models": {**ON["models"], "env": [{"name": "HF_ENDPOINT", "value": "http://elsewhere"}], "tolerations": []},
        "nats": {"image": "nats:9"},
        "etcd": {"image": "etcd:9", "priorityClassName": "high"},
        "workers": {"cpu": {"replicas": 7, "settings": {"drain_s": 9}}},
    }
    before, after = named(render(CPU, values=ON)), named(render(CPU, values={**ON, **others}))
    fixed = ("selector", "serviceName", "volumeClaimTemplates", "podManagementPolicy")
    jobs = {key for key in before.keys() & after.keys() if before[key]["kind"] == "Job"}
    assert not jobs, "a Job with another pod has another name, also where the release has no revisions"
    for key in (before.keys() & after.keys()) - jobs:
        for name in fixed if before[key]["kind"] in WORKLOADS else ():
            there = before[key]["spec"].get(name)
            assert there == after[key]["spec"].get(name), f"{key}.{name}"
            assert "app.kubernetes.io/version" not in str(there), key
            assert "helm.sh/chart" not in str(there), key


def changed(before: Any, after: Any, path: str = "") -> set[str]:
    """Return the paths at which two renderings differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        every = before.keys() | after.keys()
        return set[str]().union(*(changed(before.get(key), after.get(key), f"{path}.{key}") for key in every))
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return set[str]().union(*(changed(one, other, f"{path}.{number}") for number, (one, other) in pairs))
    return set() if before == after else {path.lstrip(".")}


def test_an_upgrade_of_replicas_changes_only_that() -> None:
    upgraded = named(render(CPU, values={"workers": {"cpu": {"replicas": 5}}}))
    assert changed(named(render(CPU)), upgraded) == {"StatefulSet/headrace-worker-cpu.spec.replicas"}


def test_an_upgrade_of_a_setting_rolls_the_pods_that_read_it_and_no_others() -> None:
    upgraded = named(render(CPU, values={"router": {"settings": {"policy": "random"}}}))
    assert changed(named(render(CPU)), upgraded) == {
        "ConfigMap/headrace-router.data.settings.toml",
        "Deployment/headrace-router.spec.template.metadata.annotations.checksum/settings",
    }
    of_all = named(render(CPU, values={"settings": {"observe": {"log_format": "json"}}}))
    rolled = {
        path.partition(".")[0] for path in changed(named(render(CPU)), of_all) if path.endswith("checksum/settings")
    }
    assert rolled == {
        "Deployment/headrace-frontend",
        "Deployment/headrace-router",
        "DaemonSet/headrace-kvbm",
        "StatefulSet/headrace-worker-cpu",
    }


def test_no_password_stands_in_what_is_rendered_and_servers_read_composes_settings() -> None:
    manifests = named(render(CPU))
    conf = manifests["ConfigMap/headrace-nats"]["data"]["nats.conf"]
    assert conf == (COMPOSE / "nats.conf").read_text(encoding="utf-8")
    for manifest in manifests.values():
        assert manifest["kind"] != "Secret"
        for container in pod_of(manifest)["containers"] if manifest["kind"] in WORKLOADS else []:
            for each in container.get("env", []):
                assert "PASSWORD" not in each["name"] or "valueFrom" in each or each["value"][:2] in ("/e", '"$')


def test_the_schema_of_values_is_what_its_program_writes_and_the_chart_has_this_version() -> None:
    assert chart_schema.written() == chart_schema.PAGE.read_text(encoding="utf-8"), "run python -m tests.chart_schema"
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
