"""How much of what all keys share one key may have. Pure.

    held by one key  ≤  GREED * what is free

So a key alone has GREED / (GREED + 1) of it at most, n keys that want all they can get have the same each, and a part
is always free for one that comes later, without anyone counting who is active. Nothing that runs is taken back: who
has more than that gets no more until some of it has ended. These are the dynamic thresholds by which switches share
their memory between ports (Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).
"""

from __future__ import annotations

GREED = 8


def may_have(held: int, more: int, taken: int, limit: int) -> bool:
    """Whether a key that holds `held` of the `taken` may have `more`, as far as others are concerned; whether it fits
    into `limit` is another question. A key that holds nothing always may."""
    return not held or held + more <= GREED * (limit - taken - more)
