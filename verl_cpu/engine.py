"""vLLM's engine and its worker on the CPU platform: forks of the process that Ray's workers are forks of.

Each would be a new interpreter that imports vLLM, for nine seconds of a core, while the whole run waits for it. To
:mod:`multiprocessing` it is a process that was spawned, with two differences: it is in the process group of its parent,
which Ray ends as a whole, but no child of it. So the parent sees from the pipe that every such process holds that it has
ended, and not how: as a failure.
"""

from __future__ import annotations

import io
import os
from multiprocessing import connection, context, popen_spawn_posix, reduction, resource_tracker, spawn, util
from typing import Any

from verl_cpu import worker

__all__ = ["CONTEXT", "begin"]

#: In the fork: what was passed on to it.
FILES: list[int] = []


class Passed:
    """A file that is passed on, by its place among those that are."""

    def __init__(self, place: int) -> None:
        self.place = place

    def detach(self) -> int:
        return FILES[self.place]


_Spawned: Any = popen_spawn_posix.Popen  # of these, typeshed knows the public half
_util: Any = util
_spawn: Any = spawn


class Popen(_Spawned):
    """A process that is forked where somebody can fork it, or else spawned."""

    DupFd: Any = Passed
    forked = True
    returncode: int | None
    _fds: list[int]

    def duplicate_for_child(self, fd: int) -> int:
        super().duplicate_for_child(fd)
        return len(self._fds) - 1 if self.forked else fd

    def _launch(self, process_obj: Any) -> None:
        data = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(_spawn.get_preparation_data(process_obj._name), data)
            reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        read, write = os.pipe()
        ended, alive = os.pipe()
        tracker: Any = resource_tracker.getfd()
        files = (0, 1, 2, read, tracker, alive, *self._fds)
        pid = worker.asked(["-m", __name__, "--multiprocessing-fork"], files, os.getpgrp())
        _util.close_fds(read, alive)
        if pid is None:
            _util.close_fds(write, ended)
            self.forked, self.DupFd, self._fds = False, _Spawned.DupFd, []
            super()._launch(process_obj)
            return
        self.pid, self.sentinel = pid, ended
        self.finalizer = _util.Finalize(self, _util.close_fds, (write, ended))
        with open(write, "wb", closefd=False) as pipe:
            pipe.write(data.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if not self.forked:
            return super().poll(flag)
        if self.returncode is None and connection.wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            self.returncode = 1
        return self.returncode


def begin(read: int, tracker: int, alive: int, *passed: int) -> None:
    """Be the process, in the fork; ``alive`` is closed when it ends."""
    FILES[:] = passed
    _spawn.spawn_main(read, tracker_fd=tracker)


class Process(context.SpawnProcess):
    """One that :class:`Popen` starts."""

    @staticmethod
    def _Popen(process_obj: Any) -> Popen:
        return Popen(process_obj)


class _Context(context.SpawnContext):
    Process = Process


CONTEXT = _Context()
