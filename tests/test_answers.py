"""Mistakes in parts that somebody else wrote: each is told, with the part and what it should have said."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.world import Arrivals, make_engine, make_stream_engine, run_step
from verl_adaptive import HOLD, Advantage, Allocator, ConfigError, Filter, Pick, PooledAllocator, Sampler, Verdict
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.filters.keep_all import KeepAll
from verl_adaptive.groups import Groups
from verl_adaptive.policy import find_part
from verl_adaptive.roles.answers import compute
from verl_adaptive.samplers.epoch import Epoch


def first(self: Any, rows: np.ndarray, planned: Any, progress: Any) -> np.ndarray:
    return np.full(len(rows), 4)


def says(answer: Any) -> Any:
    """A method with this answer; a function is given what the method is."""
    return lambda self, *about: answer(*about) if callable(answer) else answer


def verdict(**change: Any) -> Any:
    """A filter's ``decide``: drops groups without variance, but for this."""

    def decide(self: Any, groups: Groups, progress: Any) -> Verdict:
        made = {"keep": ~groups.degenerate(), "reason": np.zeros(len(groups), dtype=np.int64)}
        return Verdict(**made | {name: value(groups) for name, value in change.items()})

    return decide


EVERY = {"admit": says(lambda rows, *_: np.ones(len(rows), bool))}
POOL = {"kind": "pool"}
PLANS = {**POOL, "plans_rollouts": True}
MOST = {"first": first, "most": says(lambda n, _: np.maximum(8 - n, 0))}
WHY = {"reasons": ("flat",)}
#: A class → its base, what is in it, and what is said of it.
FAULTS: dict[str, tuple[type, dict[str, Any], str]] = {
    # positions or counts for a mask: numpy would have rolled out the prompts 0 and 1
    "Counts": (
        Sampler,
        {"admit": says(lambda r, *_: np.arange(len(r)) % 2)},
        r"admit must answer bool .* it answered int64",
    ),
    "Chances": (Sampler, {"admit": says(lambda r, *_: np.full(len(r), 0.5))}, r"admit must answer bool of shape \("),
    "Half": (Sampler, {"admit": says(lambda r, *_: np.ones(len(r) // 2, bool))}, r"it answered bool of shape \("),
    "Nothing": (Sampler, {"admit": says(None)}, "it answered NoneType"),
    "Sorts": (Sampler, {"admit": says(lambda r, *_: r.sort())}, r"Sorts\)\.admit fails: ValueError: .* read-only"),
    "Fails": (
        Sampler,
        {"admit": says(lambda *_: {}["x"])},
        r"Fails\)\.admit fails: KeyError: 'x' \(.*test_answers\.py, line",
    ),
    "Forgets": (Sampler, EVERY | {"decided": says(lambda *_: {}["x"])}, r"Forgets\)\.decided fails: KeyError: 'x' \("),
    "Unbound": (
        Sampler,
        EVERY | {"bind": says(None)},
        r"Unbound\)\.bind must call super\(\)\.bind\(table, facts\)",
    ),
    # the statistics of the run, and of every run that starts with them
    "Clears": (
        Sampler,
        EVERY | {"end_step": lambda self, _: self.table.col("visits").fill(0)},
        r"Clears\)\.end_step fails: ValueError: .*read-only \(.*test_answers\.py, line",
    ),
    "Columns": (
        Sampler,
        EVERY | {"columns": {"a": "f4"}},
        r"bind fails: ValueError: column a .*; write Column\('f4', 0\)",
    ),
    "Bare": (Sampler, POOL | {"pick": says(lambda pool, k, _: pool[:k])}, r"pick must answer Pick\(rows\)"),
    "Twice": (Sampler, POOL | {"pick": says(lambda pool, k, _: Pick(np.repeat(pool[:1], k)))}, "picks a prompt twice"),
    "Beyond": (
        Sampler,
        POOL | {"pick": says(lambda pool, k, _: Pick(np.arange(k) + 900))},
        r"row 900, which is not in the pool",
    ),
    "Shuffles": (
        Sampler,
        POOL | {"pick": lambda self, pool, k, _: (np.random.default_rng(0).shuffle(pool), Pick(pool[:k]))[1]},
        r"pick fails: ValueError: .*read-only \(.*test_answers\.py, line",
    ),
    "Unplanned": (
        Sampler,
        PLANS | {"pick": says(lambda pool, k, _: Pick(pool[:k], np.zeros(k, int)))},
        r"pick \(n\) must answer whole numbers, 1 or greater",
    ),
    "Unsaid": (
        Sampler,
        POOL | {"pick": says(lambda pool, k, _: Pick(pool[:k], np.full(len(pool[:k]), 2)))},
        r"pick answers Pick\(rows, n\), which needs plans_rollouts = True; its plans_rollouts is False",
    ),
    "Unkept": (
        Sampler,
        PLANS | {"pick": says(lambda pool, k, _: Pick(pool[:k]))},
        r"pick answers Pick\(rows\), which needs plans_rollouts = False; its plans_rollouts is True",
    ),
    "Size": (
        Sampler,
        EVERY | {"round_size": says(3.5)},
        "round_size must answer a whole number, .* it answered float 3.5",
    ),
    "Below": (
        Sampler,
        EVERY | {"round_size": says(-3)},
        "round_size must answer a whole number, 0 or greater; .* int -3",
    ),
    "Unsaved": (
        Sampler,
        EVERY | {"state_dict": says({"seen": set()}), "load_state_dict": says(None)},
        r"state_dict: state\['seen'\]: a set cannot be stored",
    ),
    "Silent": (Sampler, EVERY | {"metrics": says(None)}, r"Silent\)\.metrics must answer a dict; it answered NoneType"),
    "Arrays": (Sampler, EVERY | {"metrics": says({"x": np.zeros(2)})}, "metrics gives 'x' as a ndarray"),
    "None_": (
        Allocator,
        {"first": says(lambda r, *_: np.zeros(len(r), int))},
        "first must answer whole numbers, 1 or greater",
    ),
    "Parts": (Allocator, {"first": says(lambda r, *_: np.full(len(r), 3.7))}, "it answered float64 .* from 3.7 to 3.7"),
    "Negative": (Allocator, MOST | {"review": says(lambda g, _: np.full(len(g), -8))}, "from -8 to -8"),
    "Rollouts": (
        Allocator,
        MOST | {"review": says(lambda g, _: np.zeros(g.rollouts, int))},
        "one for each group",
    ),
    # a step in which a prompt is hopeless would never have ended
    "Endless": (
        Allocator,
        MOST | {"review": says(lambda g, _: np.where(g.degenerate(), 4, 0))},
        r"Endless\)\.review asks for 4 more rollouts for a group of 8 after 1 top-up; its most answers 0 before",
    ),
    "Constant": (
        Allocator,
        {
            "first": first,
            "most": says(lambda n, _: np.full(len(n), 8)),
            "review": says(lambda g, _: np.full(len(g), 4)),
        },
        "asks for 4 more rollouts for a group of 4 after 0 top-ups; its most answers 8 before them and 8 after them: it must",
    ),
    "Holds": (
        Allocator,
        MOST | {"review": says(lambda g, _: np.full(len(g), HOLD))},
        "HOLD, which only a PooledAllocator",
    ),
    "Kept": (
        Filter,
        WHY | {"decide": verdict(keep=lambda g: np.ones(len(g), int))},
        r"decide \(keep\) must answer bool",
    ),
    "Third": (
        Filter,
        WHY | {"decide": verdict(reason=lambda g: np.full(len(g), 3))},
        r"reason 3, and reasons = \('flat',\) has 1",
    ),
    "Unnamed": (Filter, {"decide": verdict()}, r"reason 0, and reasons = \(\) has 0"),
    "Empty": (
        Filter,
        WHY | {"decide": verdict(rollouts=lambda g: np.zeros(g.rollouts, bool))},
        "keeps a group of which no rollout trains",
    ),
    "Drops": (KeepAll, WHY | {"decide": verdict()}, "drops a group, and its keeps_all is True: set keeps_all = False"),
    "Mask": (
        Filter,
        WHY | {"decide": says(lambda g, _: ~g.degenerate())},
        r"decide must answer Verdict\(keep, reason\)",
    ),
    # rewards and counts that the engine, the store and the other parts read
    "Centres": (
        Filter,
        WHY | {"decide": verdict(keep=lambda g: g.reward.__isub__(0.5) > 0)},
        r"Centres\)\.decide fails: ValueError: .*read-only",
    ),
    "Learns": (
        Sampler,
        EVERY | {"observe": says(lambda g, _: g.signal.fill(0))},
        r"Learns\)\.observe fails: ValueError: .*read-only",
    ),
    "Counts_down": (
        Allocator,
        {"first": first, "review": says(0), "most": says(lambda n, _: n.__isub__(4))},
        r"most fails: ValueError: .*read-only",
    ),
    "Groupwise": (
        Advantage,
        {"zero": says(lambda g, _: np.zeros(len(g), bool))},
        "zero must answer bool .* one for each rollout",
    ),
}
#: The same, told when the run starts.
UNUSED: dict[str, tuple[type, dict[str, Any], str]] = {
    "Admits": (
        Sampler,
        {"admits": EVERY["admit"]},
        r"has admits, which no sampler has: did you mean admit\? A name of your",
    ),
    "Gate": (
        Epoch,
        {"admit_rows": says(None)},
        r"has admit_rows, which no sampler has: .*\? A name of your own begins with",
    ),
    "Saves": (Sampler, EVERY | {"state": says(None)}, "has state, which no sampler has"),
    "Reviews": (Allocator, {"first": first, "reviews": says(None)}, r"has reviews, .*did you mean review\?"),
    "Compares": (Filter, {"decide": verdict(), "need_groups": True}, r"has need_groups, .*did you mean needs_groups\?"),
    "Typo": (Sampler, {"kind": "pol"}, r"kind = 'pol'; a sampler's kind is 'stream' or 'pool'"),
    "Forgot": (Sampler, {"pick": says(None)}, r"has pick, which is used only with kind = 'pool'"),
    "Pickless": (Sampler, POOL, "kind = 'pool' and no pick"),
    "Gateless": (Sampler, {"round_size": says(8)}, "kind = 'stream' and no admit"),
    "Counted": (
        Sampler,
        POOL | {"pick": says(None), "decided": says(None)},
        "has decided, which is used only with kind = 'stream'",
    ),
    "Gates": (
        Sampler,
        POOL | {"pick": says(None), "admit": says(None)},
        "has admit, which is used only with kind = 'stream'",
    ),
    "Boundless": (Allocator, {"first": first, "review": says(None)}, "has review and no most"),
    "Reviewless": (Allocator, MOST, "has most, which is used only with review"),
    "ForEver": (PooledAllocator, {"first": first, "can_hold": True}, "can_hold = True and no recall"),
    **{
        f"Alone_{name}": (
            Allocator,
            {"first": first, name: True},
            f"has {name}, which is used only with the base class PooledAllocator",
        )
        for name in ("can_hold", "needs_place", "fund", "prompts", "affordable", "complete", "reserve", "recall")
    },
    "Letters": (Filter, {"decide": verdict(), "reasons": "flat"}, r"reasons = 'flat'; they are a tuple of names"),
    "Engines": (
        Filter,
        {"decide": verdict(), "reasons": ("trained",)},
        "gives the reason 'trained', a word of the engine's",
    ),
    "Eliminates": (
        Filter,
        {"decide": verdict(), "reasons": ("eliminated",)},
        "gives the reason 'eliminated', with 'min' in it: verl would take its counts' min, not their sum; rename it",
    ),
    "Same": (Filter, {"decide": verdict(), "reasons": ("flat", "flat")}, "gives the reason 'flat' twice"),
    "Rejected": (
        Filter,
        {"decide": verdict(), "reasons": ("rejected",)},
        "gives the reason 'rejected' twice, in reasons or as its rollout_reason",
    ),
    # training would have ended before its first step
    "Finished": (Sampler, EVERY | {"finished": says(False)}, "has finished as a method, .*: write @property above"),
    "Placed": (
        PooledAllocator,
        MOST | {"review": says(None), "needs_place": says(False)},
        "has needs_place as a method",
    ),
    "Estimates": (Advantage, {"estimator": says("mine")}, "has estimator as a method"),
    # told by the first resume only
    "Loads": (
        Sampler,
        EVERY | {"load_state_dict": lambda self: None},
        r"has load_state_dict\(self\), and is asked for load_state_dict\(self, state\)",
    ),
    "Saves_only": (Sampler, EVERY | {"state_dict": says({})}, "has state_dict and no load_state_dict"),
    "Loads_only": (
        Sampler,
        EVERY | {"load_state_dict": says(None)},
        "has load_state_dict, which is used only with state_dict",
    ),
    "Unasked": (Advantage, {"compute": says(None)}, 'has compute, which is used only with estimator = "…"'),
    "Uncomputed": (Advantage, {"estimator": "mine"}, 'has estimator = "…" and no compute'),
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
    assert name.lower() in str(caught.value)


@pytest.mark.parametrize("name", ["Counts", "Forgets", "Unsaid", "Negative", "Endless", "Kept"])
def test_and_in_an_asynchronous_trainers(name) -> None:
    with pytest.raises(AdaptiveError, match=FAULTS[name][2]):
        engine, world = make_stream_engine(**at(name), M=40, p=np.tile([0.0, 0.5], 20))
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
        first = says(lambda rows, *_: [8.0] * len(rows))

    globals()["Eights"] = Eights
    engine, world = make_engine(allocator=f"{__name__}:Eights", M=40)
    assert run_step(engine, world, 1).groups.n.tolist() == [8] * 8
