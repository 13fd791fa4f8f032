"""Waiting for rollouts, with a ceiling: nobody waits for ever, and whoever gives up says what for."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import wraps
from threading import Thread
from typing import Any

import ray

from verl_adaptive import __version__
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration.guard import PLUGIN

PARTITION = "train"
#: Statuses of a request that is back.
DONE = ("finished", "failure")
#: The driver's processor time for looks at the queue is at most this share of what it rests between them.
POLL_SHARE = 0.2
#: Seconds that a run may go without any rollout, where responses are short ...
STALL = 1800.0
#: ... and for each token of the longest response: a full server (512 sequences) takes 0.07 s for one.
_TOKEN = 0.1
#: Seconds between two looks at whether the workers are alive.
_LIVENESS_INTERVAL = 5.0
#: Seconds that a server gets to say how many requests it has, before a run that has waited much longer ends.
_COUNT_PATIENCE = 5.0


def stall_seconds(config: AdaptiveConfig, response_length: int) -> float:
    """Seconds without any rollout coming back that are too long: the user's, or by how long one of the longest may take."""
    if config.stall_timeout is not None:
        return config.stall_timeout
    return max(STALL, _TOKEN * response_length)


class Stopwatch:
    """What a look at the queue costs this process, from the watch's making on.

    All threads count, for TransferQueue's client works in one of its own; but no more than has passed, for those of torch's
    pool spin for a while after each operation. What the queue makes a look wait costs nothing.
    """

    def __init__(self) -> None:
        self._wall, self._processor = time.monotonic(), time.process_time()

    @property
    def seconds(self) -> float:
        """Of the processor, so far."""
        return min(time.monotonic() - self._wall, time.process_time() - self._processor)


class StallTimeout:
    """How long one wait has gone without anything coming back.

    Args:
        poll: seconds between two looks (``adaptive.poll_interval``).
        stall: seconds without anything coming back that are too long (:func:`stall_seconds`).
        step: the training step, for the message.
        dead: names of workers that have died.
        busy: what the servers are busy with (:func:`open_requests`), for the message.
    """

    def __init__(
        self, poll: float, stall: float, step: int, dead: Callable[[], list[str]], busy: Callable[[], str] = str
    ) -> None:
        self._poll, self._stall, self._step, self._dead, self._busy = poll, stall, step, dead, busy
        self.restart()

    def restart(self) -> None:
        """Something came back: the wait begins anew."""
        self._changed, self._seen = time.monotonic(), -1

    def rest(self, status: Mapping[str, str | None], rows: int, looked: float = 0.0) -> None:
        """Sleep until the next look; AdaptiveError if a worker died, or nothing came back for ``adaptive.stall_timeout`` seconds.

        ``status`` is of each request that is waited for, ``looked`` what this look has cost (:class:`Stopwatch`).
        """
        now = time.monotonic()
        seen = rows + sum(s in DONE for s in status.values())
        if seen != self._seen:
            self._seen, self._changed = seen, now
        left = {uid: s for uid, s in status.items() if s not in DONE}
        waiting = f"waiting for {len(left)} of {len(status)} prompts"
        dead = self._dead()
        if dead:
            raise AdaptiveError(
                f"step {self._step}: {', '.join(dead)} died while the trainer was {waiting}; their rollouts are lost. "
                "Look for the reason above (out of memory?) and start the same command again: it resumes from the "
                "last checkpoint"
            )
        if now - self._changed > self._stall:
            states = ", ".join(f"{n} {s or 'unknown'}" for s, n in sorted(Counter(left.values()).items(), key=str))
            busy = self._busy()
            raise AdaptiveError(
                f"step {self._step}: no rollout has finished for adaptive.stall_timeout="
                f"{self._stall:g} s; still {waiting} ({states}; first: {next(iter(left), 'none')}). A rollout "
                f"server has probably died, or the reward function{', its model' * ('reward model' in busy)} or a tool hangs"
                f"{f' (open requests: {busy})' if busy else ''}: look for the last error above, or raise "
                "adaptive.stall_timeout"
            )
        pause(self._poll, looked)


def pause(poll: float, looked: float) -> None:
    """Sleep ``poll`` seconds, or longer after a look at a large queue, which costs processor time."""
    time.sleep(max(poll, looked / POLL_SHARE))


def bounded(call: Callable[..., Any], seconds: float, what: str) -> Callable[..., Any]:
    """``call``, made in a thread of its own, which is given up after so many seconds: AdaptiveError with ``what`` has not happened."""

    @wraps(call)
    def within(*args: Any, **kwargs: Any) -> Any:
        made: Future = Future()

        def make() -> None:
            try:
                made.set_result(call(*args, **kwargs))
            except BaseException as error:  # the caller's
                made.set_exception(error)

        Thread(target=make, daemon=True).start()
        if not wait([made], seconds).done:
            raise AdaptiveError(
                f"{what} for adaptive.stall_timeout={seconds:g} s: look for the last error above, and start the same command "
                "again: it resumes from the last checkpoint"
            )
        return made.result()

    return within


class Liveness:
    """Whether Ray actors, by name, are alive, asked every few seconds without waiting for an answer.

    A busy actor answers late, one that cannot be reached for a moment may be back: only a death counts.
    """

    def __init__(self, actors: Mapping[str, ray.actor.ActorHandle]) -> None:
        self._actors = dict(actors)
        self._calls: dict[str, ray.ObjectRef] = {}
        self._looked = -math.inf

    def dead(self) -> list[str]:
        """Names of the actors that have died, as far as this look tells."""
        gone: list[str] = []
        if time.monotonic() - self._looked < _LIVENESS_INTERVAL:
            return gone
        self._looked = time.monotonic()
        for name, actor in self._actors.items():
            call = self._calls.get(name)
            if call is None:
                self._calls[name] = actor.__ray_ready__.remote()
                continue
            done, _ = ray.wait([call], timeout=0)
            if not done:
                continue
            del self._calls[name]
            try:
                ray.get(call)
            except ray.exceptions.ActorUnavailableError:
                continue  # asked again at the next look
            except ray.exceptions.RayActorError as error:
                gone.append(f"{name} ({type(error).__name__})")
        return gone


def check_installed(actors: Mapping[str, ray.actor.ActorHandle], patience: float) -> None:
    """Refuse actors in whose process this version of the package is not loaded, before anything is sent to one.

    Each may take ``patience`` seconds to answer.
    """
    calls = {name: actor.__ray_call__.remote(_version) for name, actor in actors.items()}
    done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=patience) if calls else ([], [])
    for name, call in calls.items():
        if call not in done:
            raise AdaptiveError(f"{name} has not answered for adaptive.stall_timeout={patience:g} s")
        try:
            found = ray.get(call)
        except ray.exceptions.RayActorError:
            raise
        except ray.exceptions.RayError as error:
            found = str(error).strip().splitlines()[-1]
        if found != __version__:
            raise AdaptiveError(
                f"{name} does not have verl-adaptive {__version__} ({found}); install it in the environment of every node of "
                "the cluster: `verl-adaptive doctor --ray-address auto` asks each"
            )


def _version(_actor: Any) -> str:
    """Version of this package in the actor's process."""
    return __version__ if PLUGIN in sys.modules else "verl did not load its plugin: see VERL_USE_EXTERNAL_PLUGINS"


def open_requests(servers: Mapping[str, ray.actor.ActorHandle]) -> str:
    """How many requests each server has, by name: ``rollout server 0: 0, reward model 0: 128``.

    Who has them is who does not finish them.
    """
    calls = {name: server.__ray_call__.remote(_count) for name, server in servers.items()}
    if not calls:
        return ""
    done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=_COUNT_PATIENCE)
    said = []
    for name, call in calls.items():
        try:
            count = ray.get(call) if call in done else "does not answer"
        except ray.exceptions.RayActorError as error:
            count = f"dead ({type(error).__name__})"
        except ray.exceptions.RayError:  # it could not count, which must not hide the error that is being made
            count = None
        said.append(f"{name}: {'unknown' if count is None else count}")
    return ", ".join(said)


def _count(server: Any) -> int | None:
    found = requests_of(server)
    return None if found is None else len(found)


def requests_of(server: Any) -> list[Any] | None:
    """A server's requests in vLLM's or SGLang's own books; runs in the server's process. None: it keeps none that we know."""
    books = getattr(getattr(getattr(server, "engine", None), "output_processor", None), "request_states", None)
    if books is None:
        books = getattr(getattr(server, "tokenizer_manager", None), "rid_to_state", None)
    return None if books is None else list(books.values())
