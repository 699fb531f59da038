"""Ctrl-C that a wait would not notice by itself."""

from __future__ import annotations

import subprocess
import sys

from tests.integration.stack import ROOT

LIMIT_S = 60.0
PROGRAM = """
import signal, socket, threading, time
from deploy.local.chat.interrupt import noticed_interrupts

here, there = socket.socketpair()

def interrupt():
    time.sleep(0.5)
    # In this thread: the main thread's wait goes on, as with a signal that came just before it.
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

with noticed_interrupts():
    threading.Thread(target=interrupt).start()
    try:
        here.recv(1)
    except KeyboardInterrupt:
        print("interrupted")
print(signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM) is signal.SIG_DFL)
"""


def test_an_interrupt_that_does_not_end_the_wait_is_noticed_and_the_timer_is_gone_afterwards() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "interrupted\n(0.0, 0.0) True\n"
