"""What TransferQueue holds for the groups that are open: which rows belong to which rollout, and what becomes of them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, islice

import numpy as np
import transfer_queue as tq
from transfer_queue.metadata import BatchMeta
from verl.utils import tensordict_utils as tu

from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.engine import Requests, StepResult
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.groups import Groups
from verl_adaptive.integration.bulk import stacked, without_gc
from verl_adaptive.integration.curves import RowFigures
from verl_adaptive.integration.facts import SINGLE_TURN
from verl_adaptive.integration.polling import DONE, PARTITION, STALL, bounded
from verl_adaptive.integration.rewards import no_field, read, read_rewards, sums

logger = logging.getLogger(__name__)

#: Seconds after which a look lists the queue all the same: rows of unfinished requests are a sign of life.
_LIST_INTERVAL = 30.0
#: Share of the time that listing a small queue more often may take.
_LIST_SHARE = 0.02
#: Masks of verl's agent loop of one turn that a step looks into.
_PROBES = 64
#: Status of a request none of whose sessions raised.
_WELL = "finished"
#: A session's rows are named by the number of the output.
_FIRST_OUTPUT = "_0"


@dataclass
class Request:
    """One request of a group.

    Attributes:
        uid: of its rows.
        n, stage: its rollouts, and how many requests of the group came before it.
        sessions: once it is back, each a list of row keys (outputs in order).
        tags: of all these rows.
        whole: verl's agent loop of one turn has it: a session leaves one row, and every response token counts in the loss.
        seen: keys of its rows so far, in any order, while it is waited for.
    """

    uid: str
    n: int
    stage: int
    sessions: list[list[str]] = field(default_factory=list)
    tags: list[dict] = field(default_factory=list)
    whole: bool = False
    seen: list[str] = field(default_factory=list)


@dataclass
class Batch:
    """A finished step as TransferQueue rows.

    Attributes:
        result: the engine's result.
        keys: rows that train, groups in submission order.
        tags: their tags.
        group: int64, position in ``trained`` of each row of ``sequences``.
        sequences: all rows of trained groups, those left out for zero advantage included: key, and whether it trains.
        trained: the groups that train, with all their rollouts.
        position: uid that the rows of each trained group have → its position in ``trained``.
        zero_row_tokens: loss tokens of each sequence (0 where it trains: verl counts those itself).
        rows: every row of the trained groups, for verl's curves.
    """

    result: StepResult
    keys: list[str]
    tags: list[dict]
    sequences: list[tuple[str, bool]]
    group: np.ndarray
    trained: Groups
    position: dict[str, int]
    zero_row_tokens: np.ndarray
    rows: RowFigures


class Queue:
    """The rows of open groups in TransferQueue.

    ===============================  ==========================  ===========================================================
    row's key                        tag ``status``              what it is
    ===============================  ==========================  ===========================================================
    ``<uid>``                        pending, running            a group's first request, under way
    ``<uid>.t<k>``                   pending, running            its k-th top-up: the same prompt under another uid
    either                           finished, failure           the request is back; *failure*: a session raised
    ``<uid>_<session>_<output>``     success                     a session's output, with its reward; the last is its result
    none                                                         a request that got lost, or whose group is closed
    ===============================  ==========================  ===========================================================

    A session that failed leaves no rows, or one without a finite reward: the others are the group
    (``adaptive.min_sessions``), and the rows of the failed one are cleared at once. When the batch is made, the uid of the
    group's largest request is written into the ``uid`` *field* of the others' rows, so that verl's grouping joins them.

    Args:
        config: the ``adaptive`` group.
        alone: a rollout can train without another of its prompt; False: its advantage compares it with them.
        late: rewards come when all rollouts of the step are there (a colocated reward model).

    Attributes:
        count: rows in the queue at the latest look.
        listed_at: seconds (monotonic) of the latest look that listed them.
    """

    def __init__(self, config: AdaptiveConfig, *, alone: bool = False, late: bool = False) -> None:
        self.config, self._late = config, late
        self._least = 1 if alone else 2
        self.count = 0
        self._groups: dict[int, list[Request]] = {}  # submission → its requests, in order
        self._waiting: dict[str, Request] = {}  # requests that are not back, by uid
        self._listed: dict[str, dict] = {}  # the queue at the latest look
        self.listed_at, self._list_again = -math.inf, 0.0  # when, and seconds until the next
        self._unlisted: set[str] = set()  # uids that are back, whose rows have not been listed since
        self._rows = self._sessions = 0  # of all results: how many rows a session has
        self._whole = True  # masks of verl's loop of one turn have been as long as their answers ...
        self._single: bool | None = None  # ... and its sessions one row each; None: none has been seen
        self._signal_known = config.signal == "reward"  # a rollout had the field that adaptive.signal names
        self._given: set[str] | None = None  # the fields that rollouts had, until then; None: none has had a reward
        self._asked = self._arrived = 0  # rollouts of the requests that are not back, and those of them with a row

    # -- asking ---------------------------------------------------------------------------------------------

    def ask(self, submission: int, uid: str, n: int, stage: int, *, whole: bool = False) -> str:
        """Note a request that is about to be sent; its uid: ``uid`` itself, or for a top-up one of its group's."""
        requests = self._groups.setdefault(submission, [])
        request = Request(f"{requests[0].uid}.t{stage}" if requests else uid, n, stage, whole=whole)
        requests.append(request)
        self._waiting[request.uid] = request
        self._asked += n
        return request.uid

    def _waited_for(self, request: Request) -> list[str]:
        """Wait for this request no longer: the keys that it has rows under."""
        if self._waiting.pop(request.uid, None) is None:
            return []
        self._asked -= request.n
        self._arrived -= sum(key.endswith(_FIRST_OUTPUT) for key in request.seen)
        return request.seen

    def forget_last(self, submission: int) -> None:
        """Forget a request that got lost: it will be asked anew."""
        self._waited_for(self._groups[submission].pop())
        if not self._groups[submission]:
            del self._groups[submission]

    @property
    def submissions(self) -> list[int]:
        """Submissions of the groups that have rows here."""
        return list(self._groups)

    def uids(self, requests: Requests) -> list[str]:
        """The uids of these requests, which must be the latest of their groups."""
        return [self._groups[submission][-1].uid for submission in requests.submission.tolist()]

    # -- looking --------------------------------------------------------------------------------------------

    @without_gc()
    def look(self, uids: Sequence[str]) -> dict[str, str | None]:
        """The status of each request; the whole queue is listed where nothing else tells the rows.

        A listing costs by all rows there are, a status by the requests in flight: most looks must do without one.
        """
        if uids and time.monotonic() - self.listed_at < self._list_again:
            found = tq.get_client().kv_retrieve_meta(keys=list(uids), partition_id=PARTITION, create=False)
            if found.size == len(uids):
                status = {u: tag.get("status") for u, tag in zip(uids, found.custom_meta, strict=True)}
                back = {u for u, s in status.items() if s in DONE}
                if not back or (self._single and all(self._waiting[u].whole and status[u] == _WELL for u in back)):
                    self._unlisted = back
                    return status
        rows = self._list()
        return {u: rows.get(u, {}).get("status") for u in uids}

    def _list(self) -> dict[str, dict]:
        began = time.monotonic()
        rows = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
        for key in rows.keys() - self._listed.keys():
            if key.count("_") >= 2:  # a rollout's; the others are the requests' own
                request = self._waiting.get(key.rsplit("_", 2)[0])
                if request is not None:
                    request.seen.append(key)
                    self._arrived += key.endswith(_FIRST_OUTPUT)
        self._listed, self.count, self._unlisted = rows, len(rows), set()
        self.listed_at = time.monotonic()
        self._list_again = min(_LIST_INTERVAL, (self.listed_at - began) / _LIST_SHARE)
        return rows

    def rows(self, uids: Iterable[str]) -> tuple[list[str], list[dict]]:
        """Every row of these requests, which are back and not collected: keys and tags, sessions and outputs in order."""
        self._list()
        keys = [key for uid in uids for outputs in _sessions(self._waiting[uid].seen) for key in outputs]
        return keys, [self._listed[key] for key in keys]

    @property
    def under_way(self) -> int:
        """Rollouts that were asked for and have no row yet, as of the latest listing."""
        return self._asked - self._arrived

    def expected(self) -> int:
        """Rows that the queue will hold once everything asked for is back."""
        here = sum(1 + len(request.tags) for requests in self._groups.values() for request in requests)
        return here + math.ceil(self._asked * self.outputs)

    @property
    def outputs(self) -> float:
        """Rows that a session has, on average; one until some were seen."""
        return self._rows / self._sessions if self._sessions else 1.0

    # -- reading --------------------------------------------------------------------------------------------

    @without_gc()
    def collect(self, back: Requests, step: int) -> Groups:
        """Read the rewards of requests that are back: one group per request, surviving sessions in order.

        ConfigError: everything is back, and no rollout has the field that ``adaptive.signal`` names.
        """
        requests = [self._groups[submission][-1] for submission in back.submission.tolist()]
        found, tags, meta = self._find(requests)
        sessions = [outputs for mine in found for outputs in mine]
        last = [outputs[-1] for outputs in sessions]
        reward, signal, given = read_rewards(last, self.config.signal, meta, late=self._late)
        self._signal_known |= self.config.signal in given
        if np.isfinite(reward).any():
            self._given = given | (self._given or set())
        if not self._waiting:
            self.miss_signal()
        alive = np.isfinite(reward) & np.isfinite(signal)

        # Per session ...
        outputs = np.fromiter(map(len, sessions), dtype=np.int64, count=len(sessions))
        starts = np.cumsum(outputs) - outputs
        lengths = np.array([tag.get("response_len", 0) for tag in tags], dtype=np.int64)
        tokens, longest = np.add.reduceat(lengths, starts), np.maximum.reduceat(lengths, starts)
        # ... and per request.
        home = _owners(map(len, found))
        sizes, counts = (np.bincount(at, minlength=len(requests)) for at in (home, home[alive]))
        spoilt_tokens = np.bincount(home[~alive], weights=tokens[~alive], minlength=len(requests))
        versions = np.array([tag.get("min_global_steps") for tag in tags], dtype=np.float64)  # NaN: not known
        lag = np.zeros(len(requests))
        np.fmax.at(lag, home[alive], np.fmax.reduceat(step - 1 - versions, starts)[alive])

        self._keep(requests, found, tags, alive, outputs)
        self._rows += len(tags)
        self._sessions += len(sessions)
        dead = [key for outputs, lives in zip(sessions, alive.tolist(), strict=True) if not lives for key in outputs]
        if dead:
            tq.kv_clear(keys=dead, partition_id=PARTITION)
        stage = np.array([request.stage for request in requests], dtype=np.int16)
        asked = np.array([request.n for request in requests], dtype=np.int64)
        enough = np.array([self._enough(request.n) for request in requests], dtype=np.int64)
        return Groups(
            submission=back.submission,
            row=back.row,
            index=back.index,
            # A top-up that lost sessions, or all of them, leaves its group what it has.
            failed=(stage == 0) & (counts < enough),
            lag=lag.astype(np.int32),
            offsets=np.concatenate([[0], np.cumsum(counts)]),
            reward=reward[alive],
            signal=signal[alive],
            success=self.config.success.of(signal[alive]),
            tokens=tokens[alive],
            stage=np.repeat(stage, counts),
            lost=(asked - counts).astype(np.int32),
            spoilt=sizes - counts,
            spoilt_tokens=spoilt_tokens.astype(np.int64),
            shorter=(tokens - longest)[alive],
        )

    def miss_signal(self) -> None:
        """So much has come back that a rollout would have had the signal: ConfigError if none had it, though some had a reward.

        The first that come back may lack it, where a reward function gives less of an answer that it cannot parse.
        """
        if not self._signal_known and self._given is not None:
            raise no_field(self.config.signal, self._given)

    @staticmethod
    def _keep(
        requests: list[Request], found: list[list[list[str]]], tags: list[dict], alive: np.ndarray, outputs: np.ndarray
    ) -> None:
        """Note the surviving sessions of each request, and the tags of their rows."""
        living = iter(alive.tolist())
        rows = iter(zip(tags, np.repeat(alive, outputs).tolist(), strict=True))
        for request, sessions in zip(requests, found, strict=True):
            request.sessions = list(compress(sessions, islice(living, len(sessions))))
            request.tags = [tag for tag, lives in islice(rows, sum(map(len, sessions))) if lives]

    def _find(self, requests: list[Request]) -> tuple[list[list[list[str]]], list[dict], BatchMeta | None]:
        """The sessions of requests that are back, their rows' tags, and where those are if that was asked for on the way."""
        # One row a session: the names are known.
        if self._unlisted.issuperset(request.uid for request in requests):
            names = [[f"{request.uid}_{s}{_FIRST_OUTPUT}" for s in range(request.n)] for request in requests]
            keys = list(chain.from_iterable(names))
            meta = tq.get_client().kv_retrieve_meta(keys=keys, partition_id=PARTITION, create=False)
            if meta.size == len(keys):
                for request in requests:
                    self._waited_for(request)
                return [[[key] for key in mine] for mine in names], meta.custom_meta, meta
        if self._unlisted:
            self._list()  # a session left no row
        found, alone = [], []
        for request in requests:
            found.append(_sessions([key for key in self._waited_for(request) if key in self._listed]))
            if request.whole:
                alone += [len(outputs) == 1 for outputs in found[-1]]
        if alone and self._single is not False:
            self._single = all(alone)
        return found, [self._listed[key] for sessions in found for outputs in sessions for key in outputs], None

    def _enough(self, n: int) -> int:
        """Sessions that make a group of ``n``: one that is left of several has nothing to be compared with."""
        return max(min(self._least, n), math.ceil(self.config.min_sessions * n - 1e-9))

    # -- the batch ------------------------------------------------------------------------------------------

    @without_gc()
    def take_batch(self, result: StepResult) -> Batch:
        """Collect the rows that train, in submission order, and clear everything else that is closed."""
        groups, inside = result.groups, result.groups.rollout_mask(result.trained)
        trained = groups.select(result.trained)
        opened = [self._groups[submission] for submission in trained.submission.tolist()]
        requests = [request for mine in opened for request in mine]
        # Per row of the trained groups: the rollout, the request and the group that it is of.
        every = [key for request in requests for outputs in request.sessions for key in outputs]
        tags = [tag for request in requests for tag in request.tags]
        rollout = _owners(len(outputs) for request in requests for outputs in request.sessions)
        owner = _owners(len(request.tags) for request in requests)
        place = _owners(map(len, opened))[owner]
        response = np.array([tag["response_len"] for tag in tags], dtype=np.int64)
        prompt = np.array([tag["seq_len"] for tag in tags], dtype=np.int64) - response
        trains = result.trains[inside][rollout]
        there = trains | result.zero_row[inside][rollout]
        keys = list(compress(every, trains.tolist()))

        largest = _largest(_owners(map(len, opened)), np.bincount(owner[trains], minlength=len(requests)))
        uids = [requests[at].uid for at in largest.tolist()]
        moved = np.flatnonzero(trains & (owner != largest[place]))
        if len(moved):
            _rename([every[i] for i in moved.tolist()], [uids[at] for at in place[moved].tolist()])
        whole = np.array([request.whole for request in requests], dtype=bool)[owner]
        zero_row_tokens = np.zeros(len(every), dtype=np.int64)
        absent = np.flatnonzero(there & ~trains)
        zero_row_tokens[absent] = self._loss_tokens(
            [every[i] for i in absent.tolist()], response[absent], whole[absent]
        )
        score = trained.reward[rollout]
        if self._late and len(every) > trained.rollouts:  # such a model judges every output of a session by itself
            score = sums(read(every, ["rm_scores"])["rm_scores"])
        self.close(groups.submission.tolist(), keep=set(keys))
        return Batch(
            result,
            keys,
            list(compress(tags, trains.tolist())),
            list(zip(compress(every, there.tolist()), trains[there].tolist(), strict=True)),
            place[there],
            trained,
            {uid: at for at, uid in enumerate(uids)},
            zero_row_tokens[there],
            RowFigures(score, prompt, response, left_out=len(every) - len(keys)),
        )

    def _loss_tokens(self, keys: list[str], response: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """Loss tokens of rows that are left out: the mask's sum, for tool output does not count.

        Masks are as large as the answers, and the step waits for them: of verl's loop of one turn, where they are all ones,
        a few are read, and the tags tell the others.

        Args:
            keys: the rows.
            response: int64 ``(len(keys),)``, their response tokens.
            whole: bool ``(len(keys),)``, whether they are of verl's loop of one turn.
        """
        out = response.copy()
        told = whole & self._whole
        probe = np.flatnonzero(told)[:: max(1, math.ceil(told.sum() / _PROBES))]
        if (_mask_sums([keys[i] for i in probe.tolist()]) != out[probe]).any():
            logger.warning(
                "the loss masks of %s leave out tokens, unlike verl's own: every mask is read from now on",
                SINGLE_TURN,
            )
            self._whole, told = False, np.zeros_like(told)
        rest = np.flatnonzero(~told)
        out[rest] = _mask_sums([keys[i] for i in rest.tolist()])
        return out

    @without_gc()
    def close(self, submissions: Iterable[int], keep: Iterable[str] = ()) -> None:
        """Clear everything of these groups but the rows in ``keep``, which are verl's from now on."""
        keep = set(keep)
        gone: list[str] = []
        for submission in submissions:
            for request in self._groups.pop(submission, []):  # none: cleared already
                self._waited_for(request)
                gone.append(request.uid)
                gone += [key for outputs in request.sessions for key in outputs if key not in keep]
        if gone:
            tq.kv_clear(keys=gone, partition_id=PARTITION)

    def drop(self, requests: Requests) -> list[str]:
        """Forget requests that are aborted, and clear what their groups had; their uids, for whoever ends them."""
        uids = self.uids(requests)
        for submission in requests.submission.tolist():
            self._waited_for(self._groups[submission].pop())
        self.close(requests.submission.tolist())
        return uids

    def clear_strays(self) -> dict[str, dict]:
        """Clear every row that is of no open group: what sessions wrote after they were given up. The rows that there were."""
        uids = {request.uid for requests in self._groups.values() for request in requests}
        rows = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
        stray = [key for key in rows if key.split("_", 1)[0] not in uids]
        if stray:
            tq.kv_clear(keys=stray, partition_id=PARTITION)
        return rows

    # -- groups that outlive a step, across a restart --------------------------------------------------------

    def state_dict(self) -> dict:
        """Which rows belong to open groups; the rows themselves are in TransferQueue's own checkpoint."""
        return {
            str(submission): [[p.uid, p.n, p.stage, p.sessions, p.uid not in self._waiting] for p in requests]
            for submission, requests in self._groups.items()
        }

    def load_state_dict(self, state: dict, living: Iterable[int]) -> None:
        """Take up the groups of these submissions, and clear every restored row that is not theirs.

        AdaptiveError: rows of rollouts that were reviewed before the checkpoint are missing.
        """
        known = set(living)
        saved = {int(t): requests for t, requests in state.items() if int(t) in known}
        self._groups = {t: [Request(*about) for *about, _ in requests] for t, requests in saved.items()}
        rows = self.clear_strays()
        reviewed = {
            k for requests in self._groups.values() for p in requests for outputs in p.sessions for k in outputs
        }
        lost = reviewed - rows.keys()
        if lost:
            raise AdaptiveError(
                f"{len(lost)} rows of reviewed groups are not in the checkpoint's folder transfer_queue, which verl writes last: "
                "it was saved or copied in part. Resume from another checkpoint (trainer.resume_from_path), or leave these "
                "groups behind: trainer.v1.trainer_mode=sync adaptive.resume.allow=[mode]"
            )
        for request in (request for requests in self._groups.values() for request in requests):
            request.tags = [rows[key] for outputs in request.sessions for key in outputs]
        back = {uid for requests in saved.values() for uid, *_, back in requests if back}
        self._waiting = {p.uid: p for requests in self._groups.values() for p in requests if p.uid not in back}
        self._asked = sum(request.n for request in self._waiting.values())


def bound_queue(seconds: float) -> None:
    """Give up TransferQueue's answers to this process after so many seconds; its client waits for ever once the controller is gone.

    A checkpoint of the queue may take half an hour at least. TransferQueue 0.1.8 offers no place for this.
    """
    client = tq.get_client()
    if not hasattr(client, "_run_coroutine"):
        return
    what = "TransferQueue has not answered"
    run = client._run_coroutine
    limits = [bounded(run, limit, what) for limit in (seconds, max(seconds, STALL))]
    client._run_coroutine = lambda coro: limits["checkpoint" in coro.__name__](coro)


def _sessions(keys: list[str]) -> list[list[str]]:
    """A request's sessions in order, each the keys of its outputs in order; keys are ``{uid}_{session}_{output}``."""
    found: dict[int, list[tuple[int, str]]] = {}
    for key in keys:
        _, session, output = key.rsplit("_", 2)
        found.setdefault(int(session), []).append((int(output), key))
    return [[key for _, key in sorted(outputs)] for _, outputs in sorted(found.items())]


def _owners(sizes: Iterable[int]) -> np.ndarray:
    """int64: of things that lie one after another, which owner each is of; so many are the first one's, and so on."""
    counts = np.array(list(sizes), dtype=np.int64)
    return np.repeat(np.arange(len(counts)), counts)


def _largest(owner: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """int64: position of each owner's largest thing, the first of equals; ``owner`` ascends and leaves nobody out."""
    order = np.lexsort((-sizes, owner))
    return order[np.flatnonzero(np.diff(owner[order], prepend=-1))]


def _rename(keys: list[str], uids: list[str]) -> None:
    """Write a uid into the ``uid`` field of each of these rows; AdaptiveError if one is not there.

    As ``tq.kv_batch_put``, which reads the rows' tags, copies them in depth several times and sends them back as they were.
    """
    client = tq.get_client()
    found = client.kv_retrieve_meta(keys=keys, partition_id=PARTITION, create=False)
    if found.size != len(keys):
        raise AdaptiveError(f"{len(keys) - found.size} of {len(keys)} rows have left TransferQueue")
    meta = BatchMeta(found.global_indexes, found.partition_ids, _custom_backend_meta=found._custom_backend_meta)
    meta.custom_meta = []  # no tags to write: those that there are stay
    client.put(tu.get_tensordict({"uid": stacked(uids)}), meta)


def _mask_sums(keys: list[str]) -> np.ndarray:
    """int64 ``(len(keys),)``: loss tokens of these rows."""
    if not keys:
        return np.zeros(0, dtype=np.int64)
    data = read(keys, ["response_mask"])
    return np.array([int(mask.sum().item()) for mask in data["response_mask"]], dtype=np.int64)
