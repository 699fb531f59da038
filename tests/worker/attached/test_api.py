"""How the metrics of attached servers are read."""

from __future__ import annotations

import pytest

from services.worker.attached.api import ServerLoad, read_metrics
from services.worker.attached.vllm_api import VLLM
from shared.vllm_sizes import read_sizes

METRICS = """\
# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="a {b} 7"} 3.0
vllm:num_requests_running{engine="1",model_name="a {b} 7"} 2.0
vllm:num_requests_waiting{engine="0"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 4.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:iteration_tokens_total_count{engine="0"} 1.5e+02
vllm:cache_config_info{effective_attention_block_size="64",block_size="32",engine="0",num_gpu_blocks="60"} 1.0
"""


def test_loads_are_summed_over_ranks_and_the_usage_is_their_mean() -> None:
    assert read_metrics(METRICS, VLLM.metrics) == ServerLoad(5, 4, 0.5, 150)
    assert read_metrics("nothing known", VLLM.metrics) == ServerLoad(0, 0, 0, 0)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "", "many"])
def test_a_value_that_is_no_number_is_named(value: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the server's name is added by `Server.load`
        read_metrics(METRICS.replace("3.0", value), VLLM.metrics)


def test_a_time_after_a_value_is_not_the_value() -> None:
    assert read_metrics(METRICS.replace("3.0", "3.0 1795460000000"), VLLM.metrics).running == 5


def test_sizes_are_those_of_the_first_rank() -> None:
    assert read_sizes(METRICS) == (32, 60, 1)
    assert read_sizes(METRICS + METRICS) == (32, 60, 2)
    assert read_sizes("") == (0, 0, 0)
    assert read_sizes('vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1.0') == (0, 0, 1)
