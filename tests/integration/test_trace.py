"""A request's spans come to a real OTLP collector as one tree, also when its worker is killed in mid-stream; and a
collector that fails costs spans and no request."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import nats
import pytest

from tests.collector import CLIENT, SERVER, Collector, ReceivedSpan, collector
from tests.integration.fleet import Fleet, Service, explained, fleet
from tests.integration.stack import eventually
from tests.servers import free_port
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0
CLIENTS_SPAN = "00f067aa0ba902b7"
WORKERS = ("worker 1", "worker 2")
NAMESPACE = "trace"
PROMPT = "The mill at the river turns"
LONG = f"{PROMPT}. " * 100
BLOCKS = 20
"""Fewer than LONG fills."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context_length=8192)


@pytest.fixture(scope="module")
def spans() -> Iterator[Collector]:
    with collector() as one:
        yield one


def where(folder: Path, endpoint: str, namespace: str = NAMESPACE) -> tuple[str, ...]:
    discovery = ("--namespace", namespace, "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    return (*discovery, "--trace-endpoint", endpoint)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, nats_url: str, model: Path, spans: Collector) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("trace")
    with fleet(folder, nats_url, *where(folder, spans.url)) as one:
        one.start("router", "router")
        for name in WORKERS:
            one.start("worker", name, "--model", str(model), "--threads", "1")
        # A busy machine must not make workers look frozen; a killed one is missed by its lack of answers.
        patient = ("--limits-frozen-s", "30", "--limits-quiet-s", "0.5", "--limits-rescue-s", "120")
        one.start("frontend", "frontend", "--trace-sample", "0", *patient)
        one.wait_ready()
        yield one


def ask(
    frontend: Service, headers: dict[str, str], max_tokens: int = 8, stream: bool = False, prompt: str = PROMPT
) -> tuple[Any, dict[str, str]]:
    """Open an answer; return it and its headers."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    payload = json.dumps({**body, "ignore_eos": True, "stream": stream}).encode()
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"{frontend.url}/v1/completions", payload, headers)
    answer = urllib.request.urlopen(request, timeout=LIMIT_S)
    return answer, dict(answer.headers)


def whole(spans: Collector, trace: str, *names: str) -> dict[str, list[ReceivedSpan]]:
    """The spans of a trace by name, once all of these have come."""

    def found() -> dict[str, list[ReceivedSpan]] | None:
        by_name: dict[str, list[ReceivedSpan]] = {}
        for span in spans.of_trace(trace):
            by_name.setdefault(span.name, []).append(span)
        return by_name if set(names) <= by_name.keys() else None

    return eventually(found, limit_s=LIMIT_S, what=f"spans {names} of {trace}; has {spans.of_trace(trace)}")


def is_within(inner: ReceivedSpan, outer: ReceivedSpan) -> bool:
    return outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


def test_a_request_that_migrates_is_one_tree(services: Fleet, spans: Collector, nats_url: str) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    frontend = services.services["frontend"]
    answer, headers = ask(frontend, {"traceparent": f"00-{trace}-{CLIENTS_SPAN}-01"}, max_tokens=3000, stream=True)
    for _ in range(20):
        assert answer.readline()
    first = whole(spans, trace, "prefill", "select")  # what the worker that dies has sent
    chosen = first["select"][0].attributes["headrace.instance"]
    killed = next(one for name in WORKERS if chosen in (one := services.services[name]).log.read_text())
    killed.kill()
    rest = answer.read().decode()
    assert rest.rstrip().endswith("data: [DONE]")
    found = whole(spans, trace, "text_completion tiny", "decode", "migration")
    (request,) = found["text_completion tiny"]
    assert headers["traceparent"] == f"00-{trace}-{request.span}-01"
    assert (request.parent, request.kind, request.service) == (CLIENTS_SPAN, SERVER, "headrace-frontend")
    assert request.attributes["gen_ai.request.model"] == "tiny"
    assert request.attributes["gen_ai.usage.output_tokens"] == 3000
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert request.attributes["http.response.status_code"] == 200
    lost, lasting = found["attempt"][0], found["attempt"][-1]
    (migration,) = found["migration"]
    (tokenise,) = found["tokenise"]
    assert {lost.parent, lasting.parent, migration.parent, tokenise.parent} == {request.span}
    assert lost.failed
    assert not lasting.failed
    assert lost.attributes["headrace.instance"] == chosen != lasting.attributes["headrace.instance"]
    assert migration.attributes["headrace.lost_instance"] == chosen
    assert migration.attributes["headrace.instance"] == lasting.attributes["headrace.instance"]
    assert tokenise.end_ns <= lost.start_ns
    assert lost.end_ns <= lasting.start_ns <= migration.end_ns <= lasting.end_ns
    for select in found["select"]:
        assert select.kind == CLIENT
        assert select.parent in {attempt.span for attempt in found["attempt"]}
        assert "headrace.overlap_tokens" in select.attributes or select.failed
    for choice in found["choose"]:
        assert (choice.service, choice.kind) == ("headrace-router", SERVER)
        assert any(is_within(choice, select) for select in found["select"] if select.span == choice.parent)
    (decode,) = found["decode"]
    assert (decode.service, decode.instance) == ("headrace-worker", lasting.attributes["headrace.instance"])
    of_lasting = [one for name in ("queue", "prefill", "decode") for one in found[name] if one.parent == lasting.span]
    assert [one.name for one in of_lasting] == ["queue", "prefill", "decode"]
    assert all(is_within(one, lasting) for one in of_lasting[:2])
    for earlier, later in pairwise(of_lasting):
        assert earlier.end_ns == later.start_ns
    assert {one.parent for one in found["prefill"]} == {lost.span, lasting.span}
    known = {span.span: span for span in spans.of_trace(trace)}
    assert all(span.parent in known for span in known.values() if span is not request)
    assert all(is_within(span, request) for span in known.values() if span.name != "decode")
    assert lasting.start_ns <= decode.start_ns <= request.end_ns
    decision = explained(nats_url, NAMESPACE, request.attributes["headrace.request_id"])
    assert decision["trace"] == trace


def test_the_first_tokens_histogram_names_the_trace_to_a_scraper_that_takes_exemplars(
    services: Fleet, spans: Collector
) -> None:
    trace = "1bf92f3577b34da6a3ce929d0e0e4736"
    frontend = services.services["frontend"]
    ask(frontend, {"traceparent": f"00-{trace}-{CLIENTS_SPAN}-01"})[0].read()
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"
    asked = urllib.request.Request(f"{frontend.url}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
        text = answer.read().decode()
    exemplar = rf'headrace_time_to_first_token_seconds_bucket{{[^}}]*}} \S+ # {{trace_id="{trace}"}}'
    assert re.search(exemplar, text)
    with urllib.request.urlopen(f"{frontend.url}/metrics", timeout=LIMIT_S) as answer:
        assert " # {" not in answer.read().decode()


def test_a_request_over_nats_brings_its_trace_and_gets_it_back(
    services: Fleet, spans: Collector, nats_url: str
) -> None:
    trace = "2bf92f3577b34da6a3ce929d0e0e4736"

    async def ask_nats(traceparent: str) -> dict[str, str]:
        client = await nats.connect(nats_url)
        try:
            body = json.dumps({"model": "tiny", "prompt": "The mill", "max_tokens": 3}).encode()
            headers = {"traceparent": traceparent}
            subject = f"headrace.{NAMESPACE}.frontend.completions"
            reply = await client.request(subject, body, timeout=LIMIT_S, headers=headers)
            return dict(reply.headers or {})
        finally:
            await client.close()

    headers = asyncio.run(ask_nats(f"00-{trace}-{CLIENTS_SPAN}-01"))
    (request,) = whole(spans, trace, "text_completion tiny")["text_completion tiny"]
    assert headers["traceparent"] == f"00-{trace}-{request.span}-01"
    assert request.parent == CLIENTS_SPAN
    before = services.services["frontend"].metric("headrace_malformed_traceparents_total")
    headers = asyncio.run(ask_nats("0" * 10_000))
    assert "X-Request-Id" in headers
    assert "traceparent" not in headers
    assert services.services["frontend"].metric("headrace_malformed_traceparents_total") == before + 1


@pytest.mark.parametrize(
    "hostile",
    [
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "a" * 7000,
        "00-é-01",
    ],
    ids=["upper case", "all zero", "version ff", "7 kB", "not ASCII"],
)
def test_a_hostile_traceparent_is_ignored_and_counted(services: Fleet, hostile: str) -> None:
    frontend = services.services["frontend"]
    before = frontend.metric("headrace_malformed_traceparents_total")
    answer, headers = ask(frontend, {"traceparent": hostile})
    assert answer.status == 200
    assert "traceparent" not in headers
    assert frontend.metric("headrace_malformed_traceparents_total") == before + 1


def test_a_request_whose_client_does_not_record_leaves_no_span(services: Fleet, spans: Collector) -> None:
    trace = "3bf92f3577b34da6a3ce929d0e0e4736"
    _, headers = ask(services.services["frontend"], {"traceparent": f"00-{trace}-{CLIENTS_SPAN}-00"})
    assert "traceparent" not in headers
    later = "5bf92f3577b34da6a3ce929d0e0e4736"
    ask(services.services["frontend"], {"traceparent": f"00-{later}-{CLIENTS_SPAN}-01"})[0].read()
    whole(spans, later, "text_completion tiny")
    assert not spans.of_trace(trace)


def test_blocks_from_the_machines_store_have_spans_at_the_worker_and_at_the_store(
    tmp_path: Path, nats_url: str, model: Path, spans: Collector
) -> None:
    trace = "6bf92f3577b34da6a3ce929d0e0e4736"
    pool = str(tmp_path / "pool")
    with fleet(tmp_path, nats_url, *where(tmp_path, spans.url, "store")) as one:
        one.start("router", "router")
        one.start("kvbm", "kvbm", "--pool-directory", pool, "--pool-size-bytes", str(16 << 20))
        kvbm = ("--kvbm-pool", pool, "--kvbm-wait-s", "60", "--kvbm-timeout-s", "4")
        worker = ("--model", str(model), "--threads", "1", *kvbm)
        one.start("worker", "worker", *worker)
        one.start("frontend", "frontend", "--trace-sample", "0")
        one.wait_ready()
        frontend = one.services["frontend"]
        eventually(
            lambda: one.services["worker"].metric("headrace_kvbm_attached"), limit_s=LIMIT_S, what="the worker attaches"
        )
        ask(frontend, {}, prompt=LONG)[0].read()
        eventually(
            lambda: one.services["worker"].metric("headrace_kvbm_copied_blocks_total", outcome="saved") >= BLOCKS,
            limit_s=LIMIT_S,
            what="blocks are saved",
        )
        assert one.services["worker"].stop()[0] == 0
        one.start("worker", "worker", *worker)
        one.wait_ready("worker", "frontend")
        eventually(
            lambda: one.services["worker"].metric("headrace_kvbm_attached"), limit_s=LIMIT_S, what="the worker attaches"
        )
        ask(frontend, {"traceparent": f"00-{trace}-{CLIENTS_SPAN}-01"}, prompt=LONG)[0].read()
        found = whole(spans, trace, "text_completion tiny", "decode", "kvbm fetch")
    (fetch,), (stored,) = found["fetch"], found["kvbm fetch"]
    (onboard,), (prefill,), attempt = found["onboard"], found["prefill"], found["attempt"][-1]
    assert fetch.parent == onboard.parent == prefill.parent == attempt.span
    assert stored.parent == fetch.span
    assert (fetch.service, stored.service) == ("headrace-worker", "headrace-kvbm")
    assert is_within(stored, fetch)
    assert stored.attributes["headrace.memory_blocks"] >= BLOCKS
    assert prefill.attributes["headrace.cached_tokens.host"] >= 16 * BLOCKS


def outcomes(frontend: Service) -> dict[str, float]:
    return {name: frontend.metric("headrace_spans_total", outcome=name) for name in ("exported", "dropped", "failed")}


def lossy(frontend: Service) -> dict[str, float] | None:
    """Ask more at once than the queue of spans takes."""
    with ThreadPoolExecutor(8) as pool:
        for answer, _ in pool.map(lambda _: ask(frontend, {}), range(8)):
            answer.read()
    counts = outcomes(frontend)
    return counts if counts["failed"] and counts["dropped"] else None


def test_a_collector_that_is_absent_fails_or_hangs_costs_spans_and_no_request(
    tmp_path: Path, nats_url: str, model: Path
) -> None:
    with collector() as failing, collector() as hanging, fleet(tmp_path, nats_url, *where(tmp_path, "", "ill")) as one:
        failing.mode, hanging.mode = "fail", "hang"
        absent = f"http://127.0.0.1:{free_port()}/v1/traces"
        endpoints = {"absent": absent, "failing": failing.url, "hanging": hanging.url}
        one.start("router", "router")
        one.start("worker", "worker", "--model", str(model), "--threads", "1")
        for name, endpoint in endpoints.items():
            sampled = ("--trace-endpoint", endpoint, "--trace-sample", "1")
            one.start("frontend", name, *sampled, "--trace-queue", "16", "--trace-timeout-s", "1")
        one.wait_ready()
        for name in endpoints:
            frontend = one.services[name]
            for _ in range(30):
                answer, headers = ask(frontend, {})
                assert answer.status == 200
                assert answer.read()
                assert "traceparent" in headers
            counts = eventually(
                partial(lossy, frontend),
                limit_s=LIMIT_S,
                what=f"{name}: failed and dropped spans are counted",
            )
            assert counts["exported"] == 0
        failing.mode = "take"

        def taken() -> float:
            ask(one.services["failing"], {})[0].read()
            return outcomes(one.services["failing"])["exported"]

        eventually(taken, limit_s=LIMIT_S, what="spans are taken again")
        for name in endpoints:
            status, _ = one.services[name].stop()
            assert status == 0
            lines = [line for line in one.services[name].log.read_text().splitlines() if "spans" in line]
            said = [re.sub(r'.*message="', "", line)[:14] for line in lines]
            assert said == ["spans are lost", *(["spans are sent"] if name == "failing" else [])], lines
            assert "opentelemetry" not in one.services[name].log.read_text()
