"""Aborting what a step no longer needs: the ``sync`` trainer's batch is decided while requests are still in flight.

What verl offers, and what it does not (0.9.1; 0.9.0 has no gate, its servers pause as SGLang's do):

* A request is a task ``_run_prompt`` of one agent-loop worker, kept in ``AgentLoopWorkerTQ.background_tasks``, with one
  child task a session (``trainer/ppo/v1/agent_loop_tq.py``). Dispatch returns once those tasks exist, so none is still
  under way to a worker. There is no call that ends one.
* ``CheckpointEngineManager.abort_replicas`` (``checkpoint_engine/base.py``) ends what the *servers* generate. A session
  of the ``sync`` trainer takes its cut-off answer for the whole one (``LLMServerClient``, ``workers/rollout/llm_server.py``;
  the asynchronous trainers' ``FullyAsyncLLMServerClient`` generates the rest later instead): it is scored by the reward
  function and written to TransferQueue as a finished row. A session of several turns parses it for tool calls and asks
  for its next turn. Requests that had not begun come back empty and end in a traceback. So the servers alone are not
  the place: the sessions must end first.
* A cancelled ``_run_prompt`` cancels its sessions, waits for all of them and writes no status; verl logs nothing. Nothing
  retries it. TransferQueue's client discards a socket whose call was cancelled (``utils/zmq_utils.py``, ``lease``); rows
  of sessions that had finished stay until they are cleared.
* Cancelling an awaited Ray call does not end the call: the server would go on, and so would the reward worker.
  :class:`CancellingClient` cancels the server's call with its caller (``ray.cancel``; vLLM's ``AsyncLLM.generate`` then
  aborts the request in its engine), and gives the load balancer back what a cancelled ``_acquire_server`` had taken.
  It also frees the line: a server takes ``max(1000, max_num_seqs + 16)`` calls at once (``workers/rollout/replica.py``)
  and everything else, an abort included, waits behind them. A reward that is being computed is computed to its end.
* ``abort_all_requests(reject_request=True)`` then closes a server's gate: a call that was still on its way comes back
  empty to nobody (vLLM, TensorRT-LLM), and the call returns when nothing runs any more. SGLang has no gate of verl's, and
  warns of ``reject_request``: it pauses, and waits for the callers inside the server, which is why those outlive their
  cancelled calls (:mod:`~verl_adaptive.integration.sglang`). A late call is generated after the pause; its client was
  cancelled, so no row comes of it.
* A gate stays closed until ``resume_generation``. ``colocate_async`` aborts, sleeps, trains, updates weights and resumes
  in that order (``trainer_colocate_async.py``), and so do we: :meth:`Abort.reopen` after the weights.

vLLM's ``abort_request`` takes a server's own request id, a random one that the agent loop does not know, and clears the
whole prefix cache each time: single requests cannot be picked that way. Everything in flight is aborted, which is what
the end of a step means.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import transfer_queue as tq
from verl.workers.rollout.llm_server import LLMServerClient

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration.polling import PARTITION, requests_of

logger = logging.getLogger(__name__)

#: Seconds that cancelled sessions get to end (a tool that cleans up) before the step goes on without them.
_PATIENCE = 10.0
#: Seconds that a busy server gets to say how many tokens its requests have; it is not worth more.
_COUNT_PATIENCE = 2.0


@dataclass(eq=False)
class _Asked:
    """What a session has asked of servers: calls that are not answered yet, and tokens of those that are."""

    open: int = 0
    tokens: int = 0


#: Of this process, an agent-loop worker's: its sessions that have not ended.
_sessions: dict[asyncio.Task, _Asked] = {}


class CancellingClient(LLMServerClient):
    """verl's client, whose call to a server is cancelled when its caller is."""

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        acquired = asyncio.ensure_future(super()._acquire_server(request_id, **extra))
        try:
            server_id, server = await asyncio.shield(acquired)
        except asyncio.CancelledError:
            acquired.add_done_callback(lambda done: self._give_back(done, request_id))
            raise
        return server_id, _Cancelling(server)

    def _give_back(self, acquired: asyncio.Future, request_id: str) -> None:
        """The load balancer counts requests: one that never came must not count."""
        if not acquired.cancelled() and acquired.exception() is None:
            extra = {"request_id": request_id} if _takes(self._release_server, "request_id") else {}
            self._release_server(acquired.result()[0], **extra)


class _Cancelling:
    """A server's handle as the client sees it: ``handle.generate.remote(...)``, awaited."""

    def __init__(self, server: ray.actor.ActorHandle) -> None:
        self._server = server

    @property
    def generate(self) -> _Cancelling:
        return self

    async def remote(self, **kwargs: Any) -> Any:
        session = asyncio.current_task()
        assert session is not None  # we are in it
        if session not in _sessions:
            _sessions[session] = _Asked()
            session.add_done_callback(_sessions.pop)
        asked, call = _sessions[session], self._server.generate.remote(**kwargs)
        asked.open += 1
        try:
            output = await call
        except asyncio.CancelledError:
            ray.cancel(call)
            raise
        finally:
            asked.open -= 1
        asked.tokens += len(getattr(output, "token_ids", None) or ())
        return output


@dataclass(frozen=True)
class Aborted:
    """What aborted requests had generated.

    Attributes:
        rollouts: sessions that had generated anything, those whose reward was being computed or whose tool ran included; where
            a server could not say, the calls that were cancelled, and no more than the servers generate at once.
        tokens: response tokens; of calls under way those of servers that could say.
    """

    rollouts: int
    tokens: int


class Abort:
    """Ends everything that is in flight.

    Args:
        workers: the agent-loop workers.
        servers: the rollout servers that generate (``server_handles``).
        gates: verl's checkpoint manager, which closes and opens all servers.
        timeout: seconds to wait for a worker or server that does not answer (``adaptive.stall_timeout``).
        slots: sequences that all servers together generate at once; 0: not known.
        gated: servers have a gate that rejects what comes late (all but SGLang's).
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[ray.actor.ActorHandle]],
        servers: Callable[[], Sequence[ray.actor.ActorHandle]],
        gates: Callable[[], Any],
        timeout: float,
        slots: int = 0,
        gated: bool = True,
    ) -> None:
        self._workers, self._servers, self._gates, self._timeout = workers, servers, gates, timeout
        self._slots, self._gated = slots, gated
        self._closed = False

    def __call__(self, uids: Iterable[str]) -> Aborted:
        """Abort the requests of these uids: all that are in flight, for a server's gate closes for everybody.

        Returns once nothing generates any more, the servers' gates are closed and the requests' rows are cleared; AdaptiveError
        if a worker or server died or does not answer.
        """
        started = time.monotonic()
        gone = set(uids)
        if not gone:
            return Aborted(0, 0)
        counts, all_counted = self._count()
        left, calls, between, answered = self._stop()
        begun = sum(n > 0 for n in counts)
        if not all_counted:
            begun = max(begun, min(calls, self._slots or calls))
        asyncio.run(self._close_gates())
        tags = _clear(gone)
        sessions = {key.rsplit("_", 1)[0] for key in tags}
        done = Aborted(
            rollouts=len(sessions) + between + begun,
            tokens=sum(tag.get("response_len", 0) for tag in tags.values()) + answered + sum(counts),
        )
        if left:
            logger.warning(
                "%d requests were cancelled %g s ago and have not ended: an agent loop or a tool holds asyncio.CancelledError "
                "back. The step goes on; whatever they still write is cleared",
                left,
                _PATIENCE,
            )
        logger.debug("aborted %d requests in %.2f s: %s", len(gone), time.monotonic() - started, done)
        return done

    def reopen(self) -> None:
        """Let the servers take requests again, after the weights are updated."""
        if self._closed:
            self._gates().resume_generation_replicas()
            self._closed = False

    # -- parts ----------------------------------------------------------------------------------------------

    def _count(self) -> tuple[list[int], bool]:
        """Tokens of every request of the servers that can say, and whether all could. A metric: no trouble ends a step."""
        servers = self._servers()
        calls = [server.__ray_call__.remote(_generated) for server in servers]
        counts, said = [], 0
        for call in ray.wait(calls, num_returns=len(calls), timeout=_COUNT_PATIENCE)[0] if calls else []:
            try:
                found = ray.get(call)
            except Exception as error:  # whoever is dead is missed when the gates close
                logger.debug("a rollout server could not count its requests", exc_info=error)
                continue
            if found is not None:
                counts += found
                said += 1
        if said < len(servers):
            logger.info(
                "%d of %d rollout servers could not count the tokens of aborted requests: they are busy, or keep no such books",
                len(servers) - said,
                len(servers),
            )
        return counts, said == len(servers)

    def _stop(self) -> tuple[int, int, int, int]:
        """Cancel every request of every worker: sums of what :func:`_cancel_requests` says of each."""
        until = time.monotonic() + _PATIENCE
        ended = self._get([w.__ray_call__.remote(_cancel_requests) for w in self._workers()])
        left, calls, between, answered = map(sum, zip(*ended, strict=True)) if ended else (0, 0, 0, 0)
        while left and time.monotonic() < until:
            left = sum(self._get([w.__ray_call__.remote(_wait_for_requests) for w in self._workers()]))
        return left, calls, between, answered

    async def _close_gates(self) -> None:
        self._closed = True
        abort = self._gates().abort_replicas
        extra = {"reject_request": True} if self._gated and _takes(abort, "reject_request") else {}
        try:
            await asyncio.wait_for(abort(**extra), self._timeout)
        except asyncio.TimeoutError as error:  # before Python 3.11 another class than the builtin one
            raise self._silent("a rollout server") from error

    def _get(self, calls: list[ray.ObjectRef]) -> list[Any]:
        try:
            return ray.get(calls, timeout=self._timeout)
        except ray.exceptions.GetTimeoutError as error:
            raise self._silent("an agent-loop worker") from error

    def _silent(self, who: str) -> AdaptiveError:
        return AdaptiveError(
            f"{who} has not answered for adaptive.stall_timeout={self._timeout:g} s while requests were aborted: look for "
            "the last error above, and start the same command again: it resumes from the last checkpoint"
        )


def _clear(uids: set[str]) -> dict[str, dict]:
    """Clear the rows of these requests; the tags of the rollouts among them."""
    rows = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
    mine = {key: tag for key, tag in rows.items() if _uid(key) in uids}
    if mine:
        tq.kv_clear(keys=list(mine), partition_id=PARTITION)
    return {key: tag for key, tag in mine.items() if key not in uids}


def _takes(call: Callable[..., Any], parameter: str) -> bool:
    """Whether this verl knows a parameter that came with 0.9.1."""
    return parameter in inspect.signature(call).parameters


def _uid(key: str) -> str:
    """The uid of a row's request, from the row's key: ``{uid}`` or ``{uid}_{session}_{output}``."""
    return key.rsplit("_", 2)[0] if key.count("_") >= 2 else key


# Run inside verl's actors, beside their event loops.


def _cancel_requests(worker: Any) -> tuple[int, int, int, int]:
    """Cancel a worker's requests, once, for a second time would interrupt their cleaning up.

    Returns:
        How many have not ended; how many calls the servers had of them; how many sessions had generated and were waiting for
        something else, a reward or a tool; and tokens of all calls that were answered.
    """
    if not hasattr(worker, "background_tasks"):
        raise AdaptiveError(
            f"{type(worker).__name__} keeps no background_tasks, as verl's AgentLoopWorkerTQ does, so its requests cannot be "
            "aborted; derive the workers of actor_rollout_ref.rollout.agent.agent_loop_manager_class from it"
        )
    tasks, sessions = list(worker.background_tasks), tuple(_sessions.values())
    calls, answered = sum(asked.open for asked in sessions), sum(asked.tokens for asked in sessions)
    between = sum(asked.tokens > 0 and not asked.open for asked in sessions)
    if tasks:
        tasks[0].get_loop().call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
    return _wait_for_requests(worker), calls, between, answered


def _wait_for_requests(worker: Any) -> int:
    """Wait up to a second for a worker's requests to end; return how many have not."""
    until = time.monotonic() + 1.0
    while worker.background_tasks and time.monotonic() < until:
        time.sleep(0.002)
    return len(worker.background_tasks)


def _generated(server: Any) -> list[int] | None:
    """Tokens that each request of a server has so far; None: it keeps no books that we know."""
    try:
        found = requests_of(server)
        return None if found is None else [_tokens(request) for request in found]
    except Exception:  # their private names: another version may have others
        return None


def _tokens(request: Any) -> int:
    vllm = getattr(request, "detokenizer", None)
    return int(vllm.num_output_tokens()) if vllm is not None else len(getattr(request, "output_ids", ()))
