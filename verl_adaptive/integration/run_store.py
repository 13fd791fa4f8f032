"""The store as a training run uses it: identities, table, journal, snapshots beside verl's checkpoints."""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import transfer_queue as tq

from verl_adaptive.engine import Engine, StepResult
from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.integration.async_client import AsyncRolloutClient
from verl_adaptive.integration.dataloader import identity_columns, refuse_own_numbers
from verl_adaptive.integration.facts import identity_of
from verl_adaptive.integration.monitor import Monitor
from verl_adaptive.integration.resume import SAVED, check_resume, resume_of
from verl_adaptive.integration.run_plan import RunPlan
from verl_adaptive.integration.sync_client import SyncRolloutClient
from verl_adaptive.stats import (
    Journal,
    SnapshotMissing,
    StatsTable,
    dataset_identity,
    fingerprint,
    first_difference,
    read_snapshot,
    repeated_rows,
    warm_start,
    write_snapshot,
)
from verl_adaptive.stats.atomic import sync_directory, write_file
from verl_adaptive.stats.keys import Identity
from verl_adaptive.stats.snapshot import FOLDER, MANIFEST, SnapshotError, attached, new_folder, read_manifest
from verl_adaptive.text import counted

logger = logging.getLogger(__name__)

_QUEUE = "transfer_queue"


class RunStore:
    """Everything a run remembers of its prompts.

    Attributes:
        plan: the run's, sized by the training set.
        table: the statistics.
        row_of: int64 ``(D,)``, table row of every data-set position.
        origin: how the statistics began, for people.
    """

    def __init__(self, config: Any, plan: RunPlan, dataset: Any) -> None:
        self.config, self.plan = config, plan
        self.adaptive = adaptive = plan.adaptive
        identity = identity_of(config, adaptive.id_key)
        rows, columns = identity_columns(dataset, identity)
        refuse_own_numbers(next(iter(rows()), {}))
        try:
            self.keys, questions = dataset_identity(rows(), identity)
            self.sources, self.table = columns("data_source"), StatsTable()
            self.row_of = self.table.rows_for(self.keys, sources=self.sources)
        except (TypeError, ValueError) as error:
            raise AdaptiveError(f"the training set's prompts cannot be identified: {error}") from error
        self.fingerprint = fingerprint(self.keys)
        self.origin = "new statistics"
        self._newest: Path | None = None  # the checkpoint saved last
        self._began = time.time()
        self._with_model: frozenset[Path] = frozenset()  # checkpoints seen with verl's model in them
        self.plan = plan.sized(len(self.keys), len(self.table))
        self._report_duplicates(questions, rows, identity)
        self._attempt: str | None = None  # of the journal: the one that wrote the checkpoint
        self._no_warm_start: Exception | None = None
        if adaptive.warm_start is not None:
            try:
                report = warm_start(
                    self.table, adaptive.warm_start, discount=adaptive.warm_start_discount, **plan.results
                )
                self.origin = f"warm start from {report.source}: {report}"
            except (AdaptiveError, OSError, ValueError) as error:
                self._no_warm_start = error  # a snapshot does not need it: see check_start
        self.journal = self._open_journal()

    # -- opening --------------------------------------------------------------------------------------------

    def _report_duplicates(self, questions: np.ndarray, rows: Callable[[], Iterable[dict]], identity: Identity) -> None:
        if identity.id_key is None and (found := first_difference(rows(), self.keys, identity)):
            first, again, paths = found
            logger.warning(
                "training set: rows %d and %d have the same data source, messages and answer, so they are one prompt with one "
                "set of statistics, and a sampler that picks prompts rolls out the first. But they differ in %s, which verl "
                "hands to the agent loop. If they are different tasks, give every row its own id and name the column: "
                "adaptive.id_key=extra_info.id",
                first,
                again,
                " and ".join(paths[:3]),
            )
        repeated = len(self.keys) - len(np.unique(self.row_of))
        if 5 * repeated > len(self.keys):
            logger.warning(
                "training set: %s. Prompts that come again are handled: each has one set of statistics, and pool samplers "
                "take it once. If these are different prompts, name what tells them apart: data.image_key, data.video_key "
                "and data.audio_key for what a placeholder in the messages stands for, or adaptive.id_key",
                repeated_rows(self.keys),
            )
        elif repeated:
            logger.info("training set: %s", repeated_rows(self.keys))
        conflicts = len(np.unique(self.keys)) - len(np.unique(questions))
        if conflicts:
            logger.warning("training set: %d prompts appear again with a different ground truth", conflicts)

    def check_start(self) -> None:
        """Whether the run can begin, or go on, with what is there: asked before a model is loaded.

        AdaptiveError: the checkpoint or the journal is of another run, or a warm start that counts could not be read.
        """
        _, resumes = resume_of(self.config.trainer, self.plan, self.fingerprint)
        if self._no_warm_start is not None and not resumes:
            hint = f"{self._no_warm_start}; leave it out, and the statistics start empty"
            raise ConfigError("adaptive.warm_start", self.adaptive.warm_start, hint) from self._no_warm_start

    def _open_journal(self) -> Journal | None:
        place, dumps = self.plan.place, self.config.trainer.get("rollout_data_dir", None)
        if place.folder is None:
            return None
        return Journal(
            place.folder,
            meta={
                "run": place.run,
                "preset": self.adaptive.name,
                "checkpoints": place.checkpoints,
                "dataset": self.fingerprint,
                "batch": self.plan.batch,
                "n": self.plan.rollout_n,
                "tolerance": self.adaptive.tolerance,
                "success": self.adaptive.success.least,
                "signal": self.adaptive.signal,
                "seed": self.adaptive.seed,
                "alarms": asdict(self.adaptive.alarms),
                "rollouts": os.path.abspath(dumps) if dumps else None,
            },
        )

    @property
    def where(self) -> str:
        """Where the journal is, or why there is none, for people."""
        attempt = -1 if self.journal is None else self.journal.attempt
        return self.plan.store + (f" (attempt {attempt})" if attempt >= 0 else "")

    @property
    def argument(self) -> str:
        """What our commands take to read this run."""
        place = self.plan.place
        return place.checkpoints if self.adaptive.store.dir is None else place.folder or place.checkpoints

    # -- a step ---------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Training goes on after ``step``; in the journal a new attempt begins, without what lies beyond it."""
        if self.journal is not None:
            first = np.unique(self.row_of, return_index=True)[1]
            sources = [self.sources[i] for i in first.tolist()]
            self.journal.begin(step, self.keys[first], sources, parent=self._attempt)

    def commit(self, step: int, result: StepResult, engine: Engine) -> None:
        """Write a step to the journal, beside training; trouble there never stops it, nor holds it up."""
        if self.journal is None:
            return
        groups = result.groups
        self.journal.commit_step(
            step,
            groups,
            self.table.keys[groups.row],
            result.outcome.astype(str),
            {"step": result.ledger.as_dict(), "run": engine.total.as_dict()},
            {
                **engine.policy.metrics(),
                "adaptive/prompts/epoch": engine.progress.epoch,
                # what the run plans, for a forecast: it may change with a resume
                "adaptive/plan/steps": engine.facts.steps,
                "adaptive/plan/rollouts": self.adaptive.total_rollouts,
            },
            sources=self.table.source_names(groups.row),
            longest=self.plan.longest,
        )

    def validated(self, step: int, metrics: Mapping[str, Any], prompts: Mapping[str, int], engine: Engine) -> None:
        """Write what verl's validation measured after ``step`` training steps to the journal, beside training.

        ``metrics`` are as verl logs them, ``prompts`` is data source → validation prompts.
        """
        if self.journal is not None:
            generated = engine.total.rollouts.generated
            self.journal.commit_validation(step, metrics, generated=generated, prompts=prompts)

    # -- snapshots ------------------------------------------------------------------------------------------

    def save(
        self,
        checkpoint: str,
        step: int,
        engine: Engine,
        client: SyncRolloutClient | AsyncRolloutClient,
        monitor: Monitor,
    ) -> None:
        """Write the snapshot into a checkpoint folder; complete and on disk when this returns.

        Over an earlier save of the same step, that one stays valid until this one is complete. :meth:`saved` follows, once
        verl's own files are there: until then a resume refuses it, since the weights beside it may be another attempt's.
        """
        folder = Path(checkpoint) / FOLDER
        attach = []
        if len(engine.held):
            attach.append(new_folder(folder, _QUEUE))
            tq.save_checkpoint(str(attach[0]), metadata={"global_steps": step})
        write_snapshot(
            folder,
            self.table,
            {
                "engine": engine.state_dict(),
                "rows": client.state_dict(),
                "monitor": monitor.state_dict(),
            },
            meta={
                "step": step,
                "policy": self.adaptive.name,
                "dataset": self.fingerprint,
                "settings": dict(self.plan.settings),
                "nonce": uuid.uuid4().hex,
                "attempt": None if self.journal is None else self.journal.id,
                "began": self._began,
                "under_way": engine.under_way,
            },
            attach=attach,
        )
        self._newest = Path(checkpoint)

    def saved(self, checkpoint: str, step: int) -> None:
        """verl's files of the same save are there: statistics and weights belong together. Copies them to where verl's go."""
        folder = Path(checkpoint) / FOLDER
        nonce = read_manifest(folder)["meta"]["nonce"]
        write_file(folder / SAVED, lambda file: file.write(nonce.encode()))
        sync_directory(folder)  # without it a power cut can leave a whole checkpoint that looks interrupted
        remote = self.config.trainer.default_hdfs_dir
        if remote is None:
            return
        from verl.utils import hdfs_io

        target = os.path.join(remote, f"global_step_{step}", FOLDER)
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        # First what disowns an older snapshot there, whose weights verl has replaced; last what vouches for the others.
        names.sort(key=lambda name: (name != SAVED, name == MANIFEST))
        try:
            for place in dict.fromkeys(os.path.dirname(os.path.join(target, name)) for name in names):
                hdfs_io.makedirs(place, exist_ok=True)
            for name in names:  # one by one: a folder that is copied over itself would land inside it
                if hdfs_io.copy(src=str(folder / name), dst=os.path.join(target, name)) is False:
                    raise OSError(f"{folder / name} was not copied")
        except OSError as error:
            logger.warning("trainer.default_hdfs_dir: the statistics of step %d are not in %s: %s", step, target, error)

    def load(self, checkpoint: str, step: int) -> dict[str, Any] | None:
        """The state in a checkpoint folder's snapshot; None for a checkpoint of a plain run: the statistics start empty.

        SnapshotError: torn, damaged or of another run; the message names the way out.
        """
        folder = Path(checkpoint) / FOLDER
        try:
            manifest = read_manifest(folder)
        except SnapshotMissing:
            self.origin = f"step {step} of a run without statistics: they start {self.plan.begins}"
            logger.warning(
                "%s holds no snapshot: a checkpoint of a run without verl-adaptive. %s", checkpoint, self.origin
            )
            return None
        for text in check_resume(folder, manifest, self.plan, step, self.fingerprint):
            logger.warning("%s: %s", folder, text)
        table, state, manifest = read_snapshot(folder)
        self._attempt = manifest["meta"].get("attempt")
        if len(state["engine"]["held_since"]):  # the rows of held groups; the queue checks that all are there
            self._load_queue(folder, manifest)
        self.table = table
        self.row_of = table.rows_for(self.keys, sources=self.sources)
        visited = int((table.col("visits") > 0).sum())
        self.origin = f"resumed at step {step}: {counted(visited, 'prompt')} known"
        return state

    @staticmethod
    def _load_queue(folder: Path, manifest: dict[str, Any]) -> None:
        queue = attached(folder, manifest, _QUEUE)
        if queue is None:
            raise SnapshotError(
                f"{folder} has groups that wait for more rollouts, but not TransferQueue's rows of them: it was copied in "
                "part. Resume from an earlier checkpoint (trainer.resume_from_path)"
            )
        try:
            tq.load_checkpoint(str(queue))
        except (OSError, RuntimeError, ValueError) as error:
            hint = "Resume from an earlier checkpoint (trainer.resume_from_path)"
            if isinstance(error, ValueError):  # "Storage unit count mismatch: checkpoint has 8, current system has 4."
                hint = "Set transfer_queue.backend.SimpleStorage.num_data_storage_units back"
            raise SnapshotError(f"{queue} cannot be loaded: {str(error).rstrip('.')}. {hint}") from error

    def prune(self, root: str) -> None:
        """Remove snapshots whose checkpoint verl has removed (``max_actor_ckpt_to_keep`` empties the folder's rest).

        Only where the model was seen beside the snapshot and is there no longer: it may as well lie on another node's
        disk, or still be on its way to this one.
        """
        trainer = self.config.trainer
        if trainer.get("max_actor_ckpt_to_keep", None) is None and not trainer.get(
            "remove_previous_ckpt_in_save", False
        ):
            return
        for folder in self._with_model:
            if folder != self._newest and (folder / FOLDER).is_dir() and not (folder / "actor").exists():
                try:
                    shutil.rmtree(folder / FOLDER)
                except OSError as error:
                    logger.warning("the snapshot of a removed checkpoint stays: %s", error)
        self._with_model = frozenset(f for f in Path(root).glob("global_step_*") if (f / "actor").exists())

    def close(self) -> None:
        """Let the journal go."""
        if self.journal is not None:
            self.journal.close()
