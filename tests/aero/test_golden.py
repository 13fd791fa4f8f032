"""AERO's decisions equal the listing's on six hundred random histories."""

from __future__ import annotations

import numpy as np
import pytest

from tests.aero import reference
from tests.world import World, make_engine, run_step
from verl_adaptive.rng import Draw


def rewards_of(world: World, submission: int, index: int, n_explore: int, n_extra: int):
    """The reward of a submission's j-th rollout, as the world gives it: by stage, and number within the stage's request."""

    def reward(j: int) -> float:
        stage, number = divmod(j - n_explore, n_extra) if j >= n_explore else (-1, j)
        hit = Draw(world.seed, 0).uniform("world.reward", submission, (stage + 1) * 2**20 + number) < world.p[index]
        return float(hit)

    return reward


@pytest.mark.parametrize("block", range(2))
def test_counts_retained_sets_and_advantages(block: int) -> None:
    rng = np.random.default_rng(block)
    histories = starved = rescued = 0
    while histories < 300:
        N = int(rng.integers(2, 13))
        n_explore = int(rng.integers(1, N + 1))
        pooled = bool(rng.integers(2))
        limit = 4 * N if pooled else N
        rescue = {
            "n_extra": int(rng.integers(1, 4)),
            "u_res": float(rng.choice([0.0, 0.0, 0.2])),
            "rounds": int(rng.integers(0, 9)),
        }
        reject = {
            "tau": float(rng.choice([0.5, 0.5, 0.3, 1.0])),
            "k": float(rng.choice([1.0, 1.0, 0.5, 2.0, 1.5])),
            "keep_degenerate": int(rng.integers(1, 6)),
            "thin_correct": bool(rng.integers(2)),
        }
        prior = {"alpha0": float(rng.choice([1.0, 0.5, 3.0])), "beta0": float(rng.choice([1.0, 2.0]))}
        batch, M = int(rng.integers(1, 9)), 12
        engine, world = make_engine(
            allocator={
                "name": "aero",
                "n_explore": n_explore,
                "budget": "pooled" if pooled else "per_prompt",
                **rescue,
            },
            filter={"name": "aero", **reject},
            advantage={"name": "beta", **prior},
            batch=batch,
            n=N,
            seed=int(rng.integers(1000)),
            p=rng.beta(0.3, 0.8, M),
            refill=False,
        )
        for step in (1, 2, 3, 4):
            histories += 1
            result = run_step(engine, world, step)
            groups = result.groups
            draw = Draw(engine.facts.seed, step)
            table = engine.table
            queries = [
                reference.Query(
                    int(t),
                    int(table.key_hi[r]),
                    int(table.key_lo[r]),
                    rewards_of(world, int(t), int(i), n_explore, rescue["n_extra"]),
                )
                for t, r, i in zip(groups.submission, groups.row, groups.index, strict=True)
            ]
            reference.explore_and_rescue(queries, N=N, n_explore=n_explore, pooled=pooled, limit=limit, **rescue)
            assert groups.n.tolist() == [q.n for q in queries]
            assert groups.reward.tolist() == [r for q in queries for r in q.rewards]
            rescued += sum(q.topups > 0 and q.c > 0 for q in queries)
            starved += sum(q.c == 0 and q.topups < rescue["rounds"] and q.n < limit for q in queries)

            kept = [reference.retained(q, draw, **reject) for q in queries]
            assert np.flatnonzero(result.trains).tolist() == [
                int(groups.offsets[g]) + j for g, chosen in enumerate(kept) for j in sorted(chosen)
            ]
            expected = [
                a
                for q, chosen in zip(queries, kept, strict=True)
                for _, a in sorted(reference.advantages(q, chosen, **prior).items())
            ]
            home = groups.group_of[result.trains]
            actual = engine.policy.advantage.compute(groups.reward[result.trains], home, groups)
            np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)
    assert rescued > 20 and starved > 20  # the histories do reach the interesting branches


def test_the_metrics_of_a_step() -> None:
    """A query with a correct rollout before its top-up is not rescued."""
    allocator = {"name": "aero", "n_explore": 4, "u_res": 0.3}
    engine, world = make_engine(allocator=allocator, advantage="beta", batch=40, n=8, p=np.full(400, 0.2))
    groups = run_step(engine, world, 1).groups
    correct, extra = groups.success >= 0.5, groups.stage > 0
    before, after = groups.sum(correct & ~extra) > 0, groups.sum(correct & extra) > 0
    assert (before & after).any()
    metrics = engine.policy.metrics()
    assert metrics["adaptive/allocator/rescued_total"] == (after & ~before).sum() > 0
    assert metrics["adaptive/allocator/rescue_rollouts_total"] == extra.sum() == groups.rollouts - 4 * len(groups)
    assert metrics["adaptive/allocator/rescue_topups_total"] == (groups.n - 4).sum() / 4
