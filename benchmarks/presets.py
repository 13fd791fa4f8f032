"""What the training benchmarks compare, as words after ``+adaptive=``: the same names on the tiny model and on real verl."""

from __future__ import annotations

__all__ = ["INGREDIENTS", "SHIPPED"]

_PILOTS = ("adaptive/allocator=pilot_commit", "adaptive/filter=band")

#: The presets as shipped, and DAPO with the round size of GRESO's paper.
SHIPPED: dict[str, list[str]] = {
    "grpo": ["grpo"],
    "dapo": ["dapo"],
    "dapo-sized": ["dapo", "adaptive.sampler.round.adaptive=true"],
    "greso": ["greso"],
    "aero": ["aero"],
    "cero": ["cero"],
    "pilot_commit": ["pilot_commit"],
    "full": ["full"],
}

#: Ablations: the papers' ingredients one at a time, and put together.
INGREDIENTS: dict[str, list[str]] = {
    # one at a time
    "greso-gate": ["greso", "adaptive.sampler.round.adaptive=false"],
    "greso+keep_all": ["grpo", "adaptive/sampler=greso", "adaptive.sampler.round.adaptive=false"],
    "aero-rescue": ["grpo", "adaptive/allocator=aero", "adaptive.refill=false"],
    "aero-reject": ["grpo", "adaptive/filter=aero", "adaptive.refill=false"],
    "aero-beta": ["grpo", "adaptive/advantage=beta"],
    "cero-select": ["cero", "adaptive.sampler.n_max=1"],
    "cero+informative": ["cero", "adaptive/filter=informative"],
    "pilots": ["dapo", *_PILOTS],
    "pilot_commit-sized": ["pilot_commit", "adaptive.allocator.sized_to_need=true"],
    "pilot_commit-pipelined": ["pilot_commit", "adaptive.allocator.form=pipelined"],
    # of several papers together
    "greso+pilot_commit": ["greso", *_PILOTS, "adaptive.allocator.sized_to_need=true"],
    "rescue+informative": ["dapo", "adaptive/allocator=aero"],
    "greso+rescue+informative": ["greso", "adaptive/allocator=aero"],
    "greso+aero": ["aero", "adaptive/sampler=greso", "adaptive.sampler.round.adaptive=false"],
    "mopps+keep_all": ["grpo", "adaptive/sampler=mopps"],
    "mopps+informative": ["dapo", "adaptive/sampler=mopps"],
    "mopps+aero": ["aero", "adaptive/sampler=mopps"],
    # `full` without what it adds to MoPPS
    "full-no_prior": ["full", "adaptive.sampler.source_prior=0"],
    "full-no_decay": ["full", "adaptive.sampler.decay=1"],
    "full-published_mopps": ["full", "adaptive/sampler=mopps"],
}
