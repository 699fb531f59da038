"""Shows a NATS server's counts to Prometheus: `python nats_metrics.py http://nats:8222 HOST:PORT`.

NATS says them as JSON at /varz of its monitoring port. The names are those of nats-io's prometheus-nats-exporter, so
that boards fit both.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

FIELDS = {
    "connections": "Connections now",
    "subscriptions": "Subscriptions now",
    "slow_consumers": "Connections that were cut off because they did not read fast enough, since the start",
    "in_msgs": "Messages that came, since the start",
    "out_msgs": "Messages that left, since the start",
    "in_bytes": "Bytes that came, since the start",
    "out_bytes": "Bytes that left, since the start",
    "mem": "Bytes of resident memory",
}
LIMIT_S = 2.0
"""Seconds that NATS has to answer."""
LIMIT_BYTES = 1 << 20
"""Longest answer that is read."""


class NatsServer(Collector):
    """The metrics of one server, asked at each scrape."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/") + "/varz"

    def describe(self) -> Iterator[Metric]:
        """Describe nothing: the library would ask the server."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        counts: dict[str, float] = {}
        try:
            with urllib.request.urlopen(self._url, timeout=LIMIT_S) as answer:  # noqa: S310 - the URL is http
                found = json.loads(answer.read(LIMIT_BYTES))
            counts = {name: float(found[name]) for name in FIELDS}
        except (OSError, ValueError, KeyError, TypeError) as wrong:
            print(f"{self._url}: {wrong}", file=sys.stderr, flush=True)
        yield GaugeMetricFamily("gnatsd_up", "1 if NATS answered at /varz", value=bool(counts))
        for name, value in counts.items():
            yield GaugeMetricFamily(f"gnatsd_varz_{name}", FIELDS[name], value=value)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="Shows a NATS server's counts to Prometheus.", allow_abbrev=False)
    parser.add_argument("url", help="the server's monitoring port, such as http://nats:8222")
    parser.add_argument("address", help="where Prometheus asks, such as 127.0.0.1:9101")
    flags = parser.parse_args()
    host, _, port = flags.address.rpartition(":")
    if not flags.url.startswith("http://") or not port.isdigit():
        parser.error("url begins with http://, and address is HOST:PORT")
    registry = CollectorRegistry()
    registry.register(NatsServer(flags.url))
    start_http_server(int(port), host.strip("[]"), registry)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
