"""Epoch order and the size of rounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.samplers.simulate import play, progress_at
from tests.world import make_engine
from verl_adaptive.errors import ConfigError
from verl_adaptive.samplers.epoch import Epoch
from verl_adaptive.samplers.rounds import RoundConfig, round_size


def at(need: int, finished: int = 0, degenerate: int = 0, opened: int = 0, batch: int = 256):
    progress = progress_at(1, batch=batch, kept=batch - need)
    progress.last_finished, progress.last_degenerate, progress.open = finished, degenerate, opened
    return progress


GRESO = RoundConfig(adaptive=True)


@pytest.mark.parametrize(
    ("config", "progress", "size"),
    [
        (RoundConfig(), at(256), 256),
        (RoundConfig(), at(40, 256, 216), 40),
        (RoundConfig(), at(0), 0),
        (RoundConfig(prompts=384), at(256), 384),
        (RoundConfig(prompts=384), at(1, 384, 129), 384),
        (GRESO, at(256), 384),  # 1.5 B
        (GRESO, at(56, 384, 184), 134),  # ⌊1.25 · 56 / (200/384)⌋
        (GRESO, at(10, 384, 138), 64),  # the least, B / 4
        (GRESO, at(200, 384, 328), 384),  # never above D
        (GRESO, at(256, 384, 384), 384),  # ζ = 1: the official code divides by zero
        (GRESO, at(0, 384, 128), 0),
        (RoundConfig(adaptive=True, prompts=32), at(10, 32, 0, batch=32), 12),
        (RoundConfig(adaptive=True, prompts=4), at(8, batch=8), 4),
        (RoundConfig(adaptive=True, least=1), at(1, 64, 0), 1),
        (RoundConfig(), at(256, 500, 400, opened=256), 0),  # what waits for a top-up fills the batch
        (RoundConfig(), at(256, 500, 400, opened=200), 56),
        (GRESO, at(256, 250, 250, opened=150), 282),  # ⌊1.25 · 106 / (150/400)⌋ = 353, and see below
    ],
)
def test_sizes(config, progress, size):
    if progress.open == 150:
        size = math.floor(1.25 * 106 / (150 / 400))
    assert round_size(config, progress) == size


@given(
    batch=st.integers(1, 300),
    kept=st.integers(0, 400),
    finished=st.integers(0, 500),
    share=st.floats(0, 1),
    least=st.none() | st.integers(1, 400),
    full=st.none() | st.integers(1, 600),
)
@settings(max_examples=300)
def test_adaptive_size_is_the_formula_within_its_limits(batch, kept, finished, share, least, full):
    degenerate = int(share * finished)
    progress = progress_at(1, batch=batch, kept=kept)
    progress.last_finished, progress.last_degenerate = finished, degenerate
    size = round_size(RoundConfig(adaptive=True, prompts=full, least=least), progress)
    most = full or math.ceil(1.5 * batch)
    missing = max(0, batch - kept)
    if missing == 0:
        assert size == 0
    elif finished == 0 or degenerate == finished:
        assert size == most
    else:
        floor = least or max(1, batch // 4)
        wanted = 1.25 * missing * finished / (finished - degenerate)
        assert 1 <= size <= most
        assert size == pytest.approx(max(min(math.floor(wanted), most), min(floor, most), 1), abs=1)


def test_epoch_rolls_every_prompt_out_once_a_pass():
    p = np.full(48, 0.5)
    engine, _ = make_engine("epoch", p=p, batch=8, n=4)
    results = play(engine, p, 18)
    for epoch in range(3):
        seen = np.concatenate([r.groups.index for r in results[6 * epoch : 6 * epoch + 6]])
        assert sorted(seen) == list(range(48))
    assert all(r.rounds == 1 and r.ledger.rollouts.generated == 32 for r in results)


def test_dynamic_sampling_fills_the_batch_with_informative_groups():
    p = np.where(np.arange(64) % 2, 0.5, 1.0)
    engine, _ = make_engine({"name": "epoch", "round": {"prompts": 12}}, filter="informative", p=p, batch=8, n=8)
    for result in play(engine, p, 20):
        assert result.trained.sum() == 8 and not result.partial
        assert not result.groups.select(result.trained).degenerate().any()
        assert result.ledger.rollouts.generated == 12 * 8 * result.rounds


def test_a_round_smaller_than_the_batch_is_refused_unless_adaptive():
    with pytest.raises(ConfigError, match=r"adaptive\.sampler\.round\.prompts=4"):
        make_engine({"name": "epoch", "round": {"prompts": 4}}, batch=8)
    make_engine({"name": "epoch", "round": {"prompts": 4, "adaptive": True}}, batch=8)


@pytest.mark.parametrize(("key", "value"), [("prompts", 0), ("safety", 0.5), ("least", 0), ("prompt", 3)])
def test_bad_round_options_are_refused(key, value):
    with pytest.raises(ConfigError, match=rf"adaptive\.sampler\.round\.{key}"):
        Epoch({"round": {key: value}})
