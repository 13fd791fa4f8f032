"""The generated blocks of the README and the docs: lines of Markdown from the JSON, as the sections of ``RESULTS.md`` are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from textwrap import wrap

import numpy as np

from benchmarks.runs import Runs, pm, table
from benchmarks.sections import (
    Found,
    Row,
    counted,
    difference,
    driver_seconds,
    long_rows,
    noise_scales,
    share,
    step_ratios,
    thinned_pools,
)
from benchmarks.standings import POOL_NAMES, less
from verl_adaptive.commands.parts import describe
from verl_adaptive.significance import significant

#: Pools that nothing was chosen on, whose settings are those of few users.
HELD_BACK = ("tiny/offsets", "tiny/pool128", "tiny/batch512")


def _shown(pool: str) -> bool:
    """Not the pools of the tiny model that the real pipeline has, too."""
    return pool not in ("tiny/base", "tiny/sparse")


def evidence(found: Found, runs: Mapping[str, Runs]) -> list[str]:
    """The README's table: pool and method, rollouts to GRPO's accuracy, accuracy difference; and what a step of `solo` takes."""
    rows = []
    for pool, made in found.items():
        if not _shown(pool) or pool in ("real/large", "tiny/noise", "tiny/zero"):  # docs/solo.md has them
            continue
        best = made["grpo"].best_grpo
        for name in ("solo",) if pool in HELD_BACK else dict.fromkeys(("solo", "reinforce", best)):
            if name != "grpo" and (s := made.get(name)) is not None:
                seeds = f", {len(s.gains)} seed{'s' * (len(s.gains) > 1)}"
                rows.append(
                    [f"{POOL_NAMES[pool]}{seeds}: `{name}`", share(s.of_grpo), difference(list(s.gains.values()))]
                )
    return [
        *table(["pool and method", "rollouts to GRPO's accuracy", "accuracy difference"], rows),
        *grpo_itself(found),
        *pretrained_step(runs),
        *pretrained_rate(runs),
        "[Beside verl's own GRPO](docs/solo.md#what-a-step-costs).",
    ]


def grpo_itself(found: Found) -> list[str]:
    """Where GRPO first has its own final accuracy: before its end, since accuracies waver."""
    at = [made["grpo"].of_grpo or 1.0 for pool, made in found.items() if _shown(pool)]
    return [f"GRPO itself first reaches that accuracy at {min(at):.2f} to {max(at):.2f}, by pool."]


def pretrained_thin(runs: Mapping[str, Runs]) -> str:
    """What thinned rows train and gain on the pretrained model."""
    made = runs["pretrained"]
    ratios = step_ratios(made, "solo-thin")["trained"]
    thin, solo, grpo = (("128", preset, made.best_lr("128", preset)) for preset in ("solo-thin", "solo", "grpo"))
    gains, beside = made.less(thin, grpo), made.less(thin, solo)
    return (
        f"With `thin` it trains {np.mean(ratios):.2f} ×; accuracy minus GRPO's: {difference(gains)} ({len(gains)} seeds), minus that "
        f"without `thin`: {difference(beside)} ({len(beside)}). "
    )


def pretrained_starts(runs: Mapping[str, Runs]) -> list[str]:
    """The gain of `solo` on the pretrained model by the weights that its runs started from."""
    made = runs["pretrained"]
    solo, grpo = (("128", preset, made.best_lr("128", preset)) for preset in ("solo", "grpo"))
    by_start: dict[object, list[float]] = {}
    for seed, gain in zip(made.pairs(solo, grpo), made.less(solo, grpo), strict=True):
        by_start.setdefault(made.start(made.cells[(*solo, seed)]), []).append(gain)
    told = [f"{difference(gains)} ({len(gains)})" for gains in by_start.values()]
    text = f"- On the pretrained model, in steps of 128, `solo`'s accuracy minus GRPO's by starting weights (seeds): {', '.join(told)}."
    return wrap(text, 118, subsequent_indent="  ", break_on_hyphens=False)


def pretrained_rate(runs: Mapping[str, Runs]) -> list[str]:
    """A warning where GRPO's best learning rate on the pretrained model is the lowest that it ran at."""
    made = runs["pretrained"]
    if made.best_lr("128", "grpo") != min(made.rates("128", "grpo")):
        return []
    return ["GRPO's learning rate on the pretrained model is the lowest tried."]


def pretrained_step(runs: Mapping[str, Runs]) -> list[str]:
    """What a step of `solo` takes on the pretrained model."""
    found = step_ratios(runs["pretrained"], "solo")
    text = (
        f"On the pretrained model a step of `solo` generates {np.mean(found['generated']):.2f} ×, trains "
        f"{np.mean(found['trained']):.2f} × and, beside other work on the machine, takes {pm(found['seconds'], '{:.2f}')} × what "
        "`+adaptive=grpo` does."
    )
    return wrap(text, 118, break_on_hyphens=False)


#: Preset → its page.
PRESETS = {
    "grpo": "choosing.md#grpo",
    "solo": "solo.md",
    "greso": "papers.md#greso",
    "aero": "papers.md#aero",
    "cero": "papers.md#cero",
    "pilot_commit": "papers.md#pilot_commit",
    "dapo": "choosing.md#dapo",
    "spo": "solo.md#spo",
    "sao": "solo.md#sao",
}


def cost(clock: Row, long: Row, found: Found) -> list[str]:
    """Cost of a step, of plain GRPO's: rollouts and generation time as measured on long answers, and the time that the model gives.

    Below it: rollouts of the presets that drop groups, as measured where fewer groups are informative.
    """
    measured = {row["arm"].strip("`"): row for row in long_rows(long)}
    rows, presets = [], describe()["presets"]
    for preset, page in PRESETS.items():
        about = presets[preset]["about"].rstrip(".")
        about = about[0].lower() + about[1:]
        mine, simulated = measured.get(preset), clock["policies"][preset]["time"]
        told = ["–", "–"] if mine is None else [mine[name].split(" ±")[0] for name in ("rollouts", "gen")]
        rows.append([f"[`+adaptive={preset}`](docs/{page}): {about}", *told, f"{simulated:.2f}"])
    heads = ["rollouts a step, measured", "generation time, measured", "generation time, simulated"]
    # the error bars are RESULTS'; the front page says how large they are
    halves = [mine["gen"].split("± ")[1] for preset in PRESETS if (mine := measured.get(preset))]
    sparse = found["pretrained/128"]
    more = [f"`{preset}` {sparse[preset].step:.2f}" for preset in DROPPING]
    said = (
        f"Measured times: ± {min(halves)}–{max(halves)}, where GRPO trains {measured['grpo']['trained']:.0%}. "
        f"Where GRPO trains {sparse['grpo'].trained:.0%} of what it generates "
        f"([pretrained](benchmarks/RESULTS.md#pretrained-128-rollouts-a-step)), rollouts a step: {', '.join(more)}."
    )
    return [*table(["preset", *heads], rows), *wrap(said, 118, break_on_hyphens=False)]


def measured_costs(long: Row, found: Found) -> dict[str, str]:
    """Preset → what :func:`cost` has of it as measured, for ``doctor``."""
    arms = {row["arm"].strip("`"): row for row in long_rows(long)}
    sparse, out = found["pretrained/128"], {}
    for preset in PRESETS:
        if (mine := arms.get(preset)) is not None and preset != "grpo":
            out[preset] = (
                f"{mine['rollouts']} x GRPO's rollouts and {mine['gen']} x its generation time where "
                f"GRPO trained {arms['grpo']['trained']:.0%} of what it generated"
            )
            if preset in DROPPING:
                out[preset] += (
                    f", {sparse[preset].step:.2f} x its rollouts where it trained {sparse['grpo'].trained:.0%}"
                )
    return out


#: Presets that draw further prompts for the groups that they drop.
DROPPING = ("greso", "pilot_commit", "dapo")

#: Situation, what to take, and the pool and policy that measure it.
SITUATIONS: Sequence[tuple[str, str, str, str]] = (
    ("verifiable rewards, a pretrained model", "[`solo`](solo.md)", "pretrained/128", "solo"),
    ("prompts of all difficulties, met more than once", "[`solo`](solo.md)", "real/base", "solo"),
    ("a larger pool", "[`solo`](solo.md)", "real/large", "solo"),
    ("most prompts solved or hopeless", "[`solo`](solo.md)", "real/sparse", "solo"),
    ("the same, but you need groups", "[`full`](#full)", "real/sparse", "full"),
    (
        "more prompts than rollouts: none is met twice",
        "[`solo`](solo.md) with fine-grained data sources",
        "tiny/onepass",
        "solo",
    ),
    ("rewards that err at random, one in ten", "[`solo`](solo.md)", "tiny/noise", "solo"),
    ("the same, with another offset in each data source", "[`solo`](solo.md)", "tiny/offsets", "solo"),
    ("all prompts in every step", "[`grpo`](#grpo); the figures are `solo`'s", "tiny/pool128", "solo"),
    ("thousands of rollouts a step", "[`solo`](solo.md): less to gain", "tiny/batch512", "solo"),
)
UNMEASURED = (
    ("rewards that are mostly noise", "[`grpo`](#grpo)"),
    ("nearly every group is informative", "no preset that skips prompts"),
    (
        "prompts much longer than responses",
        "[`solo`](solo.md) with `adaptive.allocator.n=4`: prefill is shared in a group",
    ),
    ("a judge that changes, a reward that drifts", "[`grpo`](#grpo) or [`dapo`](#dapo)"),
    ("training is the bottleneck", "[`grpo`](#grpo): the same gradient from fewer tokens"),
    ("a critic", "[`sao`](solo.md#sao)"),
    ("an estimator of your own", "[`dapo`](#dapo) with `adaptive/sampler=mixed`"),
    ("a comparison with a paper", "the paper's preset, as published"),
)


def choosing(found: Found) -> list[str]:
    """A line a situation: what to take, and what was measured of it and of REINFORCE."""
    rows = []
    for situation, take, pool, name in SITUATIONS:
        made = found[pool]
        told = [share(made[name].of_grpo), counted(made[name]), counted(made.get("reinforce"))]
        rows.append([situation, take, *told])
    heads = ["situation", "take", "rollouts to GRPO's accuracy", "accuracy difference (seeds)", "REINFORCE's (seeds)"]
    reasoned = ["Not measured; by what each method needs:", "", *table(["situation", "take"], UNMEASURED, left=2)]
    return [*table(heads, rows, left=2), *reasoned]


#: Of these, the ones that the README has, too.
COMMON = ("training is the bottleneck", "a critic")


def situations(found: Found) -> list[str]:
    """The README's table: the situations of :func:`choosing` with one number each."""
    rows = [[situation, take, share(found[pool][name].of_grpo)] for situation, take, pool, name in SITUATIONS]
    rows += [[situation, take, "–"] for situation, take in UNMEASURED if situation in COMMON]
    lines = table(["your run", "take", "rollouts to GRPO's accuracy"], rows, left=2)
    # the links are docs/choosing.md's
    return [line.replace("](#", "](choosing.md#").replace("](", "](docs/") for line in lines]


#: The columns of docs/solo.md, and their titles. The other forms of GRPO are in RESULTS.md alone.
TO_TARGET = {"solo": "`solo`", "reinforce": "REINFORCE", "grpo-4": "GRPO, groups of 4"}
AT_THE_END = {"solo": "accuracy, `solo`", "reinforce": "accuracy, REINFORCE"}


def solo_block(found: Found, runs: Mapping[str, Runs], second: Sequence[str] = ()) -> list[str]:
    """`solo` beside the fair baselines: a row a pool; below it what is known of the second pretrained model."""
    rows = []
    for pool, made in found.items():
        if "solo" in made and _shown(pool):
            ahead = (made.get(name) for name in TO_TARGET)
            shares = ["–" if standing is None else share(standing.of_grpo) for standing in ahead]
            rows.append([POOL_NAMES[pool], *shares, *(counted(made.get(name)) for name in AT_THE_END)])
    return [
        "Rollouts to GRPO's final accuracy (groups of 8) as a share of the budget, and final accuracy minus GRPO's (seeds in",
        "brackets; bold: significant; [how it is judged, and all policies](../benchmarks/RESULTS.md#how-it-is-judged)):",
        "",
        *table(["pool", *TO_TARGET.values(), *AT_THE_END.values()], rows),
        *(f"- {line}" for line in grpo_itself(found)),
        *pretrained_starts(runs),
        *(f"- {line} A lower one may suit it better." for line in pretrained_rate(runs)),
        *wrap("".join(f"- {line}" for line in second if line), 118, subsequent_indent="  ", break_on_hyphens=False),
    ]


def gain_note(found: Found) -> list[str]:
    """How much of `solo`'s gain REINFORCE has."""
    shares, ahead = [], 0
    for pool, made in found.items():
        if {"solo", "reinforce"} <= set(made) and _shown(pool) and significant(list(made["solo"].gains.values())):
            solo, reinforce = made["solo"].gains, made["reinforce"].gains
            both = set(solo) & set(reinforce)
            shares.append(sum(reinforce[seed] for seed in both) / sum(solo[seed] for seed in both))
            ahead += significant(less(made["solo"], made["reinforce"]))
    text = (
        "Most of the gain is one rollout for each of more prompts: less noise in the gradient. REINFORCE with one rollout a "
        "prompt and the batch's mean as baseline has no memory. It reaches "
        f"{min(shares):.0%} to {max(shares):.0%} of `solo`'s gain in final accuracy over the {len(shares)} pools below where that gain is significant "
        f"(median {statistics.median(shares):.0%}; the seeds that both have). `solo` ends significantly above REINFORCE in {ahead or 'none'} of them."
    )
    return wrap(text, 118, break_on_hyphens=False)


def noise_note(data: Row, found: Found) -> list[str]:
    """From how many rollouts a step on less noise is worth little, and what was measured with many."""

    def span(step: int) -> str:
        medians = [statistics.median(at[step]) for (_, of), at in noise_scales(data).items() if of == "grpo"]
        return f"{min(medians):,.0f} to {max(medians):,.0f}"

    _, third, end = data["steps"]
    large = found["tiny/batch512"]["solo"]
    text = (
        "- In large steps less noise is worth less. "
        f"With 4,096 rollouts a step `solo` reaches GRPO's accuracy at {share(large.of_grpo)} of the budget, and ends "
        f"{difference(list(large.gains.values()))} above it. "
        f"The noise of GRPO's gradient equals its signal at {span(third)} rollouts a step, a third into a run, and "
        f"at {span(end)} at its end ([measured](../benchmarks/RESULTS.md#gradient-noise))."
    )
    return wrap(text, 118, subsequent_indent="  ", break_on_hyphens=False)


#: What the estimate for 8 GPUs assumes.
GPUS = 8
PREFILL = 10_000  # prompt tokens a second and GPU: a model of 7 B parameters
SHARES = (0.4, 0.8)  # of generation, in a step of verl's own GRPO
#: What was aimed at: tokens that train, of those generated; a step's time, of GRPO's; tokens that a limit on length leaves.
AIMS = {"thin": 0.6, "step": 1.1, "length": 0.75}


def step_ratios_in(results: Sequence[Row], preset: str, n: int) -> list[float]:
    """Seconds of a quickstart's training steps, as ratios to GRPO's of the same seed."""
    seconds = {(r["preset"], r["seed"]): r["seconds"] / r["steps"] for r in results if r["n"] == n}
    return [value / seconds["grpo", key[1]] for key, value in seconds.items() if key[0] == preset]


def step_ratio(results: Sequence[Row], preset: str, n: int) -> str:
    """Their mean, with its interval."""
    return pm(step_ratios_in(results, preset, n), "{:.2f}")


THIN, THINNED = "solo adaptive.advantage.thin=1", "`solo-thin`"


def _replica_prefixes(group: int) -> float:
    """Share of a group's prefixes that are in the cache of the replica they go to.

    Siblings are sent to the replica that has least to do, at random as good as: the first on each reads the prompt.
    """
    return 1 - GPUS * (1 - (1 - 1 / GPUS) ** group) / group


def _long_ratio(long: Row, what: str, other: str, arm: str = "`solo`") -> str:
    """Times of the steps with longer answers, as ratios to another arm's of the same repeat."""
    steps = {row["arm"]: row["runs"] for row in long["rows"]}
    return pm([mine[what] / theirs[what] for mine, theirs in zip(steps[arm], steps[other], strict=True)], "{:.2f}")


def step_cost(clock: Row, quickstart: Row, messages: Row, runs: Mapping[str, Runs]) -> list[str]:
    """What a step costs beside GRPO's: rollouts and seconds of the quickstart, and an estimate for several GPUs.

    ``messages`` has the quickstart with thinned rows, too.
    """
    first = quickstart["results"][0]
    group = first["n"]
    generation = {}
    for name in ("grpo", "solo"):
        entry = clock["policies"][name]
        read = entry["prefill"] * (1 - (_replica_prefixes(group) if name == "grpo" else 0)) / (GPUS * PREFILL)
        generation[name] = entry["seconds"] + read
    decode = generation["solo"] / generation["grpo"]

    def row(name: str, ratio: float, trained: float, measured: str) -> list[str]:
        ends = sorted(share * ratio + (1 - share) * trained for share in SHARES)
        low, high = (f"{end:.2f}" for end in ends)
        return [name, "1.00", f"{trained:.2f}", measured, low if low == high else f"{low} to {high}"]

    def trained(found: Sequence[Row], preset: str) -> float:
        same = [r for r in found if (r["preset"], r["n"]) == (preset, group)]
        return statistics.mean(r["trained"] / r["generated"] for r in same)

    results, together = quickstart["results"], messages["together"]
    rows = [
        row("verl's own GRPO", 1.0, 1.0, ""),
        row("`+adaptive=grpo`", 1.0, trained(results, "grpo"), "1.00"),
        row("`+adaptive=solo`", decode, trained(results, "solo"), step_ratio(results, "solo", group)),
        row(f"`solo` with `{THIN.split()[1]}`", decode, trained(together, THIN), step_ratio(together, THIN, group)),
    ]
    heads = ["", "rollouts generated", "rollouts trained", "step on two CPU cores", "step on 8 GPUs, estimated"]
    text = (
        f"Rollouts are shares of verl's own GRPO's. They and the step on two CPU cores are the quickstart's, of "
        f"{first['generated'] / first['steps']:.0f} very short answers. For 8 GPUs generation is assumed to be {SHARES[0]:.0%} to "
        f"{SHARES[1]:.0%} of GRPO's step and to take what the [clock](simulate.md#the-clock) says; the rest follows the rollouts "
        f"that train. {' '.join(pretrained_step(runs))} {pretrained_thin(runs)}"
        "[Where the time goes](../benchmarks/RESULTS.md#long-answers-on-the-real-pipeline)."
    )
    return [*table(heads, rows), *wrap(text, 118, break_on_hyphens=False)]


def step_note(clock: Row, quickstart: Row, thinned: Row, engine: Row, long: Row) -> str:
    """The figures behind the table of :func:`step_cost`, for ``RESULTS.md``; ``engine`` has vLLM's iterations in a quickstart."""
    results, group = thinned["results"], quickstart["results"][0]["n"]
    per_step = statistics.mean(
        r["seconds"] / r["steps"] for r in quickstart["results"] if (r["preset"], r["n"]) == ("grpo", group)
    )
    ends = {
        (r["preset"], r["seed"]): (r["curve"][-1][1], r["trained"] / r["generated"]) for r in results if r["n"] == group
    }
    rest = [(end - ends["solo", seed][0], trained) for (preset, seed), (end, trained) in ends.items() if preset == THIN]
    counted, parts, found = engine["arms"], thinned["training_seconds"], _replica_prefixes(group)
    training = {
        preset: statistics.mean(mine / grpo for mine, grpo in zip(parts[preset], parts["grpo"], strict=True))
        for preset in ("solo", THIN)
    }
    return (
        f"Behind [the cost of a step of `solo`](../docs/solo.md#what-a-step-costs). Against `+adaptive=grpo`, `solo`'s step takes "
        f"{_long_ratio(long, 'step', '`grpo`')} here, with `thin` {_long_ratio(long, 'step', '`grpo`', THINNED)}, measured while each "
        f"status of a prompt was a message of its own. In the quickstart a step of `+adaptive=grpo` takes {per_step:.1f} s; `thin` "
        f"trained {statistics.mean(trained for _, trained in rest):.0%} of the rollouts, and its final accuracy minus `solo`'s is "
        f"{difference([gap for gap, _ in rest])} ({len(rest)} seeds). Old log-probs and update alone took {training['solo']:.2f} and "
        f"{training[THIN]:.2f} times GRPO's. Generation takes about as long as GRPO's: vLLM runs "
        f"{counted['solo']['sequences_an_iteration']:.0f} sequences an iteration instead of "
        f"{counted['grpo']['sequences_an_iteration']:.0f}, in {counted['solo']['iterations'] / counted['grpo']['iterations']:.1f} times "
        f"as many iterations for the same tokens ([counted](results/engine_steps.json)). The estimate for {GPUS} GPUs has "
        f"{clock['policies']['grpo']['begun']:,.0f} rollouts a step and prompts of 512 tokens, read at {PREFILL:,} a second and GPU. "
        f"verl spreads a group over the {GPUS} replicas, so GRPO finds {found:.0%} of its prefixes in the cache, and `solo` reads "
        f"{1 / (1 - found):.1f} times as many prompt tokens, not {group} times."
    )


def aims_note(
    quickstart: Row, thin: Runs, messages: Row, driver: Row, caps: Row, roulette: Row, lost: Row, long: Row
) -> str:
    """What `solo`'s step was to become, and what of it was reached, for ``RESULTS.md``.

    ``messages`` has the quickstart with a message for each status of a prompt, and with statuses that share messages.
    """
    pools, group = thinned_pools(thin, "solo-thin"), quickstart["results"][0]["n"]
    few, many = ([p[0] for p in pools.values() if (p[0] <= AIMS["thin"]) == kept] for kept in (True, False))
    differ = sum(significant(gains) for _, gains in pools.values())
    steps = {
        form: " and ".join(step_ratio(messages[form], preset, group) for preset in ("solo", THIN))
        for form in ("apart", "together")
    }
    seeds = len({row["seed"] for row in messages["together"]})
    head = {(row["rollouts"], row["built_by"]): row["rows"] + row["shares"] + row["pickle"] for row in driver["heads"]}
    heads = ", ".join(
        f"{head[size, 'ours']:.1f} s for {head[size, 'verl']:.1f} s at {size:,} rollouts"
        for size in sorted({size for size, _ in head})
    )
    return (
        f"**Goals.** *At most {AIMS['thin']:.0%} of the tokens trained*: `thin` trains {min(few):.2f} to {max(few):.2f} in {len(few)} pools "
        f"and {min(many):.2f} to {max(many):.2f} in {len(many)}, so it is an option and not the default; in one process the "
        f"accuracy differs significantly in {differ or 'none'}. *A step of at most {AIMS['step']} times `+adaptive=grpo`'s*: "
        f"{'reached' if statistics.mean(step_ratios_in(quickstart['results'], 'solo', group)) <= AIMS['step'] else 'missed'} in the quickstart "
        f"({step_ratio(quickstart['results'], 'solo', group)}), open with "
        f"longer answers ({_long_ratio(long, 'step', '`grpo`')} and {_long_ratio(long, 'step', '`grpo`', THINNED)}; where half of the answers get lost, "
        f"{_long_ratio(lost, 'step', 'grpo', 'solo')} and {_long_ratio(lost, 'step', 'grpo', 'solo-thin')}). Side by side the quickstart's steps, of `solo` and with `thin`, took {steps['together']} where prompts share status messages, "
        f"as they do here, and {steps['apart']} with one for each, as verl sends them ({seeds} seeds). *Half of a step's head*: reached, {heads}. {length_note(caps, roulette, lost)}"
    )


def length_note(caps: Row, roulette: Row, lost: Row) -> str:
    """What a limit on length leaves of the tokens: simulated, and on the real pipeline where many answers get lost."""
    left, of = [row["tokens"] for row in caps["rows"]], lost["settings"]
    return (
        f"*At most {AIMS['length']} of the generated tokens by a limit on length*: in {sum(tokens <= AIMS['length'] for tokens in left)} "
        f"of {len(left)} simulated settings. On the real pipeline, with a model that gets lost in {of['lost']:.0%} of its answers, 1.25 "
        f"times the 0.99 quantile of the lengths of successes is {of['limit']} tokens in place of {of['cap']}, and leaves "
        f"{_long_ratio(lost, 'tokens', 'solo', 'limited')} of the tokens ([measured](results/lost_answers.json)). Such a limit is "
        f"verl's own `data.max_response_length`; none of ours was built. Roulette (beyond some length an answer goes on with a probability, and "
        f"weighs the more then) never pays in the simulator: tokens times the mean square of the weights is "
        f"{min(row['tokens_noise'] for row in roulette['rows']):.2f} of what they are without it, at best."
    )


def critic_note(found: Found) -> list[str]:
    """`sao` beside `solo` and GRPO in one process."""
    made = found["tiny/base"]
    sao, solo, grpo = made["sao"], made["solo"], made["grpo"]
    text = (
        f"On answers of two to five tokens, in one process, it reaches GRPO's accuracy at {share(sao.of_grpo)} of the budget "
        f"(`solo`: {share(solo.of_grpo)}). Final accuracy minus GRPO's: {difference(less(sao, grpo))}; minus that of `solo`: "
        f"{difference(less(sao, solo))} ({len(sao.gains)} seeds)."
    )
    return wrap(text, 118, break_on_hyphens=False)


def forms_block(held_back: Runs) -> list[str]:
    """Pilot-Commit's two forms beside GRPO in one process, on seeds that nothing was chosen on."""
    presets = ("grpo", "pilot_commit-pipelined", "pilot_commit")
    rows = []
    for lr in held_back.lrs("base"):
        keys = [("base", preset, lr) for preset in presets]
        seeds = held_back.seeds(*keys[0])
        grpo, pipelined, on_policy = (np.array([held_back.final((*key, s)) for s in seeds]) for key in keys)
        gains = (pipelined - grpo, on_policy - grpo, pipelined - on_policy)
        rows.append([f"{lr:g}", str(len(seeds)), f"{grpo.mean():.3f}", *(difference(list(gain)) for gain in gains)])
    ends = [[held_back.curve(key, "updates")[-1] for key in held_back.cells if key[1] == preset] for preset in presets]
    grpo, pipelined, on_policy = (round(float(np.mean(counts))) for counts in ends)
    said = f"Optimizer updates, on average: GRPO {grpo}, `pipelined` {pipelined}, on-policy {on_policy}."
    heads = ["learning rate", "seeds", "GRPO", "`pipelined` minus GRPO", "on-policy minus GRPO"]
    return [*table([*heads, "`pipelined` minus on-policy"], rows), said]


def async_table(data: Row) -> list[str]:
    """Generation time one batch ahead, beside ``sync``: simulated, as ratios to GRPO's in ``sync``."""
    rows = []
    for policy, ahead in data["one batch ahead"].items():
        sync = data["policies"][policy]["time"]
        rows.append([f"`{policy}`", f"{sync:.2f}", f"{ahead['time']:.2f}", f"{ahead['age']:.1f}"])
    return table(["policy", "`sync`", "one batch ahead", "age of a trained group, updates"], rows)


def driver_note(data: Row, queue: Row) -> list[str]:
    """What a prompt for each rollout costs the driver and TransferQueue, as limits of `solo`; ``queue`` in milliseconds."""
    found = {(row["preset"], row["rollouts"]): driver_seconds(row) for row in data["rows"]}
    each, prompt = (queue["median"]["together"][what]["controller"] / 1000 for what in ("row", "prompt"))
    size = max(size for _, size in found)
    text = (
        "The work of verl's driver grows with prompts, that of TransferQueue's only controller with rollouts. "
        f"{size:,} rollouts a step take {found['solo', size]:.1f} processor seconds of the driver (GRPO {found['grpo', size]:.1f}) and "
        f"{size * (each + prompt):.0f} of the controller (GRPO {size * (each + prompt / data['groups_of']):.0f}), most of them during "
        "generation ([driver](../benchmarks/RESULTS.md#the-driver), [controller](../benchmarks/results/prompt_cost.json))."
    )
    return wrap(text, 118, break_on_hyphens=False)
