"""Weights in the memory service: one copy for all engines, the same numbers, and an engine that serves without it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from services.worker.config import WeightsConfig, WorkerConfig
from services.worker.contracts.messages import Loading
from services.worker.memory.ledger import LedgerLimits
from services.worker.memory.messages import (
    PROTOCOL,
    AskWeights,
    CommitWeights,
    MapWeights,
    WeightsIdentity,
    WriteWeights,
)
from services.worker.native import shared_weights as module
from services.worker.native.prepare import open_source, prepare, source_key
from services.worker.native.runner import NativeRunner, load_native
from services.worker.native.shared_weights import SharedWeights, shared_weights
from services.worker.native.tensor_file import TensorLayout
from shared.errors import ModelError
from tests.resource_limits import LIMIT_BYTES, small_files
from tests.tiny_model import write_tiny_model
from tests.worker.memory.test_service import Peer, made, serving, shown
from tests.worker.native.gguf_model import write_gguf
from tests.worker.native.works import work

LIMITS = LedgerLimits(size_bytes=1 << 30)


def settings_of(source: Path, tmp_path: Path, *, timeout_s: float = 20.0) -> WorkerConfig:
    weights = WeightsConfig(memory=str(tmp_path / "memory"), timeout_s=timeout_s)
    return WorkerConfig(model=str(source), cache=str(tmp_path / "cache"), weights=weights, capacity_blocks=8)


def quiet(_loading: Loading) -> None:
    """Show nothing."""


@contextmanager
def engine(settings: WorkerConfig, progress: Callable[[Loading], None] = quiet) -> Iterator[NativeRunner]:
    """Yield an engine; at the end its lock ends too, as with its process."""
    runner = load_native(settings, progress)
    try:
        yield runner
    finally:
        runner.close()
        if runner._shared is not None:
            runner._shared.release()


def token_of(runner: NativeRunner) -> int:
    [drawn] = runner.step([work([5, 6, 7, 8], [0])])
    assert drawn is not None
    return drawn.token


@pytest.fixture(params=["bfloat16", "gguf"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model whose weights must be converted: a directory of 16-bit floats, or a GGUF file."""
    if request.param == "gguf":
        return write_gguf(tmp_path / "model.gguf", write_tiny_model(tmp_path / "model"))
    return write_tiny_model(tmp_path / "model", dtype="bfloat16")


def test_two_engines_map_one_copy_and_answer_as_with_weights_on_the_disk(source: Path, tmp_path: Path) -> None:
    converted = prepare(source, tmp_path / "disk", quiet)
    alone = NativeRunner(converted, capacity_blocks=8)
    settings = settings_of(source, tmp_path)
    with serving(tmp_path / "memory", LIMITS), engine(settings) as one, engine(settings) as other:
        assert [token_of(one), token_of(other)] == [token_of(alone)] * 2
        assert one.facts.weights == other.facts.weights == alone.facts.weights
        assert one._file is not None
        assert one._file.read_bytes() == (converted / "model.safetensors").read_bytes()
        [row] = shown(tmp_path / "memory").rows
        assert row.readers == (os.getpid(),) * 2
    assert not list((tmp_path / "cache").glob("*/model.safetensors")), "nothing is converted on the disk"


def test_an_engine_that_starts_again_maps_and_converts_nothing(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, module.__name__)
    settings = settings_of(source, tmp_path)
    reported: list[str] = []
    with serving(tmp_path / "memory", LIMITS):
        with engine(settings) as first:
            token = token_of(first)
        with engine(settings, lambda loading: reported.append(loading.what)) as again:
            assert token_of(again) == token
    assert not any("converting" in what for what in reported)
    assert ["converted" in record.getMessage() for record in caplog.records] == [True, False]


def test_the_arrays_lie_in_memory_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    settings = settings_of(source, tmp_path)
    with serving(tmp_path / "memory", LIMITS), engine(settings) as one:
        array = one._decoder._weights.embedding
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


def test_level_two_gives_the_weights_back_and_wake_maps_them_again(source: Path, tmp_path: Path) -> None:
    settings = settings_of(source, tmp_path)
    with serving(tmp_path / "memory", LIMITS), engine(settings) as one:
        token = token_of(one)
        assert one.operate("sleep", "", "", 1) == ""
        assert len(shown(tmp_path / "memory").rows[0].readers) == 1
        assert one.operate("wake", "", "", 0) == ""
        assert one.operate("sleep", "", "", 2) == ""
        [row] = shown(tmp_path / "memory").rows
        assert (row.state, row.readers) == ("committed", ())
        assert one.operate("wake", "", "", 0) == ""
        assert token_of(one) == token
        assert len(shown(tmp_path / "memory").rows[0].readers) == 1


def test_an_engine_that_cannot_wake_sleeps_on_and_holds_nothing(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", dtype="bfloat16")
    settings = settings_of(source, tmp_path)
    with serving(tmp_path / "memory", LIMITS), engine(settings) as one:
        assert one.operate("sleep", "", "", 2) == ""
        write_tiny_model(tmp_path / "model", dtype="bfloat16", seed=99)
        assert "weights have changed" in one.operate("wake", "", "", 0)
        assert all(row.readers == () for row in shown(tmp_path / "memory").rows)
        write_tiny_model(tmp_path / "model", dtype="bfloat16")
        assert one.operate("wake", "", "", 0) == ""


def test_an_engine_serves_without_the_service_and_says_so_in_one_line(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(settings_of(source, tmp_path, timeout_s=0.01)) as one:
        assert token_of(one) == token_of(NativeRunner(prepare(source, tmp_path / "disk", quiet), capacity_blocks=8))
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "weights.memory" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_full_service_is_no_reason_not_to_serve(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        serving(tmp_path / "memory", LedgerLimits(size_bytes=1000)),
        engine(settings_of(source, tmp_path)) as one,
    ):
        token_of(one)
    assert any("size_bytes" in record.getMessage() for record in caplog.records if record.name == module.__name__)


def test_a_machine_without_room_for_them_is_no_reason_not_to_say_so(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", dtype="bfloat16", vocab=2 * LIMIT_BYTES // 256)
    settings = settings_of(source, tmp_path)
    with serving(tmp_path / "memory", LIMITS):
        with small_files(), pytest.raises(ModelError):  # the disk has no room either
            shared_weights(settings, quiet)
        assert shown(tmp_path / "memory").rows == ()


def test_float32_weights_are_used_in_place_and_no_service_is_asked(tmp_path: Path) -> None:
    weights = shared_weights(settings_of(write_tiny_model(tmp_path / "model"), tmp_path), quiet)
    assert weights is not None
    assert (weights.in_place, weights.file, weights.directory) == (True, None, tmp_path / "model")


def test_a_conversion_that_fails_ends_the_start_and_leaves_nothing_in_the_service(source: Path, tmp_path: Path) -> None:
    def stops(loading: Loading) -> None:
        if "converting" in loading.what:
            raise ModelError("no further")

    with serving(tmp_path / "memory", LIMITS):
        with pytest.raises(ModelError, match="no further"):
            shared_weights(settings_of(source, tmp_path), stops)
        assert shown(tmp_path / "memory").rows == ()
        with engine(settings_of(source, tmp_path)) as one:
            token_of(one)


def test_memory_that_is_laid_out_differently_is_not_mapped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_tiny_model(tmp_path / "model", dtype="bfloat16")
    weights = SharedWeights(settings_of(source, tmp_path), quiet)
    layout = TensorLayout(open_source(source, source).shapes)
    identity = WeightsIdentity(source_key(source), layout.digest)
    with serving(tmp_path / "memory", LIMITS), closing(Peer(tmp_path / "memory")) as stranger:
        stranger.send(AskWeights(PROTOCOL, identity, layout.size_bytes))
        assert stranger.answer() == WriteWeights()
        stranger.descriptors.append(made(7, size_bytes=layout.size_bytes))
        stranger.send(CommitWeights(identity), stranger.descriptors)
        assert isinstance(stranger.answer(), MapWeights)
        weights.acquire()
        assert "laid out differently" in caplog.text
        assert weights.file == prepare(source, tmp_path / "cache", quiet) / "model.safetensors"


def test_the_converted_bytes_sum_to_the_same(source: Path, tmp_path: Path) -> None:
    converted = np.fromfile(prepare(source, tmp_path / "disk", quiet) / "model.safetensors", np.uint8)
    with serving(tmp_path / "memory", LIMITS), engine(settings_of(source, tmp_path)) as one:
        assert one._file is not None
        assert np.fromfile(one._file, np.uint8).sum(dtype=np.uint64) == converted.sum(dtype=np.uint64)
