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
    "inspect --format {{.Name}} "*) echo "/$4" ;;
    inspect*)
        shift 3
        for name; do [ -e "../sick $name" ] && echo unhealthy || echo healthy; done
        ;;
    stop*) echo "stop $2; $(ls | wc -l) run" >>../said ;;
    rm*) rm "$2" ;;
    "compose exec "*) ls | grep -c '^frontend[.]' ;;
    "compose up "*)
        for service; do :; done # the last word
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
    environment["HEALTHY_WITHIN_S"] = "0"  # they are or they are not
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
    (here / "sick router.11").touch()
    assert roll(here, "router", "frontend") == (1, "router: 1 of 2 are healthy after 0 s\n")
    assert (here / "said").read_text() == "stop router.1; 8 run\nup router.11\n"


def test_nothing_is_stopped_while_another_container_of_the_service_is_sick(here: Path) -> None:
    (here / "sick frontend.2").touch()
    assert roll(here, "frontend") == (1, "frontend: 1 of 2 are healthy after 0 s\n")
    assert not (here / "said").exists()


@pytest.mark.parametrize("service", ["kvbm", "unknown"])
def test_a_service_that_has_no_second_container_is_left_alone(here: Path, service: str) -> None:
    status, said = roll(here, service)
    assert status == 1
    assert "2 are needed so that no request is lost" in said
    assert not (here / "said").exists()
