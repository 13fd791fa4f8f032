"""The one judge of what looks wrong in a run. Training calls it after each step (the alarms); the report and
``stats`` run it over the journal. Other code that judges uses its constants. It only counts and decides nothing.

By data source, in blocks of at least ``adaptive.alarms.rollouts`` rollouts and :data:`GROUPS` groups of it, so that a source
of two prompts a step is judged as carefully as one of two hundred, only later:

* *never solved*: not one success since the run began, in as many rollouts or more;
* *cut*: of the latest block, more than ``cut`` of the answers are as long as ``data.max_response_length``;
* *jumped*: from one block to the next the pass rate moved by more than ``jump``, and by more than four standard errors over
  groups: the rollouts of a prompt are alike, and a block of few prompts is a few numbers;
* *starved*: of the latest rollouts of all sources, it got less than ``starved`` of its share of the prompts, although it is
  neither solved nor hopeless;
* *all succeed*: every answer of the latest block counts as a success (``adaptive.signal=reward``), though rewards vary.

Of the whole run:

* *dead share*: more than ``DEAD`` of the latest rollouts went to sources that were never solved, as above: of none of their
  rollouts since the run began does ``adaptive.success`` make a success. Their rewards may still vary, and teach;
* *validation falls*: it is significantly below its best, while the training reward is significantly above what it was then;
* *rogue reward*: the rewards of a step are ``ROGUE`` times as far from what was expected as usual (advantages that keep a
  running scale say how far).

docs/metrics.md#alarms says what each may mean.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from verl_adaptive.config import AlarmConfig, build
from verl_adaptive.errors import ConfigError
from verl_adaptive.report.accounts import scalars_of
from verl_adaptive.report.learning_curve import Curve, headline
from verl_adaptive.stats import Run, StoreError
from verl_adaptive.stats.chance import LISTED
from verl_adaptive.stats.history import Window
from verl_adaptive.stats.journal import numbers
from verl_adaptive.stats.suspects import SURPRISING
from verl_adaptive.text import clean

#: Kinds that are judged by source.
KINDS = ("never_solved", "cut", "jumped", "starved", "all_succeed")
#: Rollouts without a success from which a prompt counts as never solved, unless something else is asked for.
TRIES = 16
#: Pass rate from which a source is solved and needs no rollouts.
SOLVED = 0.9
#: Rollouts that a data source's share must come to before it can be called starved.
_EXPECTED = 64
#: Groups that a block holds at least: of sixteen groups, a fall by 0.5 is mostly within four standard errors.
GROUPS = 32
#: Standard errors of a pass rate's move that are no accident.
_MOVED = 4.0
#: Root mean square of a step's differences, in scales, from which a reward is rogue.
ROGUE = 3.0
#: Standard deviation of a source's rewards, in sizes of their mean, from which they vary.
_VARIES = 0.05
#: Share of rows that repeat an earlier prompt from which it is said.
DUPLICATES = 0.05
#: Share of the latest rollouts on sources without a success from which it is said.
DEAD = 0.1
#: Deviations by which one of k validations falls below an earlier one in one of a hundred runs in which nothing changes:
#: the first, and the second for each √(2 ln k). Every validation is judged, so it is the largest of all falls that counts.
_FALLEN = (1.3, 1.7)
#: A deviation of an unchanged model's validations, in standard errors over prompts: the same prompts are validated again, and
#: most are solved always or never.
_AGAIN = 0.75
#: Standard errors by which the training reward has risen meanwhile.
_RISEN = 2.0
_JUMP = "adaptive/advantage/jump"

#: Conditions on prompts, as for ``stats --where``: a large change, and significant.
REGRESSED = f"change <= -0.5 and regression >= {LISTED}"
FLIPPING = f"flips >= 2 and flipping >= {LISTED}"
SUSPECTED = f"surprise >= {SURPRISING}"

_WHY = {
    "never_solved": "Read a few of its rollouts: does the reward function parse the answers' format? If the prompts are too hard, leave them out "
    "(verl-adaptive export --data).",
    "no_threshold": "Set adaptive.success.threshold between bad and good rewards, or adaptive.signal. If all answers are bad, read a "
    "few.",
    "cut": "Raise data.max_response_length, or penalise length: a cut answer is wrong whatever it thought.",
    "jumped": "Reward hacking, a verifier that fails, or a sampler that turned to other prompts (cero): read a few rollouts.",
    "starved": "The sampler sees nothing to learn there, or explores too little; or rows of other sources repeat.",
    "all_succeed": "Set adaptive.success.threshold, or adaptive.signal.",
    "dead_share": "Fix the reward function, set adaptive.success.threshold if its rewards vary, or leave the source out "
    "(verl-adaptive export --data).",
    "validation_falls": "Reward hacking or over-training: the model of that step may be the better one.",
    "rogue_reward": "A penalty, an overflow or a failed judge? It is clipped, and the scale of the advantages ignores it.",
    "duplicates": "Such rows share one set of statistics.",
    "unused_acc": "Set adaptive.signal=acc: the reward alone does not show which prompts are solved.",
}


def never_solved(tries: int) -> str:
    """The condition of the prompts without a success in so many rollouts or more."""
    return f"rollouts >= {tries} and successes == 0"


def dead(rollouts: np.ndarray, successes: np.ndarray, least: int) -> np.ndarray:
    """bool: sources that were rolled out so often without a success."""
    return (rollouts >= least) & (successes <= 0)


def fallen(curve: Curve, spread: float = 0.0) -> tuple[int, float] | None:
    """Where a validation curve was best, and how far it is below that now; None if that is no significant fall.

    Args:
        curve: up to now.
        spread: standard deviation of single rewards that are no shares; 0: they may be, or it is not known.
    """
    count, best = len(curve.values), int(np.argmax(curve.values))
    drop = float(curve.values[best] - curve.values[-1])
    # means of rewards of -1 and 1 may all lie in [0, 1]
    if curve.shares and not (spread and curve.metric.startswith("reward/")):
        # of the best alone it would be 0 where all was solved, and the next prompt that fails would be a fall
        least, error = 0.02, max(curve.error(best) or 0.0, curve.error(count - 1) or 0.0)
    else:  # a reward has a scale of its own, whose zero may be anywhere
        least, error = 0.25 * float(np.abs(curve.values).max()), curve.of_rewards(spread)
    deviations = _FALLEN[0] + _FALLEN[1] * float(np.sqrt(2 * np.log(count)))
    return (best, drop) if drop > max(least, deviations * _AGAIN * error) else None


@dataclass(frozen=True)
class Finding:
    """One thing that stands out.

    Attributes:
        grave: it spoils training; else it is worth a look.
        what: in one line.
        why: what it may be, and what to do.
        where: a condition for ``stats --where`` and ``export``, or an empty string.
        step: the training step at which it was raised; None: it is so now.
    """

    grave: bool
    what: str
    why: str
    where: str = ""
    step: int | None = None

    def __str__(self) -> str:
        return f"{self.what}. {self.why}"


def of_source(name: str) -> str:
    """The condition of a data source's prompts."""
    return 'source == "' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _named(name: str) -> str:
    return clean(name, 80) or "(unknown)"


def unsolved(name: str, rollouts: float, rewards: str = "") -> Finding:
    """That a data source was never solved; ``rewards``: what they are, where they vary."""
    what = f"{_named(name)}: not one success in {rollouts:,.0f} rollouts"
    if rewards:
        return Finding(True, f"{what}, though their rewards vary {rewards}", _WHY["no_threshold"], of_source(name))
    return Finding(True, what, _WHY["never_solved"], of_source(name))


def _vary(counts: np.ndarray) -> np.ndarray:
    """bool: sources whose rewards vary; ``counts`` as in :class:`Judge`."""
    n, total, square = counts[[0, 4, 5]]
    return square / n - (total / n) ** 2 > (_VARIES * total / n) ** 2


def _variance(counts: np.ndarray) -> np.ndarray:
    """Of a block's pass rate, over its groups, unbiased where they are of one size; nan of a single one, which has none.

    ``counts`` as in :class:`Judge`.
    """
    n, won = counts[:2]
    rate, (won_won, won_n, n_n) = won / n, counts[6:]
    return np.maximum(won_won - 2 * rate * won_n + rate * rate * n_n, 0.0) / (n**2 - n_n)


def _described(counts: np.ndarray) -> str:
    """Mean and standard deviation of a source's rewards; ``counts`` as in :class:`Judge`, of one source."""
    n, total, square = counts[[0, 4, 5]].tolist()
    return f"({total / n:.3g} ± {np.sqrt(square / n - (total / n) ** 2):.2g})"


def source_labels(names: Sequence[str]) -> list[str]:
    """The names of data sources as parts of metrics' names; those that would be alike end in a hash of the whole name."""
    labels = [clean(name.strip().strip("/"), 80) or "unknown" for name in names]
    alike = Counter(labels)
    return [
        f"{label[:71]}~{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}"
        if alike[label] > 1
        else label
        for name, label in zip(names, labels, strict=True)
    ]


class Judge:
    """Watches a run, step by step.

    Args:
        config: ``adaptive.alarms``.
        names: the data sources.
        prompts: int ``(S,)``, prompts of each in the training set.
        repeated: share of the data set's rows that repeat an earlier prompt.
        signal: ``adaptive.signal``.

    Attributes:
        fields: what the reward function gives beside a graded reward, once known: ``acc``, or nothing.
        fell: that the last of the validation curves (the mean, of several) has fallen; None: it has not.
    """

    def __init__(
        self,
        config: AlarmConfig,
        names: Sequence[str],
        prompts: np.ndarray,
        *,
        repeated: float = 0.0,
        signal: str = "reward",
    ) -> None:
        self.config, self.names, self.prompts = config, list(names), np.asarray(prompts, dtype=np.float64)
        self.repeated, self.signal = repeated, signal
        self.fields: frozenset[str] = frozenset()
        size = len(self.names)
        order = np.argsort(-self.prompts, kind="stable")
        self._shown = [i for i in order.tolist() if self.prompts[i] > 0][: config.sources]
        # Of all sources that have prompts, so that a name does not depend on how many are shown.
        here = np.flatnonzero(self.prompts > 0).tolist()
        self._labels = dict(zip(here, source_labels([self.names[i] for i in here]), strict=True))
        # Each a row of rollouts, successes, rollouts of known length, cut ones, sum and sum of squares of the rewards; then,
        # over groups, the sums of successes², successes · rollouts and rollouts².
        self._now = np.zeros((9, size))  # the latest step
        self._all = np.zeros((9, size))
        self._block = np.zeros((9, size))
        self._last = np.full((9, size), np.nan)  # the block before
        self._move = np.zeros(size)
        # Since a source was last looked at for being starved: its rollouts, what its share of the prompts comes to, and
        # everybody's; and the same as it was then.
        self._wait, self._judged = np.zeros((2, 3, size))
        # Rollouts since the budget was last looked at; and as it was then, on sources never solved, and in all.
        self._spent, self._dead = np.zeros((2, size))
        self._looked = 0.0
        self._on = {kind: np.zeros(size, dtype=bool) for kind in KINDS}
        self._validations: list[dict[str, Any]] = []
        self._before = np.zeros(3)  # of all rollouts at the latest validation: number, sum and squares of the rewards
        self._trained: list[list[float]] = []  # the same between validations
        self.fell: Finding | None = None
        self._rewards: set[float] = set()
        self._said: set[str] = set()
        self._rogue = False

    def step(
        self,
        step: int,
        source: np.ndarray,
        n: np.ndarray,
        successes: np.ndarray,
        cut: np.ndarray,
        reward: np.ndarray,
        square: np.ndarray,
        *,
        jump: float = 0.0,
        rewards: np.ndarray | None = None,
    ) -> list[Finding]:
        """Take a step's groups, failed ones left out.

        Args:
            step: the training step.
            source: int ``(G,)``, positions in ``names``.
            n, successes: ``(G,)``, rollouts and evidence of success.
            cut: ``(G,)``, rollouts as long as the limit; nan: not known.
            reward, square: ``(G,)``, sums of their training rewards and of the squares.
            jump: how far they are from what was expected, in scales; 0: not known.
            rewards: ``(R,)``, the rewards themselves, group after group, where they are at hand.

        Returns:
            What was raised now.
        """
        counted = np.where(np.isfinite(cut), n, 0), np.nan_to_num(cut)
        squares = successes * successes, successes * n, np.asarray(n, dtype=np.float64) ** 2
        rows = (n, successes, *counted, reward, square, *squares)
        self._now = np.stack([np.bincount(source, row, minlength=len(self.names)) for row in rows])
        self._all += self._now
        self._block += self._now
        got, everybody = self._now[0], self._now[0].sum()
        share = self.prompts / max(self.prompts.sum(), 1.0)
        self._wait += np.stack([got, everybody * share, np.full(len(got), everybody)])
        self._spent += got
        found = [*self._by_source(), *self._budget(), *self._once(rewards), *self._far(source, n, jump, rewards)]
        return [replace(one, step=step) for one in found]

    # -- by source ------------------------------------------------------------------------------------------

    def _by_source(self) -> list[Finding]:
        before = {kind: on.copy() for kind, on in self._on.items()}
        self._on["never_solved"] = dead(self._all[0], self._all[1], self.config.rollouts)
        n, n_n = self._block[[0, 8]]
        full = (n >= self.config.rollouts) & (n * n >= GROUPS * n_n)  # of one size: Σ n² is n² a group
        if full.any():
            self._judge_blocks(full)
        self._judge_shares()
        return [self._found(kind, i) for kind in KINDS for i in np.flatnonzero(self._on[kind] & ~before[kind]).tolist()]

    def _judge_blocks(self, full: np.ndarray) -> None:
        n, won, known, cut = self._block[:4]
        n0, won0 = self._last[:2]
        with np.errstate(all="ignore"):
            succeed = (won >= n) & _vary(self._block) & (self.signal == "reward")
            move = won / n - won0 / n0
            error = np.sqrt(_variance(self._block) + _variance(self._last))
            jumped = (np.abs(move) > self.config.jump) & (np.abs(move) > _MOVED * error)
        found = {"all_succeed": succeed, "cut": (known > 0) & (cut > self.config.cut * known), "jumped": jumped}
        for kind, on in found.items():
            self._on[kind] = np.where(full, on, self._on[kind])
        self._move = np.where(full, move, self._move)
        self._last[:, full] = self._block[:, full]
        self._block[:, full] = 0.0

    def _judge_shares(self) -> None:
        got, expected, everybody = self._wait
        due = (everybody >= self._many) & (expected >= _EXPECTED)  # a small source waits longer for its turn
        with np.errstate(all="ignore"):
            rate = self._all[1] / self._all[0]
        needless = ((rate >= SOLVED) & ~self._on["all_succeed"]) | self._on["never_solved"]
        starved = (got < self.config.starved * expected) & ~needless
        self._on["starved"] = np.where(due, starved, self._on["starved"])
        self._judged = np.where(due, self._wait, self._judged)
        self._wait[:, due] = 0.0

    @property
    def _many(self) -> int:
        """Rollouts of all sources from which shares of them are judged."""
        return self.config.rollouts * max(8, int((self.prompts > 0).sum()))

    def _found(self, kind: str, i: int) -> Finding:
        n, won, known, cut = self._last[:4, i].tolist()
        grave = kind == "all_succeed"
        if kind == "never_solved":
            counts = self._all[:, i]
            varied = self.signal == "reward" and _vary(counts)
            return unsolved(self.names[i], counts[0], _described(counts) if varied else "")
        if kind == "cut":
            grave, what = cut > 0.5 * known, f"{cut / known:.0%} of the answers are cut at data.max_response_length"
        elif kind == "jumped":
            what = f"the pass rate moved by {self._move[i]:+.2f} to {won / n:.2f} within {n:,.0f} rollouts"
        elif kind == "all_succeed":
            rewards = _described(self._last[:, i])
            what = f"every one of {n:,.0f} answers counts as a success, though their rewards vary {rewards}"
        else:
            got, expected, everybody = self._judged[:, i].tolist()
            what = (
                f"got {got:,.0f} of the latest {everybody:,.0f} rollouts; its share of the prompts would give it "
                f"{expected:,.0f}"
            )
        name = self.names[i]
        return Finding(grave, f"{_named(name)}: {what}", _WHY[kind], of_source(name))

    # -- of the whole run -----------------------------------------------------------------------------------

    def _budget(self) -> list[Finding]:
        whole = float(self._spent.sum())
        if whole < self._many:
            return []
        before, self._looked = self._dead_share, whole
        self._dead = np.where(self._on["never_solved"], self._spent, 0.0)
        self._spent[:] = 0.0
        return self._wasted() if before <= DEAD else []

    @property
    def _dead_share(self) -> float:
        """Of the rollouts last looked at, the share on sources that still have no success."""
        return float(self._dead[self._on["never_solved"]].sum()) / max(self._looked, 1.0)

    def _wasted(self) -> list[Finding]:
        if self._dead_share <= DEAD:
            return []
        spent = f"{self._dead_share:.0%} of the latest {self._looked:,.0f} rollouts"
        return [
            Finding(False, f"{spent} went to data sources without a success since the run began", _WHY["dead_share"])
        ]

    def validated(self, step: int, metrics: Mapping[str, Any], prompts: Mapping[str, int]) -> list[Finding]:
        """Take what verl's validation measured after ``step``; arguments and result as of ``Journal.commit_validation``."""
        if self._validations and self._validations[-1]["step"] >= step:
            return []  # of several measurements of a step the first one counts
        known = numbers(metrics)
        known = {n: v for n, v in known.items() if n.startswith("val-core/")} or known
        known = {n: v for n, v in known.items() if "/mean@" in n} or known  # of the others nothing is looked at again
        self._validations.append({"step": step, "metrics": known, "prompts": dict(prompts)})
        whole = self._all[[0, 4, 5]].sum(axis=1)
        self._trained.append((whole - self._before).tolist())
        self._before, before, self.fell = whole, self.fell, None
        for curve in headline(self._validations)[-1:]:
            found = fallen(curve, self.spread)
            if found is not None:
                self.fell = self._falls(curve, *found)
        if self.fell is None or before is not None:
            return []
        return [Finding(True, self.fell.what, self.fell.why, step=step)]

    @property
    def spread(self) -> float:
        """Standard deviation of the training reward over all rollouts so far; 0 where all can lie in [0, 1]."""
        n, total, square = self._all[[0, 4, 5]].sum(axis=1).tolist()
        return float(np.sqrt(max(0.0, square / n - (total / n) ** 2))) if square > total else 0.0

    def _falls(self, curve: Curve, best: int, drop: float) -> Finding | None:
        """The fall of a curve, if the training reward of the time before it is above what it was before the best."""
        (n, total, square), (m, late, squares) = (self._trained[int(curve.at[i])] for i in (best, -1))
        if not n or not m:
            return None
        was, now = total / n, late / m
        error = np.sqrt(max(square / n - was * was, 0.0) / n + max(squares / m - now * now, 0.0) / m)
        if now - was <= _RISEN * error:
            return None
        what = (
            f"Validation of {clean(curve.name, 80)} fell by {drop:.3f} from its best, {curve.values[best]:.3f} at step "
            f"{self._validations[int(curve.at[best])]['step']:,}, while the training reward rose from {was:.3g} to {now:.3g}"
        )
        return Finding(True, what, _WHY["validation_falls"])

    @property
    def graded(self) -> bool:
        """The reward takes more than two values."""
        return len(self._rewards) > 2

    @property
    def unused_acc(self) -> bool:
        """``acc`` is there, and the shaped reward is what decides difficulty."""
        return self.signal == "reward" and "acc" in self.fields and self.graded

    def _once(self, rewards: np.ndarray | None) -> list[Finding]:
        if rewards is not None and not self.graded:
            self._rewards.update(np.unique(np.round(rewards[np.isfinite(rewards)], 9))[:3].tolist())
        found = []
        if self.repeated > DUPLICATES and "duplicates" not in self._said:
            self._said.add("duplicates")
            what = f"{self.repeated:.0%} of the data set's rows repeat an earlier prompt"
            found.append(Finding(False, what, _WHY["duplicates"]))
        if self.unused_acc and "acc" not in self._said:
            self._said.add("acc")
            what = "the reward takes more than two values, and the reward function also returns acc"
            found.append(Finding(False, what, _WHY["unused_acc"]))
        return found

    def _far(self, source: np.ndarray, n: np.ndarray, jump: float, rewards: np.ndarray | None) -> list[Finding]:
        before, self._rogue = self._rogue, jump >= ROGUE
        if before or not self._rogue:
            return []
        what = f"this step's rewards are {jump:.1f} times as far from their baselines as usual"
        if rewards is not None and len(rewards):
            at = int(np.argmax(np.abs(rewards - np.median(rewards))))
            name = self.names[int(np.repeat(source, n)[at])]
            what += f"; the most extreme is {rewards[at]:g} (data source {clean(name, 80)!r})"
        return [Finding(False, what, _WHY["rogue_reward"])]

    # -- what is so now -------------------------------------------------------------------------------------

    def standing(self) -> list[Finding]:
        """Everything that is so at the latest step."""
        found = [self._found(kind, i) for kind in KINDS for i in np.flatnonzero(self._on[kind]).tolist()]
        return [*found, *self._wasted(), *([] if self.fell is None else [self.fell])]

    def cut_shares(self) -> dict[str, float]:
        """Data source → share of its answers that the length limit cut; of those whose lengths are known."""
        known, cut = self._all[2:4].tolist()
        return {name: c / k for name, k, c in zip(self.names, known, cut, strict=True) if k}

    def metrics(self) -> dict[str, float]:
        """The alarms that are on, and the latest step by data source."""
        out = {f"adaptive/alarm/{kind}": float(on.sum()) for kind, on in self._on.items()}
        out["adaptive/alarm/duplicate_share"] = self.repeated
        out["adaptive/alarm/unused_acc"] = float(self.unused_acc)
        out["adaptive/alarm/rogue_reward"] = float(self._rogue)
        out["adaptive/alarm/dead_share"] = self._dead_share
        out["adaptive/alarm/validation_falls"] = float(self.fell is not None)
        whole = float(self._now[0].sum())
        for i in self._shown:
            name = self._labels[i]
            n, won, known, cut = self._now[:4, i].tolist()
            if whole:
                out[f"adaptive/source/rollout_share/{name}"] = n / whole
            if n:
                out[f"adaptive/source/pass_rate/{name}"] = won / n
            if known:
                out[f"adaptive/source/cut_share/{name}"] = cut / known
        return out

    # -- across a restart -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counts by source, alarms that are on, and what has been said, for :func:`~verl_adaptive.stats.state.encode_state`."""
        return {
            "names": self.names,
            "counts": {name: getattr(self, f"_{name}").copy() for name in _COUNTS},
            "on": {kind: on.copy() for kind, on in self._on.items()},
            "looked": self._looked,
            "validations": self._validations,
            "trained": [self._before.tolist(), *self._trained],
            "fell": None if self.fell is None else self.fell.what,
            "rewards": sorted(self._rewards),
            "said": sorted(self._said),
            "rogue": self._rogue,
            "fields": sorted(self.fields),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the run that saved the state; of a data source that it did not know, begin to count."""
        place = {name: i for i, name in enumerate(state["names"])}
        mine = np.array([i for i, name in enumerate(self.names) if name in place], dtype=np.int64)
        theirs = np.array([place[self.names[i]] for i in mine], dtype=np.int64)
        for name in _COUNTS:
            getattr(self, f"_{name}")[..., mine] = np.asarray(state["counts"][name])[..., theirs]
        for kind, on in self._on.items():
            on[mine] = np.asarray(state["on"][kind])[theirs]
        self._looked = float(state["looked"])
        self._validations = [dict(one) for one in state["validations"]]
        before, *self._trained = (list(map(float, row)) for row in state["trained"])
        self._before = np.array(before)
        self.fell = None if state["fell"] is None else Finding(True, state["fell"], _WHY["validation_falls"])
        self._rogue = bool(state["rogue"])
        self._rewards, self._said, self.fields = set(state["rewards"]), set(state["said"]), frozenset(state["fields"])


#: Arrays of a :class:`Judge` by data source.
_COUNTS = ("all", "block", "last", "move", "wait", "judged", "spent", "dead")


# -- a journal ----------------------------------------------------------------------------------------------------------


class Hearing:
    """A journal before the judge: what training was told, found again, with the settings that it had.

    Args:
        run: with a journal.

    Attributes:
        judge: as it stands after what was added.
        raised: what was raised so far, oldest first.
    """

    def __init__(self, run: Run) -> None:
        said, table = run.about.get("alarms"), run.table
        known = {field.name for field in fields(AlarmConfig)}
        settings = {name: value for name, value in said.items() if name in known} if isinstance(said, dict) else {}
        try:
            alarms = build(AlarmConfig, settings, "alarms")
        except ConfigError as error:
            raise StoreError(f"the journal is damaged: {error}") from error
        prompts = np.bincount(table.col("source")[: run.pool], minlength=len(table.sources))
        self.judge = Judge(alarms, table.sources, prompts, signal=str(run.about.get("signal", "reward")))
        self.raised: list[Finding] = []
        self._code, self._waiting = table.col("source").astype(np.int64), run.validations()
        steps, scalars = (run.steps.column(name).to_pylist() for name in ("step", "scalars"))
        # of a policy that keeps a running scale; most have none, and their text need not be parsed
        self._jumps = {
            s: scalars_of(t).get(_JUMP, 0.0) for s, t in zip(steps, scalars, strict=True) if f'"{_JUMP}"' in t
        }

    def add(self, w: Window) -> None:
        """Take the groups of whole steps, and the validations before them."""
        good = np.flatnonzero(w.usable)
        for chosen in np.split(good, np.flatnonzero(np.diff(w.step[good])) + 1) if len(good) else ():
            step, n = int(w.step[chosen[0]]), w.n[chosen]
            self.end(step)
            sums = (column[chosen] for column in (w.success, w.clipped, w.reward, w.reward_square))
            jump = self._jumps.get(step, 0.0)
            self.raised += self.judge.step(step, self._code[w.row[chosen]], n, *sums, jump=jump)

    def end(self, step: float = np.inf) -> None:
        """Take the validations before a step, by default all that are left."""
        while self._waiting and self._waiting[0]["step"] < step:
            one = self._waiting.pop(0)
            self.raised += self.judge.validated(one["step"], one["metrics"], one["prompts"])


def hear(run: Run) -> Hearing:
    """The whole of a journal before the judge."""
    hearing = Hearing(run)
    for window in run.windows():
        hearing.add(window)
    hearing.end()
    return hearing
