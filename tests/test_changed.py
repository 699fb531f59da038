"""tests/changed.py: a change has the mirrors of its files and of what imports them tested, as far as a minute goes."""

from __future__ import annotations

import pytest

from tests.changed import SEEDS, importers, is_test, mirror_of, rows, within_budget

TEXTS = {
    "services/router/index/runs.py": "",
    "services/router/index/chains.py": "from services.router.index.runs import Run\n",
    "services/router/index/far.py": "import services.router.index.chains\n",
    "services/router/service.py": "from services.router.index import (\n    runs,\n)\n",
    "services/worker/runs.py": "",
    "shared/errors.py": "",
    "tests/router/index/test_runs.py": "",
    "tests/router/index/test_chains.py": "",
    "tests/router/index/test_far.py": "",
    "tests/router/test_service.py": "",
    "tests/router/test_whole.py": "from services.router.index.runs import Run\n",
    "tests/router/fleet.py": "",
    "tests/router/test_replicas.py": "from tests.router.fleet import Fleet\n",
    "tests/integration/test_stack.py": "from services.router.index.runs import Run\n",
    "tests/shared/test_model_files_document.py": 'DOCUMENT = ROOT / "docs" / "models.md"\n',
    SEEDS: "",
}


@pytest.mark.parametrize(
    ("module", "mirror"),
    [
        ("services/router/index/runs.py", "tests/router/index/test_runs.py"),
        ("services/router/__main__.py", "tests/router/test_main.py"),
        ("shared/errors.py", "tests/shared/test_errors.py"),
        ("deploy/local/stack/hub.py", "tests/deploy/stack/test_hub.py"),
        ("deploy/monitoring/boards.py", "tests/monitoring/test_boards.py"),
        ("services/virtual/fleet.py", "tests/virtual/test_fleet.py"),
        ("tests/durations.py", "tests/test_durations.py"),
        ("docs/conf.py", ""),
    ],
)
def test_the_mirror_of_a_module_has_its_name_in_the_folder_of_its_package(module: str, mirror: str) -> None:
    assert mirror_of(module) == mirror


def test_a_file_of_tests_is_known_by_its_name() -> None:
    assert is_test("tests/router/test_x.py")
    assert not is_test("tests/router/fleet.py")
    assert not is_test("services/router/test_x.py")


def test_only_direct_importers_are_found_whichever_way_they_import() -> None:
    assert importers(["services/router/index/runs.py"], TEXTS) == [
        "services/router/index/chains.py",
        "services/router/service.py",
        "tests/router/test_whole.py",
        "tests/integration/test_stack.py",
    ]


def test_a_changed_module_has_its_mirror_then_the_tests_and_the_mirrors_of_what_imports_it() -> None:
    assert rows(["services/router/index/runs.py"], TEXTS) == [
        [],
        ["tests/router/index/test_runs.py", SEEDS],
        ["tests/router/index/test_chains.py", "tests/router/test_service.py", "tests/router/test_whole.py"],
    ]


def test_a_changed_test_runs_whatever_its_tier_and_a_deleted_one_does_not() -> None:
    assert rows(["tests/integration/test_stack.py", "tests/router/test_gone.py"], TEXTS) == [
        ["tests/integration/test_stack.py"],
        [],
        [],
    ]


def test_a_changed_fixture_runs_the_tests_that_import_it() -> None:
    assert rows(["tests/router/fleet.py"], TEXTS) == [[], [], ["tests/router/test_replicas.py"]]


def test_a_changed_document_runs_the_tests_that_name_it() -> None:
    assert rows(["docs/models.md"], TEXTS) == [[], ["tests/shared/test_model_files_document.py"], []]
    assert rows(["docs/model"], TEXTS) == [[], [], []]


def test_the_cheapest_of_a_row_run_until_the_budget_is_spent_and_the_rest_is_named() -> None:
    cost_s = {"a": 30.0, "b": 5.0, "c": 50.0, "d": 4.0, "e": 6.0}
    assert within_budget([["a", "b"], ["c", "d"], ["e"]], cost_s.__getitem__, 45.0) == (["b", "a", "d", "e"], ["c"])
