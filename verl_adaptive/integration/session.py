"""Carries the engine's requests to verl's rollout workers and the rollouts back, through TransferQueue.

This one serves the ``sync`` trainer, round by round; :mod:`.stream_session` serves the asynchronous ones.

One session serves one run. It alone knows which TransferQueue rows belong to which group: a first request is a prompt
with a fresh uid; a top-up is the same prompt under another uid (``<first uid>.t<k>``), whose rows get the group's uid
written into their ``uid`` *field* when the batch is made, so that verl's grouping joins them. Nothing of verl's agent
loop is touched.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import transfer_queue as tq
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from verl_adaptive.config import AdaptiveConfig, SuccessConfig
from verl_adaptive.engine import Engine, Requests, StepResult
from verl_adaptive.errors import AdaptiveError, ConfigError
from verl_adaptive.groups import Groups
from verl_adaptive.integration.curves import Rows
from verl_adaptive.integration.prompts import Stream
from verl_adaptive.integration.waiting import DONE, PARTITION, StallTimeout

__all__ = ["Batch", "Session"]

logger = logging.getLogger(__name__)


@dataclass
class Part:
    """One request of a group: a uid, and once it is back its sessions, each a list of row keys (outputs in order)."""

    uid: str
    n: int
    stage: int
    sessions: list[list[str]] = field(default_factory=list)


@dataclass
class Batch:
    """A finished step as TransferQueue rows.

    Attributes:
        result: the engine's result.
        keys: rows that train, groups in ticket order.
        tags: their tags.
        group: int64, position in ``trained`` of each row of ``sequences``.
        sequences: all rows of trained groups, those left out for zero advantage included: key, and whether it trains.
        trained: the groups that train, with all their rollouts.
        position: first uid of each trained group → its position in ``trained``.
        ghost_tokens: loss tokens of each sequence (0 where it trains: verl counts those itself).
        rows: every row of the trained groups, for verl's curves.
    """

    result: StepResult
    keys: list[str]
    tags: list[dict]
    sequences: list[tuple[str, bool]]
    group: np.ndarray
    trained: Groups
    position: dict[str, int]
    ghost_tokens: np.ndarray
    rows: Rows


class Session:
    """Runs steps of the engine on verl's rollout workers.

    Args:
        engine: the policy's engine.
        stream: the prompts.
        config: the ``adaptive`` group.
        submit: sends a batch of prompts to the agent loop (verl's ``_submit_batch_to_rollout``).
        step_of: the trainer's current global step.
        dead: names of rollout workers that have died; asked now and then while waiting.
    """

    def __init__(
        self,
        engine: Engine,
        stream: Stream,
        config: AdaptiveConfig,
        submit: Callable[[TensorDict], int],
        step_of: Callable[[], int],
        dead: Callable[[], list[str]] = list,
    ) -> None:
        self.engine, self.stream, self.config = engine, stream, config
        self._submit, self._step_of, self._dead = submit, step_of, dead
        self._parts: dict[int, list[Part]] = {}  # ticket → its requests, in order
        self._prompts: dict[int, dict] = {}  # ticket → the data row, kept while the group is open or held
        self._tags: dict[str, dict] = {}
        self._failed: set[str] = set()
        self._requests: Requests | None = None
        self._all_failed: list[int] = []  # groups of the latest looks in which every group failed

    # -- a step ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin the step and send its first round, without waiting."""
        self._requests = self.engine.begin(self._step_of())
        self._send(self._requests)

    def complete(self) -> Batch:
        """Wait for the step's rounds, one after another, and make its batch.

        Raises:
            AdaptiveError: nothing came back for ``adaptive.stall_timeout`` seconds, or two rounds failed altogether.
        """
        while self._requests is not None:
            self._wait([self._parts[int(t)][-1].uid for t in self._requests.ticket])
            results = self._collect(self._requests)
            self._note_failures(results)
            self._requests = self.engine.receive(results)
            self._send(self._requests)
        batch = self._settle(self.engine.finish())
        self._finished = batch.result
        self.stream.forget()
        return batch

    def finish(self) -> StepResult:
        """The account of the step whose batches have been taken."""
        return self._finished

    # -- sending --------------------------------------------------------------------------------------------

    def _send(self, requests: Requests | None) -> None:
        if requests is None:
            return
        items, uids = [], []
        for ticket, index, n, stage in zip(
            requests.ticket.tolist(), requests.index.tolist(), requests.n.tolist(), requests.stage.tolist(), strict=True
        ):
            if ticket not in self._prompts:
                self._prompts[ticket] = self.stream.item(index)
            parts = self._parts.setdefault(ticket, [])
            uid = f"{parts[0].uid}.t{stage}" if parts else str(uuid.uuid4())
            parts.append(Part(uid, n, stage))
            items.append(dict(self._prompts[ticket]))
            uids.append(uid)
        columns = collate_fn(items)
        columns["uid"] = np.array(uids, dtype=object)
        columns["__rollout_n__"] = np.fromiter(requests.n.tolist(), dtype=object, count=len(uids))
        batch = tu.get_tensordict(columns)
        tu.assign_non_tensor_data(batch, "global_steps", self._step_of())
        self._submit(batch)

    # -- waiting --------------------------------------------------------------------------------------------

    def _wait(self, uids: list[str]) -> None:
        """Poll until every prompt of the round is finished or failed."""
        timeout = StallTimeout(self.config, self._step_of(), self._dead)
        while True:
            status = self._look(uids)
            if all(s in DONE for s in status.values()):
                return
            timeout.rest(status, self._tags)

    def wait_for_partition(self, partition: str, count: int) -> None:
        """Wait until ``count`` prompts of another partition (validation) are back, with the same ceiling as everywhere."""
        timeout = StallTimeout(self.config, self._step_of(), self._dead)
        while True:
            rows = (tq.kv_list(partition) or {}).get(partition, {})
            status = {key: tag.get("status") for key, tag in rows.items() if tag.get("is_prompt", False)}
            if sum(s in DONE for s in status.values()) >= count:
                return
            timeout.rest(status, {k: t for k, t in rows.items() if not t.get("is_prompt", False)})

    def _look(self, uids: Iterable[str]) -> dict[str, str | None]:
        """Take a picture of the queue; the status of each request."""
        rows = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
        status = {u: rows.get(u, {}).get("status") for u in uids}
        self._tags = {k: t for k, t in rows.items() if not t.get("is_prompt", False)}
        self._failed = {u for u, s in status.items() if s == "failure"}
        return status

    # -- reading --------------------------------------------------------------------------------------------

    def _collect(self, requests: Requests) -> Groups:
        """Read the round's rewards: one group per request, sessions in order."""
        sessions = _sessions(self._tags)
        finals: list[str] = []
        for ticket in requests.ticket.tolist():
            part = self._parts[ticket][-1]
            part.sessions = sessions.get(part.uid, [])
            finals += [outputs[-1] for outputs in part.sessions]
        reward, signal = self._rewards(finals)
        success = _success(signal, self.config.success)
        rewards, signals, successes, tokens, failed, lag = [], [], [], [], [], []
        at = 0
        step = self._step_of()
        for ticket in requests.ticket.tolist():
            part = self._parts[ticket][-1]
            take = slice(at, at + len(part.sessions))
            at = take.stop
            rewards.append(reward[take])
            signals.append(signal[take])
            successes.append(success[take])
            tokens.append([sum(self._tags[k]["response_len"] for k in outputs) for outputs in part.sessions])
            whole = len(part.sessions) == part.n and np.isfinite(reward[take]).all() and np.isfinite(signal[take]).all()
            failed.append(part.uid in self._failed or not whole)
            versions = [self._tags[k].get("min_global_steps") for outputs in part.sessions for k in outputs]
            lag.append(max([step - 1 - int(v) for v in versions if v is not None], default=0))
        clean = [np.nan_to_num(s, nan=0.0, posinf=0.0, neginf=0.0) for s in successes]  # failed groups only
        return Groups.from_lists(
            requests.row,
            [np.nan_to_num(r, nan=0.0, posinf=0.0, neginf=0.0) for r in rewards],
            signal=[np.nan_to_num(s, nan=0.0, posinf=0.0, neginf=0.0) for s in signals],
            success=clean,
            tokens=tokens,
            stage=[[s] * len(r) for s, r in zip(requests.stage.tolist(), rewards, strict=True)],
            ticket=requests.ticket,
            index=requests.index,
            failed=failed,
            lag=np.maximum(lag, 0),
            lost=[n - len(r) for n, r in zip(requests.n.tolist(), rewards, strict=True)],
        )

    def _rewards(self, keys: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Reward and difficulty signal of each trajectory."""
        if not keys:
            return np.zeros(0), np.zeros(0)
        name = self.config.signal
        fields = ["rm_scores"] if name == "reward" else ["rm_scores", "extra_fields"]
        data = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=fields)
        present = set(data.keys())
        if not present.issuperset(fields):  # a row without a reward hides the field of all the others
            return self._rewards_one_by_one(keys)
        reward = np.array([float(r.sum().item()) for r in data["rm_scores"]], dtype=np.float64)
        if name == "reward":
            return reward, reward
        signal = np.empty(len(keys))
        for i, extra in enumerate(data["extra_fields"]):
            extra = getattr(extra, "data", extra)
            info = extra.get("reward_extra_info", {}) if isinstance(extra, dict) else {}
            if name not in info:
                raise ConfigError(
                    "adaptive.signal",
                    name,
                    f"the reward function gives no such field; it gives: {', '.join(sorted(info)) or 'a bare number'}. "
                    "Choose one of them, or adaptive.signal=reward",
                )
            try:
                signal[i] = float(info[name])
            except (TypeError, ValueError):
                signal[i] = math.nan  # counted as a failed rollout
        return reward, signal

    def _rewards_one_by_one(self, keys: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The slow path when some trajectory came back without a reward: NaN for it, so that its group counts as failed."""
        reward, signal = np.full(len(keys), math.nan), np.full(len(keys), math.nan)
        for i, key in enumerate(keys):
            stored = tq.kv_batch_get(keys=[key], partition_id=PARTITION).keys()
            if "rm_scores" in stored and (self.config.signal == "reward" or "extra_fields" in stored):
                reward[i : i + 1], signal[i : i + 1] = self._rewards([key])
        return reward, signal

    def _note_failures(self, results: Groups) -> None:
        failures = int(results.failed.sum())
        if failures:
            logger.warning(
                "step %d: %d of %d groups failed (a session raised, returned nothing, or its reward is not finite); "
                "they are counted as failed and teach the statistics nothing",
                self._step_of(),
                failures,
                len(results),
            )
        self._all_failed = [*self._all_failed, failures] if failures == len(results) else []
        # A round that fills the last places may be one group: bad luck twice is not a broken reward function.
        if len(self._all_failed) >= 2 and sum(self._all_failed) >= self._failures_that_tell():
            raise AdaptiveError(
                f"step {self._step_of()}: all {sum(self._all_failed)} groups of the last {len(self._all_failed)} rounds "
                "failed. The reward function, the agent loop or a rollout server is broken: look for its error above (verl logs it as "
                "`Error in _run_prompt`), or for a reward that is NaN or infinite"
            )

    def _failures_that_tell(self) -> int:
        """Groups that fail one after another before something must be broken."""
        return self.engine.facts.batch

    # -- the batch ------------------------------------------------------------------------------------------

    def _settle(self, result: StepResult) -> Batch:
        """Collect the rows that train, in ticket order, and clear everything else that is closed."""
        groups = result.groups
        keys: list[str] = []
        sequences: list[tuple[str, bool]] = []
        home: list[int] = []
        position: dict[str, int] = {}
        moved: list[tuple[str, str]] = []  # top-up rows: key, the group's uid
        rows: list[tuple[float, int, int]] = []  # of every row: reward, prompt and response tokens
        trained = np.flatnonzero(result.trained)
        for place, g in enumerate(trained.tolist()):
            parts = self._parts[int(groups.ticket[g])]
            position[parts[0].uid] = place
            rollout = int(groups.offsets[g])
            for part in parts:
                for outputs in part.sessions:
                    trains, ghost = bool(result.trains[rollout]), bool(result.ghost[rollout])
                    lengths = [(self._tags[k]["seq_len"], self._tags[k]["response_len"]) for k in outputs]
                    rows += [(float(groups.reward[rollout]), seq - own, own) for seq, own in lengths]
                    rollout += 1
                    if not (trains or ghost):
                        continue
                    for key in outputs:
                        sequences.append((key, trains))
                        home.append(place)
                        if trains:
                            keys.append(key)
                            if part.stage:
                                moved.append((key, parts[0].uid))
        if moved:
            fields = tu.get_tensordict({"uid": [uid for _, uid in moved]})
            tq.kv_batch_put(keys=[k for k, _ in moved], partition_id=PARTITION, fields=fields)
        ghost_tokens = self._loss_tokens(sequences)
        tags = [self._tags[k] for k in keys]
        self._clear(groups.ticket.tolist(), keep=set(keys))
        return Batch(
            result,
            keys,
            tags,
            sequences,
            np.array(home, dtype=np.int64),
            groups.select(trained),
            position,
            ghost_tokens,
            Rows.of(rows, left_out=len(rows) - len(keys)),
        )

    def _loss_tokens(self, sequences: list[tuple[str, bool]]) -> np.ndarray:
        """Loss tokens of the sequences that are left out (the mask's sum: tool output does not count)."""
        out = np.zeros(len(sequences), dtype=np.int64)
        absent = [i for i, (_, trains) in enumerate(sequences) if not trains]
        if absent:
            data = tq.kv_batch_get(
                keys=[sequences[i][0] for i in absent], partition_id=PARTITION, select_fields=["response_mask"]
            )
            out[absent] = [int(mask.sum().item()) for mask in data["response_mask"]]
        return out

    # -- groups that outlive a step, across a restart --------------------------------------------------------

    def state_dict(self) -> dict:
        """Which rows belong to open groups; the rows themselves are in TransferQueue's own checkpoint."""
        return {
            str(ticket): [[p.uid, p.n, p.stage, p.sessions] for p in parts] for ticket, parts in self._parts.items()
        }

    def load_state_dict(self, state: dict) -> None:
        """Take up open groups, and clear every restored row that is not theirs.

        Raises:
            AdaptiveError: rows of rollouts that were reviewed before the checkpoint are missing.
        """
        known = self._indices()
        self._parts = {
            int(t): [Part(u, n, s, x) for u, n, s, x in parts] for t, parts in state.items() if int(t) in known
        }
        self._prompts = {t: self.stream.item(i) for t, i in known.items() if i >= 0}
        uids = {p.uid for parts in self._parts.values() for p in parts}
        rows = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
        stray = [k for k in rows if k.split("_", 1)[0] not in uids]
        if stray:
            tq.kv_clear(keys=stray, partition_id=PARTITION)
        reviewed = {k for parts in self._parts.values() for p in parts for outputs in p.sessions for k in outputs}
        lost = reviewed - rows.keys()
        if lost:
            raise AdaptiveError(f"{len(lost)} rows of open groups are not in the checkpoint's TransferQueue state")

    def _indices(self) -> dict[int, int]:
        """Ticket → data-set position of the groups that outlive a step."""
        held = self.engine.held
        return dict(zip(held.ticket.tolist(), held.index.tolist(), strict=True))

    def _clear(self, tickets: list[int], keep: set[str]) -> None:
        gone: list[str] = []
        for ticket in tickets:
            for part in self._parts.pop(ticket, []):  # none: its prompt left the data set, the rows are gone already
                gone.append(part.uid)
                # every row of the request, those of a failed group's surviving sessions included
                gone += [k for outputs in part.sessions for k in outputs if k not in keep]
            self._prompts.pop(ticket, None)
        if gone:
            tq.kv_clear(keys=gone, partition_id=PARTITION)


def _sessions(tags: dict[str, dict]) -> dict[str, list[list[str]]]:
    """uid → its sessions in order, each the keys of its outputs in order; keys are ``{uid}_{session}_{output}``."""
    found: dict[str, dict[int, list[tuple[int, str]]]] = {}
    for key in tags:
        if key.count("_") < 2:  # the status of a request that was cleared while it was under way
            continue
        uid, session, output = key.rsplit("_", 2)
        found.setdefault(uid, {}).setdefault(int(session), []).append((int(output), key))
    return {
        uid: [[key for _, key in sorted(outputs)] for _, outputs in sorted(sessions.items())]
        for uid, sessions in found.items()
    }


def _success(signal: np.ndarray, config: SuccessConfig) -> np.ndarray:
    if config.mode == "threshold":
        return (signal >= config.threshold).astype(np.float64)
    return np.clip((signal - config.low) / (config.high - config.low), 0.0, 1.0)
