"""`headrace up --models` on a GPU: two models take turns, and each gets most of the device's memory in its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.gpu.device import missing
from tests.integration.stack import ONE_EACH, Up, running
from tests.integration.test_model_turns import LIMIT_S, QUICK, ask, stages
from tests.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is a GPU"),
]

MODELS = ("one", "two")


@pytest.fixture(scope="module", params=["alone", "with a memory service"])
def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("models")
    models = ",".join(str(write_tiny_model(folder / name, seed=seed)) for seed, name in enumerate(MODELS, 2))
    flags = [*ONE_EACH, *QUICK, "--models", models, "--device", "cuda", "--cuda", "dtype=float32"]
    flags += ["--discovery", "file", "--kvbm-bytes", "0", "--gpu-memory-share", "0.3"]  # other tests' arrays stay
    if request.param != "alone":
        flags += ["--weights-bytes", "1G"]
    with running(tmp_path_factory.mktemp("up"), *flags) as stack:
        yield stack


def test_models_on_a_gpu_take_turns_and_answer_the_same_after_each(up: Up) -> None:
    with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        texts = {model: ask(client, model) for model in MODELS}
        assert len(set(texts.values())) == len(MODELS)
        for _ in range(2):
            for model in MODELS:
                assert ask(client, model) == texts[model]
                assert stages(up)[model] == "awake"
                assert sum(stage != "asleep" for stage in stages(up).values()) == 1


def test_workers_of_a_gpu_that_start_together_load_one_after_the_other(up: Up) -> None:
    logs = [Path(up.state, "logs", f"worker-{number}.log").read_text() for number in range(len(MODELS))]
    assert not any("no room" in log for log in logs), logs
