from __future__ import annotations

from services.frontend.requests.served import INSTANCES_NAMED, Served


def test_choices_add_up_and_each_worker_is_named_once() -> None:
    served = Served()
    served.begun(0.5)
    served.begun(0.7)
    for tokens in (3, 4):
        served.add(prompt_tokens=tokens, output_tokens=2, cached_tokens=1, instance="0a", attempts=2)
    served.add(prompt_tokens=0, output_tokens=0, cached_tokens=0, instance="", attempts=1)
    assert served == Served(7, 4, 2, 0.5, ["0a"], 5)


def test_the_workers_that_are_named_are_bounded() -> None:
    served = Served()
    for number in range(3 * INSTANCES_NAMED):
        served.add(prompt_tokens=0, output_tokens=0, cached_tokens=0, instance=f"{number}", attempts=1)
    assert len(served.instances) == INSTANCES_NAMED
