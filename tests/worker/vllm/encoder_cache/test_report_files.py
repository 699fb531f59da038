"""services/worker/vllm/encoder_cache/report_files.py: what is put is taken once and in order, if it can be
written."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.vllm.encoder_cache.report_files import ReportFiles


def test_reports_are_taken_once_and_in_order_and_nothing_is_left(tmp_path: Path) -> None:
    writer, reader = ReportFiles(tmp_path), ReportFiles(tmp_path)
    assert reader.take() == []
    reports = [({f"{number}": bytes([number])}, 0.5 + number) for number in range(12)]
    for encoded, image_s in reports:
        writer.put(encoded, image_s)
    assert reader.take() == reports
    assert reader.take() == []
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written_is_lost_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ReportFiles(tmp_path / "gone").put({"a": b"", "b": b""}, 0.1)
    assert "embeddings of 2 images are not stored: [Errno 2]" in caplog.text
    assert ReportFiles(tmp_path / "gone").take() == []
