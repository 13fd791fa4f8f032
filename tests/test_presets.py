"""The presets, composed by Hydra as ``python -m verl.trainer.main_ppo … +adaptive=<preset>`` composes them."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import DictConfig, OmegaConf

import hydra_configs.verl_adaptive
import verl_adaptive.policy as policy
from verl_adaptive.allocators.fixed import Fixed
from verl_adaptive.allocators.pilot_commit import PilotCommit
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.errors import ConfigError
from verl_adaptive.filters.keep_all import KeepAll
from verl_adaptive.policy import PARTS, build_policy, find_part
from verl_adaptive.roles import Filter, Sampler
from verl_adaptive.samplers.cero import Cero
from verl_adaptive.samplers.rounds import RoundConfig
from verl_adaptive.stats.table import Column

ADAPTIVE = Path(hydra_configs.verl_adaptive.__file__).parent / "adaptive"

#: preset: sampler, allocator, filter, advantage, refill
PRESETS = {
    "grpo": ("epoch", "fixed", "keep_all", "verl", True),
    "dapo": ("epoch", "fixed", "informative", "verl", True),
    "greso": ("greso", "fixed", "informative", "verl", True),
    "aero": ("epoch", "aero", "aero", "beta", False),
    "cero": ("cero", "fixed", "keep_all", "verl", False),
    "pilot_commit": ("retire", "pilot_commit", "band", "verl", True),
    "solo": ("spread", "fixed", "keep_all", "memory", True),
    "spo": ("spread", "fixed", "keep_all", "memory", True),
    "sao": ("spread", "fixed", "keep_all", "verl", True),
}
#: Presets that spread a step's rollouts over more prompts.
SPREAD = ("solo", "spo", "sao")
ROLES = ("sampler", "allocator", "filter", "advantage")


@pytest.fixture(scope="module")
def composed():
    """Composes what a preset and further words bring to verl's configuration; each command line once."""
    done: dict[tuple[str, ...], DictConfig] = {}

    def with_overrides(*overrides: str) -> DictConfig:
        if overrides not in done:
            with initialize_config_module("hydra_configs.verl_adaptive", version_base=None):
                done[overrides] = compose(overrides=list(overrides))
        return copy.deepcopy(done[overrides])

    with_overrides.forget = done.clear  # type: ignore[attr-defined]
    return with_overrides


def adaptive(config: DictConfig) -> AdaptiveConfig:
    return AdaptiveConfig.from_mapping(OmegaConf.to_container(config.adaptive, resolve=True))


def test_every_preset_file_is_known() -> None:
    assert {p.stem for p in ADAPTIVE.glob("*.yaml")} == set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_names_its_parts_and_changes_nothing_else(preset, composed) -> None:
    config = composed(f"+adaptive={preset}")
    parsed = adaptive(config)
    assert parsed.name == preset
    assert (*(getattr(parsed, role)["name"] for role in ROLES), parsed.refill) == PRESETS[preset]
    differs = {key for key, default in asdict(AdaptiveConfig()).items() if asdict(parsed)[key] != default}
    said = {"refill": not parsed.refill, "batch_unit": preset in SPREAD, "longest_first": preset == "grpo"}
    assert differs - {*ROLES, "name"} == {key for key, is_said in said.items() if is_said}
    assert config.trainer.v1.sampler.custom_sampler == {
        "path": "pkg://verl_adaptive.integration.replay_buffer",
        "name": "AdaptiveReplayBuffer",
    }


def test_presets_set_no_options_of_parts(composed) -> None:
    """Or a part swapped on the command line would be handed another part's keys."""
    for preset in PRESETS:
        body = yaml.safe_load((ADAPTIVE / f"{preset}.yaml").read_text())
        assert not set(body["adaptive"]) & set(ROLES), preset


@pytest.mark.parametrize(("role", "name"), [(role, name) for role in PARTS for name in PARTS[role]])
def test_every_part_is_a_choice_with_the_options_of_its_dataclass(role, name, composed) -> None:
    config = composed("+adaptive=grpo", f"adaptive/{role}={name}")
    assert config.adaptive[role] == {"name": name, **asdict(find_part(role, name)().config)}


def test_files_beside_the_parts_are_a_part_with_other_options(composed) -> None:
    files = {(role, p.stem) for role in ROLES for p in (ADAPTIVE / role).glob("*.yaml")}
    assert ("sampler", "mopps_by_source") in files
    assert not files & {(role, name) for role in PARTS for name in PARTS[role]}  # their dataclasses say it all
    for role, variant in files:
        options = OmegaConf.to_container(composed("+adaptive=grpo", f"adaptive/{role}={variant}").adaptive[role])
        name = options.pop("name")
        assert name in PARTS[role] and find_part(role, name)(options).config != find_part(role, name)().config, variant


@pytest.mark.parametrize("word", ["gres", "base"])  # what the presets share is none
def test_an_unknown_preset_lists_those_there_are(word, composed) -> None:
    with pytest.raises(MissingConfigException, match=f"adaptive/{word}") as error:
        composed(f"+adaptive={word}")
    offered = str(error.value).split("Available options in")[1].split("Config search path")[0].split()
    assert {*PRESETS} <= {*offered} and "base" not in offered


# -- other packages' parts ----------------------------------------------------------------------------------


@pytest.fixture
def third_party(monkeypatch, composed):
    """Entry points of other packages, as their installation would add them; Hydra's store is put back afterwards."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    Plugins.instance()  # Hydra's own put their configurations there when they are first loaded
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", copy.deepcopy(store.repo))

    def have(**entries: str) -> None:
        points = {k.replace("_", ".", 1): v for k, v in entries.items()}
        made = {n: [EntryPoint(n, v, policy.ENTRY_POINT_GROUP) for v in values.split()] for n, values in points.items()}
        monkeypatch.setattr(policy, "_third_party", lambda: made)
        composed.forget()

    yield have
    composed.forget()


class Mine(Sampler):
    """A sampler of somebody else's."""

    name = "mine"

    @dataclass
    class Config:
        """``steps``: how many; ``round``: as of others; ``decay``: how fast."""

        steps: int = 2
        decay: float = 0.5
        round: RoundConfig = field(default_factory=RoundConfig)

    def admit(self, rows, position, progress):
        return np.ones(len(rows), dtype=bool)


class Unfinished(Filter):
    name = "unfinished"


class Nameless(Sampler):
    """Says nothing."""


class Dashed(Sampler):
    """A condition on its columns would be a subtraction."""

    name = "my-sampler"


def test_an_entry_point_alone_makes_a_choice(third_party, composed) -> None:
    third_party(sampler_mine=f"{__name__}:Mine")
    config = composed("+adaptive=dapo", "adaptive/sampler=mine", "adaptive.sampler.steps=3")
    assert config.adaptive.sampler.steps == 3 and config.adaptive.sampler.round.safety == 1.1
    assert build_policy(adaptive(config)).sampler.config == Mine.Config(steps=3)
    with pytest.raises(ConfigCompositionException, match="Could not override"):
        composed("+adaptive=dapo", "adaptive/sampler=mine", "adaptive.sampler.stps=3")


def test_a_part_that_does_not_load_is_told_of_where_it_is_chosen(third_party, composed) -> None:
    third_party(sampler_broken="no_such_module:Mine", filter_wrong=f"{__name__}:Mine")
    assert build_policy(adaptive(composed("+adaptive=dapo"))).sampler.name == "epoch"
    with pytest.raises(ConfigError, match=r"adaptive\.sampler\.name='broken': .*no_such_module"):
        build_policy(adaptive(composed("+adaptive=dapo", "adaptive/sampler=broken")))
    with pytest.raises(ConfigError, match=r"adaptive\.filter\.name='wrong': is no filter: .*verl_adaptive\.Filter"):
        build_policy(adaptive(composed("+adaptive=dapo", "adaptive/filter=wrong")))


def test_a_part_does_not_take_the_place_of_a_shipped_one(third_party, composed) -> None:
    """A preset would do something else wherever a package with such a name is installed."""
    third_party(filter_band=f"{__name__}:Unfinished")
    assert build_policy(adaptive(composed("+adaptive=dapo"))).filter.name == "informative"
    with pytest.raises(
        ConfigError, match=r"adaptive\.filter\.name='band': .*entry point .*:Unfinished; rename that one"
    ):
        build_policy(adaptive(composed("+adaptive=pilot_commit")))


def test_two_packages_with_one_name_are_told(third_party, composed) -> None:
    """The package that came later on Python's path decided, and nothing said so."""
    third_party(sampler_mine=f"{__name__}:Mine {__name__}:Counting")
    assert build_policy(adaptive(composed("+adaptive=dapo"))).sampler.name == "epoch"
    with pytest.raises(
        ConfigError, match=r"sampler\.name='mine': is the name of the entry points .*:Counting and .*:Mine; rename one"
    ):
        build_policy(adaptive(composed("+adaptive=dapo", "adaptive/sampler=mine")))


class Counting(Mine):
    columns = {"seen": Column("i4")}


class CountingToo(KeepAll):
    name, columns = "mine", {"seen": Column("i4")}


def test_two_parts_do_not_share_a_column(composed) -> None:
    """Each visit counted twice in it."""
    parts = [f"{SAMPLER}:Counting", f"{FILTER}:CountingToo"]
    assert build_policy(adaptive(composed("+adaptive=dapo", parts[0]))).sampler.name == "mine"
    with pytest.raises(
        ConfigError, match=r"adaptive\.filter\.name='mine': has the column 'seen', and so has the sampler"
    ):
        build_policy(adaptive(composed("+adaptive=dapo", *parts)))


# -- what a part can do -------------------------------------------------------------------------------------


class Renamed(Fixed):
    """What ``fixed`` does, under another name."""

    name = "renamed"


class RenamedCommits(PilotCommit):
    name = "renamed_commits"


class RenamedPlan(Cero):
    name = "renamed_plan"


#: A class of this module in a preset's place.
SAMPLER, ALLOCATOR, FILTER = (f"adaptive.{role}.name={__name__}" for role in ("sampler", "allocator", "filter"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (f"+adaptive=cero {ALLOCATOR}:Renamed adaptive.allocator.n=4", r"adaptive\.allocator\.n=4: .*plans"),
        (
            f"+adaptive=aero {SAMPLER}:RenamedPlan adaptive.allocator.budget=per_prompt",
            r"adaptive\.allocator\.budget='per_prompt'.*budget=pooled",
        ),
        (f"+adaptive=pilot_commit {ALLOCATOR}:Renamed", r"adaptive\.filter\.name='band'.*makes none.*informative"),
    ],
)
def test_parts_are_asked_what_they_can_do_not_who_they_are(words, says, composed) -> None:
    with pytest.raises(ConfigError, match=says):
        build_policy(adaptive(composed(*words.split())))


def test_a_filter_on_commits_takes_any_allocator_that_makes_them(composed) -> None:
    policy = build_policy(adaptive(composed("+adaptive=pilot_commit", f"{ALLOCATOR}:RenamedCommits")))
    assert policy.allocator.name == "renamed_commits" and policy.filter.judge == policy.allocator.side


# -- a class named by its path ------------------------------------------------------------------------------

MINE = f"{SAMPLER}:Mine"


@pytest.mark.parametrize(
    "words", [("+adaptive=dapo",), ("+adaptive=aero",), ("+adaptive=dapo", "adaptive/sampler=cero")]
)
def test_a_class_is_named_by_its_path(words, composed) -> None:
    """What the preset's own part left in the configuration is not handed to it."""
    made = build_policy(adaptive(composed(*words, MINE, "+adaptive.sampler.steps=5")))
    assert type(made.sampler) is Mine and made.sampler.config == Mine.Config(steps=5)


def test_a_class_without_what_the_preset_left(composed) -> None:
    words = ("+adaptive=dapo", "adaptive/sampler=custom", MINE)
    assert build_policy(adaptive(composed(*words))).sampler.config == Mine.Config()
    with pytest.raises(ConfigError, match=r"adaptive\.sampler\.name=None: must name a part"):
        adaptive(composed("+adaptive=dapo", "adaptive/sampler=custom"))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        # `adaptive.store.dir=$FOLDER` went to a file beside the checkpoints, `adaptive.record=$FOLDER` recorded nothing
        *(
            (f"{key}=", "'': is empty, as an unset shell variable.*")
            for key in ("store.dir", "id_key", "signal", "record", "warm_start")
        ),
        ("tolerance=1e300", r"must be in \[0, 1000\]: in units of the signal"),
        ("success.threshold=inf", "must be finite"),
        ("success.low=-inf", "must be finite"),
        ("success.high=0", r"must be greater than adaptive\.success\.low=0\.0"),
        ("total_rollouts=0", "must be 1 or greater, or null"),
        ("total_rollouts=many", "must be int or null"),
        ("seed=123456789012345678901234567890", "is too large"),
        ("min_sessions=0", r"must be in \(0, 1\]"),
        ("max_rounds=true", "must be int"),
        ("sampler=greso", "choose one by adaptive/sampler=greso"),
        ("store.dir=file:///runs", "is no folder; write the path of one"),
    ],
)
def test_a_value_must_be_there_and_in_its_range(word, says, composed) -> None:
    with pytest.raises(ConfigError, match=rf"^adaptive\.{word.partition('=')[0]}=.*{says}$"):
        adaptive(composed("+adaptive=grpo", f"adaptive.{word}"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            f"adaptive/sampler=mopps {MINE}",
            r"adaptive\.sampler\.decay=1\.0: is left from adaptive/sampler=mopps, and .*write adaptive/sampler=custom",
        ),
        (f"{MINE} +adaptive.sampler.stps=5", r"adaptive\.sampler\.stps=5: .*did you mean steps"),
        ("adaptive.sampler.name=no.such:Mine", r"No module named 'no'; .*adaptive\.sampler\.name=FILE\.py:Mine"),
        ("adaptive.sampler.name=/none/mine.py:Mine", r"there is no file /none/mine\.py"),
        (f"{SAMPLER}:Mein", r"has no 'Mein'; parts in it: Mine"),
        (f"{SAMPLER}:Zzz", r"has no 'Zzz'; parts in it: Mine, Unfinished"),
        (f"{FILTER}:Mine", r"is no filter: derive a class from verl_adaptive\.Filter"),
        (f"{FILTER}:Unfinished", r"Unfinished lacks decide, which every filter has"),
        (f"{SAMPLER}:Nameless", r"Nameless needs a name"),
        (f"{SAMPLER}:Dashed", r"Dashed needs a name of letters, digits"),
        ("adaptive.sampler.name=mien", r"name='mien': no such sampler; .*module:Class"),
    ],
)
def test_a_class_that_cannot_be_used_says_what_to_write(words, says, composed) -> None:
    with pytest.raises(ConfigError, match=says):
        build_policy(adaptive(composed("+adaptive=dapo", *words.split())))


# -- what users write ---------------------------------------------------------------------------------------


def test_presets_with_an_advantage_of_their_own_choose_its_estimator(composed) -> None:
    chosen = {p: OmegaConf.select(composed(f"+adaptive={p}"), "algorithm.adv_estimator") for p in PRESETS}
    assert chosen == {p: find_part("advantage", PRESETS[p][3]).estimator or None for p in chosen} | {"sao": "gae"}
    assert chosen["aero"] == "adaptive_beta" and chosen["solo"] == "adaptive_memory"
