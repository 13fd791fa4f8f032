"""What every allocator must do; make a test class of your own from this one:

class TestMine(AllocatorConformance):
    def make(self):
        return MyAllocator({"option": 3})
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from verl_adaptive.groups import Groups
from verl_adaptive.roles import CLOSE, Allocator, answers
from verl_adaptive.testing.components import PROMPTS, PartConformance, everything, pure


@pure
class AllocatorConformance(PartConformance):
    """A suite for pytest.

    Attributes:
        patience: reviews after which a group that never succeeds must be closed or held.
    """

    patience = 64

    # -- helpers --------------------------------------------------------------------------------------------

    def play(self, allocator: Allocator, step: int, rng: np.random.Generator, rate: float) -> list[list[int]]:
        """A step of ``batch`` prompts with this success rate; the answers of every review."""
        rows = rng.permutation(PROMPTS)[: self.facts.batch]
        progress = self.progress(step)
        n = answers.first(allocator, rows, None, progress)
        rewards = [(rng.random(k) < rate).astype(float).tolist() for k in n]
        stage = [[0] * k for k in n]
        opened = np.arange(len(rows))
        reviews, closed = [], []
        for _ in range(self.patience):
            groups = Groups.from_lists(
                rows[opened], [rewards[i] for i in opened], stage=[stage[i] for i in opened], submission=opened.tolist()
            )
            more = answers.more(allocator, "review", groups, progress)
            before = everything(allocator)
            for g in range(len(groups)):  # in an asynchronous trainer the counts are others each time
                other = self.progress(step, kept=g, open=5 * g, planned=97 * g, rounds=g + 2)
                alone = allocator.review(groups.select(np.array([g])), other)[0]
                assert more[g] == alone, "a review depends on more than the group"
            assert everything(allocator) == before, (
                "review changes something: how often it is asked depends on who is back"
            )
            reviews.append(more.tolist())
            closed.append(groups.select(more == CLOSE))
            for i, k in zip(opened, more, strict=True):
                rewards[i] += (rng.random(max(k, 0)) < rate).astype(float).tolist()
                stage[i] += [max(stage[i]) + 1] * max(k, 0)
            opened = opened[more > 0]
            if not len(opened):
                break
        else:
            raise AssertionError(f"groups still open after {self.patience} reviews")
        self.close(allocator, Groups.concat(closed).sorted(), step)
        allocator.end_step(progress)
        return reviews

    # -- tests ----------------------------------------------------------------------------------------------

    def test_first_gives_every_prompt_rollouts(self) -> None:
        allocator = self.bound()
        for count in (0, 1, 7):
            n = answers.first(allocator, np.arange(count), None, self.progress())
            assert allocator.fixed_size(self.facts.n) in (None, *n.tolist()) or not count, "fixed_size is not first's"
            answers.fund(allocator, n, None)  # of no prompt, too: an engine that resumes asks whether there is a pool

    def test_review_of_nothing(self) -> None:
        answers.more(self.bound(), "review", Groups.empty(), self.progress())

    def test_every_group_comes_to_an_end(self) -> None:
        for rate in (0.0, 0.1, 0.5, 1.0):
            self.play(self.bound(), 1, np.random.default_rng(3), rate)

    def test_decisions_repeat(self) -> None:
        for rate in (0.0, 0.2, 0.8):
            first = self.play(self.bound(), 2, np.random.default_rng(1), rate)
            assert self.play(self.bound(), 2, np.random.default_rng(1), rate) == first

    def test_state_is_complete(self) -> None:
        allocator = self.bound()
        for step in (1, 2):
            self.play(allocator, step, np.random.default_rng(step), 0.3)
        other = self.resumed(allocator)
        for step in (3, 4, 5):
            rng = np.random.default_rng(step), np.random.default_rng(step)
            assert self.play(allocator, step, rng[0], 0.3) == self.play(other, step, rng[1], 0.3)

    def played(self) -> Iterator[Allocator]:
        allocator = self.bound()
        yield allocator
        for step in (1, 2):
            self.play(allocator, step, np.random.default_rng(0), 0.2)
            yield allocator
