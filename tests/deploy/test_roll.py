"""deploy/compose/roll.sh, with a program in place of `docker` that keeps containers as files and notes its orders."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "compose" / "roll.sh"
DOCKER = """#!/bin/sh
# Containers are files SERVICE.NUMBER in $HERE/containers.
cd "$HERE/containers"
case "$*" in
    "compose ps --quiet "*) ls | grep "^$4[.]" || true ;;
    inspect*) echo "/$4" ;;
    stop*) echo "stop $2; $(ls | wc -l) run" >>../said ;;
    rm*) rm "$2" ;;
    "compose exec "*) ls | grep -c '^frontend[.]' ;;
    "compose up "*)
        for service; do :; done # the last word
        [ ! -e "../sick $service" ] || { echo "$service is unhealthy" >&2; exit 1; }
        number=$(($(cat ../made) + 1)); echo "$number" >../made
        touch "$service.$number"
        echo "up $service.$number" >>../said ;;
    *) echo "unknown: $*" >&2; exit 9 ;;
esac
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    containers = tmp_path / "containers"
    containers.mkdir()
    for name in ("worker.1", "worker.2", "router.1", "router.2", "frontend.1", "frontend.2", "kvbm.1", "balancer.1"):
        (containers / name).touch()
    (tmp_path / "made").write_text("10")
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    return tmp_path


def roll(here: Path, *services: str) -> tuple[int, str]:
    environment = os.environ | {"PATH": f"{here / 'bin'}:{os.environ['PATH']}", "HERE": str(here)}
    ended = subprocess.run(
        [str(SCRIPT), *services], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return ended.returncode, ended.stderr


def test_one_container_is_down_at_a_time_and_the_next_goes_when_it_is_replaced(here: Path) -> None:
    assert roll(here) == (0, "")
    said = (here / "said").read_text().splitlines()
    stops, ups = said[::2], said[1::2]
    assert stops == [f"stop {name}.{number}; 8 run" for name in ("worker", "router", "frontend") for number in (1, 2)]
    assert ups == [f"up {name}" for name in ("worker.11", "worker.12", "router.13", "router.14")] + [
        "up frontend.15",
        "up frontend.16",
    ]


def test_a_replacement_that_does_not_get_healthy_ends_it_before_the_next_one_goes(here: Path) -> None:
    (here / "sick router").touch()
    status, said = roll(here, "router", "frontend")
    assert (status, said) == (1, "router is unhealthy\n")
    assert (here / "said").read_text() == "stop router.1; 8 run\n"


@pytest.mark.parametrize("service", ["kvbm", "nobody"])
def test_a_service_that_has_no_second_container_is_left_alone(here: Path, service: str) -> None:
    status, said = roll(here, service)
    assert status == 1
    assert "2 are needed so that no request is lost" in said
    assert not (here / "said").exists()
