"""GRESO: decisions against a slow reference over random histories, edge cases."""

from __future__ import annotations

import numpy as np
import pytest

from tests.samplers.bound import bound, progress_at
from tests.world import make_engine, run
from verl_adaptive.groups import Groups
from verl_adaptive.samplers.greso import Greso
from verl_adaptive.stats.table import StatsTable


def make_greso(M: int = 200, table: StatsTable | None = None, **options) -> Greso:
    return bound(Greso(options), M, table=table)


class SlowGreso:
    """Sections 1.2 to 1.5 of the method, one prompt at a time: traces, trailing runs, two probabilities."""

    def __init__(self, p=(0.5, 0.5), floor=(0.01, 0.01), target=0.25, delta=0.01, rails=(0.05, 0.95)) -> None:
        self.p = dict(zip(("easy", "hard"), p, strict=True))
        self.floor = dict(zip(("easy", "hard"), floor, strict=True))
        self.goal = {"easy": target / 3, "hard": 2 * target / 3}
        self.delta, self.rails = delta, rails
        self.traces: dict[int, list[str]] = {}
        self.tally = {"easy": 0, "hard": 0, "mixed": 0}

    def keeps(self, row: int, u: float) -> bool:
        trace = self.traces.get(row, [])
        if not trace or trace[-1] == "mixed":
            return True
        z = 0
        for kind in reversed(trace):
            if kind != trace[-1]:
                break
            z += 1
        return u < max(self.p[trace[-1]] ** z, self.floor[trace[-1]])

    def saw(self, row: int, rewards: list[float]) -> None:
        kind = "mixed" if len(set(rewards)) > 1 else ("easy" if rewards[0] > 0.5 else "hard")
        self.traces.setdefault(row, []).append(kind)
        self.tally[kind] += 1

    def step_ends(self, epoch: float) -> None:
        total = sum(self.tally.values())
        if total and epoch > 1:  # the step that ends on the last prompt of a pass belongs to it
            for kind in ("easy", "hard"):
                if self.tally[kind] / total >= self.goal[kind]:
                    self.p[kind] = max(self.p[kind] - self.delta, self.rails[0])
                else:
                    self.p[kind] = min(self.p[kind] + self.delta, self.rails[1])
        self.tally = dict.fromkeys(self.tally, 0)


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_decisions_equal_the_slow_reference_over_random_histories(seed):
    """Pools of 200 prompts over 120 steps: some 4,000 gate decisions each, and as many histories."""
    rng = np.random.default_rng(seed)
    options = {}
    if seed >= 3:
        options = dict(p_easy=0.8, p_hard=0.3, floor_easy=0.1, floor_hard=0.4, p_min=0.01, p_max=0.99, target=0.4)
    fast = make_greso(**options)
    slow = SlowGreso()
    if options:
        slow = SlowGreso((0.8, 0.3), (0.1, 0.4), 0.4, 0.01, (0.01, 0.99))
    p = rng.choice([0.0, 0.02, 0.5, 0.98, 1.0], 200)
    position, decided = 0, 0
    for step in range(1, 121):
        progress = progress_at(step, seed=seed)
        gate = dict.fromkeys(("easy_seen_total", "easy_skipped_total", "hard_seen_total", "hard_skipped_total"), 0)
        for _ in range(int(rng.integers(1, 4))):
            rows = rng.permutation(200)[: rng.integers(5, 120)]
            where = position + np.arange(len(rows))
            position += len(rows)
            passed = fast.admit(rows, where, progress)
            u = progress.draw.uniform("greso.gate", fast.table.key_hi[rows], fast.table.key_lo[rows], where)
            assert passed.tolist() == [slow.keeps(int(r), x) for r, x in zip(rows, u, strict=True)]
            decided += len(rows)
            fast.decided(rows, passed)
            for row, kept in zip(rows.tolist(), passed, strict=True):
                kind = slow.traces.get(row, ["mixed"])[-1]
                if kind != "mixed":
                    gate[f"{kind}_seen_total"] += 1
                    gate[f"{kind}_skipped_total"] += not kept
            rows = rows[passed]
            rewards = [(rng.random(8) < p[r]).astype(float).tolist() for r in rows]
            groups = Groups.from_lists(rows, rewards)
            fast.table.observe(groups, step, tolerance=1e-6)
            fast.observe(groups, progress)
            for row, reward in zip(rows, rewards, strict=True):
                slow.saw(int(row), reward)
        progress.epoch = position / 200
        fast.end_step(progress)
        slow.step_ends(progress.epoch)
        assert (fast.p_easy, fast.p_hard) == (slow.p["easy"], slow.p["hard"])
        assert gate.items() <= fast.metrics().items()
    assert decided > 3_000


@pytest.mark.parametrize("size", [32, 128])
def test_a_data_set_of_another_size_begins_no_pass_anew(size):
    """Resumed on twice as many prompts, a run in its second pass was in the warm-up again; on half as many, far ahead."""
    engine, world = make_engine("greso", filter="informative", M=64)
    run(engine, world, 9)
    before = engine.prompt_source.epoch(0)
    assert before > 1
    other, world = make_engine("greso", filter="informative", M=size)
    other.load_state_dict(engine.state_dict())
    assert other.prompt_source.epoch(0) == pytest.approx(before)
    at = other.prompt_source.position
    run(other, world, 3, start=10)
    gone = (other.prompt_source.position - at) / size
    assert other.progress.epoch == pytest.approx(before + gone)
    again, _ = make_engine("greso", filter="informative", M=size)
    again.load_state_dict(other.state_dict())
    assert again.prompt_source.epoch(0) == pytest.approx(before + gone)


@pytest.mark.parametrize(("position", "moves"), [(599, False), (600, False), (601, True)])
def test_the_step_that_ends_on_the_last_prompt_of_a_pass_belongs_to_it(position, moves):
    greso, progress = make_greso(8), progress_at(3, epoch=position / 600)
    greso.observe(Groups.from_lists([0, 1], [[1.0, 1.0], [0.0, 1.0]]), progress)
    greso.end_step(progress)
    assert ((greso.p_easy, greso.p_hard) != (0.5, 0.5)) == moves
