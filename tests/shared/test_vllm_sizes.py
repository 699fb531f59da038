"""The sizes in vLLM's metrics."""

from __future__ import annotations

from shared.vllm_sizes import read_sizes

LINE = 'vllm:cache_config_info{block_size="32",num_gpu_blocks="64",engine="0"} 1.0\n'


def test_sizes_are_those_of_the_first_rank_among_other_lines() -> None:
    assert read_sizes(f"# HELP\n{LINE}") == (32, 64, 1)
    assert read_sizes(LINE + LINE) == (32, 64, 2)


def test_what_is_not_there_is_unknown() -> None:
    assert read_sizes("") == read_sizes("<html>") == (0, 0, 0)
    assert read_sizes('vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1.0') == (0, 0, 1)
    assert read_sizes(LINE.replace("64", "9" * 10)) == (32, 0, 1), "no number of blocks"
