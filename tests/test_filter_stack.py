"""Filters stack: an AND of named filters."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.filters.aero_rejection import AeroRejection
from verl_adaptive.filters.informative import Informative
from verl_adaptive.filters.stack import Stack
from verl_adaptive.groups import Groups
from verl_adaptive.policy import build_policy
from verl_adaptive.roles import answers
from verl_adaptive.simulate.presets import compose_preset
from verl_adaptive.testing.filters import FilterConformance

OWN = """
import numpy as np
from verl_adaptive import Filter, Verdict


class Short(Filter):
    name = "short"
    reasons = ("long",)
    may_leave_one = True

    def __init__(self, options=None):
        super().__init__(options)
        self.seen = 0

    def decide(self, groups, progress):
        keep = groups.n <= 8
        place = np.arange(groups.rollouts) - groups.offsets[:-1][groups.group_of]
        return Verdict(keep, np.zeros(len(groups), dtype=np.int64), place % 2 == 0)

    def observe(self, groups, progress):
        self.seen += len(groups)

    def metrics(self):
        return {"seen_total": float(self.seen)}

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Others(Short):
    name = "others"

    def decide(self, groups, progress):
        found = super().decide(groups, progress)
        return Verdict(found.keep & (groups.n > 1), found.reason, ~found.rollouts)
"""


class TestStack(FilterConformance):
    def make(self):
        return Stack({"filters": [{"name": "informative", "low": 0.1}, "aero"]})


def test_what_all_keep_trains_and_the_first_that_drops_gives_the_reason(tmp_path):
    (tmp_path / "short_filters.py").write_text(OWN)
    suite = TestStack()
    of = [f"{tmp_path}/short_filters.py:Short", {"name": "aero", "keep_degenerate": 0}]
    suite.make = lambda: Stack({"filters": of})
    made = suite.bound()
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


def test_a_group_of_which_each_filter_leaves_other_rollouts_is_dropped(tmp_path):
    (tmp_path / "short_filters_three.py").write_text(OWN)
    suite, file = TestStack(), f"{tmp_path}/short_filters_three.py"
    suite.make = lambda: Stack({"filters": [f"{file}:Short", f"{file}:Others"]})
    made = suite.bound()
    found = made.decide(suite.groups(), suite.progress())
    assert not found.keep.any()
    assert {made.reasons[r] for r in found.reason} == {"long", "none_left"}


def test_no_rollout_is_left_alone_by_filters_that_leave_several(tmp_path):
    """Its advantage would be its bare reward."""
    middle = OWN.replace("place % 2 == 0", "(place > 0) & (place < 3)").replace("may_leave_one = True", "")
    (tmp_path / "middle_filters.py").write_text(middle.replace("~found.rollouts", "np.ones(groups.rollouts, bool)"))
    last = (
        middle.replace("(place > 0) & (place < 3)", "place > 1").replace('"short"', '"last"').replace("Short", "Last")
    )
    (tmp_path / "last_filters.py").write_text(last)
    suite = TestStack()
    suite.make = lambda: Stack({"filters": [f"{tmp_path}/middle_filters.py:Short", f"{tmp_path}/last_filters.py:Last"]})
    made = suite.bound()
    groups = Groups.from_lists([0, 1], [[1.0, 0.0, 1.0, 0.0]] * 2)
    for part in made.filters:
        assert answers.decide(part, groups, suite.progress()).keep.all()
    found = made.decide(groups, suite.progress())
    assert not found.keep.any() and {made.reasons[r] for r in found.reason} == {"none_left"}
    with pytest.raises(AdaptiveError, match=r"filter last .*single rollout.*may_leave_one"):
        answers.decide(made.filters[1], Groups.from_lists([0], [[1.0, 0.0, 1.0]]), suite.progress())


def test_each_filter_observes_and_is_saved(tmp_path):
    (tmp_path / "short_filters_too.py").write_text(OWN)
    suite = TestStack()
    of = [f"{tmp_path}/short_filters_too.py:Short", "informative"]
    suite.make = lambda: Stack({"filters": of})
    made = suite.bound()
    made.observe(suite.groups(), suite.progress())
    seen = float(len(suite.groups()))
    assert made.metrics() == {"short/seen_total": seen}
    assert suite.resumed(made).metrics() == {"short/seen_total": seen}


def test_an_answer_that_is_no_mask_names_the_filter_that_gave_it(tmp_path):
    """As numbers, ~1 is −2, and other groups would train than the filter meant."""
    (tmp_path / "short_filters_four.py").write_text(
        OWN.replace("keep = groups.n <= 8", "keep = (groups.n <= 8).astype(int)")
    )
    suite = TestStack()
    suite.make = lambda: Stack({"filters": ["informative", f"{tmp_path}/short_filters_four.py:Short"]})
    with pytest.raises(AdaptiveError, match="filter short .*decide"):
        suite.bound().decide(suite.groups(), suite.progress())


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
    ],
)
def test_what_is_no_list_of_filters_is_refused(filters, said):
    with pytest.raises(ConfigError, match=said):
        Stack({"filters": filters})
