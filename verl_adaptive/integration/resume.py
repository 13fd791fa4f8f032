"""Whether a run may go on from a checkpoint: the data set and the policy with its options are compared by their fingerprints,
the other settings as :mod:`.compared_settings` says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_adaptive.config import check
from verl_adaptive.engine.base import check_mode
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration.compared_settings import differences
from verl_adaptive.integration.run_plan import RunPlan
from verl_adaptive.stats.snapshot import FOLDER, MANIFEST, MARKER, SnapshotError, SnapshotMissing, read_manifest

#: Beside a snapshot, once verl's files of the same save are there, too: its nonce.
SAVED = "saved"
#: The word in ``adaptive.resume.allow`` that accepts differences.
ALLOW = "settings"
#: Fingerprint in the manifest's ``meta`` → the word in ``adaptive.resume.allow`` that accepts another one, and what it is of.
FINGERPRINTS = {
    "policy_digest": ("policy", "the policy's configuration"),
    "dataset": ("dataset", "the data set's fingerprint"),
}


def resume_of(trainer: Any, plan: RunPlan, **expect: Any) -> tuple[str, bool]:
    """What verl's ``resume_mode`` leads to, and whether statistics are there to begin with.

    ``trainer`` is the group of verl's configuration, ``expect`` as of :func:`check_resume`. AdaptiveError: training would refuse
    to resume.
    """
    mode = trainer.resume_mode
    check(mode in ("auto", "disable", "resume_path"), "trainer.resume_mode", mode, "use auto, disable or resume_path")
    if plan.only_validates:
        return "no training (trainer.val_only=true)", True
    if mode == "disable":
        return "starts at step 0 (trainer.resume_mode=disable)", False
    if mode == "resume_path":
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
            return f"starts at step 0: no checkpoint in {root}", False
        checkpoint = root / f"global_step_{marker.read_text().strip()}"
        if not checkpoint.is_dir():
            return f"starts at step 0: {checkpoint}, which {marker.name} names, is gone", False
    try:
        manifest = read_manifest(checkpoint / FOLDER)
    except SnapshotMissing:
        return f"resumes {checkpoint}, which has no statistics: they start {plan.begins}", False
    accepted = check_resume(checkpoint / FOLDER, manifest, plan, **expect)
    meta = manifest["meta"]
    known = f"resumes {checkpoint} with its statistics (step {meta.get('step')}, {meta.get('policy')}), if the data are the same"
    return "; ".join([known, *accepted]), True


def check_resume(folder: Path, manifest: Mapping[str, Any], plan: RunPlan, **expect: Any) -> list[str]:
    """Compare a snapshot with the run that would go on from it; what differs and is accepted.

    ``expect`` has further fields of the manifest's ``meta`` that must be equal. SnapshotError: a difference is not accepted; the
    message names it and the way out.
    """
    allow, accepted = plan.adaptive.resume.allow, []
    for key, want in {"policy_digest": plan.policy_digest, **expect}.items():
        have = manifest["meta"].get(key)
        if have == want:
            continue
        word, what = FINGERPRINTS.get(key, ("", key))
        text = f"{what} is {have!r}, this run has {want!r}"
        if word not in allow:
            hint = f". To resume all the same: adaptive.resume.allow=[{word}]" if word else ""
            raise SnapshotError(f"{folder / MANIFEST}: {text}{hint}")
        accepted.append(f"{text}; accepted because of adaptive.resume.allow=[{word}]")
    nonce = manifest["meta"].get("nonce")
    if nonce is not None and nonce != _saved_with(folder):
        text = f"{folder} and the weights beside it are not of one save: it ended between the two"
        if "interrupted" not in allow:
            raise SnapshotError(
                f"{text}. Resume from an earlier checkpoint (trainer.resume_from_path); to resume from this one all the "
                "same: adaptive.resume.allow=[interrupted]"
            )
        accepted.append(f"{text}; accepted because of adaptive.resume.allow=[interrupted]")
    if plan.async_facts is None:
        check_mode(manifest["meta"].get("under_way", {}), allow)
    hard, soft = differences(manifest["meta"].get("settings"), plan.settings)
    if hard and ALLOW not in allow:
        raise SnapshotError(
            f"{folder} was written under other settings: {'; '.join(hard)}. Its statistics and its state mean something else "
            f"under these. Set them back, or go on with the new ones: adaptive.resume.allow=[{ALLOW}]"
        )
    accepted += [f"{text}; accepted because of adaptive.resume.allow=[{ALLOW}]" for text in hard]
    return [*accepted, *soft]


def _saved_with(folder: Path) -> str:
    """The nonce of the save whose weights are beside a snapshot."""
    try:
        return (folder / SAVED).read_text()
    except OSError:
        return ""
