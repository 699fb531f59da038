"""Tests of how processes' CPU time is assigned to kinds."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.serving_stacks import RunningStack

PARENT = """
import subprocess, sys
program = "import sys; print(flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
child.stdout.readline()  # it runs, and has its memory
print(child.pid, flush=True)
child.wait()
"""


def test_a_workers_child_is_its_engine_and_others_children_count_as_their_parents() -> None:
    parents = [
        subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for parent in parents:
            assert parent.stdout is not None
            assert int(parent.stdout.readline()) != parent.pid
        shell, nats = (parent.pid for parent in parents)
        costs = RunningStack(0, {shell: "shell", nats: "nats"}).costs()
        assert set(costs) == {"shell", "engine", "nats"}
        assert costs["nats"].rss_mb > costs["shell"].rss_mb > 0
        assert RunningStack(0, {shell: "shell"}).pids("shell") == [shell]
    finally:
        for parent in parents:
            parent.communicate()


def test_other_processes_of_the_machine_do_not_count() -> None:
    assert set(RunningStack(0, {os.getpid(): "frontend"}).costs()) == {"frontend"}
