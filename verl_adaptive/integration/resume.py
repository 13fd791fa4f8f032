"""Whether a run may go on from a checkpoint: the data set is compared by its fingerprint, the policy and the other settings as
:mod:`.compared_settings` says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_adaptive.config import check
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration.compared_settings import differences
from verl_adaptive.integration.run_plan import RunPlan
from verl_adaptive.stats.journal import attempts_in
from verl_adaptive.stats.snapshot import FOLDER, MANIFEST, MARKER, SnapshotError, SnapshotMissing, read_manifest

#: Beside a snapshot, once verl's files of the same save are there, too: its nonce.
SAVED = "saved"


def resume_of(trainer: Any, plan: RunPlan, dataset: str | None = None) -> tuple[str, bool]:
    """What verl's ``resume_mode`` leads to, and whether statistics are there to begin with.

    ``trainer`` is the group of verl's configuration, ``dataset`` as of :func:`check_resume`. AdaptiveError: training would refuse
    to resume, or its journal is another run's.
    """
    mode = trainer.resume_mode
    check(mode in ("auto", "disable", "resume_path"), "trainer.resume_mode", mode, "use auto, disable or resume_path")
    if plan.only_validates:
        return "no training (trainer.val_only=true)", True
    text, meta = _checkpoint(trainer, plan, dataset)
    _refuse_other_run(plan, meta.get("attempt") if meta else None)
    return text, meta is not None


def _checkpoint(trainer: Any, plan: RunPlan, dataset: str | None) -> tuple[str, Mapping[str, Any] | None]:
    """What training starts from, for people, and what its statistics' manifest says; None: there are none."""
    if trainer.resume_mode == "disable":
        return "starts at step 0 (trainer.resume_mode=disable)", None
    if trainer.resume_mode == "resume_path":
        path = str(trainer.resume_from_path)
        checkpoint = Path(path)
        if not checkpoint.is_dir():
            raise AdaptiveError(f"trainer.resume_from_path={checkpoint}: there is no such checkpoint")
        hint = "verl reads the step from the path's end: write <folder>/global_step_<number>, without a slash after it"
        check(bool(re.search(r"global_step_\d+$", path)), "trainer.resume_from_path", path, hint)
    else:
        root = Path(os.path.abspath(trainer.default_local_dir))
        marker = root / MARKER
        if not marker.is_file():
            return f"starts at step 0: no checkpoint in {root}", None
        checkpoint = root / f"global_step_{marker.read_text().strip()}"
        if not checkpoint.is_dir():
            return f"starts at step 0: {checkpoint}, which {marker.name} names, is gone", None
    try:
        manifest = read_manifest(checkpoint / FOLDER)
    except SnapshotMissing:
        return f"resumes {checkpoint}, which has no statistics: they start {plan.begins}", None
    step = int(checkpoint.name.rpartition("_")[2])  # verl's way to know it: the folder may have been renamed
    accepted = check_resume(checkpoint / FOLDER, manifest, plan, step, dataset)
    meta = manifest["meta"]
    known = f"resumes {checkpoint} with its statistics (step {meta.get('step')}, {meta.get('policy')}), if the data are the same"
    return "; ".join([known, *accepted]), meta


def _refuse_other_run(plan: RunPlan, attempt: str | None) -> None:
    """AdaptiveError: the journal's place in ``adaptive.store.dir`` is taken by a run that ``attempt`` does not go on with."""
    place = plan.place
    if plan.adaptive.store.dir is None or place.folder is None:
        return
    known = attempts_in(Path(place.folder))
    other = known[-1].get("checkpoints") if known else None
    if other and other != place.checkpoints and attempt not in [said.get("id") for said in known]:
        raise AdaptiveError(
            f"{place.folder} is the journal of a run with its checkpoints in {other}; this one would take its place. Give "
            "this run its own trainer.experiment_name, or another adaptive.store.dir"
        )


def check_resume(
    folder: Path, manifest: Mapping[str, Any], plan: RunPlan, step: int, dataset: str | None = None
) -> list[str]:
    """Compare a snapshot with the run that would go on from it; what differs and is accepted.

    ``step`` is the step that verl takes the checkpoint for, ``dataset`` the training set's fingerprint; None: not known.
    SnapshotError: a difference is not accepted; the message names it and the way out.
    """
    allow, meta = plan.adaptive.resume.allow, manifest["meta"]
    accepted: list[str] = []

    def accept(word: str, found: list[str], refused: str) -> None:
        """Note what is found, unless that takes a word that is not there: then what is refused, and the word."""
        way_out = f"adaptive.resume.allow=[{word}]"
        if found and word not in allow:
            raise SnapshotError(f"{refused}: {way_out}")
        accepted.extend(f"{text}; accepted because of {way_out}" for text in found)

    if meta.get("step") != step:
        raise SnapshotError(f"{folder / MANIFEST}: step is {meta.get('step')!r}, this run has {step!r}")
    if dataset is not None and meta.get("dataset") != dataset:
        text = f"the data set's fingerprint is {meta.get('dataset')!r}, this run has {dataset!r}"
        accept("dataset", [text], f"{folder / MANIFEST}: {text}. To resume all the same")
    policy, hard, soft = differences(meta.get("settings"), plan.settings)
    accept("policy", policy, f"{folder / MANIFEST}: another policy: {'; '.join(policy)}. To resume all the same")
    if meta.get("nonce") not in (None, _saved_with(folder)):
        text = f"{folder} and the weights beside it are not of one save: it ended between the two"
        hint = "Resume from an earlier checkpoint (trainer.resume_from_path); to resume from this one all the same"
        accept("interrupted", [text], f"{text}. {hint}")
    if plan.async_facts is None:
        flight, ready = (meta.get("under_way", {}).get(name, 0) for name in ("flight", "ready"))
        text = (
            f"{folder} is an asynchronous trainer's, with {flight} prompts in flight and {ready} groups ready to train"
        )
        hint = "Go on with the same trainer.v1.trainer_mode, or leave them behind"
        accept("mode", [text] if flight or ready else [], f"{text}. {hint}")
    accept(
        "settings",
        hard,
        f"{folder} was written under other settings: {'; '.join(hard)}. Its statistics and its state mean something else "
        "under these. Set them back, or go on with the new ones",
    )
    return [*accepted, *soft]


def _saved_with(folder: Path) -> str:
    """The nonce of the save whose weights are beside a snapshot."""
    try:
        return (folder / SAVED).read_text()
    except OSError:
        return ""
