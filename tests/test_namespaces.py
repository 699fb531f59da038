"""tests/namespaces.py: a machine that is cut off hears nothing, and its connections go on afterwards."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.namespaces import machines, unfit

UNFIT = unfit()
pytestmark = pytest.mark.skipif(bool(UNFIT), reason=UNFIT or "-")
ECHO = """
import socket, sys
listening = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
connection, _ = listening.accept()
while data := connection.recv(100):
    connection.sendall(data)
"""
LIMIT_S = 60.0
SILENT_S = 0.5


def test_a_machine_that_is_cut_off_is_silent_and_what_was_sent_arrives_afterwards() -> None:
    with machines("far") as joined:
        command = [*joined.inside("far"), sys.executable, "-c", ECHO, joined.address("far")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as far:
            assert far.stdout is not None
            assert far.stdout.readline() == "ready\n"
            with socket.create_connection((joined.address("far"), 7000), timeout=LIMIT_S) as connection:
                connection.sendall(b"first")
                assert connection.recv(100) == b"first"
                joined.cut("far")
                connection.sendall(b"second")
                connection.settimeout(SILENT_S)
                with pytest.raises(TimeoutError):
                    connection.recv(100)
                joined.mend("far")
                connection.settimeout(LIMIT_S)
                assert connection.recv(100) == b"second"
