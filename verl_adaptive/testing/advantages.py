"""What every advantage must do; make a test class of your own from this one:

class TestMine(AdvantageConformance):
    def make(self):
        return MyAdvantage({"option": 3})
"""

from __future__ import annotations

import numpy as np

from verl_adaptive.groups import Groups, success_by_default
from verl_adaptive.roles import Advantage, answers
from verl_adaptive.testing.components import PROMPTS, PartConformance, pure


@pure
class AdvantageConformance(PartConformance):
    """A suite for pytest.

    Attributes:
        per_group: a group's advantages do not depend on the other groups of the batch.
    """

    per_group = True

    # -- helpers --------------------------------------------------------------------------------------------

    def groups(self, seed: int = 0) -> Groups:
        """Groups of many sizes; binary, ±1, continuous and constant rewards."""
        rng = np.random.default_rng(seed)
        rewards = []
        for g in range(24):
            n = rng.integers(1, 13)
            binary = (rng.random(n) < rng.random()).astype(float)
            rewards.append(
                (binary, 2 * binary - 1, rng.random(n), np.zeros(n), np.ones(n), np.full(n, 0.3))[g % 6].tolist()
            )
        success = [success_by_default(np.array(group)) for group in rewards]
        return Groups.from_lists(rng.permutation(PROMPTS)[:24].tolist(), rewards, success=success)

    def training(self, groups: Groups, seed: int = 0) -> np.ndarray:
        """int64: rollouts that train, at least one a group, in an order of verl's choosing."""
        rng = np.random.default_rng(seed)
        chosen = rng.random(groups.rollouts) < 0.7
        chosen[groups.offsets[:-1]] = True
        return rng.permutation(np.flatnonzero(chosen))

    def observed(self) -> tuple[Advantage, Groups]:
        """An advantage that has seen the second step's groups closed, as happens before it is asked."""
        made, groups = self.bound(), self.groups()
        self.close(made, self.groups(1), 1)
        made.end_step(self.progress())
        self.close(made, groups, 2)
        return made, groups

    # -- tests ----------------------------------------------------------------------------------------------

    def test_one_finite_number_a_rollout(self) -> None:
        made, groups = self.observed()
        rows = self.training(groups)
        answers.compute(made, groups.reward[rows], groups.group_of[rows], groups)
        none = np.zeros(0, dtype=np.int64)
        answers.compute(made, none.astype(float), none, groups)

    def test_the_order_of_rows_does_not_matter(self) -> None:
        made, groups = self.observed()
        rows = self.training(groups)
        out = made.compute(groups.reward[rows], groups.group_of[rows], groups)
        order = np.random.default_rng(1).permutation(len(rows))
        again = made.compute(groups.reward[rows[order]], groups.group_of[rows[order]], groups)
        np.testing.assert_allclose(again, out[order], rtol=1e-9, atol=1e-12)

    def test_groups_do_not_mix(self) -> None:
        if not self.per_group:
            return
        made, groups = self.observed()
        rows = self.training(groups)
        home = groups.group_of[rows]
        out = made.compute(groups.reward[rows], home, groups)
        for g in range(len(groups)):
            own = rows[home == g]
            alone = made.compute(groups.reward[own], np.zeros(len(own), dtype=np.int64), groups.select(np.array([g])))
            np.testing.assert_allclose(alone, out[home == g], rtol=1e-9, atol=1e-12)

    def test_zero_means_zero(self) -> None:
        made, groups = self.observed()
        trains = np.zeros(groups.rollouts, dtype=bool)
        trains[self.training(groups)] = True
        zero = answers.zero(made, groups, trains)
        assert not (zero & ~trains).any(), "a rollout that does not train is called a zero"
        out = made.compute(groups.reward[trains], groups.group_of[trains], groups)
        named = out[zero[trains]]
        assert (named == 0).all(), (
            f"zero names a rollout to which compute gives {named[named != 0][0]}: not exactly zero"
        )
        rest = trains & ~zero
        few = made.compute(groups.reward[rest], groups.group_of[rest], groups)
        np.testing.assert_allclose(
            few, out[rest[trains]], rtol=1e-9, atol=1e-12, err_msg="leaving zeros out changes others"
        )

    def test_state_is_complete(self) -> None:
        made, _ = self.observed()
        made.end_step(self.progress(2))
        other = self.resumed(made)
        for step in (3, 4):
            groups = self.groups(step)
            rows = self.training(groups, step)
            for part in (made, other):
                self.close(part, groups, step)
            a, b = (m.compute(groups.reward[rows], groups.group_of[rows], groups) for m in (made, other))
            np.testing.assert_array_equal(a, b)
            for part in (made, other):
                part.end_step(self.progress(step))
