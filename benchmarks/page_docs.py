"""The measured parts of ``docs/solo.md`` and ``docs/choosing.md``."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from benchmarks.cells import interval
from benchmarks.headline import Standing, less
from benchmarks.page_summary import POOL_NAMES, entry
from benchmarks.presets import FULL
from benchmarks.runs import Runs, pm, table

__all__ = ["choosing_block", "forms_block", "solo_block"]

#: What `solo` is shown beside, and how the table calls it.
BESIDE = {
    "solo": "`solo`",
    "spo": "`spo`",
    "grpo-4": "GRPO, groups of 4",
    "grpo-2": "GRPO, groups of 2",
    "grpo halved16": "GRPO, groups of 16",
    "grpo decay": "GRPO, learning rate decayed",
    "grpo-4 decay": "groups of 4, decayed",
    "solo decay": "`solo`, decayed",
    "reinforce": "REINFORCE, no memory",
    "grpo epochs2": "GRPO, two epochs a batch",
    "solo epochs2": "`solo`, two epochs a batch",
    "full": "`full`",
    "oracle": "oracle of prompts",
}
#: Ablations: what is different from `solo`.
WITHOUT = {
    "solo-2": "two rollouts a prompt",
    "solo-4": "four rollouts a prompt",
    "solo-epoch": "prompts in epoch order, no draw",
    "solo-no_prompt": "no memory of a prompt, its source's mean alone",
    "solo-no_source": "prior from all prompts, not from the data source",
    "reinforce": "no memory at all: the batch's mean, epoch order",
    "reinforce-spread": "no memory in the baseline: the batch's mean, the draw",
    "solo-whiten": "whitened over the batch",
    "solo-thin": "rows thinned without bias, τ = 1",
    "solo-decay.8": "ρ = 0.8 in the baseline",
    "solo-decay.95": "ρ = 0.95 in the baseline",
    "solo-strength2": "κ = 2 in the baseline",
    "solo-strength8": "κ = 8 in the baseline",
    "solo-floor.05": "floor 0.05",
    "solo-floor.2": "floor 0.2",
    "solo-draw_sharp": "a draw that trusts the prompt more (κ = 1, ρ = 0.95)",
    "spo": "SPO's options",
}


def solo_block(found: dict[str, dict[str, Standing]], tiny: Runs | None) -> list[str]:
    """`solo` beside the fair baselines in every pool, and what it is made of."""
    rows = []
    for name, title in BESIDE.items():
        if any(name in made for made in found.values()):
            rows.append([title, *(entry(made[name]) if name in made else "" for made in found.values())])
    lines = [
        "Rollouts until GRPO's final held-out accuracy (groups of 8) as a share of GRPO's, median over seeds, and accuracy at "
        "the end less GRPO's, ± half of the 95 % interval; each at its best learning rate, all with as many generated rollouts "
        "and as many updates a step ([how it is judged](../benchmarks/RESULTS.md)). Empty: not run.",
        "",
        *table(["", *(POOL_NAMES[pool] for pool in found)], rows),
    ]
    return _wrapped(lines + rivals(found) + (ablations(tiny) if tiny else []))


def _wrapped(lines: Sequence[str]) -> list[str]:
    """Sentences in lines of the width of the pages; tables as they are."""
    plain = {"break_long_words": False, "break_on_hyphens": False}
    return [part for line in lines for part in ([line] if line[:1] in ("", "|") else wrap(line, 118, **plain))]


#: Those that `solo` is compared with seed by seed.
RIVALS = ("reinforce", "grpo-4", "grpo decay", "grpo-4 decay", "grpo epochs2", "spo", "full", "oracle")


def rivals(found: dict[str, dict[str, Standing]]) -> list[str]:
    """Accuracy of `solo` less each rival's, and which differences are told apart."""
    rows, told = [], []
    for name in RIVALS:
        row = []
        for pool, made in found.items():
            gains = less(made["solo"], made[name]) if "solo" in made and name in made else []
            row.append(pm(gains, "{:+.3f}") + f" ({len(gains)})" if gains else "")
            if len(gains) > 2 and abs(interval(gains)[0]) > interval(gains)[1]:
                told.append(f"{'above' if interval(gains)[0] > 0 else 'below'} {BESIDE[name]} ({POOL_NAMES[pool]})")
        if any(row):
            rows.append([BESIDE[name], *row])
    if not rows:
        return []
    return [
        "`solo` less each of them, accuracy at the end of the same seed (seeds):",
        "",
        *table(["", *(POOL_NAMES[pool] for pool in found)], rows),
        f"Told apart, at 95 % and by three seeds or more: {'; '.join(told) or 'none'}. What is not listed may be chance.",
        "",
    ]


def ablations(runs: Runs, variant: str = "base") -> list[str]:
    """What each part and option adds: accuracy less `solo`'s of the same seed and learning rate."""
    lr = runs.best_lr(variant, "solo")
    if lr is None:
        return []
    whole = {s: runs.final((variant, "solo", lr, s)) or 0.0 for s in runs.seeds(variant, "solo", lr)}
    rows, told = [], []
    for name, title in WITHOUT.items():
        mine = {s: runs.final((variant, name, lr, s)) or 0.0 for s in runs.seeds(variant, name, lr) if s in whole}
        if not mine:
            continue
        pool = [
            (runs.final((variant, name, lr, s), "pool") or 0.0) - (runs.final((variant, "solo", lr, s), "pool") or 0.0)
            for s in mine
        ]
        gains = [value - whole[s] for s, value in mine.items()]
        rows.append([title, f"`{name}`", str(len(mine)), pm(gains, "{:+.3f}"), pm(pool, "{:+.3f}")])
        if len(gains) > 2 and abs(interval(gains)[0]) > interval(gains)[1]:
            told.append(f"`{name}`")
    if not rows:
        return []
    return [
        f"What it is made of, in one process at learning rate {lr:g}: accuracy at the end less that of `solo` of the same seed.",
        "",
        *table(["other than in `solo`", "name in the results", "seeds", "held-out", "prompts of the pool"], rows),
        f"Told apart from `solo` on held-out prompts, at 95 %: {', '.join(told) or 'none'}.",
        "",
    ]


#: Situation, what to take, pools that measure it, what is shown of them.
SITUATIONS: Sequence[tuple[str, str, tuple[str, ...], tuple[str, ...]]] = (
    (
        "prompts of all difficulties, met more than once",
        "[`solo`](solo.md)",
        ("real/base", "tiny/base"),
        ("solo", "grpo-4", "reinforce"),
    ),
    ("a larger pool", "[`solo`](solo.md)", ("real/large",), ("solo", "grpo-4", "reinforce")),
    (
        "most prompts solved or hopeless",
        "[`solo`](solo.md)",
        ("real/sparse", "tiny/sparse"),
        ("solo", "grpo-4", "reinforce", "full"),
    ),
    (
        "more prompts than rollouts, none met twice",
        "[`solo`](solo.md) with fine data sources",
        ("tiny/onepass",),
        ("solo", "reinforce", "grpo-4"),
    ),
    ("rewards that err", "[`solo`](solo.md)", ("tiny/noise",), ("solo", "reinforce", "grpo-4")),
    (
        "groups of 8 must stay, most prompts solved or hopeless",
        f"[`full`](combinations.md#full): `+adaptive={' '.join(FULL['full'])}`",
        ("real/base", "real/sparse", "tiny/base", "tiny/sparse"),
        ("full", "dapo-mixed", "cero", "greso"),
    ),
)
UNMEASURED = (
    (
        "a critic, or an estimator of your own",
        "[`dapo`](baselines.md) with `adaptive/sampler=mixed`: `solo` brings its own",
    ),
    (
        "prompts much longer than responses",
        "[`solo`](solo.md) with `adaptive.allocator.n=4`: prefill is shared in a group only",
    ),
    (
        "a judge that changes, a reward that drifts",
        "[`grpo`](baselines.md) or [`dapo`](baselines.md): a group needs no memory",
    ),
    (
        "training is the bottleneck",
        "[`grpo`](baselines.md): the same gradient from fewer tokens "
        "([bill](../README.md#presets-and-what-they-change-in-the-bill)); `solo` with `adaptive.advantage.thin=1`",
    ),
    ("a comparison with a paper", "the paper's preset, as published"),
)


def forms_block(tiny: Runs) -> list[str]:
    """Pilot-Commit's published form beside the other, in one process."""
    rows = []
    for lr in tiny.lrs("base"):
        keys = [("base", preset, lr) for preset in ("pilot_commit-pipelined", "pilot_commit")]
        seeds = sorted(set(tiny.seeds(*keys[0])) & set(tiny.seeds(*keys[1])))
        published, other = ([tiny.final((*key, seed)) for seed in seeds] for key in keys)
        both = [(a, b) for a, b in zip(published, other, strict=True) if a is not None and b is not None]
        if both:
            ahead = pm([a - b for a, b in both], "{:+.3f}")
            rows.append([f"{lr:g}", str(len(both)), pm(a for a, _ in both), pm(b for _, b in both), ahead])
    return table(("learning rate", "seeds", "`pipelined`", "`on_policy`", "one less the other, by seed"), rows)


def choosing_block(found: dict[str, dict[str, Standing]]) -> list[str]:
    """A line a situation: what to take, and what was measured."""
    rows = []
    for situation, take, pools, names in SITUATIONS:
        said = []
        for pool in pools:
            shown = [f"`{n}` {entry(found[pool][n])}" for n in names if pool in found and n in found[pool]]
            if shown:
                said.append(f"{POOL_NAMES[pool]}: {'; '.join(shown)}")
        rows.append([situation, take, "<br>".join(said) or "no"])
    rows += [[situation, take, "no"] for situation, take in UNMEASURED]
    text = [
        *wrap(
            "A measured entry is the share of GRPO's rollouts (groups of 8) until GRPO's final held-out accuracy, and accuracy at the "
            "end less GRPO's, ± half of the 95 % interval over seeds; *real* is verl and vLLM on CPU, *tiny* one process; both "
            'models are tiny. "no" is a reason without a measurement.',
            118,
        ),
        "",
    ]
    head = ["situation", "take", "measured"]
    return [
        *text,
        "| " + " | ".join(head) + " |",
        "|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]
