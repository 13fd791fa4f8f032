"""What the training benchmarks compare, as words after ``+adaptive=``: the same names on the tiny model and on real verl."""

from __future__ import annotations

#: GRESO that skips more: the published target lets a quarter of what is generated be without variance.
TIGHT = ["greso", "adaptive.sampler.target=0.05", "adaptive.sampler.p_easy=0.25", "adaptive.sampler.p_hard=0.25"]
#: Rows of Pilot-Commit were run when commits within the step were its default, and so keep their name and their meaning.
_ON_POLICY = "adaptive.allocator.form=on_policy"

#: The presets as shipped.
SHIPPED: dict[str, list[str]] = {
    "grpo": ["grpo"],
    "dapo": ["dapo"],
    "greso": ["greso"],
    "aero": ["aero"],
    "cero": ["cero"],
    "pilot_commit": ["pilot_commit", _ON_POLICY],
}

#: The preset ``full`` of 0.1.0, which ``solo`` replaced: its parts, under the name that the results have.
FULL: dict[str, list[str]] = {
    "full": ["dapo", "adaptive/sampler=mopps_by_source", "adaptive/allocator=aero"],
}

#: Ablations: the papers' ingredients one at a time, and put together.
INGREDIENTS: dict[str, list[str]] = {
    # one at a time
    "greso-tight": TIGHT,
    "aero-rescue": ["grpo", "adaptive/allocator=aero", "adaptive.refill=false"],
    "aero-reject": ["grpo", "adaptive/filter=aero", "adaptive.refill=false"],
    "aero-beta": ["grpo", "adaptive/advantage=beta"],
    "cero-select": ["cero", "adaptive.sampler.n_max=1"],
    "cero+informative": ["cero", "adaptive/filter=informative"],
    "pilots": ["dapo", "adaptive/allocator=pilot_commit", "adaptive/filter=band", _ON_POLICY],
    "pilot_commit-pipelined": ["pilot_commit", "adaptive.allocator.form=pipelined"],
    # of several papers together
    "rescue+informative": ["dapo", "adaptive/allocator=aero"],
    "mopps+keep_all": ["grpo", "adaptive/sampler=mopps"],
    "mopps+informative": ["dapo", "adaptive/sampler=mopps"],
    "mopps+aero": ["aero", "adaptive/sampler=mopps"],
    # `full` without what it adds to MoPPS
    "full-no_prior": [*FULL["full"], "adaptive.sampler.source_prior=0"],
    "full-no_decay": [*FULL["full"], "adaptive.sampler.decay=1"],
    "full-published_mopps": ["dapo", "adaptive/sampler=mopps", "adaptive/allocator=aero"],
}

_SPREAD = ("adaptive.batch_unit=rollouts",)

#: The store as the baseline, beside fair ones: groups of other sizes with the same rollouts a step.
SOLO: dict[str, list[str]] = {
    "solo": ["solo"],
    "solo-2": ["solo", "adaptive.allocator.n=2"],
    "spo": ["spo"],
    # one rollout a prompt, and a critic
    "sao": ["sao"],
    # fair baselines
    "grpo-2": ["grpo", *_SPREAD, "adaptive.allocator.n=2"],
    "grpo-4": ["grpo", *_SPREAD, "adaptive.allocator.n=4"],
    "reinforce": ["grpo", *_SPREAD, "adaptive.allocator.n=1"],
    "dapo-mixed": ["dapo", "adaptive/sampler=mixed"],
}

#: Ablations: ``solo`` without what it is made of, and with other options.
SOLO_PARTS: dict[str, list[str]] = {
    "reinforce-spread": ["grpo", *_SPREAD, "adaptive.allocator.n=1", "adaptive/sampler=spread"],
    "solo-4": ["solo", "adaptive.allocator.n=4"],
    "solo-epoch": ["solo", "adaptive/sampler=epoch"],
    "solo-no_source": ["solo", "adaptive.sampler.prior=all", "adaptive.advantage.prior=all"],
    "solo-no_prompt": ["solo", "adaptive.advantage.strength=1e9"],
    "solo-whiten": ["solo", "adaptive.advantage.scale=whiten"],
    "solo-thin": ["solo", "adaptive.advantage.thin=1"],
    "solo-thin1.5": ["solo", "adaptive.advantage.thin=1.5"],
    "solo-floor.05": ["solo", "adaptive.sampler.floor=0.05"],
    "solo-floor.2": ["solo", "adaptive.sampler.floor=0.2"],
    "solo-draw_sharp": ["solo", "adaptive.sampler.strength=1", "adaptive.sampler.decay=0.95"],
    "solo-strength2": ["solo", "adaptive.advantage.strength=2"],
    "solo-strength8": ["solo", "adaptive.advantage.strength=8"],
    "solo-decay.8": ["solo", "adaptive.advantage.decay=0.8"],
    "solo-decay.95": ["solo", "adaptive.advantage.decay=0.95"],
}
