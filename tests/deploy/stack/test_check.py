"""deploy/local/stack/check.py: each service is asked itself whether it would start, before anything else is."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from deploy.local.stack.check import BUILT_IN, check
from deploy.local.stack.stack import AccessFiles, BlockStoreOptions, ServiceName, Setting, UpOptions
from deploy.local.state import StateDirectory
from services.router.selection import policy
from shared.errors import ConfigError
from tests.tiny_model import write_tiny_model


def checked(tmp_path: Path, options: UpOptions, *, model: bool = False) -> None:
    check(options, StateDirectory(tmp_path / "state"), python=sys.executable, model=model)
    assert not (tmp_path / "state").exists()


def refused(tmp_path: Path, options: UpOptions, *, model: bool = False) -> str:
    with pytest.raises(ConfigError) as wrong:
        checked(tmp_path, options, model=model)
    return str(wrong.value)


DEFAULT = UpOptions(model="/to/be/fetched", model_name="m")


def test_every_built_in_policy_is_known_without_asking() -> None:
    assert tuple(policy.BUILT_IN) == BUILT_IN


def test_what_up_has_set_itself_is_not_asked_about(tmp_path: Path) -> None:
    check(DEFAULT, StateDirectory(tmp_path), python="/no/such/python", model=False)


def test_a_policys_module_is_loaded_as_routers_do(tmp_path: Path) -> None:
    checked(tmp_path, msgspec.structs.replace(DEFAULT, policy="services.router.selection.policies.kv:KvPolicy"))


def test_the_check_does_not_get_the_hubs_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "showing.py").write_text(
        "import os\nraise ImportError([name for name in os.environ if name.startswith('H')])\n"
    )
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OTHER"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = refused(tmp_path, msgspec.structs.replace(DEFAULT, policy="showing:Policy"))
    assert "HF_OTHER" in said
    assert "_TOKEN" not in said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fastest", "policy fastest: not one of kv, round-robin, random, least-loaded, power-of-two and not module"),
        ("no.such:Policy", "policy no.such:Policy: ModuleNotFoundError: No module named 'no'"),
        ("json:loads", "policy json:loads: it must be a class with filter, score, pick"),
    ],
)
def test_a_policy_that_routers_would_not_start_with_is_refused_in_their_words(
    tmp_path: Path, name: str, said: str
) -> None:
    assert refused(tmp_path, msgspec.structs.replace(DEFAULT, policy=name)).startswith(said)


@pytest.mark.parametrize(
    ("service", "setting", "said"),
    [
        (
            "worker",
            "foo",
            "worker.foo: no such setting; `.venv/bin/python -m services.worker --help` lists them all",
        ),
        ("worker", "max_runing", "worker.max_runing: no such setting; did you mean worker.max_running"),
        ("worker", "kvbm.wait", "worker.kvbm.wait: no such setting; did you mean worker.kvbm.wait_s"),
        (
            "frontend",
            "limits-request",
            "frontend.limits-request: no such setting; did you mean frontend.limits-requests",
        ),
        ("router", "polcy", "router.polcy: no such setting; did you mean router.policy"),
        ("kvbm", "tiers.host_polcy", "kvbm.tiers.host_polcy: no such setting; did you mean kvbm.tiers.host_policy"),
        (
            "kvbm",
            "lending",
            "kvbm.lending: no such setting; `.venv/bin/python -m services.kvbm --help` lists them all; "
            "those of workers for it begin with worker.kvbm",
        ),
        ("worker", "max_running", "worker.max_running: Expected `int`, got `str`"),
        (
            "worker",
            "capacity_bytes",
            "worker.capacity_bytes: Expected `int`, got `str`; write a whole number of bytes",
        ),
        ("kvbm", "tiers.host_policy", "eviction policy many: not one of reuse, "),
        ("router", "policy", "policy many: not one of kv, "),
    ],
)
def test_a_setting_that_a_service_would_not_start_with_is_named_as_it_was_typed(
    tmp_path: Path, service: str, setting: str, said: str
) -> None:
    options = msgspec.structs.replace(
        DEFAULT, overrides={service: [(f"--{setting}", "many")]}, store=BlockStoreOptions(str(tmp_path), 1 << 20)
    )
    assert refused(tmp_path, options).startswith(said)


def test_files_without_a_certificate_are_named_by_ups_flags(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no certificate")
    file = str(tmp_path / "text")
    with_tls = msgspec.structs.replace(DEFAULT, access=AccessFiles(tls_cert=file, tls_key=file))
    assert refused(tmp_path, with_tls).startswith(f"--tls-cert {file}, --tls-key {file}: not a certificate and its key")


def test_an_address_for_peers_that_is_another_machines_is_named(tmp_path: Path) -> None:
    options = msgspec.structs.replace(
        DEFAULT,
        overrides={"kvbm": [("--peers.listen", "192.0.2.1:7000")]},
        store=BlockStoreOptions(str(tmp_path), 1 << 20),
    )
    assert refused(tmp_path, options).startswith("kvbm.peers.listen: 192.0.2.1 is no address of this machine")


def test_each_fault_has_a_line_of_its_own(tmp_path: Path) -> None:
    overrides: dict[ServiceName, list[Setting]] = {
        "kvbm": [("--tickets.store_time_s", "-1"), ("--peers.backend", "carrier-pigeons")]
    }
    store = BlockStoreOptions(str(tmp_path), 1 << 20)
    said = refused(tmp_path, msgspec.structs.replace(DEFAULT, overrides=overrides, store=store)).splitlines()
    assert said == [
        "kvbm.tickets.store_time_s: Expected `float` > 0.0",
        "kvbm.peers.backend: 'carrier-pigeons' is not one of sockets, nixl",
    ]


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("max_runing", "1", "worker.max_runing: no such setting; did you mean worker.max_running"),
        ("kvbm.offload", "off", "role is prefill, but kvbm.offload is off"),
    ],
)
def test_workers_with_roles_are_asked_too(tmp_path: Path, setting: str, value: str, said: str) -> None:
    options = msgspec.structs.replace(
        DEFAULT,
        prefill=1,
        decode=1,
        overrides={"worker": [(f"--{setting}", value)]},
        store=BlockStoreOptions(str(tmp_path), 1 << 20),
    )
    assert said in refused(tmp_path, options)


def test_settings_of_the_simulated_engine_are_checked_too(tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(DEFAULT, engine="simulated", simulated={"sped": 2})
    assert refused(tmp_path, wrong).startswith("worker: unknown key simulated.sped; did you mean speed")
    checked(tmp_path, msgspec.structs.replace(wrong, simulated={"speed": 2}))


def test_settings_that_will_do_are_checked_with_the_model(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    options = UpOptions(model=str(model), model_name="m", overrides={"worker": [("--max_running", "8")]})
    checked(tmp_path, options, model=True)


def test_a_model_that_a_worker_would_not_start_with_is_refused_in_its_words(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    (model / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    said = refused(tmp_path, UpOptions(model=str(model), model_name="m"), model=True)
    assert said.startswith(f"{model}/config.json: architecture GPT2LMHeadModel is not supported; ")


@pytest.mark.parametrize("prefill", [0, 1])
def test_encode_workers_of_a_model_that_takes_no_images_are_refused_before_anything_starts(
    tmp_path: Path, prefill: int
) -> None:
    store = BlockStoreOptions(str(tmp_path), 1 << 20)
    model = str(write_tiny_model(tmp_path / "model"))
    options = UpOptions(model, "m", workers=3, prefill=prefill, decode=prefill, encode=1, store=store)
    assert refused(tmp_path, options, model=True).startswith("role is encode, but the model takes no images")
    eyes = write_tiny_model(tmp_path / "eyes", architecture="LlavaForConditionalGeneration", tied=False)
    checked(tmp_path, msgspec.structs.replace(options, model=str(eyes)), model=True)


def test_a_check_that_takes_long_is_shown_meanwhile(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nuntil [ -e {tmp_path}/shown ]; do sleep 0.05; done\n")
    python.chmod(0o755)
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        (tmp_path / "shown").touch()

    check(DEFAULT, StateDirectory(tmp_path / "state"), python=str(python), model=True, notice=show)
    assert shown == ["worker: checking its settings and the model m"]


def test_a_service_that_cannot_even_be_asked_is_named(tmp_path: Path) -> None:
    options = msgspec.structs.replace(DEFAULT, policy="mine:Policy")
    with pytest.raises(ConfigError, match="router: its check ended with status 1"):
        check(options, StateDirectory(tmp_path), python="/bin/false", model=False)


SERVICES = """#!/bin/sh
case "$*" in
    *services.worker*) touch "$TMPDIR/written"; echo "$TMPDIR" >{here}/worker.new; echo $$ >{here}/pid
        mv {here}/worker.new {here}/worker; exec sleep 1000 ;;
    *) until [ -e {here}/worker ]; do sleep 0.05; done; echo refused >&2; exit 2 ;;
esac
"""


def test_once_one_service_refuses_the_others_have_ended_and_nothing_that_they_wrote_is_left(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(SERVICES.format(here=tmp_path))
    python.chmod(0o755)
    options = msgspec.structs.replace(DEFAULT, policy="mine:Policy")
    with pytest.raises(ConfigError, match="refused"):
        check(options, StateDirectory(tmp_path / "state"), python=str(python), model=True)
    assert not Path((tmp_path / "worker").read_text().strip()).exists(), "where the worker had its files"
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists(), "the worker itself"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ m.content }", "the chat template, line 1: unexpected '}'"),
        ("{{ 'x' | center(10000000000) }}", "the chat template: compiling or rendering it takes more than"),
        ("", "the chat template is empty"),
    ],
)
def test_a_chat_template_that_no_frontend_could_use_is_refused_by_its_file(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "bad.jinja"
    file.write_text(text)
    assert refused(tmp_path, msgspec.structs.replace(DEFAULT, chat_template=str(file))).startswith(f"{file}: {said}")
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    checked(tmp_path, msgspec.structs.replace(DEFAULT, chat_template=str(file)))


def test_the_models_own_chat_template_is_checked_with_the_model(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    (tmp_path / "tiny/chat_template.jinja").write_text("{{ m.content }")
    said = refused(tmp_path, UpOptions(model=str(tmp_path / "tiny"), model_name="tiny", discovery="file"), model=True)
    assert said == f"{tmp_path}/tiny: the chat template, line 1: unexpected '}}'"
