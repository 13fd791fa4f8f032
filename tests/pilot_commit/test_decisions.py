"""The allocator's decisions, one call at a time."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest

from tests.pilot_commit.reference import Pilot, recall
from tests.samplers.bound import bound, progress_at
from tests.world import keys_of, make_engine, run_step
from verl_adaptive.allocators.pilot_commit import PilotCommit, band_side
from verl_adaptive.groups import Groups
from verl_adaptive.progress import Progress
from verl_adaptive.roles import CLOSE, HOLD


def made(options=None, *, batch=4, n=64) -> PilotCommit:
    return bound(PilotCommit({"form": "on_policy", **(options or {})}), 100, batch=batch, n=n)


def at(step=1, batch=4, **more) -> Progress:
    return progress_at(step, batch, **more)


def pilots_with(counts, n_pilot) -> Groups:
    rewards = [[1.0] * c + [0.0] * (n_pilot - c) for c in counts]
    return Groups.from_lists(range(len(counts)), rewards)


# -- the band -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_pilot", "low", "high"), [(4, 1, 3), (8, 1, 6), (16, 2, 12), (32, 4, 24)])
def test_published_bands_in_counts(n_pilot, low, high) -> None:
    side = band_side(np.arange(n_pilot + 1), np.int64(n_pilot), 0.125, 0.25)
    assert side.tolist() == [-1] * low + [0] * (high - low + 1) + [1] * (n_pilot - high)


def test_band_is_exact_for_every_margin_in_hundredths() -> None:
    """Against exact fractions; a comparison of float means fails this at 0.07 · 100, 0.29 · 100, ..."""
    wrong = []
    for n in (*range(1, 41), 50, 64, 100):
        for percent in range(100):
            lower = Fraction(percent, 100)
            side = band_side(np.arange(n + 1), np.int64(n), percent / 100, percent / 100)
            expected = [int(c > floor((1 - lower) * n)) - int(c < ceil(lower * n)) for c in range(n + 1)]
            if side.tolist() != expected:
                wrong.append((n, percent))
    assert not wrong


def test_expected_successes_use_the_same_bounds() -> None:
    n = np.int64(8)
    assert band_side(np.array([0.99, 1.0, 3.5, 6.0, 6.01]), n, 0.125, 0.25).tolist() == [-1, 0, 0, 0, 1]


# -- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "n_pilot"), [(64, 16), (128, 32), (16, 4), (8, 2), (6, 2), (4, 2), (3, 2)])
def test_a_quarter_of_the_group_pilots(n, n_pilot) -> None:
    part = made(n=n)
    assert part.n_pilot == n_pilot
    assert part.first(np.arange(3), None, at()).tolist() == [n_pilot] * 3


# -- golden decisions ---------------------------------------------------------------------------------------


def test_decisions_equal_the_reference_on_random_histories() -> None:
    """1,000 random histories: margins, sizes, choices and buffers differ in each."""
    rng = np.random.default_rng(1)
    keys = keys_of(100)
    commits = expired = inside = 0
    for history in range(1000):
        batch, n_pilot = int(rng.integers(1, 9)), int(rng.choice([4, 5, 8, 16]))
        n = n_pilot + int(rng.integers(1, 20))
        percent = rng.integers(1, 40, size=2)
        choose = ("random", "max_variance")[history % 2]
        max_age, factor = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        margins = {"lower": percent[0] / 100, "upper": percent[1] / 100}
        options = {
            "n_pilot": n_pilot,
            "choose": choose,
            "max_age": max_age,
            "factor": float(factor),
            "form": "pipelined",
        }
        part = made({**options, **margins}, batch=batch, n=n)
        lower, upper = (Fraction(int(x), 100) for x in percent)
        # Groups that wait, of ages 0 to max_age + 2, in submission order.
        step, waiting, rows = int(rng.integers(6, 50)), int(rng.integers(1, 20)), rng.permutation(100)
        since = np.sort(rng.integers(step - max_age - 2, step + 1, size=waiting))
        results = [[float(x) for x in rng.random(n_pilot) < rng.random()] for _ in range(40)]
        held = Groups.from_lists(rows[:waiting], results[:waiting])
        buffer = [
            Pilot(i, (int(keys["hi"][rows[i]]), int(keys["lo"][rows[i]])), [int(x) for x in results[i]], int(s))
            for i, s in enumerate(since)
        ]
        recalled, given_up = recall(buffer, step, batch, choose, max_age)
        progress = at(step, batch)
        answer = part.recall(held, since, progress)
        assert held.submission[answer > 0].tolist() == recalled
        assert held.submission[answer == CLOSE].tolist() == given_up
        assert (answer[answer > 0] == n - n_pilot).all()
        assert part.prompts(batch, progress) == factor * batch
        commits, expired = commits + len(recalled), expired + len(given_up)
        # New pilots, and groups whose commit came back.
        done, first = int(rng.integers(0, batch + 1)), int(rng.integers(0, 20))
        rewards = [[1.0] * n_pilot + [0.0] * (n - n_pilot)] * done + results[20 : 20 + first]
        stage = [[0] * n_pilot + [1] * (n - n_pilot)] * done + [[0] * n_pilot] * first
        groups = Groups.from_lists(rows[: done + first], rewards, stage=stage)
        fresh = [
            Pilot(i, (0, 0), [int(x) for x in rewards[i]], step).in_band(lower, upper)
            for i in range(done, done + first)
        ]
        assert part.review(groups, progress).tolist() == [0] * done + [(n - n_pilot) * inside for inside in fresh]
        inside += sum(fresh)
    assert commits > 500 and expired > 500 and inside > 500  # the histories reach what they test


@pytest.mark.parametrize("n", [6, 7, 8])
def test_groups_that_a_smaller_n_leaves_no_commit_are_given_up(n) -> None:
    """Pilots as many as a group has now, or more, after a resume: they take no place, and no pilot's place either."""
    part = made({"n_pilot": 2, "form": "pipelined"}, n=n, batch=4)
    part.load_state_dict({"recent": [10.0, 5.0], "range": None})
    groups, since = pilots_with([2, 3, 2, 4], 8), np.zeros(4, dtype=np.int64)
    assert part.recall(groups, since, at()).tolist() == [CLOSE] * 4
    # Every second one is in the band: this step's 4 and the next one's, and a tenth more.
    assert part.prompts(4, at()) == 18
    part.end_step(at())
    assert part.metrics()["expired_total"] == 4
    # of -1 rollouts and fewer no commit can be made, and the run ended
    assert made({}, n=n).review(groups, at()).tolist() == [CLOSE] * 4


@pytest.mark.parametrize("form", ["on_policy", "pipelined"])
def test_every_step_has_every_count(form) -> None:
    """Where nothing was held there was no ``expired_total``, and a curve with gaps."""
    engine, world = make_engine("retire", {"name": "pilot_commit", "form": form}, "band", batch=8, n=16, M=200)
    seen = []
    for step in range(1, 5):
        run_step(engine, world, step)
        seen.append(set(engine.policy.allocator.metrics()))
    assert all(names == seen[0] for names in seen) and ("expired_total" in seen[0]) == (form == "pipelined")


def test_commits_of_held_groups_take_no_more_than_the_step_has_room_for() -> None:
    part = made({"n_pilot": 4, "form": "pipelined", "choose": "max_variance"}, n=16)
    groups, since = pilots_with([1, 3, 2, 2, 1], 4), np.zeros(5, dtype=np.int64)
    assert part.recall(groups, since, at(cap=100, planned=100 - 30)).tolist() == [-1, -1, 12, 12, -1]
    assert part.recall(groups, since, at(cap=100, planned=95)).tolist() == [HOLD] * 5


def test_lost_pilots_leave_the_group_size_as_it_is() -> None:
    """A pilot that came back with fewer rollouts is judged by what there is; its commit makes up the group."""
    part = made({"n_pilot": 8}, n=16)
    answer = part.review(Groups.from_lists([0], [[1.0, 0.0, 1.0]]), at())
    assert answer.tolist() == [13]


# -- the filter ---------------------------------------------------------------------------------------------


def test_every_drop_has_its_reason() -> None:
    engine, _ = make_engine("epoch", {"name": "pilot_commit", "n_pilot": 4}, "band", n=8)
    band = engine.policy.filter
    pilots = pilots_with([0, 1, 2, 3, 4], 4)
    verdict = band.decide(pilots, at())
    assert not verdict.keep.any()
    assert [band.reasons[r] for r in verdict.reason] == ["too_hard", *["surplus_pilot"] * 3, "too_easy"]
    whole = Groups.from_lists([0, 1], [[1.0] * 8, [1.0, 0.0] * 4], stage=[[0] * 4 + [1] * 4] * 2)
    assert band.decide(whole, at()).keep.tolist() == [True, True]


# -- how many are piloted -----------------------------------------------------------------------------------


def seen(part: PilotCommit, successes: list[int], step: int = 1) -> None:
    """A step's pilots were observed."""
    part.observe(pilots_with(successes, 4), at(step, 10))


def test_pilots_follow_the_recent_share_unless_it_is_said() -> None:
    part = made({"n_pilot": 4}, batch=10, n=16)
    assert part.prompts(10, at(batch=10)) == 30  # nothing known: as published
    seen(part, [2] * 15 + [0] * 5)  # 3 in 4 in the band
    assert part.prompts(10, at(2, batch=10)) == 15  # 1.1 · 10 / 0.75
    assert part.prompts(4, at(2, batch=10, kept=6)) == 6
    assert part.prompts(0, at(2, batch=10, kept=6, open=4)) == 0
    for _ in range(20):
        part.end_step(at(batch=10))
    seen(part, [2] * 5 + [0] * 15)  # the past is forgotten: 1 in 4
    assert part.prompts(10, at(2, batch=10)) == 44
    for step in range(3, 4000):  # nothing in the band any more
        part.end_step(at(step, batch=10))
        seen(part, [4] * 20, step)
    assert part.prompts(10, at(4000, batch=10)) == 704  # 1.1 · 10 / (1/64): no share below that is reckoned with
    fixed = made({"n_pilot": 4, "factor": 2.0}, batch=10, n=16)
    seen(fixed, [2] * 5 + [0] * 15)
    assert fixed.prompts(10, at(2, batch=10)) == 20


def test_pipelined_pilots_are_for_this_step_and_the_next() -> None:
    part = made({"n_pilot": 4, "form": "pipelined"}, batch=10, n=16)
    seen(part, [2] * 15 + [0] * 5)
    held = pilots_with([2] * 13, 4)
    progress = at(2, batch=10)
    assert (part.recall(held, np.ones(13, dtype=np.int64), progress) > 0).sum() == 10
    assert part.prompts(10, progress) == 11  # 3 still wait, 7 more for the next step: 1.1 · 7 / 0.75
    assert part.prompts(10, at(3, batch=10)) == 30  # nothing waits, nothing is recalled: 20 groups in all


def test_a_cap_leaves_room_for_the_commits() -> None:
    part = made({"n_pilot": 16}, batch=128)
    new = part.affordable(384, at(batch=128, cap=128 * 64))
    assert new == 8192 // (16 + 16)  # at one in three, 256 pilots lead to 85 commits
    assert new * 16 + new / 3 * 48 <= 8192
    assert part.affordable(384, at(batch=128, cap=12288)) == 384
    assert part.affordable(384, at(batch=128, cap=20)) == 0
    assert (
        part.affordable(384, at(batch=128, kept=126, cap=2000)) == (2000 - 2 * 48) // 16
    )  # few places: all may commit
