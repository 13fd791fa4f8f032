"""What the suites share."""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from verl_adaptive.config import RunFacts
from verl_adaptive.groups import Groups
from verl_adaptive.policy import checked
from verl_adaptive.progress import Progress
from verl_adaptive.rng import Draw
from verl_adaptive.roles.answers import ask
from verl_adaptive.stats.keys import KEY_DTYPE
from verl_adaptive.stats.state import decode_state, encode_state
from verl_adaptive.stats.table import StatsTable

PROMPTS = 40
SOURCES = ("algebra", "geometry", "numbers")  # data sources, in turn
LOST = "column {}: depends on how visits are shown; a prompt may come twice in one observe (verl_adaptive.stats.visits.waves)"
_CLOCKS = frozenset(
    (
        *(time.time, time.time_ns, time.monotonic, time.monotonic_ns, time.perf_counter, time.perf_counter_ns),
        *(time.process_time, datetime.now, datetime.utcnow, datetime.today, date.today),
    )
)
_Suite = TypeVar("_Suite", bound=type)


class PartConformance:
    """A suite for pytest.

    Attributes:
        facts: the run that the part is told of.
    """

    facts = RunFacts(batch=8, n=8, steps=100, prompts=PROMPTS)

    def make(self) -> Any:
        """A new part, not bound."""
        raise NotImplementedError

    def bound(self) -> Any:
        """A new part over a new table of ``PROMPTS`` prompts; row ``i`` is the same prompt each time."""
        table = StatsTable()
        keys = np.zeros(PROMPTS, dtype=KEY_DTYPE)
        keys["hi"], keys["lo"] = np.arange(PROMPTS) * 977 + 5, np.arange(PROMPTS)
        table.rows_for(keys, sources=sources_of(PROMPTS))
        made = self.make()
        made.bind(table, self.facts)
        return made

    def resumed(self, made: Any) -> Any:
        """A new part with the table and the state of another one, as a checkpoint gives them back."""
        other = self.bound()
        for name in made.table.columns:
            other.table.col(name)[:] = made.table.col(name)
        other.load_state_dict(through_files(made.state_dict()))
        return other

    def progress(self, step: int = 1, **more: Any) -> Progress:
        """The state of a step in its first review."""
        return Progress(**{"step": step, "batch": self.facts.batch, "draw": Draw(0, step), "rounds": 1, **more})

    def test_a_run_accepts_the_class(self) -> None:
        """Nothing is misspelt, missing or never called."""
        kind = type(self.make())
        checked(kind.role, f"{kind.__module__}:{kind.__qualname__}", kind)

    def test_how_visits_are_shown_makes_no_difference(self) -> None:
        """A prompt's second visit of a step counts in its columns, shown with the first or after it."""
        rows = np.array([4, 0, 7, 2, 9, 1, 4, 2, 4])
        visits = Groups.from_lists(rows, [[1.0] * (i % 5) + [0.0] * (4 - i % 5) for i in range(len(rows))])
        straight, found = np.arange(len(rows)), []
        for pieces in ([straight], np.split(straight, [3, 7]), np.split(np.argsort(rows, kind="stable"), straight[1:])):
            made = self.bound()
            for piece in pieces:
                self.close(made, visits.select(piece), 1)
            made.end_step(self.progress())
            found.append({name: made.table.col(name).tobytes() for name in made.table.columns})
        for other in found[1:]:
            for name, column in found[0].items():
                assert other[name] == column, LOST.format(name)

    def test_metrics_are_finite_numbers(self) -> None:
        for made in self.played():
            found = made.metrics()
            for name, value in found.items():
                assert isinstance(name, str) and math.isfinite(value), (name, value)
            assert made.metrics() == found, "metrics() changes what it says: it is called several times a step"

    def played(self) -> Iterator[Any]:
        """A part, before its first step and after some."""
        made = self.bound()
        yield made
        for step in (1, 2):
            self.close(made, Groups.from_lists([4, 0, 7], [[1.0, 0.0], [1.0] * 2, [0.0] * 2]), step)
            made.end_step(self.progress(step))
            yield made

    def close(self, made: Any, groups: Groups, step: int) -> None:
        """Closed groups go into the table and to the part, as in a step; it cannot write into them."""
        made.table.observe(groups, step, tolerance=self.facts.tolerance)
        ask(made, "observe", groups, self.progress(step))


def sources_of(prompts: int) -> list[str]:
    """The data source of each prompt."""
    return [SOURCES[i % len(SOURCES)] for i in range(prompts)]


def pure(suite: _Suite) -> _Suite:
    """A suite in whose tests nobody looks at a clock or uses global randomness."""
    for name, test in list(vars(suite).items()):
        if name.startswith("test_"):
            setattr(suite, name, _pure()(test))
    return suite


@contextmanager
def _pure() -> Iterator[None]:
    before, others = _global_state(), sys.getprofile()
    sys.setprofile(_refuse_clocks)
    try:
        yield
    finally:
        sys.setprofile(others)
    assert _global_state() == before, "a global generator of random numbers was used"


def _refuse_clocks(frame: FrameType, event: str, called: Any) -> None:
    """Told of every call of a function in C, under whatever name it was imported."""
    if event == "c_call" and called in _CLOCKS and frame.f_globals.get("__name__") != "logging":  # dates what is logged
        raise AssertionError(f"a decision looked at a clock ({frame.f_code.co_filename}:{frame.f_lineno})")


def _global_state() -> str:
    state = np.random.get_state(legacy=False)["state"]
    return f"{random.getstate()} {state['pos']} {state['key'].tolist()}"


def everything(made: Any) -> str:
    """What a part remembers: its state, and the table."""
    return as_text(made.state_dict()) + "".join(made.table.col(name).tobytes().hex() for name in made.table.columns)


def through_files(state: dict[str, Any]) -> dict[str, Any]:
    """A state as a checkpoint gives it back."""
    return decode_state(encode_state(state))


def as_text(state: dict[str, Any]) -> str:
    """A state as text, to compare it."""
    return json.dumps(through_files(state), default=np.ndarray.tolist, sort_keys=True)
