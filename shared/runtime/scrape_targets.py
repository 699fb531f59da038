"""Where Prometheus finds the metrics of all processes, in the form of its HTTP service discovery. Pure.

Format: https://prometheus.io/docs/prometheus/latest/http_sd/

Every process serves them from the address book that it follows anyway, so there is no writer of files. One that has not
read it yet answers 503: for an empty list, Prometheus would drop all targets.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

import msgspec

from shared.messages.cards import Instance


def scrape_targets(instances: Iterable[Instance]) -> bytes:
    """Return the targets as JSON: one for each instance that has a /metrics, in the order of services and instances."""
    groups: list[dict[str, object]] = []
    for one in sorted(instances, key=lambda one: (one.service, one.instance)):
        url = urlsplit(one.http)
        if not url.netloc:
            continue
        labels = {
            "namespace": one.namespace,
            "service": one.service,
            "instance": one.instance,
            "__scheme__": url.scheme,
            "__metrics_path__": f"{url.path.rstrip('/')}/metrics",
        }
        groups.append({"targets": [url.netloc], "labels": labels})
    return msgspec.json.encode(groups)
