"""Why vLLM did not start: the line that matters, and whether another start may help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.contracts.messages import Failed
from services.worker.vllm.start_failure import VARIABLE, Cause, explained, failure, read_cause

IMPORTED = "from services.worker.vllm import start_failure"
CORE = Cause("RuntimeError", "Engine core initialization failed. See root cause above. Failed core proc(s): {}")
PROGRAM = """
import logging, logging.config
from services.worker.vllm.start_failure import note_exceptions
note_exceptions()
logging.config.dictConfig({"version": 1, "handlers": {"none": {"class": "logging.NullHandler"}},
                           "loggers": {"vllm": {"handlers": ["none"], "level": "INFO", "propagate": False}}})
log = logging.getLogger("vllm.core")
log.error("no exception")
for wrong in (ValueError("the first"), KeyError("the second")):
    try:
        raise wrong
    except Exception:
        log.exception("failed to start")
"""


def test_the_cores_own_exception_is_named_instead_of_the_parents() -> None:
    noted = Cause("SafetensorError", "Error while deserializing header: incomplete metadata, file not fully covered")
    failed = failure(CORE, noted)
    assert failed.reason == (
        "vLLM cannot start: SafetensorError: Error while deserializing header: incomplete metadata, file not fully"
        " covered (the files of worker.model are torn or missing)"
    )
    assert failed.model


def test_what_the_parent_raises_itself_comes_first() -> None:
    failed = failure(Cause("ValueError", "awq is unknown"), Cause("KeyError", "something logged before"))
    assert (failed.reason, failed.model) == ("vLLM cannot start: ValueError: awq is unknown", True)


UNINSPECTED = Cause("ValidationError", "Model architectures ['A'] failed to be inspected. Please check the logs")


def inspection(written: str, died: str = "returned non-zero exit status 1.") -> Cause:
    """The cause that vLLM's parent logs if the process that looks at a model's class fails."""
    try:
        try:
            raise OSError(f"Command '['python', '-m', 'vllm…registry']' {died}")
        except OSError as wrong:
            raise RuntimeError(f"Error raised in subprocess:\n{written}") from wrong
    except RuntimeError as wrong:
        return Cause.of(wrong)


def test_a_model_that_cannot_be_inspected_is_named_by_what_ended_the_inspection() -> None:
    failed = failure(UNINSPECTED, inspection("Traceback …\n  File …\nModuleNotFoundError: No module named 'timm'\n"))
    assert failed.reason == "vLLM cannot start: RuntimeError: ModuleNotFoundError: No module named 'timm'"
    assert failed.model
    illegal = failure(UNINSPECTED, inspection("", "died with <Signals.SIGILL: 4>."))
    assert "died with <Signals.SIGILL: 4>." in illegal.reason
    assert illegal.model
    assert not failure(UNINSPECTED, inspection("", "died with <Signals.SIGKILL: 9>.")).model, "memory may come free"
    assert failure(UNINSPECTED, None).reason.endswith("failed to be inspected. Please check the logs")


def test_a_core_that_was_killed_is_tried_again() -> None:
    killed = Cause("RuntimeError", CORE.text.replace("{}", "{'EngineCore': -9}"))
    assert "by signal 9" in failure(killed, None).reason
    assert not failure(killed, None).model
    assert "without a word" in failure(CORE, None).reason
    assert not failure(Cause("EngineDeadError", "EngineCore encountered an issue"), None).model


@pytest.mark.parametrize(
    ("kind", "text", "hint"),
    [
        (
            "ValueError",
            "Available memory on node 0 (21/23 GiB) on kv cache allocation is less than requested memory for kv"
            " (4000.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory",
            "worker.capacity_bytes",
        ),
        (
            "ValueError",
            "Free memory on device cuda:0 (3/79 GiB) on startup is less than desired GPU memory utilization (0.9, 71)",
            "vllm.gpu_memory_utilization",
        ),
        ("OutOfMemoryError", "CUDA: none left", ""),
        ("ZMQError", "Address already in use (addr='tcp://127.0.0.1:5557')", "5557"),
    ],
)
def test_memory_and_ports_may_come_free(kind: str, text: str, hint: str) -> None:
    failed = failure(CORE, Cause(kind, text))
    assert not failed.model
    assert hint in failed.reason


def test_a_context_that_does_not_fit_names_its_setting() -> None:
    text = (
        "To serve at least one request with the model's max seq len (1024), (9 GiB KV cache is needed, which is larger"
    )
    failed = failure(CORE, Cause("ValueError", text))
    assert failed.model
    assert failed.reason.endswith("(set vllm.max_model_len)")


def test_validation_is_one_readable_line() -> None:
    text = (
        "1 validation error for ModelConfig\n  Value error, Model architectures ['Nope'] are not supported for now."
        " Supported architectures: dict_keys(['A', 'B']) [type=value_error, input_value=Args(), input_type=Args]\n  For"
    )
    assert Cause.of(ValueError(text)).text == "Model architectures ['Nope'] are not supported for now"
    assert Cause.of(ValueError("a\n b")) == Cause("ValueError", "a b")
    assert len(Cause.of(ValueError("x" * 100_000)).text) == 1000


def test_a_dead_core_is_explained_by_what_it_noted() -> None:
    dead = Failed(reason="EngineDeadError: EngineCore encountered an issue. See stack trace (above)")
    explanation = explained(dead, Cause("RuntimeError", "the kernel failed"))
    assert explanation == Failed(reason="vLLM's core has ended: RuntimeError: the kernel failed")
    assert explained(dead, None) is dead
    assert explained(None, Cause("RuntimeError", "noted, but it was shut down")) is None
    other = Failed(reason="TimeoutError: ")
    assert explained(other, Cause("RuntimeError", "an earlier one")) is other


def test_the_first_logged_exception_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "cause"
    assert read_cause(path) is None
    subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | {VARIABLE: str(path)}, check=True)
    assert read_cause(path) == Cause("ValueError", "the first")
    assert [one.name for one in tmp_path.iterdir()] == ["cause"]


def test_of_a_process_that_notes_only_meanwhile_nothing_later_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "cause"
    program = PROGRAM.replace("\nnote_exceptions()", "\nwith start_failure.noting_exceptions():\n    pass")
    program = program.replace("from services.worker.vllm.start_failure import note_exceptions", IMPORTED)
    subprocess.run([sys.executable, "-c", program], env=os.environ | {VARIABLE: str(path)}, check=True)
    assert read_cause(path) is None


def test_a_factory_of_records_that_is_set_meanwhile_stays(tmp_path: Path) -> None:
    """vLLM sets one when it reads the model's configuration, and its formats need what it adds."""
    program = f"""
import logging
{IMPORTED}
with start_failure.noting_exceptions():
    make = logging.getLogRecordFactory()
    def naming(*arguments, **named):
        record = make(*arguments, **named)
        record.process_title = "core"
        return record
    logging.setLogRecordFactory(naming)
logging.basicConfig(format="%(process_title)s: %(message)s")
logging.warning("ready")
"""
    kept = os.environ | {VARIABLE: str(tmp_path / "cause")}
    ran = subprocess.run([sys.executable, "-c", program], env=kept, check=True, capture_output=True, text=True)
    assert ran.stderr == "core: ready\n"


def test_without_the_variable_nothing_is_noted() -> None:
    kept = {name: value for name, value in os.environ.items() if name != VARIABLE}
    subprocess.run([sys.executable, "-c", PROGRAM], env=kept, check=True)


def test_an_exception_without_a_text_is_named_by_the_line_that_raised_it() -> None:
    dtypes, dtype = ["float16"], "float32"
    try:
        assert dtype in dtypes
    except AssertionError as wrong:
        wrong.args = ()
        cause = Cause.of(wrong)
    assert cause.text.startswith("test_start_failure.py:")
    assert cause.text.endswith(": assert dtype in dtypes")
    assert Cause.of(KeyError()).text == ""
