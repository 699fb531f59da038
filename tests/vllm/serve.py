"""Plain `vllm serve` processes on a CPU that join no Headrace, and the answers of a vLLM without a connector."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.worker.config import KVConnectorConfig, WorkerConfig
from services.worker.vllm.kv_transfer import kv_transfer
from tests.integration.stack import ROOT, eventually
from tests.servers import free_port
from tests.worker.vllm.environment import LIMIT_S, ON_DEVICE, PYTHON, run_there

BLOCK = 32
VARIABLES = {
    "PYTHONPATH": str(ROOT),
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}
_ALONE = """
import json
from vllm import LLM, SamplingParams
llm = LLM({model!r}, enforce_eager=True, dtype="float32", block_size={block}, num_gpu_blocks_override=64, **{more!r})
params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
answers = [llm.generate({{"prompt_token_ids": each}}, params)[0] for each in {prompts!r}]
print(json.dumps([list(each.outputs[0].token_ids) for each in answers]))
"""


def answers_alone(model: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the first eight tokens of greedy answers, of one process without a connector."""
    code = _ALONE.format(model=str(model), block=BLOCK, prompts=[list(each) for each in prompts], more=ON_DEVICE)
    answers: list[list[int]] = run_there(code)
    return answers


def connector(pool: Path, timeout_s: float = 2.0) -> dict[str, Any]:
    """Return the fields of --kv-transfer-config for our connector on this pool."""
    kvbm = KVConnectorConfig(pool=str(pool), wait_s=60, timeout_s=timeout_s, verify=True)
    config = WorkerConfig(model="", engine="vllm", kvbm=kvbm)
    transfer = kv_transfer(config)
    assert transfer is not None
    return transfer


def serve_words(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as words of the command line of `vllm serve`."""
    return [
        word
        for name, value in arguments.items()
        for word in (f"--{name.replace('_', '-')}", *(() if value is True else (str(value),)))
    ]


class Serve:
    """One `vllm serve`."""

    def __init__(
        self, model: Path, log: Path, transfer: dict[str, Any] | None = None, words: Sequence[str] = (), ranks: int = 1
    ) -> None:
        """`transfer` are the fields of --kv-transfer-config, `words` more of the command line."""
        self.model, self.log = model, log
        cores = sorted(os.sched_getaffinity(0))
        # vLLM gives ranks cores by itself only where each has a NUMA node.
        bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)) if ranks > 1 else "auto"
        self._environment = os.environ | VARIABLES | {"VLLM_CPU_OMP_THREADS_BIND": bound}
        self._words = [*words, *(("--kv-transfer-config", json.dumps(transfer)) if transfer else ())]
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it serves."""
        words = ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", "64", "--max-num-seqs", "8"]
        words += ["--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details", *serve_words(ON_DEVICE)]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [PYTHON.with_name("vllm"), "serve", self.model, *words, *self._words],
                env=self._environment,
                cwd=self.log.parent,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        eventually(self.serves, limit_s=LIMIT_S, what=f"{self.log.name} serves")

    def attach(self) -> None:
        """Wait until it exchanges blocks with a kvbm."""

        def met() -> bool:
            self.ask([7, 8, 9], 2)
            return self.metric("headrace_kvbm_attached") == 1

        eventually(met, limit_s=LIMIT_S, what="the engine is attached")

    def serves(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10).status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
            return dict(json.loads(answer.read()))

    def ask(self, prompt: list[int], most: int = 8) -> tuple[list[int], int]:
        """Return the tokens of a greedy answer, and how many tokens of the prompt were not computed."""
        answer = self.post("/v1/completions", completion(prompt, most))
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0

    def forget(self) -> None:
        """Clear the device's cache, once nothing holds a block of it."""
        eventually(
            lambda: bool(self.post("/reset_prefix_cache", {}).get("success")),
            limit_s=LIMIT_S,
            what="the cache is cleared",
        )

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == f"vllm:{name}")


def completion(prompt: list[int], most: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}
    return body | {"return_token_ids": True} | fields
