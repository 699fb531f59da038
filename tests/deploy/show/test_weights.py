"""deploy/local/show/weights.py: what a memory service of this machine keeps, and how it is freed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from deploy.local import cli
from deploy.local.show.overview import Overview, SharedWeightsRow, render
from deploy.local.show.weights import free_weights, shared_rows
from shared.errors import Unavailable
from tests.worker.memory.memory_process import identity_of
from tests.worker.memory.test_service import SIZE, Peer, commit_weights, serving

PID = 4242


def test_weights_are_shown_with_who_makes_and_who_maps_them(tmp_path: Path) -> None:
    with serving(tmp_path / "memory"), closing(commit_weights(tmp_path / "memory", 7)) as peer:
        (row,) = shared_rows(tmp_path / "memory")
        assert (row.name, row.state, row.size_bytes, row.writer) == ("model-7", "committed", SIZE, 0)
        assert len(row.readers) == 1
        assert peer.descriptors


def test_a_model_or_all_are_freed_and_what_is_mapped_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "memory"
    with serving(directory):
        commit_weights(directory, 7).close()
        commit_weights(directory, 8).close()
        with closing(Peer(directory)) as reader:
            reader.ask(7)
            assert free_weights(directory, "model-8") == (SIZE, ())
            assert free_weights(directory, identity_of(7).model) == (0, ("model-7",))
            assert cli.main(["weights", "free", "--memory", str(directory)]) == 0
            assert cli.main(["weights", "free", "model-9", "--memory", str(directory)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("0 B of weights were freed\nengines use those of model-7; they stay\n")
    assert "no weights of model-9 are there" in said


def test_a_service_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unavailable, match=f"no answer from the memory service in {tmp_path}: No such file"):
        shared_rows(tmp_path)
    assert cli.main(["weights", "free", "--state", str(tmp_path)]) == 1
    assert "(--memory DIR names the directory of a service that runs by itself)" in capsys.readouterr().err
    assert cli.main(["weights", "free", "--memory", str(tmp_path)]) == 1
    assert "--memory" not in capsys.readouterr().err


def test_the_table_has_a_row_for_each_model() -> None:
    rows = (
        SharedWeightsRow("one", "committed", 5 << 30, readers=(PID, PID + 1)),
        SharedWeightsRow("two", "written", 1 << 20, writer=PID, waiting=(PID + 2,)),
    )
    text = render(Overview("default", "nats", "etcd", (), (), (), (), (), weights=rows))
    head, first, second = text.splitlines()[-3:]
    assert head.split() == ["SHARED", "WEIGHTS", "MEMORY", "STATE", "MADE", "BY", "MAPPED", "BY", "AWAITED", "BY"]
    assert first.split()[-5:] == ["committed", "-", "4242", "4243", "-"]
    assert second.split()[-4:] == ["written", "4242", "-", "4244"]
