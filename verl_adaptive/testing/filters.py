"""What every filter must do; make a test class of your own from this one:

class TestMine(FilterConformance):
    def make(self):
        return MyFilter({"option": 3})
"""

from __future__ import annotations

import numpy as np

from verl_adaptive.groups import Groups, success_by_default
from verl_adaptive.roles import Verdict, answers
from verl_adaptive.testing.components import PROMPTS, PartConformance, everything, pure


@pure
class FilterConformance(PartConformance):
    """A suite for pytest.

    Attributes:
        per_group: a group's verdict does not depend on the groups judged with it.
    """

    per_group = True

    # -- helpers --------------------------------------------------------------------------------------------

    def groups(self, seed: int = 0) -> Groups:
        """Groups of many sizes, success rates and lengths; binary, continuous and constant rewards."""
        rng = np.random.default_rng(seed)
        rows = rng.permutation(PROMPTS)
        sizes = rng.integers(1, 17, PROMPTS)
        rewards = []
        for g, n in enumerate(sizes):
            binary = (rng.random(n) < rng.random()).astype(float)
            rewards.append((binary, rng.random(n), np.zeros(n), np.ones(n), np.full(n, 0.4))[g % 5].tolist())
        success = [success_by_default(np.array(group)) for group in rewards]
        tokens = [np.rint(np.exp(rng.uniform(0, 10, n))).astype(int).tolist() for n in sizes]
        return Groups.from_lists(rows.tolist(), rewards, success=success, tokens=tokens)

    # -- tests ----------------------------------------------------------------------------------------------

    def test_verdicts_are_complete(self) -> None:
        made = self.bound()
        for seed in range(5):
            answers.decide(made, self.groups(seed), self.progress())
        answers.decide(made, Groups.empty(), self.progress())

    def test_verdicts_repeat(self) -> None:
        groups = self.groups()
        first, again = (self.bound().decide(groups, self.progress()) for _ in range(2))
        np.testing.assert_array_equal(first.keep, again.keep)
        np.testing.assert_array_equal(first.reason[~first.keep], again.reason[~again.keep])
        np.testing.assert_array_equal(self.mask(groups, first), self.mask(groups, again))

    def test_a_verdict_does_not_depend_on_company(self) -> None:
        if not self.per_group:
            return
        groups, made = self.groups(), self.bound()
        before = everything(made)
        together = made.decide(groups, self.progress())
        mask = self.mask(groups, together)
        for g in range(len(groups)):
            one = groups.select(np.array([g]))
            alone = made.decide(one, self.progress(kept=g, open=5 * g, planned=97 * g, rounds=g + 2))
            assert alone.keep[0] == together.keep[g]
            if not alone.keep[0]:
                assert alone.reason[0] == together.reason[g]
            np.testing.assert_array_equal(self.mask(one, alone), mask[groups.offsets[g] : groups.offsets[g + 1]])
        assert everything(made) == before, "decide changes something: how often it is asked depends on who is back"

    def test_state_is_complete(self) -> None:
        made = self.bound()
        for step in (1, 2):
            made.decide(self.groups(step), self.progress(step))
            self.close(made, self.groups(step), step)
            made.end_step(self.progress(step))
        groups = self.groups(3)
        a, b = (m.decide(groups, self.progress(3)) for m in (made, self.resumed(made)))
        np.testing.assert_array_equal(a.keep, b.keep)
        np.testing.assert_array_equal(self.mask(groups, a), self.mask(groups, b))

    @staticmethod
    def mask(groups: Groups, verdict: Verdict) -> np.ndarray:
        """Rollouts that train."""
        kept = groups.rollout_mask(verdict.keep)
        return kept if verdict.rollouts is None else kept & verdict.rollouts
