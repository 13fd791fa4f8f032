"""What the fuzz tests share: how long they look, and what may come of bad input.

By default each test tries the same few examples every time. ``bash tests/run.sh fuzz`` (VERL_ADAPTIVE_FUZZ=100, a factor)
tries many, others each time.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from verl_adaptive.errors import AdaptiveError

#: How many times more examples than in a normal run.
FACTOR = int(os.environ.get("VERL_ADAPTIVE_FUZZ", "1"))
#: Seconds that one example may take; a hang ends here.
LIMIT = 60


def examples(count: int) -> Callable[[Any], Any]:
    """Try ``count`` examples, the same ones each time; in the long mode more of them, and others."""
    return settings(
        max_examples=count * FACTOR, derandomize=FACTOR == 1, database=None, suppress_health_check=list(HealthCheck)
    )


def _hangs(*_: object) -> None:
    raise TimeoutError(f"no answer within {LIMIT} s")


@contextmanager
def survives() -> Iterator[list[str]]:
    """What is inside ends in time, well or in an error of ours; yields the list that the error's text goes into."""
    said: list[str] = []
    before = signal.signal(signal.SIGALRM, _hangs)
    began = time.monotonic()
    left, _ = signal.setitimer(signal.ITIMER_REAL, LIMIT)  # what pytest-timeout has left of its own
    try:
        yield said
    except AdaptiveError as error:
        said.append(str(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.1, left - (time.monotonic() - began)))


def damage(data: bytes, rng: random.Random) -> bytes:
    """Flipped bits, overwritten stretches, a cut or a lengthened end."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        at = rng.randrange(len(out))
        kind = rng.randrange(4)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            stretch = rng.randrange(1, 32)
            out[at : at + stretch] = rng.randbytes(len(out[at : at + stretch]))
        else:
            other = rng.randrange(len(out))
            stretch = rng.randrange(1, 64)
            out[at : at + stretch] = out[other : other + len(out[at : at + stretch])]
    if rng.random() < 0.2:
        del out[rng.randrange(len(out)) :]
    elif rng.random() < 0.05:
        out += rng.randbytes(rng.randrange(1, 5000))
    return bytes(out)


#: Anything that JSON can say, and more: what Python's reader lets through.
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([10**400, -(2**63)]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)

#: A number that names one example; what happens in it comes from a generator of its own.
seeds = st.integers(min_value=0, max_value=2**32 - 1)
