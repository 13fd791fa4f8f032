"""What the suites of allocators, filters and advantages share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from verl_adaptive.config import RunFacts
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.rng import Draw
from verl_adaptive.stats.keys import KEY_DTYPE
from verl_adaptive.stats.table import StatsTable

PROMPTS = 40


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
        table.rows_for(keys)
        made = self.make()
        made.bind(table, self.facts)
        return made

    def resumed(self, made: Any) -> Any:
        """A new part with the table and the state of another one, as a checkpoint gives them back."""
        other = self.bound()
        for name in made.table.columns:
            other.table.col(name)[:] = made.table.col(name)
        other.load_state_dict(_through_files(made.state_dict()))
        return other

    def progress(self, step: int = 1, **more: Any) -> Progress:
        """The state of a step."""
        return Progress(step=step, batch=self.facts.batch, draw=Draw(0, step), **more)


@contextmanager
def unchanged(groups: Groups) -> Iterator[None]:
    """What is done inside must leave the groups as they are."""
    before = {name: np.copy(value) for name, value in vars(groups).items()}
    yield
    for name, value in before.items():
        np.testing.assert_array_equal(getattr(groups, name), value, err_msg=name)


@contextmanager
def no_global_randomness() -> Iterator[None]:
    """What is done inside must not use numpy's global generator; afterwards it stands elsewhere."""
    before = _global_state()
    yield
    assert _global_state() == before, "the global generator was used"
    np.random.random(3)


def _global_state() -> str:
    state = np.random.get_state(legacy=False)["state"]
    return f"{state['pos']} {state['key'].tolist()}"


def _through_files(state: Any) -> Any:
    """A state as a checkpoint gives it back: plain values through JSON, arrays copied."""
    if isinstance(state, dict):
        return {key: _through_files(value) for key, value in state.items()}
    return state.copy() if isinstance(state, np.ndarray) else json.loads(json.dumps(state))
