"""deploy/local/ray/plan.py: what Ray is asked to run, where, and with which settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from deploy.local.ray.order import Order
from deploy.local.ray.plan import SETTINGS, Fleet, Head, lacking, paths_needed, plan
from deploy.local.show.fleet import FleetConfig
from deploy.local.stack.stack import AccessFiles, BlockStoreOptions, Gpus, UpOptions
from deploy.local.state import StateDirectory
from services.frontend.config import FrontendConfig
from services.kvbm.config import KvbmConfig
from services.router.config import RouterConfig
from services.worker.config import WorkerConfig
from shared.config import ServiceConfig, load

HEAD = Head("1" * 56, "10.0.0.1", (21_000, 21_001, 21_002))
OPTIONS = UpOptions(
    model="/models/tiny",
    model_name="tiny",
    cache="/models/cache",
    frontends=2,
    routers=2,
    store=BlockStoreOptions("", 1 << 30, needed=False),
)
SCHEMAS: dict[str, type[ServiceConfig]] = {
    "frontend": FrontendConfig,
    "router": RouterConfig,
    "worker": WorkerConfig,
    "kvbm": KvbmConfig,
}


def planned(options: UpOptions = OPTIONS) -> Fleet:
    return plan(options, HEAD, StateDirectory(Path("/home/me")), name="f1ee7", password="0123secret")


def named(fleet: Fleet) -> dict[str, Order]:
    return {order.name: order for order in fleet.orders}


def test_servers_first_frontend_and_first_router_are_on_the_head_node_and_the_rest_where_ray_likes() -> None:
    orders = named(planned())
    there = {name for name, order in orders.items() if order.node == HEAD.node}
    assert there == {"nats", "etcd", "frontend-0", "router-0"}
    assert set(orders) - there == {"frontend-1", "router-1", "worker-0", "worker-1"}
    assert {orders[name].node for name in set(orders) - there} == {""}
    assert {name for name, order in orders.items() if order.cpus} == {"worker-0", "worker-1"}, "the head may offer none"


@pytest.mark.parametrize("service", list(SCHEMAS))
def test_each_service_takes_its_settings_and_the_address_and_pool_of_its_node(service: str, tmp_path: Path) -> None:
    fleet = planned()
    assert fleet.store is not None
    store = fleet.store.at("2" * 56)
    [order, *_] = [each for each in (*fleet.orders, store) if each.service == service]
    file = tmp_path / SETTINGS
    file.write_text(order.files[SETTINGS], encoding="utf-8")
    places = {"host": "10.0.0.2", "pool": "/dev/shm/pool", "url_file": "/tmp/url"}
    environ = {variable: places[place] for variable, place in order.variables.items()}
    config = load(SCHEMAS[service], file=file, environ=environ, flags=order.arguments[4:])
    assert (config.nats.url, config.discovery.endpoints) == ("nats://10.0.0.1:21000", ("10.0.0.1:21001",))
    assert (config.observe.host, config.observe.url_file, config.observe.events) == ("10.0.0.2", "/tmp/url", "")
    match config:
        case FrontendConfig():
            assert (config.http.host, config.http.port, config.http.reuse_port) == ("10.0.0.2", 8000, True)
        case WorkerConfig():
            assert (config.kvbm.pool, config.model, config.threads) == ("/dev/shm/pool", "/models/tiny", 1)
        case KvbmConfig():
            assert (config.pool.directory, config.pool.size_bytes) == ("/dev/shm/pool", 1 << 30)


def test_a_kvbm_has_a_name_of_its_node_and_runs_nowhere_else() -> None:
    store = planned().store
    assert store is not None
    one, other = (store.at(digit * 56) for digit in "23")
    assert (one.name, one.node, one.owns_pool, one.needed) == ("kvbm-22222222", "2" * 56, True, False)
    assert other.name == "kvbm-33333333"
    assert planned(replace(OPTIONS, store=None)).store is None


def test_servers_that_run_already_are_not_started() -> None:
    fleet = planned(replace(OPTIONS, nats="nats://10.9.9.9:4222", etcd="10.9.9.9:2379,10.9.9.8:2379"))
    assert not {"nats", "etcd"} & set(named(fleet))
    assert "0123secret" not in fleet.text + "".join(text for order in fleet.orders for text in order.files.values())


def test_a_further_process_joins_by_the_settings_of_the_fleet(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(planned().text, encoding="utf-8")
    config = load(FleetConfig, file=file, environ={})
    assert (config.nats.url, config.nats.password) == ("nats://10.0.0.1:21000", "0123secret")
    assert config.discovery.endpoints == ("10.0.0.1:21001",)


def test_a_worker_takes_as_many_cpus_of_ray_as_it_has_threads() -> None:
    threads = replace(OPTIONS, overrides={"worker": [("--threads", "4")]})
    assert named(planned(threads))["worker-0"].cpus == 4


def test_a_worker_on_a_gpu_has_one_of_its_own_as_the_only_one_it_sees(tmp_path: Path) -> None:
    order = named(planned(replace(OPTIONS, gpus=Gpus(1, 0.9, {"graphs": False}))))["worker-1"]
    assert (order.cpus, order.gpus) == (1, 1)
    (tmp_path / SETTINGS).write_text(order.files[SETTINGS], encoding="utf-8")
    config = load(WorkerConfig, file=tmp_path / SETTINGS, environ={})
    assert (config.device, config.cuda.gpu, config.cuda.memory_share, config.cuda.graphs) == ("cuda", 0, 0.9, False)


def test_what_a_cluster_lacks_is_named_with_the_flag() -> None:
    orders = planned(replace(OPTIONS, gpus=Gpus(1, 0.9))).orders
    assert lacking(OPTIONS, orders, {"CPU": 2.0, "GPU": 2.0}) == ""
    assert lacking(OPTIONS, orders, {"CPU": 16.0, "GPU": 1.0}) == (
        "--device cuda: the workers need 2 GPUs, the nodes of this Ray cluster have 1"
        " (`ray start --num-gpus` says how many a node has)"
    )
    assert lacking(OPTIONS, planned().orders, {"CPU": 1.0}).startswith("--workers: the workers need 2 CPUs, the nodes")
    roles = replace(OPTIONS, prefill=1, decode=1)
    assert lacking(roles, planned(roles).orders, {"CPU": 1.0}).startswith("--prefill, --decode: the workers need 2 CP")
    vllm = replace(OPTIONS, engine="vllm", vllm_gpus=("0,1", "2,3"))
    assert lacking(vllm, planned(vllm).orders, {"CPU": 4.0}).startswith("--engine vllm: the workers need 4 GPUs, the ")


def test_workers_with_roles_have_kvbms_that_read_from_each_other(tmp_path: Path) -> None:
    fleet = planned(replace(OPTIONS, workers=3, prefill=1, decode=2))
    orders = named(fleet)
    for name, role in {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}.items():
        (tmp_path / SETTINGS).write_text(orders[name].files[SETTINGS], encoding="utf-8")
        config = load(WorkerConfig, file=tmp_path / SETTINGS, environ={"HEADRACE_KVBM_POOL": "/dev/shm/pool"})
        assert (config.role, orders[name].service, orders[name].cpus) == (role, "worker", 1)
    assert fleet.store is not None
    assert fleet.store.variables["HEADRACE_PEERS_LISTEN"] == "peers"
    alike = planned().store
    assert alike is not None
    assert "HEADRACE_PEERS_LISTEN" not in alike.variables


def test_a_worker_with_vllm_has_as_many_gpus_of_ray_as_it_has_ranks_and_its_settings_name_none(tmp_path: Path) -> None:
    vllm = replace(OPTIONS, engine="vllm", vllm_python="/opt/vllm/bin/python", vllm_gpus=("0,1", "2,3"))
    order = named(planned(vllm))["worker-1"]
    assert (order.cpus, order.gpus) == (1, 2)
    (tmp_path / SETTINGS).write_text(order.files[SETTINGS], encoding="utf-8")
    config = load(WorkerConfig, file=tmp_path / SETTINGS, environ={})
    assert (config.engine, config.vllm_python, config.vllm_gpus) == ("vllm", "/opt/vllm/bin/python", "")
    assert ("--engine vllm", "/opt/vllm/bin/python") in paths_needed(vllm)
    assert named(planned(replace(vllm, vllm_gpus=())))["worker-0"].gpus == 0


def test_nodes_must_have_the_files_that_flags_name() -> None:
    assert paths_needed(OPTIONS) == [("--model", "/models/tiny")]
    access = AccessFiles("/etc/keys.toml", "/etc/cert.pem", "/etc/key.pem")
    more = replace(OPTIONS, chat_template="/models/chat.jinja", access=access)
    assert [flag for flag, _ in paths_needed(more)] == [
        "--model",
        "--chat-template",
        "--keys",
        "--tls-cert",
        "--tls-key",
    ]
    assert len(paths_needed(replace(OPTIONS, chat_template="chatml"))) == 1
