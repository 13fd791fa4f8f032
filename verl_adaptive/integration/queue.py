"""What TransferQueue holds for the groups that are open: which rows belong to which rollout, and what becomes of them.

A request is a prompt row with a fresh uid; a top-up is the same prompt under another uid (``<first uid>.t<k>``), whose
rows get the group's uid written into their ``uid`` *field* when the batch is made, so that verl's grouping joins them.
A session that failed leaves no rows, or one without a finite reward: the others are the group
(``adaptive.min_sessions``), and the rows of the failed one are cleared at once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import transfer_queue as tq
from transfer_queue.metadata import BatchMeta
from verl.utils import tensordict_utils as tu

from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.engine import Requests, StepResult
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.groups import Groups
from verl_adaptive.integration.curves import Rows
from verl_adaptive.integration.facts import SINGLE_TURN
from verl_adaptive.integration.rewards import read, read_rewards
from verl_adaptive.integration.waiting import DONE, PARTITION

__all__ = ["Batch", "Queue"]

logger = logging.getLogger(__name__)

#: Seconds after which a look lists the queue all the same: rows of unfinished requests are a sign of life.
_LIST_INTERVAL = 10.0
#: Share of the time that listing a small queue more often may take.
_LIST_SHARE = 0.02
#: Masks of verl's agent loop of one turn that a step looks into.
_PROBES = 64
#: Status of a request none of whose sessions raised.
_WELL = "finished"
#: A session's rows are named by the number of the output.
_FIRST_OUTPUT = "_0"


@dataclass
class Part:
    """One request of a group: a uid, and once it is back its sessions, each a list of row keys (outputs in order).

    ``whole``: verl's agent loop of one turn has it: a session leaves one row, and every response token counts in the loss.
    """

    uid: str
    n: int
    stage: int
    sessions: list[list[str]] = field(default_factory=list)
    back: bool = False
    whole: bool = False


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


class Queue:
    """The rows of open groups in TransferQueue.

    Args:
        config: the ``adaptive`` group.
        alone: a rollout can train without another of its prompt; False: its advantage compares it with them.

    Attributes:
        count: rows in the queue at the latest look.
    """

    def __init__(self, config: AdaptiveConfig, *, alone: bool = False) -> None:
        self.config = config
        self._least = 1 if alone else 2
        self.count = 0
        self._parts: dict[int, list[Part]] = {}  # ticket → its requests, in order
        self._waiting: dict[str, list[str]] = {}  # uid that is not back → keys of its rows so far, in any order
        self._told: set[str] = set()  # of these, those whose sessions leave one row each
        self._tags: dict[str, dict] = {}  # of the rows of requests that are back
        self._listed: dict[str, dict] = {}  # the queue at the latest look
        self._listed_at, self._list_again = -math.inf, 0.0  # when, and seconds until the next
        self._unlisted: set[str] = set()  # uids that are back, whose rows have not been listed since
        self._outputs = 1.0  # rows of a session, on average over the latest results
        self._whole = True  # masks of verl's loop of one turn have been as long as their answers ...
        self._single: bool | None = None  # ... and its sessions one row each; None: none has been seen
        self._asked = self._arrived = 0  # rollouts of the requests that are not back, and those of them with a row

    # -- asking ---------------------------------------------------------------------------------------------

    def ask(self, ticket: int, uid: str, n: int, stage: int, *, whole: bool = False) -> str:
        """Note a request that is about to be sent; its uid: ``uid`` itself, or for a top-up one of its group's."""
        parts = self._parts.setdefault(ticket, [])
        part = Part(f"{parts[0].uid}.t{stage}" if parts else uid, n, stage, whole=whole)
        parts.append(part)
        self._waiting[part.uid] = []
        if whole:
            self._told.add(part.uid)
        self._asked += n
        return part.uid

    def _waited_for(self, part: Part) -> list[str]:
        """Wait for this request no longer: the keys that it has rows under."""
        self._told.discard(part.uid)
        keys = self._waiting.pop(part.uid, None)
        if keys is None:
            return []
        self._asked -= part.n
        self._arrived -= sum(key.endswith(_FIRST_OUTPUT) for key in keys)
        return keys

    def forget_last(self, ticket: int) -> None:
        """Forget a request that got lost: it will be asked anew."""
        self._waited_for(self._parts[ticket].pop())
        if not self._parts[ticket]:
            del self._parts[ticket]

    @property
    def tickets(self) -> list[int]:
        """Of the groups that have rows here."""
        return list(self._parts)

    def uids(self, requests: Requests) -> list[str]:
        """Of these requests, which must be the latest of their groups."""
        return [self._parts[ticket][-1].uid for ticket in requests.ticket.tolist()]

    # -- looking --------------------------------------------------------------------------------------------

    def look(self, uids: Sequence[str]) -> dict[str, str | None]:
        """The status of each request; the whole queue is listed where nothing else tells the rows.

        A listing costs by all rows there are, a status by the requests in flight: most looks must do without one.
        """
        self._unlisted = set()
        if uids and time.monotonic() - self._listed_at < self._list_again:
            found = tq.get_client().kv_retrieve_meta(keys=list(uids), partition_id=PARTITION, create=False)
            if found.size == len(uids):
                status = {u: tag.get("status") for u, tag in zip(uids, found.custom_meta, strict=True)}
                back = {u for u, s in status.items() if s in DONE}
                if not back or (self._single and all(u in self._told and status[u] == _WELL for u in back)):
                    self._unlisted = back
                    return status
        rows = self._list()
        return {u: rows.get(u, {}).get("status") for u in uids}

    def _list(self) -> dict[str, dict]:
        began = time.monotonic()
        rows = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
        for key in rows.keys() - self._listed.keys():
            if key.count("_") >= 2:  # a rollout's; the others are the requests' own
                arrived = self._waiting.get(key.rsplit("_", 2)[0])
                if arrived is not None:
                    arrived.append(key)
                    self._arrived += key.endswith(_FIRST_OUTPUT)
        self._listed, self.count, self._unlisted = rows, len(rows), set()
        self._listed_at = time.monotonic()
        self._list_again = min(_LIST_INTERVAL, (self._listed_at - began) / _LIST_SHARE)
        return rows

    def _fetch_unlisted(self, parts: list[Part]) -> BatchMeta | None:
        """What a listing would tell of requests whose rows have names that are known: one a session.

        Returns:
            Where the rows are, session after session, if that is so of all these requests.
        """
        parts = [part for part in parts if part.uid in self._unlisted]
        if not parts:
            return None
        names = [[f"{part.uid}_{s}{_FIRST_OUTPUT}" for s in range(part.n)] for part in parts]
        keys = [key for mine in names for key in mine]
        meta = tq.get_client().kv_retrieve_meta(keys=keys, partition_id=PARTITION, create=False)
        if meta.size != len(keys):
            self._list()  # a session left no row
            return None
        self._listed.update(zip(keys, meta.custom_meta, strict=True))
        for part, mine in zip(parts, names, strict=True):
            self._arrived += part.n - sum(key.endswith(_FIRST_OUTPUT) for key in self._waiting[part.uid])
            self._waiting[part.uid] = mine
        return meta

    @property
    def under_way(self) -> int:
        """Rollouts that were asked for and have no row yet, as of the latest listing."""
        return self._asked - self._arrived

    def expected(self) -> int:
        """Rows that the queue will hold once everything asked for is back."""
        rows = 0.0
        for parts in self._parts.values():
            for part in parts:
                rows += 1 + (sum(map(len, part.sessions)) if part.back else part.n * self._outputs)
        return math.ceil(rows)

    # -- reading --------------------------------------------------------------------------------------------

    def collect(self, requests: Requests, step: int) -> Groups:
        """Read the rewards of requests that are back: one group per request, surviving sessions in order."""
        parts = [self._parts[ticket][-1] for ticket in requests.ticket.tolist()]
        found, meta = self._find(parts)
        finals = [outputs[-1] for sessions in found for outputs in sessions]
        reward, signal = read_rewards(finals, self.config.signal, meta)
        alive = np.isfinite(reward) & np.isfinite(signal)
        sizes = np.array([len(sessions) for sessions in found], dtype=np.int64)
        at = np.concatenate([[0], np.cumsum(sizes)])
        dead: list[str] = []
        tokens, shorter, failed, lag = [], [], [], []
        spoilt, spoilt_tokens = [], []
        for part, sessions, start in zip(parts, found, at.tolist(), strict=False):
            living = alive[start : start + len(sessions)]
            part.sessions = [outputs for outputs, lives in zip(sessions, living, strict=True) if lives]
            unread: list[str] = []
            if len(part.sessions) < len(sessions):
                unread = [key for outputs, lives in zip(sessions, living, strict=True) if not lives for key in outputs]
                dead += unread
            spoilt.append(len(sessions) - len(part.sessions))
            spoilt_tokens.append(sum(self._listed[key].get("response_len", 0) for key in unread))
            part.back = True
            mine = {key: self._listed[key] for outputs in part.sessions for key in outputs}
            self._tags.update(mine)
            lengths = [[mine[k]["response_len"] for k in outputs] for outputs in part.sessions]
            tokens.append([sum(outputs) for outputs in lengths])
            shorter.append([sum(outputs) - max(outputs) if len(outputs) > 1 else 0 for outputs in lengths])
            # A top-up that lost sessions, or all of them, leaves its group what it has.
            failed.append(part.stage == 0 and len(part.sessions) < self._enough(part.n))
            versions = [tag.get("min_global_steps") for tag in mine.values()]
            lag.append(max([step - 1 - int(v) for v in versions if v is not None], default=0))
        if finals:
            self._outputs = sum(len(outputs) for sessions in found for outputs in sessions) / len(finals)
        if dead:
            tq.kv_clear(keys=dead, partition_id=PARTITION)
        counts = [len(part.sessions) for part in parts]
        cuts = np.cumsum(counts)[:-1] if counts else np.zeros(0, dtype=np.int64)
        reward, signal = reward[alive], signal[alive]
        return Groups.from_lists(
            requests.row,
            np.split(reward, cuts) if counts else [],
            signal=np.split(signal, cuts) if counts else [],
            success=np.split(self.config.success.of(signal), cuts) if counts else [],
            tokens=tokens,
            stage=[[part.stage] * count for part, count in zip(parts, counts, strict=True)],
            ticket=requests.ticket,
            index=requests.index,
            failed=failed,
            lag=np.maximum(lag, 0),
            lost=[part.n - count for part, count in zip(parts, counts, strict=True)],
            spoilt=spoilt,
            spoilt_tokens=spoilt_tokens,
            shorter=shorter,
        )

    def _find(self, parts: list[Part]) -> tuple[list[list[list[str]]], BatchMeta | None]:
        """The sessions of requests that are back, and where their rows are if that was asked for on the way."""
        meta = self._fetch_unlisted(parts)
        named = set() if meta is None else self._unlisted
        found, alone = [], []
        for part in parts:
            told = part.uid in self._told
            keys = self._waited_for(part)
            if part.uid in named:
                found.append([[key] for key in keys])
                continue
            found.append(_sessions([key for key in keys if key in self._listed]))
            if told:
                alone += [len(outputs) == 1 for outputs in found[-1]]
        if alone and self._single is not False:
            self._single = all(alone)
        return found, meta if len(named.intersection(part.uid for part in parts)) == len(parts) else None

    def _enough(self, n: int) -> int:
        """Sessions that make a group of ``n``: one that is left of several has nothing to be compared with."""
        return max(min(self._least, n), math.ceil(self.config.min_sessions * n - 1e-9))

    # -- the batch ------------------------------------------------------------------------------------------

    def settle(self, result: StepResult) -> Batch:
        """Collect the rows that train, in ticket order, and clear everything else that is closed."""
        groups = result.groups
        keys: list[str] = []
        sequences: list[tuple[str, bool]] = []
        whole: list[bool] = []
        home: list[int] = []
        position: dict[str, int] = {}
        moved: list[tuple[str, str]] = []  # top-up rows: key, the group's uid
        rows: list[tuple[float, int, int]] = []  # of every row: reward, prompt and response tokens
        trained = np.flatnonzero(result.trained)
        trains, ghosts, reward = result.trains.tolist(), result.ghost.tolist(), groups.reward.tolist()
        for place, g in enumerate(trained.tolist()):
            parts = self._parts[int(groups.ticket[g])]
            position[parts[0].uid] = place
            rollout = int(groups.offsets[g])
            for part in parts:
                for outputs in part.sessions:
                    trains_here, ghost = trains[rollout], ghosts[rollout]
                    lengths = [(self._tags[k]["seq_len"], self._tags[k]["response_len"]) for k in outputs]
                    rows += [(reward[rollout], seq - own, own) for seq, own in lengths]
                    rollout += 1
                    if not (trains_here or ghost):
                        continue
                    for key in outputs:
                        sequences.append((key, trains_here))
                        whole.append(part.whole)
                        home.append(place)
                        if trains_here:
                            keys.append(key)
                            if part.stage:
                                moved.append((key, parts[0].uid))
        if moved:
            fields = tu.get_tensordict({"uid": [uid for _, uid in moved]})
            tq.kv_batch_put(keys=[k for k, _ in moved], partition_id=PARTITION, fields=fields)
        ghost_tokens = self._loss_tokens(sequences, whole)
        tags = [self._tags[k] for k in keys]
        self.close(groups.ticket.tolist(), keep=set(keys))
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

    def _loss_tokens(self, sequences: list[tuple[str, bool]], whole: list[bool]) -> np.ndarray:
        """Loss tokens of the sequences that are left out (the mask's sum: tool output does not count); 0 of the others.

        Masks are as large as the answers, and the step waits for them: of verl's loop of one turn, where they are all ones,
        a few are read, and the tags tell the others.
        """
        out = np.zeros(len(sequences), dtype=np.int64)
        absent = np.array([i for i, (_, trains) in enumerate(sequences) if not trains], dtype=np.int64)
        told = np.array([self._whole and whole[i] for i in absent], dtype=bool)
        out[absent] = [self._tags[sequences[i][0]]["response_len"] for i in absent]
        probe = absent[told][:: max(1, math.ceil(told.sum() / _PROBES))]
        if (_mask_sums([sequences[i][0] for i in probe]) != out[probe]).any():
            logger.warning(
                "the loss masks of %s leave out tokens, as verl's own do not: every mask is read from now on",
                SINGLE_TURN,
            )
            self._whole, told = False, np.zeros_like(told)
        rest = absent[~told]
        out[rest] = _mask_sums([sequences[i][0] for i in rest])
        return out

    def close(self, tickets: Iterable[int], keep: Iterable[str] = ()) -> None:
        """Clear everything of these groups but the rows in ``keep``, which are verl's from now on."""
        keep = set(keep)
        gone: list[str] = []
        for ticket in tickets:
            for part in self._parts.pop(ticket, []):  # none: cleared already
                self._waited_for(part)
                gone.append(part.uid)
                for outputs in part.sessions:
                    for key in outputs:
                        self._tags.pop(key, None)
                        if key not in keep:
                            gone.append(key)
        if gone:
            tq.kv_clear(keys=gone, partition_id=PARTITION)

    def drop(self, requests: Requests) -> list[str]:
        """Forget requests that are aborted, and clear what their groups had; their uids, for whoever ends them."""
        uids = self.uids(requests)
        for ticket in requests.ticket.tolist():
            self._waited_for(self._parts[ticket].pop())
        self.close(requests.ticket.tolist())
        return uids

    # -- groups that outlive a step, across a restart --------------------------------------------------------

    def state_dict(self) -> dict:
        """Which rows belong to open groups; the rows themselves are in TransferQueue's own checkpoint."""
        return {
            str(ticket): [[p.uid, p.n, p.stage, p.sessions] for p in parts] for ticket, parts in self._parts.items()
        }

    def load_state_dict(self, state: dict, living: Iterable[int]) -> None:
        """Take up the groups of these tickets, and clear every restored row that is not theirs.

        Raises:
            AdaptiveError: rows of rollouts that were reviewed before the checkpoint are missing.
        """
        known = set(living)
        self._parts = {
            int(t): [Part(u, n, s, x, bool(x)) for u, n, s, x in parts] for t, parts in state.items() if int(t) in known
        }
        uids = {p.uid for parts in self._parts.values() for p in parts}
        rows = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
        reviewed = {k for parts in self._parts.values() for p in parts for outputs in p.sessions for k in outputs}
        stray = [k for k in rows if k not in reviewed and k.split("_", 1)[0] not in uids]
        if stray:
            tq.kv_clear(keys=stray, partition_id=PARTITION)
        lost = reviewed - rows.keys()
        if lost:
            raise AdaptiveError(f"{len(lost)} rows of open groups are not in the checkpoint's TransferQueue state")
        self._tags = {key: rows[key] for key in reviewed}
        self._waiting = {p.uid: [] for parts in self._parts.values() for p in parts if not p.back}
        self._asked = sum(p.n for parts in self._parts.values() for p in parts if not p.back)
        self._arrived = 0
        self._told = set()
        self._listed, self._listed_at = {}, -math.inf


def _sessions(keys: list[str]) -> list[list[str]]:
    """A request's sessions in order, each the keys of its outputs in order; keys are ``{uid}_{session}_{output}``."""
    found: dict[int, list[tuple[int, str]]] = {}
    for key in keys:
        _, session, output = key.rsplit("_", 2)
        found.setdefault(int(session), []).append((int(output), key))
    return [[key for _, key in sorted(outputs)] for _, outputs in sorted(found.items())]


def _mask_sums(keys: list[str]) -> np.ndarray:
    """int64 ``(len(keys),)``: loss tokens of these rows."""
    if not keys:
        return np.zeros(0, dtype=np.int64)
    data = read(keys, ["response_mask"])
    return np.array([int(mask.sum().item()) for mask in data["response_mask"]], dtype=np.int64)
