"""The part of ``RESULTS.md`` about seconds of generation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.runs import table

__all__ = ["async_table", "clock_page"]


def _share(entry: dict[str, Any], key: str) -> str:
    """A mean over seeds and its standard error; a dash where there is none."""
    if entry[key] is None:
        return "–"
    error = entry["spread"][key]["se"] if key in entry.get("spread", {}) else None
    return f"{entry[key]:.2f}" if error is None else f"{entry[key]:.2f} ± {error:.2f}"


def _seeds(counts: Iterable[int]) -> str:
    few, *_, many = sorted([*counts] * 2)
    return f"{few} seed{'s' * (few > 1)}" if few == many else f"{few} to {many} seeds"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _name(policy: str) -> str:
    return "verl's own `filter_groups`" if policy == "verl_filter_groups" else f"`{policy}`"


def _to_grpo(entry: dict[str, Any]) -> str:
    if entry["to_grpo"] is None:
        return f"not in any of {entry['seeds']}"
    some = "" if entry["reached"] == entry["seeds"] else f" ({entry['reached']} of {entry['seeds']} seeds)"
    return f"{entry['to_grpo']:.2f}{some}"


def clock_page(data: dict[str, Any]) -> list[str]:
    """Tables of the model, of its variations, and of the pools that learn."""
    found, blocks = data["policies"], data["blocks"]
    model = blocks["model"]
    seeds = _seeds(entry["seeds"] for entry in found.values())
    rows = [
        [
            _name(policy),
            f"{e['seconds']:,.0f}",
            _share(e, "time"),
            f"{e['idle']:.0%}",
            f"{e['rounds']:.1f}",
            f"{e['begun']:,.0f}",
            f"{e['aborted_tokens']:.0%}",
            f"{e['prefill'] / found['grpo']['prefill']:.2f}",
            f"{e['informative']:.0f}",
            _share(e, "time_per_informative"),
        ]
        for policy, e in found.items()
    ]
    lines = [
        "## Seconds of generation, in a model",
        "",
        f"`{data['command']}`: the package's own engine in a queueing model ({model['about']}; {model['batch']} groups of "
        f"{model['n']}; a pool that stands still), steps {model['skip'] + 1} to {model['steps']}, "
        f"{seeds}. Generation only: prefill, rewards, training and weight updates take "
        "no time in it. [The model, and what the columns mean](../docs/simulate.md#the-clock).",
        "",
        "Shares are of GRPO's in the same seeds, with standard errors. *Idle*: share of the tokens that full slots would have "
        "generated in the time and did not. *Waves*: times in a step that requests met an empty machine. *Aborted*: share of "
        "the generated tokens. *Prefill*: prompt tokens, a prompt counted once a rollout, of GRPO's.",
        "",
        *([data["note"], ""] if data.get("note") else []),
        *table(
            [
                "policy",
                "s a step",
                "time",
                "idle",
                "waves",
                "rollouts",
                "aborted",
                "prefill",
                "informative groups",
                "time an informative group",
            ],
            rows,
        ),
    ]
    if data.get("bound"):
        lines += _bound(data)
    if data["variations"]:
        lines += _variations(data)
    if data["learning"]:
        lines += _learning(data)
    return lines


def async_table(data: dict[str, Any]) -> list[str]:
    """Asynchronous trainers beside ``sync``, as shares of GRPO's generation in ``sync``."""
    names = list(data["asynchronous"])
    if not names:
        return []
    rows = []
    for policy in data["policies"]:
        entries = [data["asynchronous"][name].get(policy) for name in names]
        if all(e is None for e in entries):
            continue
        cells = [_cost(data["policies"][policy])]
        for entry in entries:
            cells += ["–", "–"] if entry is None else [_cost(entry), f"{entry['age']:.1f}"]
        rows.append([_name(policy), *cells])
    heads = [head for name in names for head in (f"{name}: time · idle · apiece", "age")]
    seeds = _seeds(e["seeds"] for name in names for e in data["asynchronous"][name].values())
    return [
        "Time of generation · idle share · time an informative group (*apiece*); *age*: weight updates between a trained group's",
        f"first request and its training. {seeds}, `{data['command']}`.",
        "",
        *table(["policy", "`sync`", *heads], rows),
    ]


def _cost(entry: dict[str, Any]) -> str:
    return f"{entry['time']:.2f} · {max(0.0, entry['idle']):.0%} · {_plain(entry['time_per_informative'])}"


def _bound(data: dict[str, Any]) -> list[str]:
    rows = [
        [_name(policy), *(_share(e, "time") for e in (data["policies"][policy], entry)), f"{entry['idle']:.0%}"]
        for policy, entry in data["bound"].items()
    ]
    return [
        "",
        "### If every answer's length were known",
        "",
        f"The same machine, but that {data['blocks']['lengths known']['about']}: what nobody knows beforehand, so this shows how "
        "much a better order of requests could gain at most, or nearly. Three quarters of the variance of a length's logarithm is "
        "between answers to one prompt, which is why beginning the prompts with long answers first gains next to nothing here: "
        "a long answer that began in the middle of a step ends last. On-policy Pilot-Commit gains little even so: its commits wait for "
        f"their slowest pilot. Time of GRPO's in the model, as above and so ({_seeds(e['seeds'] for e in data['bound'].values())}).",
        "",
        *table(["policy", "in order", "lengths known", "idle"], rows),
    ]


def _variations(data: dict[str, Any]) -> list[str]:
    names = list(data["variations"])
    listed = "; ".join(f"*{name}*: {data['blocks'][name]['about']}" for name in names)
    rows = []
    for policy in data["policies"]:
        cells = []
        for name in names:
            entry = data["variations"][name].get(policy)
            cells.append("–" if entry is None else f"{entry['time']:.2f} · {_plain(entry['time_per_informative'])}")
        rows.append([_name(policy), *cells])
    return [
        "",
        "### Other machines, other answers",
        "",
        f"The same with one thing changed; {listed}. Time · time an informative group, of GRPO's.",
        "",
        *table(["policy", *names], rows),
    ]


def _learning(data: dict[str, Any]) -> list[str]:
    names = list(data["learning"])
    listed = "; ".join(f"*{name}*: {data['blocks'][name]['about'].partition(': ')[2]}" for name in names)
    steps = data["blocks"][names[0]]["steps"]
    rows = []
    for policy in data["policies"]:
        entries = [data["learning"][name].get(policy) for name in names]
        rows.append([_name(policy), *("–" if e is None else _to_grpo(e) for e in entries)])
    return [
        "",
        "### To where GRPO's pool ends",
        "",
        f"Pools that learn ([how](../docs/simulate.md#pools)): {listed}. Seconds of generation until the mean pass rate is "
        f"where {steps} steps of GRPO leave it, of GRPO's, at GRPO's number of rollouts at most. What a pool learns is a "
        "formula, not a model's accuracy; a policy that makes more steps of the same rollouts trains more often.",
        "",
        *table(["policy", *names], rows),
    ]
