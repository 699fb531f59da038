"""tests/conftest.py: no test can fail because the machine is slow or busy."""

from __future__ import annotations

import re

from hypothesis import HealthCheck, settings

from tests.__main__ import HERE


def test_hypothesis_has_no_limit_of_time() -> None:
    assert settings.default is not None
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check


def test_no_test_has_settings_that_bring_a_limit_of_time_back() -> None:
    for path in HERE.rglob("*.py"):
        if path.name != "conftest.py" and path.name != "test_conftest.py":
            code = path.read_text(encoding="utf-8")
            assert not re.search(r"settings\([^)]*deadline=", code), path
            for suppressed in re.findall(r"suppress_health_check=\[([^]]*)\]", code):
                assert "HealthCheck.too_slow" in suppressed, path
