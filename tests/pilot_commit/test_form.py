"""``form=auto``: the published form where groups can wait for a later step, settled once; and records of before."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.world import Arrivals, make_engine, make_stream_engine, run
from verl_adaptive.allocators.pilot_commit import PilotCommit
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.engine import AsyncFacts
from verl_adaptive.errors import ConfigError
from verl_adaptive.policy import build_policy, settle
from verl_adaptive.record import HEADER, Tape, replay
from verl_adaptive.simulate.presets import compose_preset

HALF = np.full(120, 0.5)
PILOTS = ("adaptive/allocator=pilot_commit", "adaptive/filter=band")


@pytest.mark.parametrize(
    ("words", "sync"),
    [
        (("pilot_commit",), "pipelined"),
        (("greso", *PILOTS), "pipelined"),
        (("dapo", "adaptive/sampler=mopps", *PILOTS), "pipelined"),
        (("pilot_commit", "adaptive.rounds=true"), "pipelined"),
        (("pilot_commit", "adaptive.allocator.hold_surplus=true", "adaptive.rounds=true"), "on_policy"),
        (("cero", *PILOTS), "on_policy"),  # it plans whole steps
    ],
    ids=" ".join,
)
def test_what_auto_stands_for(words, sync) -> None:
    config = compose_preset(list(words))
    assert config.allocator["form"] == "auto"
    for holds, form in ((True, sync), (False, "on_policy")):
        settled = settle(config, holds=holds)
        assert settled.allocator["form"] == form
        assert settle(settled, holds=not holds) == settled  # once
        policy = build_policy(settled)
        assert policy.allocator.config.form == form and policy.allocator.pipelined == (form == "pipelined")
    assert build_policy(config).digest() == build_policy(settle(config)).digest()


@pytest.mark.parametrize("form", ["on_policy", "pipelined"])
def test_what_is_said_stays(form) -> None:
    config = compose_preset(["pilot_commit", f"adaptive.allocator.form={form}"])
    assert settle(config, holds=True) is config and settle(config, holds=False) is config


def test_a_policy_has_the_fingerprint_of_its_form() -> None:
    """Those that snapshots of before have: the default was ``on_policy``."""
    before = {"on_policy": "40ed8d9758a5f072", "pipelined": "3c2f2549315ef11f"}
    config = compose_preset(["pilot_commit"])
    assert build_policy(settle(config, holds=False)).digest() == before["on_policy"]
    assert build_policy(settle(config, holds=True)).digest() == before["pipelined"]


def test_a_sampler_that_plans_steps_refuses_what_is_held() -> None:
    with pytest.raises(ConfigError, match="on-policy form"):
        build_policy(compose_preset(["cero", *PILOTS, "adaptive.allocator.form=pipelined"]))


def test_a_part_by_itself_is_of_the_sync_trainer() -> None:
    assert PilotCommit().can_hold and PilotCommit().pipelined
    assert not PilotCommit({"hold_surplus": True}).pipelined
    assert PilotCommit().config.form == "auto"  # settling is the policy's


# -- records ------------------------------------------------------------------------------------------------


def recorded(folder, stream: bool, **options) -> dict:
    """Six steps on a tape; the header."""
    options = dict(filter="band", batch=4, n=8, p=HALF, rounds=False) | options
    made = make_stream_engine if stream else make_engine
    engine, world = made(
        "epoch", options.pop("allocator"), **options, **({"stream": AsyncFacts(warmup=4)} if stream else {})
    )
    tape = Tape(folder, engine)
    if stream:
        arrivals = Arrivals(world)
        for step in range(1, 7):
            arrivals.step(engine, step)
    else:
        run(engine, world, 6)
    tape.close()
    return json.loads((tape.folder / HEADER).read_text())


@pytest.mark.parametrize(("stream", "form"), [(False, "pipelined"), (True, "on_policy")])
def test_a_record_says_what_the_form_was(tmp_path, stream, form) -> None:
    header = recorded(tmp_path, stream, allocator={"name": "pilot_commit", "n_pilot": 2})
    assert header["adaptive"]["allocator"]["form"] == form
    assert replay(tmp_path / "attempt-0").identical


@pytest.mark.parametrize("stream", [False, True])
def test_a_record_that_does_not_say_is_of_before(tmp_path, stream) -> None:
    header = recorded(tmp_path, stream, allocator={"name": "pilot_commit", "n_pilot": 2, "form": "on_policy"})
    del header["adaptive"]["allocator"]["form"]
    header["version"] = 1  # of which there are no sums, so that the header may be written anew
    (tmp_path / "attempt-0" / HEADER).write_text(json.dumps(header))
    report = replay(tmp_path / "attempt-0")
    assert report.identical and report.steps == 6, str(report)


# -- a change within a run ----------------------------------------------------------------------------------


def test_groups_that_were_held_commit_under_the_other_form() -> None:
    options = dict(filter="band", batch=4, n=8, p=HALF, rounds=False)
    engine, world = make_engine("epoch", {"name": "pilot_commit", "n_pilot": 2}, **options)
    run(engine, world, 3)
    held = set(engine.held.ticket.tolist())
    assert len(held) >= 4
    other, _ = make_engine(
        "epoch", {"name": "pilot_commit", "n_pilot": 2, "form": "on_policy"}, world=world, table=engine.table, **options
    )
    other.load_state_dict(engine.state_dict())
    results = run(other, world, 4, start=4)
    assert held & set(results[0].groups.ticket[results[0].trained].tolist())
    assert not len(other.held) and all(r.trained.sum() == 4 for r in results)
    assert results[-1].groups.lag.max() == 0


def test_without_a_word_a_configuration_has_no_form() -> None:
    """Whoever builds one by hand gets the same as with the word."""
    config = AdaptiveConfig(allocator={"name": "pilot_commit"})
    assert settle(config).allocator["form"] == "pipelined"
    assert settle(AdaptiveConfig()) == AdaptiveConfig()
