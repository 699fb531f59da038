from __future__ import annotations

from services.frontend.media.jobs import VideoJob
from shared.messages.generate import Picture

JOB = VideoJob(
    id="video_1",
    key="alice",
    model="m",
    picture=Picture("a mill", 64, 64, 4, 0, frames=9, format="mp4"),
    priority=0,
    created_s=1.0,
    due_s=100.0,
)


def test_progress_counts_steps_and_what_comes_after_them() -> None:
    assert [JOB.advanced(step).progress for step in range(5)] == [0, 20, 40, 60, 80]
    assert JOB.advanced(4).ended("completed", 9.0).progress == 100
    assert JOB.advanced(2).status == "in_progress"


def test_a_job_that_begins_again_has_no_progress() -> None:
    again = JOB.advanced(3).again()
    assert (again.status, again.progress, again.is_over) == ("queued", 0, False)


def test_a_job_that_is_over_says_why() -> None:
    failed = JOB.advanced(3).ended("failed", 9.0, code="overloaded", error="full")
    assert (failed.is_over, failed.completed_s, failed.code, failed.error) == (True, 9.0, "overloaded", "full")
