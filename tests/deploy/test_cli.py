"""deploy/local/cli.py and usage.py: wrong usage is reported in one line, with status 2, before anything starts."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from huggingface_hub import constants

from deploy.local import cli, usage
from deploy.local.stack.stack import Value, toml
from services.worker.config import EngineName
from shared.runtime import logs
from shared.version import VERSION


@pytest.fixture(autouse=True)
def empty_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No `up` runs here."""
    monkeypatch.setattr(usage, "DEFAULT_HOME", tmp_path / ".headrace")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "--model", "/no/such"], "error: --model /no/such: no such file or directory"),
        (
            ["up", "--model", "org/../name"],
            "error: --model org/../name: no such file or directory; a model on ",
        ),
        (["pull", "/no/such"], "error: pull /no/such: a model on the hub is ORG/NAME[@REVISION][:FILE.gguf]"),
        (["pull", "org/name"], "error: HF_HUB_OFFLINE is set, so no hub is asked, and the cache /"),
        (["up", "--model", "org/name", "--set", "worker.foo=1"], "error: worker.foo: no such setting; "),
        (["up", "--model", "/tmp", "--port", "0"], "error: --port is 1 to 65535"),
        (["up", "--model", "/tmp", "--workers", "0"], "error: --workers is 1 to 64"),
        (["up", "--model", "/tmp", "--workers", "65"], "error: --workers is 1 to 64"),
        (["up", "--frontends", "0"], "error: --frontends is 1 to 64"),
        (
            ["up", "--prefill", "1"],
            "error: --prefill needs --decode: without a worker that decodes nothing is answered",
        ),
        (["up", "--decode", "1"], "error: --decode needs --prefill; workers that also compute all prompts are --wo"),
        (["up", "--set", "worker.role=decode"], "error: --set worker.role: `up` sets that itself; use --prefill, --d"),
        (
            ["up", "--prefill", "1", "--decode", "1", "--workers", "2"],
            "error: --workers: --prefill and --decode say how many there are",
        ),
        (
            ["up", "--prefill", "0", "--decode", "1"],
            "error: --prefill 0: at least 1; leave --prefill and --decode out, and each worker does both",
        ),
        (["up", "--prefill", "0"], "error: --prefill 0: at least 1; leave --prefill and --decode out"),
        (["up", "--decode", "-1"], "error: --decode -1: at least 1; leave --prefill and --decode out"),
        (["up", "--encode", "0"], "error: --encode 0: 1 to 64; leave it out, and each worker encodes its own images"),
        (["up", "--encode", "63"], "error: --encode 63: with the others they are 65 workers; 64 together at most"),
        (["up", "--encode", "1", "--engine", "echo"], "error: --encode: engine echo encodes no images; use --engine"),
        (["up", "--encode", "1"], "error: --encode: the default model takes no images; name one that does with --m"),
        (
            ["up", "--encode", "1", "--model", "m", "--tensor-parallel", "2"],
            "error: --encode: not with --tensor-parallel 2; one rank",
        ),
        (["up", "--single", "--standby"], "error: --standby: not with --single, which is one frontend"),
        (
            ["up", "--encode", "1", "--model", "m", "--kvbm-bytes", "0"],
            "error: --encode needs some --kvbm-bytes: embeddings are handed",
        ),
        (["up", "--encode", "1", "--single"], "error: --encode: not with --single"),
        (["up", "--encode", "1", "--models", "a,b"], "error: --encode: not with --models"),
        (["up", "--nats", "foo"], "error: --nats foo: not HOST:PORT"),
        (["status", "--etcd", "foo"], "error: --etcd: 'foo' is none of host:port, https://host:port and unix:PATH"),
        (["bench", "--url", "foo"], "error: --url foo: not an address such as http://127.0.0.1:8000/v1"),
        (
            ["up", "--prefill", "1", "--decode", "64"],
            "error: --prefill and --decode are at least 1, and 64 together at most",
        ),
        (
            ["up", "--prefill", "1", "--decode", "1", "--engine", "echo"],
            "error: --prefill and --decode: workers with engine echo have no roles",
        ),
        (
            ["up", "--prefill", "1", "--decode", "1", "--kvbm-bytes", "0"],
            "error: --prefill and --decode need some --kvbm-bytes: prompts are handed over through that memory",
        ),
        (
            ["up", "--engine", "simulated", "--set", "kvbm.peers.listen=7400"],
            "error: --set kvbm.peers.listen: this `up` has no kvbm; give it one with --kvbm-bytes",
        ),
        (
            ["up", "--kvbm-bytes", "0", "--set", "kvbm.peers.listen=7400"],
            "error: --set kvbm.peers.listen: this `up` has no kvbm; give it one with --kvbm-bytes",
        ),
        (["up", "--routers", "0"], "error: --routers is 1 to 64"),
        (["up", "--policy", "fastest"], "error: policy fastest: not one of kv, "),
        (["up", "--simulated", "speed=2"], "error: --simulated needs --engine simulated"),
        (["route"], "error: route: give URLs of servers, such as http://127.0.0.1:8001, or a file of them with --file"),
        (["route", "http://127.0.0.1:1", "--file", "/none"], "error: route: give URLs of servers, such as http://127"),
        (["route", "--file", "/none"], "error: --file /none: No such file or directory"),
        (["route", "127.0.0.1:1"], "error: 127.0.0.1:1: not a URL such as http://127.0.0.1:8001"),
        (["route", "http://127.0.0.1:1", "http://127.0.0.1:1/"], "error: http://127.0.0.1:1/: the same server as http"),
        (
            ["route", "http://no.such.host.invalid"],
            "error: http://no.such.host.invalid: the host no.such.host.invalid ",
        ),
        (["route", "http://127.0.0.1:1", "--api-key-file", "/none"], "error: --api-key-file /none: No such file or di"),
        (["route", "http://127.0.0.1:1", "--model", "/none"], "error: --model /none: no such file or directory; a mod"),
        (["route", "http://127.0.0.1:1", "--port", "0"], "error: --port is 1 to 65535"),
        (["picker"], "error: route: give URLs of servers, such as http://127.0.0.1:8001, or a file "),
        (["route", "http://127.0.0.1:1", "--picker", "0"], "error: --picker is 1 to 65535"),
        (["picker", "http://127.0.0.1:1", "--set", "frontend.picker.prot=1"], "error: frontend.picker.prot: no such "),
        (["route", "http://127.0.0.1:1", "--set", "worker.foo=1"], "error: worker.foo: no such setting; "),
        (
            ["route", "http://127.0.0.1:1", "--set", "worker.attached.api_key_file=key"],
            "error: --set worker.attached.api_key_file: `route` sets that itself",
        ),
        (["up", "--engine", "attached", "--workers", "2"], "error: --workers: an attached server is one worker"),
        (["up", "--engine", "simulated", "--simulated", "speed", "--nats", ""], "error: --simulated speed: not KEY="),
        (["up", "--cuda", "graphs=false"], "error: --cuda needs --device cuda"),
        (
            ["up", "--set", "worker.cuda.copy_path=direct"],
            "error: --set worker.cuda.copy_path: it needs --device cuda",
        ),
        (
            ["up", "--set", "worker.vllm.enable_lora=true"],
            "error: --set worker.vllm.enable_lora: it needs --engine vllm",
        ),
        (
            ["up", "--engine", "echo", "--set", "worker.simulated.speed=2"],
            "error: --set worker.simulated.speed: it needs --engine simulated",
        ),
        (["up", "--gpu-memory-share", "0.5"], "error: --gpu-memory-share needs --device cuda"),
        (
            ["up", "--device", "cuda", "--gpu-memory-share", "0"],
            "error: --gpu-memory-share must be above 0 and at most 1",
        ),
        (
            ["up", "--device", "cuda", "--gpu-memory-share", "nan"],
            "error: --gpu-memory-share must be above 0 and at most 1",
        ),
        (["up", "--device", "cuda", "--cuda", "graphs"], "error: --cuda graphs: not KEY=VALUE"),
        (["up", "--device", "cuda", "--cuda", "gpu=1"], "error: --cuda gpu: CUDA_VISIBLE_DEVICES chooses"),
        (["up", "--device", "cuda", "--cuda", "memory_share=1"], "error: --cuda memory_share: --gpu-memory-share "),
        (["up", "--device", "cuda", "--engine", "echo"], "error: --device cuda: engine echo computes nothing"),
        (["up", "--nats", "nats://127.0.0.1:1"], "error: --nats nats://127.0.0.1:1: no server answers there"),
        (
            ["up", "--nats", "nats://a.invalid:1,nats://127.0.0.1:1"],
            "error: --nats nats://a.invalid:1, nats://127.0.0.1:1: ",
        ),
        (["up", "--model", "SmolLM2-135M-Instruct", "--policy", "nope"], "error: policy nope: not one of kv, "),
        (["up", "--chat-template", "nope"], "error: --chat-template nope: no such file, and not one of chatml, "),
        (["up", "--keys", "/no/such"], "error: --keys /no/such: no such file"),
        (["up", "--tls-cert", "/etc/hostname"], "error: --tls-cert and --tls-key must be given together"),
        (["up", "--set", "limits.requests=1"], "error: --set limits.requests=1: not SERVICE.SETTING=VALUE; services "),
        (["up", "--set", "worker.threads"], "error: --set worker.threads: not SERVICE.SETTING=VALUE"),
        (
            ["up", "--set", "worker.tensor_parallel=2"],
            "error: --set worker.tensor_parallel: `up` sets that itself; use --tensor-parallel",
        ),
        (["up", "--set", "worker.nats.url=x"], "error: --set worker.nats.url: `up` sets that itself"),
        (["up", "--set", "frontend.http.port=1"], "error: --set frontend.http.port: `up` sets that itself"),
        (["up", "--set", "frontend.http-port=1"], "error: --set frontend.http-port: `up` sets that itself"),
        (["up", "--set", "frontend.http.tls_cert=c"], "error: --set frontend.http.tls_cert: `up` sets that itself"),
        (["up", "--set", "frontend.access.keys_file=k"], "error: --set frontend.access.keys_file: `up` sets that"),
        (["up", "--set", "frontend.observe.port=1"], "error: --set frontend.observe.port: `up` sets that itself"),
        (["up", "--set", "frontend.observe.log_level=debug", "--nats", "nats://127.0.0.1:1"], "error: --nats"),
        (["up", "--set", "router.config=/tmp/c"], "error: --set router.config: `up` sets that itself"),
        (["up", "--set", "worker.cuda.gpu=1"], "error: --set worker.cuda.gpu: `up` sets that itself"),
        (["up", "--set", "worker.foo=1"], "error: worker.foo: no such setting; "),
        (
            ["up", "--set", "worker.max_runing=1"],
            "error: worker.max_runing: no such setting; did you mean worker.max_running",
        ),
        (["up", "--set", "frontend.limits.requests=x"], "error: frontend.limits.requests: Expected `int`"),
        (
            ["up", "--engine", "simulated", "--simulated", "sped=2"],
            "error: worker: unknown key simulated.sped; did you",
        ),
        (["up", "--model", "/etc/hostname"], "error: /etc/hostname: no model here; expected a Hugging Face directory"),
        (["up", "--kvbm-bytes", "1X"], "error: --kvbm-bytes 1X: not a size, such as 512M, 2G or 2GiB"),
        (["up", "--kvbm-disk", "/d", "--kvbm-disk-bytes", "-1"], "error: --kvbm-disk-bytes -1: not a size, "),
        (["up", "--kvbm-disk", "/d", "--kvbm-bytes", "0"], "error: --kvbm-disk needs some --kvbm-bytes: "),
        (["up", "--kvbm-bytes", "1G", "--engine", "echo"], "error: --kvbm-bytes: engine echo has no blocks to store"),
        (["up", "--etcd", "somewhere"], "error: --etcd somewhere: not HOST:PORT"),
        (["check", "--peer", "somewhere"], "error: --peer somewhere: not HOST:PORT"),
        (["check", "--serve", "0.0.0.0"], "error: --serve 0.0.0.0: not HOST:PORT"),
        (["check", "--serve", ""], "error: --serve answers another machine: give HOST:PORT, and neither --peer nor"),
        (["check", "--serve", "--json"], "error: --serve answers another machine: give HOST:PORT, and neither --peer"),
        (["check", "--serve", "127.0.0.1:1", "--peer", "127.0.0.1:1"], "error: --serve answers another machine: "),
        (["check", "--serve", "192.0.2.1:8770"], "error: --serve 192.0.2.1:8770: "),
        (["check", "--kvbm-bytes", "1X"], "error: --kvbm-bytes 1X: not a size, such as 512M, 2G or 2GiB"),
        (
            ["check", "--nats", "http://127.0.0.1:1"],
            "error: --nats: http://127.0.0.1:1 is not nats://host:port or tls://host:port",
        ),
        (
            ["check", "--etcd", "somewhere"],
            "error: --etcd: 'somewhere' is none of host:port, https://host:port and unix:PATH",
        ),
        (["status"], "error: no `up` runs with --state /"),
        (["explain", "--nats", "nats://127.0.0.1:1"], "error: no `up` runs with --state /"),
        (["status", "--nats", "nats://127.0.0.1:1", "--etcd", "127.0.0.1:1"], "error: etcd at "),
        (["explain", "--nats", "nats://127.0.0.1:1", "--etcd", "127.0.0.1:1"], "error: etcd at "),
    ],
)
def test_wrong_settings_are_reported_in_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) in (1, 2)
    *meanwhile, last = capsys.readouterr().err.splitlines()
    assert last.startswith(said)
    assert all(": checking its settings and " in line for line in meanwhile), "said on a slow machine"
    assert not (tmp_path / ".headrace").exists()


def test_the_command_that_shows_all_settings_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["up", "--help"])
    named = re.search(r"`\S*python (.*?)`", " ".join(capsys.readouterr().out.split()))
    assert named is not None
    shown = subprocess.run([sys.executable, *named[1].split()], check=True, capture_output=True, text=True)
    assert "--limits-requests" in shown.stdout


def test_without_a_command_the_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith("usage: headrace ")
    assert {name.split()[0] for name in usage.COMMANDS} == set(re.findall(r"^    (\S+)", shown.out, re.MULTILINE))


@pytest.mark.parametrize("word", ["version", "--version"])
def test_the_version_is_printed(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(cli.main([word]))
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"headrace {VERSION}\n"


@pytest.mark.parametrize(
    "words", [["fly"], ["up", "--port", "x"], ["up", "--discovery", "dns"], ["completion", "fish"]]
)
def test_wrong_usage_ends_with_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has an NVIDIA driver")
def test_without_a_gpu_up_tells_what_was_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--device", "cuda"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: --device cuda")
    assert "libcuda.so.1" in shown or "needs CuPy" in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / ".headrace").exists()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has an NVIDIA driver")
def test_install_gpu_has_done_its_work_where_the_driver_is_still_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cupy.py").touch()  # found, and not imported
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["install-gpu"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("CuPy is installed\nno GPU can be used yet: --device cuda: there is no NVIDIA driver here")


def test_install_nixl_says_what_to_set_where_nixl_is_and_refuses_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("nixl_cu13") is None:
        assert cli.main(["install-nixl"]) == 2
        assert "is not installed here: ./headrace install-nixl" in capsys.readouterr().err
    (tmp_path / "nixl_cu13.py").touch()  # found, and not imported
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["install-nixl"]) == 0
    assert capsys.readouterr().out == "NIXL is installed: set peers.backend of every kvbm to nixl\n"


@pytest.mark.parametrize("engine", get_args(EngineName))
def test_every_engine_can_be_asked_for(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--engine", engine, "--port", "0"]) == 2
    assert capsys.readouterr().err == "error: --port is 1 to 65535\n"


def test_a_key_comes_from_a_file_with_nothing_else_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "key"
    for content, said in (("hr-a\nhr-b", "must contain only a key"), (None, f"--api-key-file {file}: No such file")):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
        assert cli.main(["chat", "Where?", "--url", "http://127.0.0.1:1/v1", "--api-key-file", str(file)]) == 2
        shown = capsys.readouterr().err
        assert said in shown
        assert "hr-" not in shown


def test_a_key_of_the_environment_is_taken_where_no_file_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hr-environment")
    file = tmp_path / "key"
    file.write_text("hr-file\n")
    assert cli._api_key(usage.ChatFlags(question="Where?")) == "hr-environment"
    assert cli._api_key(usage.ChatFlags(question="Where?", api_key_file=file)) == "hr-file"


def test_up_takes_every_level_that_the_logs_have() -> None:
    for level in logs.LEVELS:
        flags = usage.parse(["up", "--log-level", level])
        assert isinstance(flags, usage.UpFlags)
        assert flags.log_level == level


def test_chat_without_an_up_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "Where?", "--url", "http://127.0.0.1:1/v1"]) == 1
    assert "does `./headrace up` run?" in capsys.readouterr().err


def test_status_reads_what_the_running_up_has_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / ".headrace" / "run" / "up.json"
    record.parent.mkdir(parents=True)
    directory = tmp_path / "discovery"
    record.write_text('{"nats": "nats://127.0.0.1:1"}')
    files: dict[str, Value] = {"backend": "file", "path": str(directory)}
    record.with_name("fleet.toml").write_text(toml({"nats": {"url": "nats://127.0.0.1:1"}, "discovery": files}))
    assert cli.main(["status"]) == 0
    said = capsys.readouterr().out
    assert f"namespace default, NATS nats://127.0.0.1:1, files in {directory}\n" in said
    assert "no process is alive in this namespace" in said
    assert "note: NATS did not answer" in said


@pytest.mark.parametrize("words", [["status"], ["top"], ["explain"], ["drain", "0a"], ["log", "debug"]])
def test_a_command_that_one_process_cannot_answer_says_which_can(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.local.top.app.require_terminal", lambda: None)
    record = tmp_path / ".headrace" / "run" / "up.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"single": true, "nats": "", "etcd": "", "discovery": "", "url": "http://127.0.0.1:1/v1"}')
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: `up --single` runs here, one process whose services no other process reaches: ")


def test_another_fleet_can_be_asked_where_one_process_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / ".headrace" / "run" / "up.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"single": true, "nats": "", "etcd": ""}')
    assert cli.main(["status", "--etcd", "127.0.0.1:1", "--nats", "nats://127.0.0.1:1"]) == 1
    assert "etcd" in capsys.readouterr().err
