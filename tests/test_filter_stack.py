"""Filters stack: an AND of named filters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.filters.aero_rejection import AeroRejection
from verl_adaptive.filters.informative import Informative
from verl_adaptive.filters.stack import Stack
from verl_adaptive.groups import Groups
from verl_adaptive.policy import build_policy
from verl_adaptive.roles import Filter, Verdict, answers
from verl_adaptive.simulate.presets import compose_preset
from verl_adaptive.testing.filters import FilterConformance


class Short(Filter):
    """Keeps short groups, and every second rollout of them."""

    name = "short"
    reasons = ("long",)
    may_leave_one = True
    _least = 1
    _seen = 0
    _trains = staticmethod(lambda place: place % 2 == 0)

    def decide(self, groups, progress):
        place = np.arange(groups.rollouts) - groups.offsets[:-1][groups.group_of]
        keep = (self._least <= groups.n) & (groups.n <= 8)
        return Verdict(keep, np.zeros(len(groups), dtype=np.int64), self._trains(place))

    def observe(self, groups, progress):
        self._seen += len(groups)

    def metrics(self):
        return {"seen_total": float(self._seen)}

    def state_dict(self):
        return {"seen": self._seen}

    def load_state_dict(self, state):
        self._seen = state["seen"]


class Others(Short):
    name = "others"
    _least = 2
    _trains = staticmethod(lambda place: place % 2 == 1)


class Middle(Short):
    name, may_leave_one = "middle", False
    _trains = staticmethod(lambda place: (place > 0) & (place < 3))


class Last(Short):
    name, may_leave_one = "last", False
    _trains = staticmethod(lambda place: place > 1)


class Numbers(Short):
    name = "numbers"

    def decide(self, groups, progress):
        found = super().decide(groups, progress)
        return replace(found, keep=found.keep.astype(int))


class TestStack(FilterConformance):
    def make(self):
        return Stack({"filters": [{"name": "informative", "low": 0.1}, "aero"]})


def stack_of(*filters):
    """The suite of these filters, those here by their class, and the part itself."""
    suite = TestStack()
    suite.make = lambda: Stack({"filters": [f"{__name__}:{f.__name__}" if isinstance(f, type) else f for f in filters]})
    return suite, suite.bound()


def test_what_all_keep_trains_and_the_first_that_drops_gives_the_reason():
    suite, made = stack_of(Short, {"name": "aero", "keep_degenerate": 0})
    groups = suite.groups()
    short, aero = made.filters
    one, other = short.decide(groups, suite.progress()), aero.decide(groups, suite.progress())
    found = made.decide(groups, suite.progress())
    np.testing.assert_array_equal(found.keep, one.keep & other.keep)
    kept = groups.rollout_mask(found.keep)
    np.testing.assert_array_equal(suite.mask(groups, found), kept & one.rollouts & other.rollouts)
    said = Counter(made.reasons[r] for r in found.reason[~found.keep])
    assert made.reasons == ("long", "all_correct", "all_wrong", "none_left")
    assert said["long"] == (~one.keep).sum() > 0
    assert said["all_correct"] + said["all_wrong"] == (one.keep & ~other.keep).sum() > 0


def test_a_group_of_which_each_filter_leaves_other_rollouts_is_dropped():
    suite, made = stack_of(Short, Others)
    found = made.decide(suite.groups(), suite.progress())
    assert not found.keep.any()
    assert {made.reasons[r] for r in found.reason} == {"long", "none_left"}


def test_no_rollout_is_left_alone_by_filters_that_leave_several():
    """Its advantage would be its bare reward."""
    suite, made = stack_of(Middle, Last)
    groups = Groups.from_lists([0, 1], [[1.0, 0.0, 1.0, 0.0]] * 2)
    for part in made.filters:
        assert answers.decide(part, groups, suite.progress()).keep.all()
    found = made.decide(groups, suite.progress())
    assert not found.keep.any() and {made.reasons[r] for r in found.reason} == {"none_left"}
    with pytest.raises(AdaptiveError, match=r"filter last .*single rollout.*may_leave_one"):
        answers.decide(made.filters[1], Groups.from_lists([0], [[1.0, 0.0, 1.0]]), suite.progress())


def test_each_filter_observes_and_is_saved():
    suite, made = stack_of(Short, "informative")
    made.observe(suite.groups(), suite.progress())
    seen = float(len(suite.groups()))
    assert made.metrics() == {"short/seen_total": seen}
    assert suite.resumed(made).metrics() == {"short/seen_total": seen}


def test_an_answer_that_is_no_mask_names_the_filter_that_gave_it():
    """As numbers, ~1 is −2, and other groups would train than the filter meant."""
    suite, made = stack_of("informative", Numbers)
    with pytest.raises(AdaptiveError, match="filter numbers .*decide"):
        made.decide(suite.groups(), suite.progress())


def test_capabilities_are_those_of_the_filters():
    assert Stack({"filters": ["keep_all"]}).keeps_all and not Stack({"filters": ["keep_all"]}).needs_groups
    both = Stack({"filters": ["keep_all", "aero"]})
    assert not both.keeps_all and both.needs_groups and not both.may_leave_one
    assert Stack({"filters": [{"name": "aero", "keep_degenerate": 1}]}).may_leave_one
    assert AeroRejection({"keep_degenerate": 1}).may_leave_one and not Informative().may_leave_one


def test_the_command_line_chooses_it():
    words = ["dapo", "adaptive/filter=stack", "adaptive.filter.filters=[{name: informative, low: 0.2}, aero]"]
    policy = build_policy(compose_preset(words))
    assert [(part.name, getattr(part.config, "low", None)) for part in policy.filter.filters] == [
        ("informative", 0.2),
        ("aero", None),
    ]
    band = AdaptiveConfig.from_mapping({"filter": {"name": "stack", "filters": ["informative", "band"]}})
    with pytest.raises(
        ConfigError, match=r"^adaptive\.filter\.filters\[1\]\.name='band': keeps only groups that got a commit"
    ):
        build_policy(band)


@pytest.mark.parametrize(
    "filters, said",
    [
        ([], "must be a list of filters"),
        (["informative", 3], "must be a list of filters"),
        ([{"low": 0.2}], "must be a list of filters"),
        (["informativ"], r"^adaptive\.filter\.filters\[0\]\.name='informativ': .*did you mean informative"),
        (["informative", {"name": "informative", "low": 0.2}], "names a filter twice"),
        (
            ["aero", {"name": "informative", "lo": 0.2}],
            r"^adaptive\.filter\.filters\[1\]\.lo=.*mean adaptive\.filter\.filters\[1\]\.low\?",
        ),
        ([{"name": "informative", "low": 2}], r"^adaptive\.filter\.filters\[0\]\.low=2: "),
        ([{"name": "informative", "low": 0.6, "high": 0.6}], r"^adaptive\.filter\.filters\[0\]\.high=0\.6: .*low=0\.6"),
    ],
)
def test_what_is_no_list_of_filters_is_refused(filters, said):
    with pytest.raises(ConfigError, match=said):
        Stack({"filters": filters})


def test_a_word_where_a_list_is_wanted_says_how_to_write_it():
    with pytest.raises(ConfigError, match=r"resume\.allow='policy': .*write adaptive\.resume\.allow=\[policy\]"):
        AdaptiveConfig.from_mapping({"resume": {"allow": "policy"}})
    with pytest.raises(ConfigError, match=r"write adaptive\.filter\.filters=\[informative\]"):
        build_policy(AdaptiveConfig.from_mapping({"filter": {"name": "stack", "filters": "informative"}}))
