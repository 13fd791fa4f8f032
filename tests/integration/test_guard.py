"""Programs of verl's that would not read a preset refuse it, in real processes: nothing trains plainly under its name.

One is started as users start it; the others are forks (:mod:`tests.forks`).
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_adaptive.integration import guard

ROOT = Path(__file__).resolve().parents[2]
VERL = Path(find_spec("verl").submodule_search_locations[0])


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "VERL_PLATFORM": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture
def forked(below_verl, tmp_path):
    """What :func:`python` gives, from a fork in a folder of its own."""

    def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return below_verl(*words, cwd=tmp_path, VERL_PLATFORM="", **env)

    return run


@pytest.mark.parametrize(("default", "says"), [("true", "true is verl's default"), ("false", "take verl 0.9.1")])
def test_the_advice_follows_verls_own_default(default, says, tmp_path, monkeypatch) -> None:
    """verl's branch ``neo`` has ``use_v1: false``, and refuses ``true``."""
    (tmp_path / "ppo_trainer.yaml").write_text(f"trainer:\n  use_v1: {default}\n")
    monkeypatch.setattr(guard.importlib.resources, "files", lambda package: tmp_path)
    assert says in guard.unread(OmegaConf.create({"adaptive": {}, "trainer": {"use_v1": False}}), guard.MAIN)


MAIN = "verl.trainer.main_ppo"
ONE_STEP_OFF = (
    "verl.experimental.one_step_off_policy.main_ppo --config-name=one_step_off_ppo_trainer "
    "hydra.searchpath=[pkg://verl.trainer.config]"
)


@pytest.mark.parametrize(
    ("words", "env", "says"),
    [
        (f"{MAIN} trainer.use_v1=false", {}, r"trainer\.use_v1=False: .*leave trainer\.use_v1 out"),
        ("verl.experimental.fully_async_policy.fully_async_main", {}, r"trainer\.v1\.trainer_mode=separate_async"),
        (ONE_STEP_OFF, {}, r"trainer\.v1\.trainer_mode=colocate_async"),
        ("verl.trainer.sft_trainer", {}, "presets are for GRPO and PPO"),
        (f"{MAIN} +adaptve=greso", {}, r"did you mean \+adaptive=greso\?"),
        (MAIN, {"VERL_USE_EXTERNAL_PLUGINS": "none"}, "unset VERL_USE_EXTERNAL_PLUGINS"),
        (MAIN, {"VERL_USE_EXTERNAL_PLUGINS": ""}, "unset VERL_USE_EXTERNAL_PLUGINS"),
    ],
    ids=["use_v1=false", "fully_async", "one_step_off", "sft", "misspelt", "no plugin", "empty"],
)
def test_a_preset_that_nobody_would_read_is_refused_before_ray_starts(words, env, says, forked) -> None:
    preset = () if "adaptve" in words else ("+adaptive=greso",)
    done = forked("-m", *words.split(), *preset, **env)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(rf"verl-adaptive: \+adapt\w+=greso: .*{says}", done.stderr), done.stderr
    assert "ray init kwargs" not in done.stdout and "Traceback" not in done.stderr


def test_the_program_that_reads_presets_goes_on(tmp_path) -> None:
    """Up to verl's own validation, which refuses something else."""
    words = (
        "-m",
        "verl.trainer.main_ppo",
        "+adaptive=greso",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=1",
    )
    done = python(*words, cwd=tmp_path)
    assert done.returncode == 1 and "in validate_config" in done.stderr, done.stderr
    assert "verl-adaptive:" not in done.stderr


@pytest.mark.parametrize(
    ("chosen", "more", "word", "plugins", "says"),
    [
        ("{adaptive: greso}", "", "trainer.use_v1=false", "auto", "+adaptive=greso: trainer.use_v1=False"),
        ("_self_", "adaptive: solo", "", "none", "`- adaptive: solo` in the defaults list"),
        ("_self_", "adaptive: solo", "", "auto", "`- adaptive: solo` in the defaults list"),
        ("{adaptive@algorithm: solo}", "", "", "auto", "+adaptive@algorithm=solo: it has no effect below algorithm"),
        ("{adaptive: grpo}, {adaptive/platform: cpu}", "", "", "auto", "trainer.device=cpu needs VERL_PLATFORM=cpu"),
    ],
    ids=["a preset", "a plain value, no plugin", "a plain value", "a misplaced preset", "a platform"],
)
def test_what_a_file_of_the_users_says_is_refused_too(chosen, more, word, plugins, says, tmp_path, forked) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [ppo_trainer, {chosen}]\n{more}\n")
    words = ["-m", "verl.trainer.main_ppo", f"--config-path={tmp_path}", "--config-name=mine", *word.split()]
    done = forked(*words, "hydra.searchpath=[pkg://verl.trainer.config]", VERL_USE_EXTERNAL_PLUGINS=plugins)
    assert done.returncode == 1 and says in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("word", "says"),
    [
        *((f"+adaptve.{word}", "did you mean +adaptive=solo?") for word in ("name=solo", "solo=1")),
        ("+adaptve.seed=1", "did you mean adaptive.seed=1?"),
        ("+adpative.rounds=4", "did you mean adaptive.rounds=4?"),
        ("+adaptve.rounds=4", "did you mean adaptive.rounds=4?"),  # two mistakes, or an option that is gone
        ("+adaptiv=soloo", "did you mean +adaptive=soloo?"),
        ("+adaptve/sampler=cero", "did you mean adaptive/sampler=cero?"),
        ("+adaptive_seed=1", "+adaptive_seed=1: there is no adaptive_seed; did you mean adaptive.seed=1?"),
        ("++adaptive-total_rollout=64", "did you mean adaptive.total_rollout=64?"),
        ("+adaptiveSeed=1", "did you mean adaptive.seed=1?"),
        ("+adaptive_sampler=cero", "did you mean adaptive/sampler=cero?"),
        ("+adaptive_platform=cpu", "did you mean +adaptive/platform=cpu?"),
        ("+adaptive_solo=1", "+adaptive_solo=1: there is no adaptive_solo; did you mean +adaptive=solo?"),
        ("+adaptive_preset=solo", "did you mean +adaptive=solo?"),
        ("+adaptive/seed=1", "there is no adaptive/seed; did you mean adaptive.seed=1?"),
        ("+adaptive/samplr=cero", "did you mean adaptive/sampler=cero?"),
        ("+adaptive=true", "must be a preset: write +adaptive=solo"),
        ("+adaptive@mine=solo", "it has no effect below mine; write +adaptive=solo"),
    ],
)
def test_words_that_nobody_would_read(word, says) -> None:
    assert says in guard.misread(["main_ppo", "trainer.logger=x", word])


def test_the_plus_of_a_preset_is_not_of_its_parts() -> None:
    words = ["+adaptive=greso", "+adaptive/platform=cpu", "+adaptive/sampler=cero"]
    assert guard.misread(words).endswith("has a sampler already; write adaptive/sampler=cero, without the +")


def test_any_key_that_begins_like_ours_is_taken_for_ours_beside_a_preset() -> None:
    """Without one it may be a key of the user's own, and this package is none of their business."""
    assert "did you mean adaptive.kl_coef=0.1?" in guard.misread(["+adaptive=solo", "+adaptive_kl_coef=0.1"])
    assert guard.misread(["+adaptive_kl_coef=0.1"]) == guard.misread(["+adaptive=solo", "+adapter=lora"]) == ""


@pytest.mark.parametrize(
    "word",
    [
        "+adaptive=greso",
        "+adaptive/sampler=cero",
        "+adaptive/sampler@adaptive.sampler=cero",
        "+adaptive/platform@_global_=cpu",
        "+adaptive.allocator.mine=1",
        "adaptive_kl.rate=1",
        "+adaptive@_global_=greso",
        "+adaptative=mine",
        "+adaptor.seed=1",
    ],
)
def test_keys_that_are_not_misspelt(word) -> None:
    assert guard.misread(["main_ppo", word]) == ""


#: A program like verl-recipe's SPIN: it composes verl's configuration and trains with a loop of its own.
SPIN = """
import hydra
import verl

@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config):
    print("TRAINS")

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def spin(forked, tmp_path):
    (tmp_path / "main_spin.py").write_text(SPIN)
    return functools.partial(forked, "main_spin.py")


@pytest.mark.parametrize("words", [("+adaptive=solo",), ("+adaptive@algorithm=solo",), ("+adaptive={name: solo}",)])
def test_a_program_that_is_none_of_verls(spin, words) -> None:
    done = spin(*words)
    told = words != ("+adaptive={name: solo}",)  # a key of theirs that only has our key's name
    assert ("TRAINS" in done.stdout) is not told and (done.returncode == 1) is told, done.stderr
    assert "Traceback" not in done.stderr and (guard.ANY_PROGRAM in done.stderr) == (words == ("+adaptive=solo",))


def test_another_program_is_let_through_by_one_override_that_is_logged(spin) -> None:
    let = spin("+adaptive=solo", guard.ANY_PROGRAM)
    assert "TRAINS" in let.stdout, let.stderr
    assert "lets the preset through" in let.stdout, let.stdout


BARE = """
import sys
import hydra

@hydra.main(config_path=None, version_base=None)
def main(config):
    print(*sorted({m.partition(".")[0] for m in sys.modules}))

main()
"""


def test_a_hydra_program_without_our_word_loads_nothing_of_ours(tmp_path) -> None:
    """The search-path plugin is loaded in every Hydra program of the environment."""
    (tmp_path / "bare.py").write_text(BARE)
    loaded = set(python("bare.py", "+x=1", cwd=tmp_path).stdout.split())
    assert {"hydra", "hydra_plugins"} <= loaded
    assert not loaded & {"verl_adaptive", "pyarrow", "numpy", "sqlalchemy", "verl"}


#: A recipe that composes by itself: no Hydra callback runs, so the trainers themselves refuse.
RECIPE = """
import sys
import verl
from omegaconf import OmegaConf
from verl_adaptive.errors import AdaptiveError

def refused(make, *arguments):
    try:
        make(*arguments)
    except AdaptiveError as error:
        return "knows nothing of presets" in str(error)
    except Exception as error:
        print(type(error).__name__, error)
    return False

def run(**more):
    config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "mine"}}, "actor_rollout_ref": {}, **more})
    from verl.experimental.separation.utils import create_role_worker_mapping
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.v1 import PPOTrainerSync

    class Recipe(RayPPOTrainer):
        pass

    class Mine(PPOTrainerSync):
        pass

    return [refused(Recipe, config, None, {}, None), refused(create_role_worker_mapping, config), refused(Mine, config)]

print("with", *run(adaptive={"name": "mine"}))
print("as a string", *run(adaptive="greso"))
print("without", *run())
"""


def test_other_trainers_refuse_however_their_configuration_came_about(forked) -> None:
    done = forked("-c", RECIPE)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert "with True True True" in said and "as a string True True True" in said
    assert "without False False False" in said  # plain runs do not notice that the package is installed


def test_every_program_of_the_installed_verl_is_known() -> None:
    """A program that composes verl's configuration, and that is not in the list, might run a preset plainly."""
    found = {
        ".".join(path.relative_to(VERL.parent).with_suffix("").parts)
        for path in VERL.rglob("*.py")
        if "@hydra.main" in path.read_text(encoding="utf-8", errors="replace")
    }
    assert found and found <= set(guard.PROGRAMS), found - set(guard.PROGRAMS)


@pytest.mark.parametrize(
    ("word", "program"),
    [
        ("verl.trainer.main_ppo", "verl.trainer.main_ppo"),
        ("/opt/verl/verl/trainer/main_ppo.py", "verl.trainer.main_ppo"),
        ("verl/experimental/one_step_off_policy/main_ppo.py", "verl.experimental.one_step_off_policy.main_ppo"),
        ("mine/main_ppo.py", None),
        ("data.path=verl/trainer/main_ppo", None),
    ],
)
def test_programs_are_known_by_module_and_by_path(word, program) -> None:
    assert guard.program_of(word) == program


def test_the_plugin_stays_light() -> None:
    """It is imported in every process of verl's, while verl is still importing."""
    said = (
        "import sys; import verl_adaptive.integration.guard; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    loaded = set(python("-c", said, cwd=ROOT).stdout.split())
    assert "verl_adaptive" in loaded
    assert not loaded & {"hydra", "omegaconf", "numpy", "torch", "ray", "verl", "sqlalchemy", "pyarrow"}


PLATFORM = """
import os, sys
import verl
from verl.plugin.platform import get_platform
print(type(get_platform()).__name__, os.environ.get("VERL_PLATFORM"))
"""


def test_the_word_alone_chooses_the_cpu(forked) -> None:
    """verl picks a platform when it is imported; without the variable training died of NCCL."""
    done = forked("-c", PLATFORM, "+adaptive=grpo", "+adaptive/platform=cpu")
    assert done.stdout.split() == ["PlatformCPU", "cpu"], done.stderr
