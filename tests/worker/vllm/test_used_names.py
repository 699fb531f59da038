"""The table of the names of vLLM that we use is that of our code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.config import WorkerConfig
from services.worker.engine.process import engine_environment
from services.worker.vllm.connector.pool import PoolBlock, VllmPool
from services.worker.vllm.sampling import ROWS
from services.worker.vllm.used_names import CONNECTOR, ENGINE, ENVIRONMENT, Table

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "services" / "worker" / "vllm"
TABLE_FILE = PACKAGE / "used_names.py"


def imports(file: Path) -> Iterator[str]:
    """Yield the names that a file imports from vLLM, also within functions, as the table has them."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
            yield from (f"{node.module}:{each.name}" for each in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vllm":
            yield f"vllm:{node.attr}"


def files() -> dict[Path, Table]:
    """Return our files with the part of the table in which their imports are."""
    found = [file for file in (ROOT / "services").rglob("*.py") if file != TABLE_FILE]
    return {file: CONNECTOR if PACKAGE / "connector" in file.parents else ENGINE for file in found}


def test_each_name_that_is_imported_from_vllm_is_in_the_table() -> None:
    used = {(file, name): table for file, table in files().items() for name in imports(file)}
    assert len(used) > 30, "the imports are not found"
    assert [(str(file), name) for (file, name), table in used.items() if name not in table] == []


@pytest.mark.parametrize("table", [ENGINE, CONNECTOR], ids=["engine", "connector"])
def test_nothing_is_in_the_table_that_our_code_does_not_name(table: Table) -> None:
    code = "\n".join(file.read_text(encoding="utf-8") for file in files()) + (
        ROOT / "shared" / "messages" / "kv_events.py"
    ).read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", code))
    for name, used in table.items():
        members = {*used.passes, *used.reads, *used.calls, *used.overrides} - {"/"}
        by_place = {each for each in used.passes if "/" in used.passes[used.passes.index(each) :]}
        assert members - by_place - words == set(), name


def test_each_argument_of_sampling_parameters_is_in_the_table() -> None:
    passed = set(re.findall(r'\{"(\w+)":|_same\("(\w+)"\)', (PACKAGE / "sampling.py").read_text(encoding="utf-8")))
    names = {first or second for first, second in passed}
    assert len(names) >= len(ROWS) - 2
    assert names <= set(ENGINE["vllm.sampling_params:SamplingParams"].passes)


def test_the_variables_of_vllm_that_a_worker_sets_are_in_the_table() -> None:
    environment = engine_environment(WorkerConfig(model="m", engine="vllm"), sockets="/tmp/sockets")
    assert {name for name in environment if name.startswith("VLLM_")} >= set(ENVIRONMENT)
    source = (ROOT / "services" / "worker" / "engine" / "process.py").read_text(encoding="utf-8")
    assert set(re.findall(r'"(VLLM_\w+)"', source)) == set(ENVIRONMENT)


@pytest.mark.parametrize(
    ("protocol", "name"),
    [(VllmPool, "vllm.v1.core.block_pool:BlockPool"), (PoolBlock, "vllm.v1.core.kv_cache_utils:KVCacheBlock")],
)
def test_all_that_our_protocols_of_vllms_pool_have_is_in_the_table(protocol: type, name: str) -> None:
    members = {each for each in vars(protocol) if not each.startswith("_")} | set(protocol.__annotations__)
    used = CONNECTOR[name]
    assert len(members) > 3
    assert members == {*used.reads, *used.calls}
