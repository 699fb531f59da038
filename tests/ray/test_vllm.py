"""`headrace up --on ray --engine vllm` in a real cluster of one node, with vLLM on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import OpenAI

from tests.integration.stack import running
from tests.ray.rig import HEAD, cluster, node, python, variables
from tests.ray.test_up import ask
from tests.tiny_model import write_tiny_model
from tests.worker.vllm.environment import LIMIT_S, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


def test_a_worker_with_vllm_answers(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", hidden=128, heads=2, tied=False)
    with cluster(node(HEAD, cpus=1)) as ray:
        flags = ("--on", "ray", "--ray-address", ray.address, "--model", str(model), "--kvbm-bytes", "0")
        more = ("--engine", "vllm", "--workers", "1", "--set", "worker.vllm.max_model_len=1024")
        with (
            running(tmp_path / "up", *flags, *more, variables=variables(), python=str(python())) as up,
            OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client,
        ):
            assert ask(client, "How does water get to the mill?")[0]
