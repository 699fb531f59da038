"""The tests of a package lie in a folder of its name: `services/router/index/runs.py` is tested by
`tests/router/index/test_runs.py`.

A test file in such a folder has the name of a module there, or stands in OF_SEVERAL. Tests of a whole service lie one
folder higher and have any name.
"""

from __future__ import annotations

from pathlib import Path

from tests.changed import AREAS

ROOT = Path(__file__).resolve().parents[1]
OF_SEVERAL = {
    "tests/deploy/autoscale/test_day_curve.py": "the decider over a simulated fleet",
    "tests/deploy/bench/test_compare.py": "fleets that `bench` starts and compares",
    "tests/frontend/tool_parsers/test_rules.py": "all formats, by rules that Hypothesis draws",
    "tests/kvbm/disk/test_disk_killed.py": "the disk tier's files after a writer was killed",
    "tests/kvbm/tickets/test_ticket_machine.py": "tickets and tiers as a Hypothesis state machine",
    "tests/router/index/test_chains_of_stores.py": "chains whose blocks are in a store",
    "tests/shared/bus/test_events.py": "KV events over all back ends",
    "tests/worker/memory/test_memory_processes.py": "the memory service and its engines as processes that are killed",
    "tests/worker/native/test_structured.py": "grammars with the engine's own sampler",
    "tests/worker/sharing/test_sharing_processes.py": "lender and reader in two processes, on both memories",
    "tests/worker/vllm/connector/test_hand_overs.py": "prompts that one engine computes for another",
    "tests/worker/vllm/connector/test_machine.py": "the connector's two halves as a Hypothesis state machine",
    "tests/worker/vllm/connector/test_troubles.py": "the connector over a kvbm that is silent, full or strange",
}
"""Test files of more than one module, and what they test."""


def strangers() -> list[str]:
    """Test files below a package's folder that have no module of their name."""
    found = []
    for tests, code in AREAS.items():
        for file in (ROOT / tests).rglob("test_*.py"):
            inside = file.parent.relative_to(ROOT / tests)
            module = ROOT / code / inside / file.name.removeprefix("test_")
            if inside.parts and not module.exists():
                found.append(str(file.relative_to(ROOT)))
    return sorted(found)


def test_a_test_file_in_a_packages_folder_has_the_name_of_a_module_there() -> None:
    assert strangers() == sorted(OF_SEVERAL)


def test_a_folder_of_tests_has_the_name_of_a_package() -> None:
    folders = {file.parent for tests in AREAS for file in (ROOT / tests).rglob("test_*.py")}
    inside = [(folder, folder.relative_to(ROOT).parts) for folder in folders]
    packages = [ROOT / AREAS["/".join(parts[:2])] / "/".join(parts[2:]) for _, parts in inside]
    assert [package for package in packages if not package.is_dir()] == []
