"""The candidates of a step are one list, however it is asked for."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_adaptive.config import RunFacts
from verl_adaptive.engine.prompt_source import CandidateQueue, PromptSource
from verl_adaptive.progress import Progress
from verl_adaptive.rng import Draw
from verl_adaptive.roles import Sampler
from verl_adaptive.simulate.worlds import WorldPrompts


class Gate(Sampler):
    """Lets each place of the stream through with a chance that is the prompt's own."""

    name = "gate"

    def __init__(self, chance: np.ndarray, seed: int) -> None:
        super().__init__()
        self.chance, self.seed = chance, seed

    def admit(self, rows: np.ndarray, position: np.ndarray, progress: Progress) -> np.ndarray:
        return Draw(self.seed, 0).uniform("gate", rows, position) < self.chance[rows]


class Batches(WorldPrompts):
    """Gives whole batches, as verl's dataloader does."""

    def __init__(self, size: int, seed: int, whole: int) -> None:
        super().__init__(size, seed)
        self.whole = whole

    def take(self, count: int) -> np.ndarray:
        return super().take(-(-count // self.whole) * self.whole)


def candidates(size: int, chance: np.ndarray, seed: int, whole: int, asks: list[int]) -> tuple[list[list[int]], str]:
    """Three laps of a step's candidates, each asked for by ``asks`` and then to its end."""
    facts = RunFacts(4, 2, 1, size, seed)
    prompt_source = PromptSource(Gate(chance, seed), facts, np.arange(size), Batches(size, seed, whole))
    progress = Progress(step=1, batch=4, draw=Draw(seed, 1))
    # Ungated, a step in which nothing is let through takes as much as its first request wants, which is the state's.
    line = CandidateQueue(prompt_source, progress, np.zeros(0, dtype=np.int64), ungated=False)
    laps = []
    for _ in range(3):
        begun = len(line)
        for count in sorted(asks):
            line.extend(begun + count)
        line.extend(begun + 3 * size)
        laps.append(line.index[begun:].tolist())
        if prompt_source.ended or not line.new_lap(line.row[:0]):
            break
    return laps, prompt_source.ended


@given(
    size=st.integers(1, 25),
    shape=st.sampled_from([(0.0, 0.0), (0.0, 1.0), (0.05, 0.3), (0.9, 1.0), (0.0, 0.05)]),
    seed=st.integers(0, 10_000),
    whole=st.integers(1, 7),
    asks=st.lists(st.integers(1, 40), max_size=8),
)
@settings(max_examples=150)
def test_the_list_does_not_depend_on_how_it_is_asked_for(size, shape, seed, whole, asks) -> None:
    """Sizes of the requests and of the source's batches change nothing, to the end of the list and over laps."""
    chance = np.random.default_rng(seed).uniform(*shape, size)
    if seed % 3 == 0:
        chance[: size // 2] = 0.0
    assert candidates(size, chance, seed, whole, asks) == candidates(size, chance, seed, 1, [])
