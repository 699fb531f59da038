"""A `vllm serve` of its own for tests: a server that is not ours, on a loopback port, with KV events on local
sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.servers import free_port
from tests.vllm.serve import serve_words
from tests.worker.vllm.environment import LIMIT_S, ON_DEVICE, PYTHON, VARIABLES

KEY = "sesame"
_OWN = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


class VllmServer:
    """One server, which can be killed and started again on the same ports."""

    def __init__(self, model: Path, log: Path) -> None:
        self._model, self._log = model, log
        self._process: subprocess.Popen[bytes] | None = None
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        key = log.with_suffix(".key")
        key.write_text(KEY + "\n")
        self.settings: dict[str, object] = {
            "url": self.url,
            "api_key_file": str(key),
            "events": f"ipc://{log.with_suffix('.events')}",
            "replay": f"ipc://{log.with_suffix('.replay')}",
            "grammars": True,
            "priorities": True,
            "look_s": 0.2,
            "limit_s": 60.0,
        }
        """The table `attached` of a worker for this server."""
        kv_events = {"enable_kv_cache_events": True, "publisher": "zmq"}
        kv_events |= {"endpoint": self.settings["events"], "replay_endpoint": self.settings["replay"]}
        self._flags = f"--host 127.0.0.1 --port {port} --api-key {KEY} --enforce-eager --dtype float32 --block-size 32"
        self._flags += " --num-gpu-blocks-override 64 --max-num-seqs 4 --scheduling-policy priority"
        self._flags += "".join(f" {word}" for word in serve_words(ON_DEVICE))
        self._tables = ["--structured-outputs-config", '{"backend": "guidance"}']
        self._tables += ["--kv-events-config", json.dumps(kv_events)]

    def start(self) -> None:
        """Return when it answers."""
        command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._flags.split(), *self._tables],
                env=os.environ | VARIABLES | _OWN | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
                stdout=log,
                stderr=log,
                process_group=0,
            )
        deadline = time.monotonic() + LIMIT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(self._log.read_text(errors="replace")[-3000:])
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill all of its processes at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def metric(self, name: str) -> float:
        """Return the value of a metric with one line."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(name + "{")).rpartition(" ")[2])

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
