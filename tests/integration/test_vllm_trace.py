"""vLLM's own span of a traced request is a part of the request's trace; of others it sends none."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from tests.collector import SERVER, ReceivedSpan, collector
from tests.integration.fleet import Service, fleet
from tests.integration.stack import eventually
from tests.tiny_model import write_tiny_model
from tests.worker.vllm.environment import LIMIT_S, PYTHON, needs_vllm

pytestmark = needs_vllm
NAMESPACE = "vllmtrace"
TRACE, CLIENTS_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_vllms_span_joins_the_trace_of_its_request(tmp_path: Path, nats_url: str) -> None:
    model = write_tiny_model(tmp_path / "tiny", hidden=128, heads=2, context_length=1024, tied=False, seed=3)
    with collector() as spans:
        where = ("--namespace", NAMESPACE, "--discovery-backend", "file", "--discovery-path", str(tmp_path / "where"))
        with fleet(tmp_path, nats_url, *where, "--trace-endpoint", spans.url) as services:
            services.start("router", "router")
            flags = ("--model", str(model), "--engine", "vllm", "--vllm-python", str(PYTHON), "--threads", "1")
            worker = services.start("worker", "worker", *flags, "--vllm.num_gpu_blocks_override", "64")
            frontend = services.start("frontend", "frontend", "--trace-sample", "0", "--limits-frozen-s", "60")
            eventually(worker.ready, limit_s=LIMIT_S, what="the worker serves")
            services.wait_ready()
            eventually(lambda: answers(frontend), limit_s=LIMIT_S, what="a request is answered")
            assert answers(frontend, {"traceparent": f"00-{TRACE}-{CLIENTS_SPAN}-01"})

            def whole() -> dict[str, ReceivedSpan] | None:
                found = {span.name: span for span in spans.of_trace(TRACE)}
                return found if {"attempt", "decode", "llm_request"} <= found.keys() else None

            found = eventually(whole, limit_s=LIMIT_S, what="the spans of the worker and of vLLM have come")
            own, decode = found["llm_request"], found["decode"]
            assert own.parent == decode.parent == found["attempt"].span
            assert (own.kind, own.service, own.instance) == (SERVER, "headrace-vllm", decode.instance)
            assert own.attributes["gen_ai.usage.completion_tokens"] == 4
            assert found["attempt"].start_ns <= own.start_ns <= decode.end_ns
            assert {span.trace for span in spans.spans} == {TRACE}


def answers(frontend: Service, headers: dict[str, str] | None = None) -> bool:
    """Ask for four tokens. Return whether they came."""
    body = json.dumps({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}).encode()
    request = urllib.request.Request(
        f"{frontend.url}/v1/completions", body, {"Content-Type": "application/json", **(headers or {})}
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return bool(json.loads(answer.read())["usage"]["completion_tokens"] == 4)
    except OSError:  # the frontend has not seen the worker's card yet
        return False
