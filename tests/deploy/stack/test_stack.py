"""deploy/local/stack/stack.py: what `up` starts, with which settings."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local.show.fleet import FleetConfig
from deploy.local.stack.model import CHAT_TEMPLATE, SAMPLING
from deploy.local.stack.stack import (
    AccessFiles,
    BlockStoreOptions,
    Gpus,
    ServiceName,
    Setting,
    Stack,
    TurnModel,
    UpOptions,
    Value,
    default_replicas,
    plan,
    plan_attached,
    ports_needed,
    separated,
    toml,
)
from deploy.local.state import StateDirectory
from services.frontend.config import FrontendConfig
from services.kvbm.config import DiskConfig, KvbmConfig
from services.router.config import RouterConfig
from services.single.__main__ import SERVICES, flags_by_service
from services.worker.config import EngineName, SamplingConfig, WorkerConfig
from services.worker.memory.config import MemoryConfig
from services.worker.turns.config import TurnsConfig
from shared.chat_templates import NAMES
from shared.config import NatsConfig, load

PASSWORD = "0123secret"
STATE_DIR = StateDirectory(Path("/home/some one/headrace"))
OPTIONS = UpOptions(model="/models/tiny", model_name="tiny", port=8123, workers=3, policy="random")


def planned(options: UpOptions, cores: int = 8) -> Stack:
    ports = list(range(21_000, 21_000 + ports_needed(options)))
    return plan(options, STATE_DIR, ports, python="/venv/python", cores=cores, password=PASSWORD)


def names(stack: Stack) -> list[str]:
    return [launch.program.name for launch in stack.launches]


def settings(stack: Stack, name: str, tmp_path: Path) -> Path:
    file = tmp_path / f"{name}.toml"
    file.write_text(stack.files[STATE_DIR.run / f"{name}.toml"], encoding="utf-8")
    return file


def test_the_services_know_every_setting(tmp_path: Path) -> None:
    stack = planned(OPTIONS)
    assert names(stack) == ["nats", "etcd", "frontend", "router", "worker-0", "worker-1", "worker-2"]
    frontend = load(FrontendConfig, file=settings(stack, "frontend", tmp_path), environ={})
    router = load(RouterConfig, file=settings(stack, "router", tmp_path), environ={})
    workers = [load(WorkerConfig, file=settings(stack, f"worker-{n}", tmp_path), environ={}) for n in range(3)]
    assert frontend.http.port == 8123
    assert router.policy == "random"
    assert {worker.model for worker in workers} == {"/models/tiny"}
    assert {worker.model_name for worker in workers} == {"tiny"}
    assert {worker.nats.url for worker in workers} == {frontend.nats.url, router.nats.url} == {stack.nats}
    assert frontend.discovery.endpoints == (stack.etcd,)
    observed = [frontend.observe.port, router.observe.port, *(worker.observe.port for worker in workers)]
    assert [f"http://127.0.0.1:{port}" for port in observed] == [launch.observe for launch in stack.launches[2:]]
    assert len(set(observed)) == 5


def test_workers_that_share_weights_know_the_memory_service_that_is_started_with_them(tmp_path: Path) -> None:
    stack = planned(msgspec.structs.replace(OPTIONS, weights_bytes=1 << 30))
    assert names(stack) == ["nats", "etcd", "frontend", "router", "memory", "worker-0", "worker-1", "worker-2"]
    (launch,) = (launch for launch in stack.launches if launch.program.name == "memory")
    _python, _isolated, _module, module, *flags = launch.arguments
    config = load(MemoryConfig, flags=flags, environ={})
    assert (module, config.size_bytes) == ("services.worker.memory", 1 << 30)
    workers = [load(WorkerConfig, file=settings(stack, f"worker-{n}", tmp_path), environ={}) for n in range(3)]
    assert {worker.weights.memory for worker in workers} == {config.directory} == {str(STATE_DIR.weights)}
    assert launch.program.stage > 1, "the workers are drained first"
    assert not launch.observe


def test_workers_that_compute_prompts_and_workers_that_decode_have_the_names_of_their_roles(tmp_path: Path) -> None:
    store = BlockStoreOptions("/pool", 1 << 20)
    stack = planned(msgspec.structs.replace(OPTIONS, prefill=1, decode=2, store=store))
    roles = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    assert names(stack)[-3:] == list(roles)
    for name, role in roles.items():
        assert load(WorkerConfig, file=settings(stack, name, tmp_path), environ={}).role == role


def test_workers_that_encode_images_come_after_the_others_and_embeddings_have_an_arena(tmp_path: Path) -> None:
    store = BlockStoreOptions("/pool", 1 << 20)
    stack = planned(msgspec.structs.replace(OPTIONS, workers=3, encode=1, store=store))
    assert names(stack)[-3:] == ["worker-0", "worker-1", "encode-0"]
    workers = {each: load(WorkerConfig, file=settings(stack, each, tmp_path), environ={}) for each in names(stack)[-3:]}
    assert {each: one.role for each, one in workers.items()} == {
        **{"worker-0": "aggregated", "worker-1": "aggregated", "encode-0": "encode"},
    }
    assert all(one.kvbm.embeddings for one in workers.values())
    assert load(KvbmConfig, file=settings(stack, "kvbm", tmp_path), environ={}).pool.arenas == 2
    pairs = planned(msgspec.structs.replace(OPTIONS, workers=3, prefill=1, decode=1, encode=1, store=store))
    assert names(pairs)[-3:] == ["prefill-0", "decode-0", "encode-0"]


def test_ready_waits_for_workers_with_roles_and_a_kvbm_that_was_asked_for() -> None:
    store = BlockStoreOptions("/pool", 1 << 20)
    stack = planned(msgspec.structs.replace(OPTIONS, prefill=1, decode=2, store=store))
    awaited = {launch.program.name for launch in stack.launches if launch.hands_over}
    assert awaited == {"kvbm", "prefill-0", "decode-0", "decode-1"}
    usual = planned(msgspec.structs.replace(OPTIONS, store=msgspec.structs.replace(store, needed=False)))
    assert not any(launch.hands_over for launch in usual.launches)


def test_converted_weights_go_into_the_cache_or_else_into_the_state_directory(tmp_path: Path) -> None:
    for cache, expected in (("/var/cache/headrace", "/var/cache/headrace"), ("", str(STATE_DIR.models))):
        stack = planned(msgspec.structs.replace(OPTIONS, cache=cache))
        worker = load(WorkerConfig, file=settings(stack, "worker-0", tmp_path), environ={})
        assert worker.cache == expected


def test_the_default_models_template_and_sampling_reach_its_workers_and_one_that_is_set_by_name_wins(
    tmp_path: Path,
) -> None:
    overrides: dict[ServiceName, list[Setting]] = {"worker": [("--sampling.temperature", "1")]}
    options = msgspec.structs.replace(OPTIONS, chat_template=CHAT_TEMPLATE, sampling=SAMPLING, overrides=overrides)
    stack = planned(options)
    file = settings(stack, "worker-0", tmp_path)
    worker = load(WorkerConfig, file=file, environ={}, flags=stack.launches[-1].arguments[-1:])
    assert worker.chat_template in NAMES
    assert (worker.sampling.temperature, worker.sampling.top_p) == (1.0, 0.9)
    assert load(WorkerConfig, file=file, environ={}).sampling.temperature == 0.2
    plain = load(WorkerConfig, file=settings(planned(OPTIONS), "worker-0", tmp_path), environ={})
    assert (plain.chat_template, plain.sampling) == ("", SamplingConfig())


def test_the_address_of_the_page_is_known_unless_keys_or_settings_may_have_moved_it() -> None:
    assert planned(OPTIONS).page == "http://127.0.0.1:8123/ui"
    moved = {"frontend": [("--ui-serve", "off")]}
    keyed = AccessFiles(keys="/keys.toml")
    for changes in ({"overrides": moved}, {"access": keyed}):
        assert planned(msgspec.structs.replace(OPTIONS, **changes)).page == ""


def test_the_address_of_the_picker_is_known_if_there_is_one() -> None:
    assert not planned(OPTIONS).picker
    for settings, address in (
        ([("--picker-port", "9002")], "127.0.0.1:9002"),
        ([("--picker-host", "0.0.0.0"), ("--picker-port", "9002"), ("--picker-port", "9003")], "0.0.0.0:9003"),
        ([("--picker-host", "0.0.0.0"), ("--picker-port", "0")], ""),
    ):
        changes = {"overrides": {"frontend": settings}}
        assert planned(msgspec.structs.replace(OPTIONS, frontends=2, **changes)).picker == address


def test_keys_and_certificates_are_all_frontends_and_the_url_says_so(tmp_path: Path) -> None:
    access = AccessFiles(keys="/keys.toml", tls_cert="/tls.pem", tls_key="/tls.key")
    stack = planned(msgspec.structs.replace(OPTIONS, frontends=2, access=access))
    for name in ("frontend-0", "frontend-1"):
        frontend = load(FrontendConfig, file=settings(stack, name, tmp_path), environ={})
        assert frontend.access.keys_file == "/keys.toml"
        assert (frontend.http.tls_cert, frontend.http.tls_key) == ("/tls.pem", "/tls.key")
    assert (stack.url, stack.access) == ("https://127.0.0.1:8123", access)
    assert planned(OPTIONS).url == "http://127.0.0.1:8123"


def test_a_setting_that_is_given_by_name_wins_in_all_of_that_service(tmp_path: Path) -> None:
    overrides: dict[ServiceName, list[Setting]] = {"worker": [("--threads", "7"), ("--max-running", "8")]}
    stack = planned(msgspec.structs.replace(OPTIONS, overrides=overrides))
    for launch in stack.launches[4:]:
        flags = launch.arguments[launch.arguments.index("--config") + 2 :]
        worker = load(WorkerConfig, file=settings(stack, launch.program.name, tmp_path), environ={}, flags=flags)
        assert (worker.threads, worker.max_running, worker.model) == (7, 8, "/models/tiny")
    assert all("--threads=7" not in launch.arguments for launch in stack.launches[:4])


def test_several_frontends_share_the_port_and_each_is_observed_on_one_of_its_own(tmp_path: Path) -> None:
    stack = planned(msgspec.structs.replace(OPTIONS, frontends=3, routers=2))
    several = ["frontend-0", "frontend-1", "frontend-2", "router-0", "router-1"]
    assert names(stack)[2:7] == several
    frontends = [load(FrontendConfig, file=settings(stack, name, tmp_path), environ={}) for name in several[:3]]
    assert {(each.http.port, each.http.reuse_port) for each in frontends} == {(8123, True)}
    assert len({launch.observe for launch in stack.launches[2:]}) == 8
    alone = load(FrontendConfig, file=settings(planned(OPTIONS), "frontend", tmp_path), environ={})
    assert not alone.http.reuse_port, "another program on the port is an error, not a companion"


def test_the_simulated_engine_gets_its_settings(tmp_path: Path) -> None:
    simulated: dict[str, Value] = {"fixed_s": 0.02, "output_tokens": 0, "table": "times.toml"}
    stack = planned(msgspec.structs.replace(OPTIONS, engine="simulated", simulated=simulated))
    worker = load(WorkerConfig, file=settings(stack, "worker-2", tmp_path), environ={})
    assert (worker.simulated.fixed_s, worker.simulated.output_tokens, worker.simulated.table) == (0.02, 0, "times.toml")


def test_without_gpus_the_cpu_computes(tmp_path: Path) -> None:
    assert load(WorkerConfig, file=settings(planned(OPTIONS), "worker-0", tmp_path), environ={}).device == "cpu"


@pytest.mark.parametrize(
    ("workers", "count", "expected"),
    [
        (1, 1, [(0, 0.8)]),
        (2, 1, [(0, 0.4), (0, 0.4)]),
        (3, 2, [(0, 0.4), (1, 0.8), (0, 0.4)]),
        (2, 8, [(0, 0.8), (1, 0.8)]),
    ],
)
def test_workers_take_the_gpus_in_turn_and_share_the_memory_of_each(
    tmp_path: Path, workers: int, count: int, expected: list[tuple[int, float]]
) -> None:
    stack = planned(msgspec.structs.replace(OPTIONS, workers=workers, gpus=Gpus(count, 0.8)))
    loaded = [load(WorkerConfig, file=settings(stack, name, tmp_path), environ={}) for name in names(stack)[4:]]
    assert {worker.device for worker in loaded} == {"cuda"}
    assert [(worker.cuda.gpu, worker.cuda.memory_share) for worker in loaded] == expected


@pytest.mark.parametrize(("awake", "share"), [(1, 0.8), (2, 0.4)])
def test_models_that_take_turns_on_a_gpu_share_its_memory_with_those_that_are_awake(
    tmp_path: Path, awake: int, share: float
) -> None:
    models = tuple(TurnModel(name, f"/models/{name}") for name in "abc")
    by_turns = msgspec.structs.replace(OPTIONS, workers=3, turns=models, awake=awake, gpus=Gpus(2, 0.8))
    stack = planned(by_turns)
    workers = [name for name in names(stack) if name.startswith("worker")]
    loaded = [load(WorkerConfig, file=settings(stack, name, tmp_path), environ={}).cuda for name in workers]
    assert [(cuda.gpu, cuda.memory_share) for cuda in loaded] == [(0, share)] * 3


@pytest.mark.parametrize(
    ("count", "usual", "expected"),
    [
        (1, 1, [(0, 0.4), (0, 0.4)]),
        (2, 1, [(0, 0.4), (0, 0.4)]),
        (3, 1, [(0, 0.4), (0, 0.4)]),
        (4, 2, [(0, 0.8), (2, 0.8)]),
        (5, 2, [(0, 0.8), (2, 0.8)]),
    ],
)
def test_each_worker_of_two_ranks_takes_two_gpus(
    tmp_path: Path, count: int, usual: int, expected: list[tuple[int, float]]
) -> None:
    gpus = Gpus(count, 0.8, {"ranks_share_gpus": "true"}, 2)
    assert gpus.workers(None, 2) == usual
    assert gpus.workers(2, 2) == 2
    stack = planned(msgspec.structs.replace(OPTIONS, workers=2, tensor_parallel=2, gpus=gpus))
    loaded = [load(WorkerConfig, file=settings(stack, name, tmp_path), environ={}) for name in names(stack)[4:]]
    assert [(worker.cuda.gpu, worker.cuda.memory_share) for worker in loaded] == expected
    assert all(worker.cuda.ranks_share_gpus and worker.tensor_parallel == 2 for worker in loaded)


@pytest.mark.parametrize(("host", "url"), [("10.0.0.7", "http://10.0.0.7:"), ("fd00::7", "http://[fd00::7]:")])
def test_services_of_an_address_that_other_machines_reach_have_ports_for_kv_events(
    tmp_path: Path, host: str, url: str
) -> None:
    stack = planned(msgspec.structs.replace(OPTIONS, observe_host=host))
    for launch in stack.launches:
        assert not launch.observe or launch.observe.startswith(url)
    observe = load(WorkerConfig, file=settings(stack, "worker-0", tmp_path), environ={}).observe
    assert (observe.host, observe.events) == (host, "")
    alone = load(WorkerConfig, file=settings(planned(OPTIONS), "worker-0", tmp_path), environ={}).observe
    assert (alone.host, alone.events != "") == ("127.0.0.1", True)


def test_workers_with_vllm_get_the_gpus_that_are_their_own(tmp_path: Path) -> None:
    options = msgspec.structs.replace(
        OPTIONS, workers=2, engine="vllm", vllm_python="/python", vllm_gpus=("0,1", "2,3")
    )
    stack = planned(options)
    loaded = [load(WorkerConfig, file=settings(stack, f"worker-{n}", tmp_path), environ={}) for n in (0, 1)]
    assert [worker.vllm_gpus for worker in loaded] == ["0,1", "2,3"]
    assert [worker.threads for worker in loaded] == [0, 0]


def test_workers_that_take_turns_start_late_but_for_the_first() -> None:
    for late in (False, True):
        stack = planned(msgspec.structs.replace(OPTIONS, workers=3, late_workers=late))
        workers = [launch.program for launch in stack.launches if launch.program.name.startswith("worker")]
        assert [program.late for program in workers] == [False, late, late]
        assert all(program.needed for program in workers)


def test_workers_on_gpus_get_their_other_settings(tmp_path: Path) -> None:
    gpus = Gpus(1, 0.9, {"dtype": "float16", "graphs": "false", "graph_upper_bound": 32})
    stack = planned(msgspec.structs.replace(OPTIONS, gpus=gpus))
    cuda = load(WorkerConfig, file=settings(stack, "worker-1", tmp_path), environ={}).cuda
    assert (cuda.dtype, cuda.graphs, cuda.graph_upper_bound) == ("float16", False, 32)


def test_the_block_store_and_the_workers_share_a_pool(tmp_path: Path) -> None:
    store = BlockStoreOptions("/dev/shm/headrace-0-x", 1 << 30, "/blocks", 5 << 30)
    stack = planned(msgspec.structs.replace(OPTIONS, store=store))
    assert names(stack)[2:] == ["frontend", "router", "kvbm", "worker-0", "worker-1", "worker-2"]
    kvbm = load(KvbmConfig, file=settings(stack, "kvbm", tmp_path), environ={})
    assert (kvbm.pool.directory, kvbm.pool.size_bytes) == (store.pool, store.pool_bytes)
    assert (kvbm.disk.directory, kvbm.disk.limit_bytes) == (store.disk, store.disk_bytes)
    workers = [load(WorkerConfig, file=settings(stack, f"worker-{n}", tmp_path), environ={}) for n in range(3)]
    assert {worker.kvbm.pool for worker in workers} == {store.pool}
    assert not any(launch.program.late for launch in stack.launches), "where it cannot be, that is told at once"
    assert {worker.nats.url for worker in workers} == {kvbm.nats.url}
    assert f"http://127.0.0.1:{kvbm.observe.port}" in {launch.observe for launch in stack.launches}


def test_a_block_store_may_have_no_disk_and_there_may_be_none(tmp_path: Path) -> None:
    stack = planned(msgspec.structs.replace(OPTIONS, store=BlockStoreOptions("/pool", 1 << 30, needed=False)))
    assert load(KvbmConfig, file=settings(stack, "kvbm", tmp_path), environ={}).disk == DiskConfig()
    assert [launch.program.name for launch in stack.launches if not launch.program.needed] == ["kvbm"]
    assert [launch.program.name for launch in stack.launches if launch.program.late] == ["kvbm"]
    alone = planned(OPTIONS)
    assert "kvbm" not in names(alone)
    assert all(launch.program.needed for launch in alone.launches)
    assert load(WorkerConfig, file=settings(alone, "worker-0", tmp_path), environ={}).kvbm.pool == ""


def test_all_services_log_at_the_level_that_was_asked_for_and_one_may_differ(tmp_path: Path) -> None:
    overrides: dict[ServiceName, list[Setting]] = {"router": [("--observe-log-level", "error")]}
    stack = planned(msgspec.structs.replace(OPTIONS, log_level="debug", overrides=overrides))
    worker = load(WorkerConfig, file=settings(stack, "worker-0", tmp_path), environ={})
    assert worker.observe.log_level == "debug"
    (launch,) = (launch for launch in stack.launches if launch.program.name == "router")
    flags = ["--config", str(settings(stack, "router", tmp_path)), launch.arguments[-1]]
    assert load(RouterConfig, flags=flags, environ={}).observe.log_level == "error"


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 1), (3, 2), (128, 2)])
def test_there_are_two_frontends_and_routers_where_there_are_more_than_two_cores(cores: int, count: int) -> None:
    assert default_replicas(cores) == count


@pytest.mark.parametrize(("cores", "workers", "threads"), [(8, 2, 4), (2, 2, 1), (2, 3, 1), (7, 2, 3)])
def test_workers_share_the_cores(tmp_path: Path, cores: int, workers: int, threads: int) -> None:
    stack = planned(msgspec.structs.replace(OPTIONS, workers=workers), cores)
    assert load(WorkerConfig, file=settings(stack, "worker-0", tmp_path), environ={}).threads == threads


@pytest.mark.parametrize("engine", get_args(EngineName))
def test_workers_know_every_engine(tmp_path: Path, engine: str) -> None:
    stack = planned(msgspec.structs.replace(OPTIONS, engine=engine))
    flags = ["--attached-url", "http://127.0.0.1:1"] if engine == "attached" else []
    assert load(WorkerConfig, file=settings(stack, "worker-0", tmp_path), environ={}, flags=flags).engine == engine


def test_a_worker_for_a_server_is_planned_for_a_stack_that_runs(tmp_path: Path) -> None:
    overrides: dict[ServiceName, list[Setting]] = {"worker": [("--attached-grammars", "true")]}
    options = msgspec.structs.replace(OPTIONS, engine="attached", workers=0, overrides=overrides)
    stack = planned(options)
    assert not [name for name in names(stack) if name.startswith("worker")]
    attached = {"url": "http://there:8001", "events": "tcp://there:5557"}
    launch, files = plan_attached(options, stack, STATE_DIR, "worker-a", attached, 9000, python="python")
    assert (launch.program.name, launch.program.needed, launch.added) == ("worker-a", False, True)
    assert launch.observe == "http://127.0.0.1:9000"
    ((file, text),) = files.items()
    (tmp_path / "worker.toml").write_text(text)
    assert str(file) in launch.arguments
    config = load(WorkerConfig, file=tmp_path / "worker.toml", environ={}, flags=launch.arguments[-1:])
    router = load(RouterConfig, file=settings(stack, "router", tmp_path), environ={})
    assert (config.nats, config.discovery, config.namespace) == (router.nats, router.discovery, router.namespace)
    assert (config.attached.url, config.attached.events) == ("http://there:8001", "tcp://there:5557")
    assert config.attached.grammars


def test_the_frontend_drains_first_and_the_servers_last() -> None:
    stages = {launch.program.name.partition("-")[0]: launch.program.stage for launch in planned(OPTIONS).launches}
    assert sorted(stages, key=lambda name: stages[name])[:3] == ["frontend", "worker", "router"]
    assert stages["nats"] == stages["etcd"] == 3


def test_a_service_may_drain_longer_than_its_own_limit() -> None:
    limit_s = {launch.program.name: launch.program.drain_limit_s for launch in planned(OPTIONS).launches}
    assert limit_s["frontend"] > FrontendConfig().limits.drain_s
    assert limit_s["worker-0"] > WorkerConfig(model="m").drain_s


def test_with_files_no_etcd_runs(tmp_path: Path) -> None:
    stack = planned(msgspec.structs.replace(OPTIONS, discovery="file"))
    assert "etcd" not in names(stack)
    discovery = load(RouterConfig, file=settings(stack, "router", tmp_path), environ={}).discovery
    assert (discovery.backend, discovery.path) == ("file", str(STATE_DIR.run / "discovery"))


def test_servers_that_run_already_are_not_started(tmp_path: Path) -> None:
    stack = planned(msgspec.structs.replace(OPTIONS, nats="nats://there:4222", etcd="there:2379"))
    assert names(stack)[0] == "frontend"
    assert (stack.nats, stack.etcd) == ("nats://there:4222", "there:2379")
    fleet = load(FleetConfig, file=settings(stack, "fleet", tmp_path), environ={})
    assert fleet.nats == NatsConfig(url="nats://there:4222"), "a NATS that others run has its own users"
    assert fleet.discovery.endpoints == ("there:2379",)


def test_services_and_what_joins_them_know_the_password_of_nats_and_no_argument_has_it(tmp_path: Path) -> None:
    stack = planned(msgspec.structs.replace(OPTIONS, store=BlockStoreOptions("/pool", 1 << 30)))
    nats = NatsConfig(url=stack.nats, user="services", password=PASSWORD, inbox="_INBOX_services")
    assert load(FleetConfig, file=settings(stack, "fleet", tmp_path), environ={}).nats == nats
    assert load(FrontendConfig, file=settings(stack, "frontend", tmp_path), environ={}).nats == nats
    assert load(RouterConfig, file=settings(stack, "router", tmp_path), environ={}).nats == nats
    assert load(WorkerConfig, file=settings(stack, "worker-0", tmp_path), environ={}).nats == nats
    assert load(KvbmConfig, file=settings(stack, "kvbm", tmp_path), environ={}).nats == nats
    assert not any(PASSWORD in argument for launch in stack.launches for argument in launch.arguments)


def test_kv_events_are_published_at_sockets_in_the_run_directory_also_by_what_joins(tmp_path: Path) -> None:
    stack = planned(msgspec.structs.replace(OPTIONS, store=BlockStoreOptions("/pool", 1 << 30)))
    for name in ("worker-0", "fleet"):
        assert load(
            WorkerConfig, file=settings(stack, name, tmp_path), environ={"HEADRACE_MODEL": "m"}
        ).observe.events == str(STATE_DIR.run)
    assert load(KvbmConfig, file=settings(stack, "kvbm", tmp_path), environ={}).observe.events == str(STATE_DIR.run)


def test_etcd_listens_at_sockets_in_the_run_directory_alone() -> None:
    stack = planned(OPTIONS)
    (etcd,) = (launch for launch in stack.launches if launch.program.name == "etcd")
    listening = [argument.partition("=")[2] for argument in etcd.arguments if argument.startswith("--listen-")]
    assert listening == ["unix://etcd:0", "unix://peer:0"]
    assert stack.etcd == f"unix:{STATE_DIR.run}/etcd:0"


VALUES: st.SearchStrategy[Value] = st.one_of(
    st.text(st.characters(codec="utf-8")),
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.lists(st.text(max_size=3)),
)
KEYS = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)


@given(st.dictionaries(KEYS, VALUES, max_size=4), KEYS, st.dictionaries(KEYS, VALUES, max_size=4))
def test_toml_reads_back_as_it_was(top: dict[str, Value], name: str, table: dict[str, Value]) -> None:
    written = {**top, name: table}
    assert tomllib.loads(toml(written)) == written


def test_one_process_runs_the_three_services_with_their_settings_and_no_server(tmp_path: Path) -> None:
    overrides: dict[ServiceName, list[Setting]] = {"worker": [("--max_running", "8")]}
    options = msgspec.structs.replace(OPTIONS, single=True, workers=1, overrides=overrides)
    stack = planned(options)
    (launch,) = stack.launches
    assert (launch.program.name, stack.nats, stack.etcd, stack.single) == ("single", "", "", True)
    assert sorted(file.name for file in stack.files) == ["frontend.toml", "router.toml", "worker-0.toml"]
    assert launch.arguments[:4] == ("/venv/python", "-P", "-m", "services.single")
    flags = flags_by_service(launch.arguments[4:])
    files = {service: flags[service][1] for service in ("frontend", "router", "worker")}
    assert list(files.values()) == [str(STATE_DIR.run / f"{name}.toml") for name in ("frontend", "router", "worker-0")]
    assert flags["worker"][2:] == ["--max_running=8"]
    frontend = load(FrontendConfig, file=settings(stack, "frontend", tmp_path), environ={})
    router = load(RouterConfig, file=settings(stack, "router", tmp_path), environ={})
    worker = load(WorkerConfig, file=settings(stack, "worker-0", tmp_path), environ={}, flags=flags["worker"][2:])
    assert (frontend.http.port, router.policy, worker.max_running) == (8123, "random", 8)
    ports = [config.observe.port for config in (worker, router, frontend)]
    assert [f"http://127.0.0.1:{port}" for port in ports] == [*launch.also, launch.observe]
    assert not {"nats", "discovery"} & tomllib.loads(stack.files[STATE_DIR.run / "frontend.toml"]).keys()


def test_one_process_may_drain_as_long_as_its_services_one_after_the_other() -> None:
    (launch,) = planned(msgspec.structs.replace(OPTIONS, single=True, workers=1)).launches
    assert launch.program.drain_limit_s > sum(
        service.drain_limit_s(config)
        for service, config in zip(SERVICES, (FrontendConfig(), WorkerConfig(model="m"), RouterConfig()), strict=True)
    )


def test_the_settings_of_one_process_are_checked_service_by_service() -> None:
    stack = planned(separated(msgspec.structs.replace(OPTIONS, single=True, workers=1)))
    assert names(stack) == ["frontend", "router", "worker-0"]
    assert separated(OPTIONS) is OPTIONS


def test_models_that_take_turns_have_a_worker_each_and_one_process_that_decides(tmp_path: Path) -> None:
    models = (TurnModel("a", "/models/a"), TurnModel("b", "/models/b.gguf", "smollm2", {"top_p": 0.9}))
    options = msgspec.structs.replace(OPTIONS, workers=2, turns=models, turns_device="host-cpu-1", awake=1)
    stack = planned(options, cores=8)
    decides = next(launch for launch in stack.launches if launch.program.name == "turns")
    assert "services.worker.turns" in decides.arguments
    turns = load(TurnsConfig, file=settings(stack, "turns", tmp_path), environ={})
    assert (turns.device, turns.awake) == ("host-cpu-1", 1)
    frontend = load(FrontendConfig, file=settings(stack, "frontend", tmp_path), environ={})
    assert frontend.expected_models == ("a", "b")
    for index, model in enumerate(models):
        worker = load(WorkerConfig, file=settings(stack, f"worker-{index}", tmp_path), environ={})
        assert (worker.model, worker.model_name, worker.turns) == (model.path, model.name, turns.device)
        assert (worker.chat_template, worker.sampling.top_p) == (model.chat_template, model.sampling.get("top_p"))
        assert worker.threads == 8
    assert stack.by_turns == ("a", "b")
    assert not planned(OPTIONS).by_turns
