"""The runs of :mod:`benchmarks.long_answers` on one start-up of verl, whose own trainer looks as often as ours does."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from examples.cpu import several

#: Seconds between two looks, as ``adaptive.poll_interval``. verl's own is 2, which no option reaches: nothing beside steps of
#: minutes, and half of a step here.
POLL = 0.1


class Quick(several.Several):
    """verl's driver for several runs, with verl's replay buffer looking every :data:`POLL` seconds."""

    def run(self, config: DictConfig) -> None:
        real = ReplayBuffer.__init__

        def quick(self: Any, *args: Any, **kwargs: Any) -> None:
            real(self, *args, **{"poll_interval": POLL, **kwargs})

        ReplayBuffer.__init__ = quick
        super().run(config)


if __name__ == "__main__":
    several.main(Quick)
