"""A Ray cluster of several nodes on this machine, for a test: `cluster_program.py VERSION ARGUMENTS…`.

It runs in the environment with Ray. Each argument is JSON: the arguments of one node, the head node first. It prints
its address, then does what stdin says, a line for each, and prints `done` after it: `kill INDEX` kills a node with all
of its processes, `add ARGUMENTS` adds one. The cluster ends with stdin. A VERSION that is not empty is the one that the
cluster claims to have.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster


def main() -> None:
    version, *given = sys.argv[1:]
    if version:
        ray.__version__ = version  # what the head node writes down about its cluster
    cluster = Cluster()
    nodes: list[Any] = []

    def add(text: str) -> None:
        head = {} if nodes else {"include_dashboard": False}
        nodes.append(cluster.add_node(**head, **json.loads(text)))

    try:
        for text in given:
            add(text)
        print(cluster.address, flush=True)
        for line in sys.stdin:
            word, _, rest = line.partition(" ")
            if word == "kill":
                cluster.remove_node(nodes[int(rest)], allow_graceful=False)
            else:
                add(rest)
            print("done", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
