from __future__ import annotations

import json
from typing import Any

from shared.messages.cards import Instance, ServiceName
from shared.runtime.scrape_targets import scrape_targets


def instance(service: ServiceName, name: str, http: str) -> Instance:
    return Instance("default", service, name, 1, "machine", 7, 0.0, "1.0", http=http)


def test_each_instance_with_metrics_is_a_target_with_the_labels_of_its_series() -> None:
    found: list[dict[str, Any]] = json.loads(
        scrape_targets(
            [
                instance("worker", "0b", "http://[::1]:4001"),
                instance("frontend", "0c", "https://node-1:9100/"),
                instance("worker", "0a", "http://node-1:4000"),
                instance("router", "0d", ""),
            ]
        )
    )
    assert [group["targets"] for group in found] == [["node-1:9100"], ["node-1:4000"], ["[::1]:4001"]]
    assert found[0]["labels"] == {
        "namespace": "default",
        "service": "frontend",
        "instance": "0c",
        "__scheme__": "https",
        "__metrics_path__": "/metrics",
    }
    assert [group["labels"]["instance"] for group in found] == ["0c", "0a", "0b"]


def test_without_instances_there_is_an_empty_list() -> None:
    assert scrape_targets([]) == b"[]"
