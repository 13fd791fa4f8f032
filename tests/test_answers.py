"""Mistakes in parts that somebody else wrote: each is told, with the part and what it should have said."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.world import Arrivals, make_async_engine, make_engine, run_step
from verl_adaptive import HOLD, Advantage, Allocator, ConfigError, Filter, Pick, PooledAllocator, Sampler, Verdict
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.filters.keep_all import KeepAll
from verl_adaptive.groups import Groups
from verl_adaptive.policy import find_part
from verl_adaptive.roles.answers import compute
from verl_adaptive.samplers.epoch import Epoch
from verl_adaptive.stats.table import Column


def first(self: Any, rows: np.ndarray, planned: Any, progress: Any) -> np.ndarray:
    return np.full(len(rows), 4)


def verdict(**change: Any) -> Any:
    """A filter's ``decide``: drops groups without variance, but for this."""

    def decide(self: Any, groups: Groups, progress: Any) -> Verdict:
        made = {"keep": ~groups.degenerate(), "reason": np.zeros(len(groups), dtype=np.int64)}
        return Verdict(**made | {name: value(groups) for name, value in change.items()})

    return decide


Case = tuple[type, dict[str, Any], str]


def case(base: type, usual: dict[str, Any], says: str, **body: Any) -> Case:
    """A class of this base, with the ``usual`` body but for this; and what is said of it."""
    return base, usual | body, says


EVERY = {"admit": lambda self, r, *_: np.ones(len(r), bool)}
MOST = {"first": first, "most": lambda self, n, _: np.maximum(8 - n, 0)}
WHOLE = {"decide": verdict(), "reasons": ("flat",)}
bare = partial(case, Sampler, {})
gate = partial(case, Sampler, EVERY)
pool = partial(case, Sampler, {"kind": "pool"})
plans = partial(case, Sampler, {"kind": "pool", "plans_rollouts": True})
once = partial(case, Allocator, {"first": first})
tops_up = partial(case, Allocator, MOST)
judge = partial(case, Filter, WHOLE)
#: Classes, and what is said of them in the first step.
FAULTS: dict[str, Case] = {
    # positions or counts for a mask: numpy would have rolled out the prompts 0 and 1
    "Counts": gate("admit must answer bool .* it answered int64", admit=lambda self, r, *_: np.arange(len(r)) % 2),
    "Chances": gate(r"admit must answer bool of shape \(", admit=lambda self, r, *_: np.full(len(r), 0.5)),
    "Half": gate(r"it answered bool of shape \(", admit=lambda self, r, *_: np.ones(len(r) // 2, bool)),
    "Nothing": gate("it answered NoneType", admit=lambda *_: None),
    "Sorts": gate(r"Sorts\)\.admit fails: ValueError: .* read-only", admit=lambda self, r, *_: r.sort()),
    "Fails": gate(r"Fails\)\.admit fails: KeyError: 'x' \(.*test_answers\.py, line", admit=lambda *_: {}["x"]),
    "Forgets": gate(r"Forgets\)\.decided fails: KeyError: 'x' \(", decided=lambda *_: {}["x"]),
    "Unbound": gate(r"Unbound\)\.bind must call super\(\)\.bind\(table, facts\)", bind=lambda *_: None),
    # the statistics of the run, and of every run that starts with them
    "Clears": gate(
        r"Clears\)\.end_step fails: ValueError: .*read-only \(.*test_answers\.py, line",
        end_step=lambda self, _: self.table.col("visits").fill(0),
    ),
    "Columns": gate(r"bind fails: ValueError: column a .*; write a type and a default: Column", columns={"a": "f4"}),
    "Type": gate("bind fails: ValueError: column a: data type 'x9'", columns={"a": Column("x9", 0)}),
    "Unmade": gate("Unmade.__init__ must call super", __init__=lambda self, options: None),
    "Bare": pool(r"pick must answer Pick\(rows\)", pick=lambda self, rows, k, _: rows[:k]),
    "Twice": pool("picks a prompt twice", pick=lambda self, rows, k, _: Pick(np.repeat(rows[:1], k))),
    "Beyond": pool("row 900, which is not in the pool", pick=lambda self, rows, k, _: Pick(np.arange(k) + 900)),
    "Shuffles": pool(
        r"pick fails: ValueError: .*read-only \(.*test_answers\.py, line",
        pick=lambda self, rows, k, _: (np.random.default_rng(0).shuffle(rows), Pick(rows[:k]))[1],
    ),
    "Unplanned": plans(
        r"pick \(n\) must answer whole numbers, 1 or greater",
        pick=lambda self, rows, k, _: Pick(rows[:k], np.zeros(k, int)),
    ),
    "Unsaid": pool(
        r"pick answers Pick\(rows, n\), which needs plans_rollouts = True; its plans_rollouts is False",
        pick=lambda self, rows, k, _: Pick(rows[:k], np.full(len(rows[:k]), 2)),
    ),
    "Unkept": plans(
        r"pick answers Pick\(rows\), which needs plans_rollouts = False; its plans_rollouts is True",
        pick=lambda self, rows, k, _: Pick(rows[:k]),
    ),
    "Size": gate("round_size must answer a whole number, .* it answered float 3.5", round_size=lambda *_: 3.5),
    "Below": gate("round_size must answer a whole number, 0 or greater; .* int -3", round_size=lambda *_: -3),
    "Unsaved": gate(
        r"state_dict: state\['seen'\]: a set cannot be stored",
        state_dict=lambda self: {"seen": set()},
        load_state_dict=lambda *_: None,
    ),
    "Silent": gate(r"Silent\)\.metrics must answer a dict; it answered NoneType", metrics=lambda self: None),
    "Arrays": gate("metrics gives 'x' as a ndarray", metrics=lambda self: {"x": np.zeros(2)}),
    "None_": once("first must answer whole numbers, 1 or greater", first=lambda self, r, *_: np.zeros(len(r), int)),
    "Parts": once("it answered float64 .* from 3.7 to 3.7", first=lambda self, r, *_: np.full(len(r), 3.7)),
    "Negative": tops_up("from -8 to -8", review=lambda self, g, _: np.full(len(g), -8)),
    "Rollouts": tops_up("one for each group", review=lambda self, g, _: np.zeros(g.rollouts, int)),
    # a step in which a prompt is hopeless would never have ended
    "Endless": tops_up(
        r"Endless\)\.review asks for 4 more rollouts for a group of 8 after 1 top-up; its most answers 0 before",
        review=lambda self, g, _: np.where(g.degenerate(), 4, 0),
    ),
    "Constant": once(
        "asks for 4 more rollouts for a group of 4 after 0 top-ups; its most answers 8 before them and 8 after them: it must",
        most=lambda self, n, _: np.full(len(n), 8),
        review=lambda self, g, _: np.full(len(g), 4),
    ),
    "Holds": tops_up("HOLD, which only a PooledAllocator", review=lambda self, g, _: np.full(len(g), HOLD)),
    "Kept": judge(r"decide \(keep\) must answer bool", decide=verdict(keep=lambda g: np.ones(len(g), int))),
    "Third": judge(r"reason 3, and reasons = \('flat',\) has 1", decide=verdict(reason=lambda g: np.full(len(g), 3))),
    "Unnamed": judge(r"reason 0, and reasons = \(\) has 0", reasons=()),
    "Empty": judge(
        "keeps a group of which no rollout trains", decide=verdict(rollouts=lambda g: np.zeros(g.rollouts, bool))
    ),
    "Drops": case(KeepAll, WHOLE, "drops a group, and its keeps_all is True: set keeps_all = False"),
    "Mask": judge(r"decide must answer Verdict\(keep, reason\)", decide=lambda self, g, _: ~g.degenerate()),
    # rewards and counts that the engine, the store and the other parts read
    "Centres": judge(
        r"Centres\)\.decide fails: ValueError: .*read-only",
        decide=verdict(keep=lambda g: g.reward.__isub__(0.5) > 0),
    ),
    "Learns": gate(r"Learns\)\.observe fails: ValueError: .*read-only", observe=lambda self, g, _: g.signal.fill(0)),
    "Counts_down": once(
        "most fails: ValueError: .*read-only", review=lambda *_: 0, most=lambda self, n, _: n.__isub__(4)
    ),
    "Groupwise": case(
        Advantage,
        {},
        "zero must answer bool .* one for each rollout",
        zero=lambda self, g, _: np.zeros(len(g), bool),
    ),
}
#: The same, told when the run starts.
UNUSED: dict[str, Case] = {
    "Admits": bare("has admits, which no sampler has: did you mean admit[?] A name of your", admits=EVERY["admit"]),
    "Gate": case(Epoch, {}, "has admit_rows, which no sampler has: .*[?] A name of your own begins with", admit_rows=1),
    "Saves": gate("has state, which no sampler has", state=lambda self: None),
    "Reviews": once("has reviews, .*did you mean review[?]", reviews=lambda *_: None),
    "Compares": judge("has need_groups, .*did you mean needs_groups[?]", need_groups=True),
    "Typo": bare("kind = 'pol'; a sampler's kind is 'stream' or 'pool'", kind="pol"),
    "Forgot": bare("has pick, which is used only with kind = 'pool'", pick=lambda *_: None),
    "Pickless": pool("kind = 'pool' and no pick"),
    "Gateless": bare("kind = 'stream' and no admit", round_size=lambda *_: 8),
    "Counted": pool("has decided, which is used only with kind = 'stream'", pick=first, decided=lambda *_: None),
    "Gates": pool("has admit, which is used only with kind = 'stream'", pick=first, **EVERY),
    "Boundless": once("has review and no most", review=lambda *_: None),
    "Reviewless": tops_up("has most, which is used only with review"),
    "ForEver": case(PooledAllocator, {"first": first}, "can_hold = True and no recall", can_hold=True),
    **{
        f"Alone_{name}": once(f"has {name}, which is used only with the base class PooledAllocator", **{name: True})
        for name in ("can_hold", "needs_place", "fund", "prompts", "affordable", "complete", "reserve", "recall")
    },
    "Letters": judge("reasons = 'flat'; they are a tuple of names", reasons="flat"),
    "Engines": judge("gives the reason 'trained', a word of the engine's", reasons=("trained",)),
    "Eliminates": judge(
        "gives the reason 'eliminated', with 'min' in it: verl would take its counts' min, not their sum; rename it",
        reasons=("eliminated",),
    ),
    "Same": judge("gives the reason 'flat' twice", reasons=("flat", "flat")),
    "Rejected": judge("gives the reason 'rejected' twice, in reasons or as its rollout_reason", reasons=("rejected",)),
    # training would have ended before its first step
    "Finished": gate("has finished as a method, .*: write @property above", finished=lambda self: False),
    "Placed": case(
        PooledAllocator, MOST, "has needs_place as a method", review=lambda *_: None, needs_place=lambda self: False
    ),
    "Estimates": case(Advantage, {}, "has estimator as a method", estimator=lambda self: "mine"),
    # told by the first resume only
    "Loads": gate(
        r"has load_state_dict\(self\), and is asked for load_state_dict\(self, state\)",
        load_state_dict=lambda self: None,
    ),
    "Saves_only": gate("has state_dict and no load_state_dict", state_dict=lambda self: {}),
    "Loads_only": gate(
        "has load_state_dict, which is used only with state_dict", load_state_dict=lambda self, state: None
    ),
    "Unasked": case(Advantage, {}, 'has compute, which is used only with estimator = "…"', compute=lambda *_: None),
    "Uncomputed": case(Advantage, {}, 'has estimator = "…" and no compute', estimator="mine"),
}
for _name, (_base, _body, _) in {**FAULTS, **UNUSED}.items():
    globals()[_name] = type(_name, (_base,), {"name": _name.lower(), "__module__": __name__, **_body})


class Copied(Epoch):
    """A copy of a shipped file: its records would be mixed with the original's."""

    name = "greso"


class Helped(Epoch):
    name = "helped"
    LEAST = 3

    def _helper(self) -> None: ...


def at(name: str) -> dict[str, str]:
    base = {**FAULTS, **UNUSED}[name][0]
    return {base.role: f"{__name__}:{name}"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_answer_is_told_in_the_first_step(name) -> None:
    with pytest.raises(AdaptiveError, match=FAULTS[name][2]) as caught:
        engine, world = make_engine(**at(name), M=40, p=np.tile([0.0, 0.5], 20))
        run_step(engine, world, 1)
    assert name.lower() in str(caught.value).lower()


@pytest.mark.parametrize("name", ["Counts", "Forgets", "Unsaid", "Negative", "Endless", "Kept"])
def test_and_in_an_asynchronous_trainers(name) -> None:
    with pytest.raises(AdaptiveError, match=FAULTS[name][2]):
        engine, world = make_async_engine(**at(name), M=40, p=np.tile([0.0, 0.5], 20))
        Arrivals(world).step(engine, 1)


@pytest.mark.parametrize("name", UNUSED)
def test_what_would_never_be_asked_is_told_before_the_run(name) -> None:
    role, path = at(name).popitem()
    with pytest.raises(ConfigError, match=rf"adaptive\.{role}\.name='{re.escape(path)}': {name} .*{UNUSED[name][2]}"):
        find_part(role, path)


def test_a_name_is_its_own() -> None:
    with pytest.raises(
        ConfigError, match=r"Copied has name = 'greso', which is verl_adaptive\.samplers\.greso:Greso: give"
    ):
        find_part("sampler", f"{__name__}:Copied")
    assert find_part("sampler", f"{__name__}:Helped") is Helped
    assert find_part("sampler", "verl_adaptive.samplers.epoch:Epoch") is Epoch


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (np.zeros(2), r"compute must answer numbers of shape \(5,\), one for each rollout; it answered float64"),
        (0.5, "it answered float 0.5"),
        (
            np.array([0, np.nan, 1, 1, 1]),
            r"answers nan for 1 of 5 rollouts \(the first with reward 0, in a group of 3\)",
        ),
    ],
)
def test_an_advantage_is_a_finite_number_for_each_rollout(answer, says) -> None:
    """One number was every rollout's, and not-a-number went into the update."""

    class Mine(Advantage):
        name, estimator = "mine", "mine"

        def compute(self, reward: np.ndarray, group_of: np.ndarray, observed: Groups) -> Any:
            return answer

    groups = Groups.from_lists([0, 1], [[1.0, 0.0, 1.0], [0.0, 0.0]])
    with pytest.raises(AdaptiveError, match=says):
        compute(Mine(), groups.reward, groups.group_of, groups)


def test_a_class_that_cannot_be_made() -> None:
    class Plain(Sampler):
        name, admit = "plain", EVERY["admit"]

        def __init__(self) -> None: ...

    globals()["Plain"] = Plain
    with pytest.raises(
        ConfigError, match=r"adaptive\.sampler\.name='.*:Plain': making a Plain of its options fails: TypeError"
    ):
        make_engine(f"{__name__}:Plain")


def test_whole_numbers_in_floats_and_lists_are_as_good() -> None:
    class Eights(Allocator):
        name = "eights"
        first = lambda self, rows, *_: [8.0] * len(rows)  # noqa: E731

    globals()["Eights"] = Eights
    engine, world = make_engine(allocator=f"{__name__}:Eights", M=40)
    assert run_step(engine, world, 1).groups.n.tolist() == [8] * 8
