"""What must hold of a run, whatever its preset, environment and machine; each finding is a sentence."""

from __future__ import annotations

import logging
from pathlib import Path

from verl_adaptive.integration.selftest.runs import ProcessRun

#: Metrics that every run has in every step.
METRICS = (
    *("actor/grad_norm", "critic/score/mean", "training/global_step"),
    *("adaptive/updates_total", "adaptive/rollouts/generated_total", "adaptive/tokens/generated_total"),
    *("adaptive/groups/finished_total", "adaptive/groups/informative_share"),
)


def imbalance(run: ProcessRun, before: dict | None = None) -> list[str]:
    """Where generated + held before = trained + dropped + held after fails, in rollouts and in tokens.

    The run has at least one step; ``before`` is the account in the snapshot from which it went on.
    """
    found = []
    for unit in ("rollouts", "tokens"):
        account = (before or {}).get(unit, {})
        held = float(account.get("held", 0))
        for m in run.steps:
            name, step = f"adaptive/{unit}/", int(m["training/global_step"])
            dropped = sum(v for k, v in m.items() if k.startswith(f"{name}dropped_total/"))
            if dropped != m[f"{name}dropped_total"]:
                found.append(f"step {step}: {m[f'{name}dropped_total']:g} {unit} dropped, {dropped:g} with a reason")
            out = m[f"{name}trained_total"] + dropped + m[f"{name}held"]
            if m[f"{name}generated_total"] + held != out:
                came = m[f"{name}generated_total"] + held
                found.append(f"step {step}: {came:g} {unit} generated or held, {out:g} accounted for")
            held = m[f"{name}held"]
        generated = account.get("generated", 0) + sum(run.series(f"{name}generated_total"))
        if run.steps[-1][f"adaptive/cumulative/{unit}_generated"] != generated:
            found.append(f"the steps' generated {unit} are not the cumulative ones")
    return found


def differences(run: ProcessRun, steps: int | None = None) -> list[str]:
    """Where the policy, driven by the recorded rewards alone, decides or counts otherwise than the run did.

    ``run`` is the last attempt at a run with ``adaptive.record=true``; ``steps`` are those of all attempts together, None: of
    this one.
    """
    from verl_adaptive.record import attempts, replay

    metrics = {int(m["training/global_step"]): m for m in run.steps}
    reports = [replay(folder) for folder in attempts(run.folder / "checkpoints" / "record")]
    if not reports:
        return ["nothing was recorded"]
    found = [f"attempt {i} is not replayed: {r}" for i, r in enumerate(reports) if not r.identical]
    ledgers = reports[-1].ledgers
    if len(ledgers) != len(metrics):
        return [*found, f"{len(ledgers)} steps were recorded, {len(metrics)} were logged"]
    for ledger, (step, m) in zip(ledgers, metrics.items(), strict=True):
        for unit, account in (("rollouts", ledger.rollouts), ("tokens", ledger.tokens)):
            counts = [m[f"adaptive/{unit}/{k}"] for k in ("generated_total", "trained_total", "held")]
            prefix = f"adaptive/{unit}/dropped_total/"
            dropped = {k.removeprefix(prefix): v for k, v in m.items() if k.startswith(prefix)}
            if counts != [account.generated, account.trained, account.held] or dropped != account.dropped:
                found.append(f"step {step}: the replay counts other {unit}")
    if steps is not None and sum(report.steps for report in reports) < steps:
        found.append(f"{sum(report.steps for report in reports)} steps are on record, {steps} were made")
    return found


def absent(run: ProcessRun) -> list[str]:
    """Metrics that some step of a run lacks."""
    return [f"{name} is missing in some step" for name in METRICS if any(name not in m for m in run.steps)]


def optimizer_updates(run: ProcessRun, step: int) -> int:
    """Updates that Adam has really made, from verl's own checkpoint; FileNotFoundError if there is none that FSDP wrote."""
    import torch

    folder: Path = run.folder / "checkpoints" / f"global_step_{step}" / "actor"
    paths = list(folder.glob("optim_world_size_*_rank_0.pt"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no optimizer state of FSDP's")
    logging.getLogger("torch.distributed.device_mesh").setLevel(
        logging.ERROR
    )  # it warns of training with what is loaded
    state = torch.load(paths[0], weights_only=False, map_location="cpu")["state"]
    return int(next(iter(state.values()))["step"])
