"""Each example runs as it stands. In front of servers, `vllm` is a stand-in that computes nothing; real ones are in
test_real_examples.py."""

from __future__ import annotations

import json
import re
import shlex
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.local.usage import parse
from tests.authority import needs_openssl
from tests.examples.running import EXAMPLES, ONE_EACH, Examples
from tests.integration.stack import ROOT, eventually
from tests.picker import envoy
from tests.picker.environment import RUNS_HERE
from tests.picker.environment import envoy as envoy_program
from tests.tiny_model import write_tiny_model

LIMIT_S = 240.0
SMALL = f"{ONE_EACH} --workers 1 --engine echo --discovery file"
NAMES = sorted(each.name for each in EXAMPLES.iterdir() if each.is_dir())
READMES = [EXAMPLES / "README.md", *(EXAMPLES / name / "README.md" for name in NAMES)]


@pytest.fixture
def examples(tmp_path: Path) -> Examples:
    """Copies of all examples, for a tiny model, with the stand-in for vLLM."""
    found = Examples(tmp_path, write_tiny_model(tmp_path / "tiny", context_length=4096))
    stand_in = f'PYTHONPATH={ROOT} exec {sys.executable} -P -m tests.examples.stand_in "$@"'
    found.program("vllm", stand_in)
    return found


def answer_of(said: str) -> str:
    """Return the text of an answer that was printed as JSON."""
    [choice] = json.loads(said)["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def test_servers_that_come_later_are_served_also_a_night_of_requests(examples: Examples) -> None:
    run, serve, ask = examples.commands("before-vllm")
    night = examples.folder / "a-nights-batch"
    with examples.running("before-vllm", f"{run} {ONE_EACH}") as route:
        route.wait_for(": left out: does not answer: Connection refused\n", 2)
        with examples.running("before-vllm", serve):
            route.wait_for(": serves\n", 2)
            route.wait_for("ready ")
            assert answer_of(examples.do("before-vllm", ask))
            examples.do(night.name, "\n".join(examples.commands(night.name)))
    asked = {json.loads(line)["custom_id"] for line in (night / "requests.jsonl").read_text().splitlines()}
    answers = list(map(json.loads, (night / "answers.jsonl").read_text().splitlines()))
    assert {found["custom_id"] for found in answers} == asked
    assert all(answer_of(json.dumps(found["response"]["body"])) for found in answers)


@pytest.mark.skipif(not RUNS_HERE, reason="there is no wheel of Envoy for this machine")
def test_envoy_goes_where_the_picker_says(examples: Examples) -> None:
    run, ask = examples.commands("behind-envoy")
    _, serve, _ = examples.commands("before-vllm")
    with (
        examples.running("before-vllm", serve),
        examples.running("behind-envoy", f"{run} {ONE_EACH}", ENVOY=str(envoy_program())) as started,
    ):
        started.wait_for(": serves\n", 2)
        eventually(
            lambda: read(f"{examples.url('8080')}/v1/models"), limit_s=LIMIT_S, what="Envoy is served by the picker"
        )
        assert answer_of(examples.do("behind-envoy", ask))
        metrics = read(f"{examples.url('8000')}/metrics")
        assert re.search(r'^headrace_picker_choice_seconds_count\{by="prompt",[^}]*\} 1\.0$', metrics, re.M)


def read(url: str) -> str:
    """Return what a URL answers. Empty if it is not 200."""
    try:
        with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as wrong:
        wrong.close()
    except OSError:
        pass
    return ""


def test_a_fleet_is_measured_planned_and_started(examples: Examples) -> None:
    run, bench, plan = examples.commands("sized-fleet")
    folder, quick = examples.folder / "sized-fleet", "--longest 256 --most 2 --limit-s 20"
    simulated = run.replace("./run.sh", f'PROFILE="{quick}" ./run.sh --engine simulated')
    with examples.running("sized-fleet", f"env {simulated}") as started:
        started.wait_for("ready ")
        examples.do("sized-fleet", bench)
        assert "the cheapest that meets them: " in examples.do("sized-fleet", plan)
    assert "Planned and measured" in (folder / "plan.html").read_text(encoding="utf-8")
    made = {file.name for file in folder.iterdir()} - {"README.md", "run.sh"}
    endings = ("up", "html", "png", "compose.yaml", "values.yaml")
    assert made == {"profile.json", "measured.json", "measured.png", *(f"plan.{ending}" for ending in endings)}


@needs_openssl
def test_only_a_key_and_the_certificate_let_a_client_in(examples: Examples, tmp_path: Path) -> None:
    run, ask = examples.commands("keys-and-tls")
    folder = examples.folder / "keys-and-tls"
    with examples.running("keys-and-tls", f"{run} up {SMALL} --model {tmp_path / 'tiny'}") as started:
        started.wait_for("ready ")
        [model] = json.loads(examples.do("keys-and-tls", ask))["data"]
        assert model["id"] == "tiny"
        trusted = ssl.create_default_context(cafile=str(folder / "tls.pem"))
        url = examples.url("8000").replace("http:", "https:")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/v1/models", timeout=LIMIT_S, context=trusted)
        with refused.value as answer:
            assert answer.code == 401
    made = {file.name for file in folder.iterdir()} - {file.name for file in (EXAMPLES / "keys-and-tls").iterdir()}
    patterns = [
        line.rpartition("/")[2] for line in (ROOT / ".gitignore").read_text().splitlines() if "examples" in line
    ]
    assert made == {"keys.toml", "alice.key", "tls.key", "tls.pem"}
    assert [name for name in made if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_every_example_is_listed_and_has_one_command() -> None:
    listed = re.findall(r"^\| .* \| \[(.*)\]\(\1/README\.md\) \|$", READMES[0].read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == NAMES
    for name in NAMES:
        script = EXAMPLES / name / "run.sh"
        assert script.exists() or name == "a-nights-batch"
        for file in (EXAMPLES / name).glob("*.sh"):
            assert file.stat().st_mode & 0o111, file
            assert subprocess.run(["sh", "-n", str(file)], capture_output=True).returncode == 0, file


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: readme.parent.name)
def test_every_command_that_a_readme_shows_is_accepted(readme: Path) -> None:
    for line in re.findall(r"(?:`|^\$ )headrace ([a-z].*?)(?:`|$)", readme.read_text(encoding="utf-8"), re.M):
        assert parse(shlex.split(line)) is not None, line


def test_envoys_file_has_the_filter_and_the_policy_that_the_suite_for_pickers_runs() -> None:
    resources: dict[str, Any] = yaml.safe_load((EXAMPLES / "behind-envoy" / "envoy.yaml").read_text())[
        "static_resources"
    ]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    assert manager["http_filters"][0] == envoy.ext_proc("none")
    servers = next(cluster for cluster in resources["clusters"] if cluster["name"] == "servers")
    assert servers["load_balancing_policy"] == envoy.servers_cluster([])["load_balancing_policy"]
