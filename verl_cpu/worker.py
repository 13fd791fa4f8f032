"""Ray's worker processes on the CPU platform: forks of one process that has imported verl and vLLM.

A run is eight such processes, and importing verl and vLLM is ten seconds of a core in each: on a small machine, most of a
start-up. Ray starts a worker as ``py_executable default_worker.py …``. Here ``py_executable`` is this file: it asks the
server of its raylet for a fork that becomes the worker, with its own environment, arguments, folder and output. The first
one to ask starts the server, which ends with the raylet. What cannot be had from a server is started as Ray does. vLLM's
own processes are had from it as well: see :mod:`.engine`.

The server imports modules only; it starts no thread, and neither Ray nor a process group. Run by path, without ``site``:
nothing but the standard library is imported before the fork.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

#: What the processes of a run import, beyond what these import themselves.
MODULES = (
    "transfer_queue",
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.v1",
    "verl.experimental.agent_loop",
    "verl.experimental.reward_loop",
    "verl.workers.engine_workers",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


def executable() -> str:
    """For ``py_executable`` in Ray's runtime environment."""
    import shlex

    return shlex.join([sys.executable, "-I", "-S", os.path.abspath(__file__)])


def name() -> bytes:
    """The name of this raylet's server socket: an abstract one, which leaves no file behind."""
    return f"\0verl-cpu-{os.getuid()}-{os.environ['RAY_RAYLET_PID']}".encode()


def mine(connection: socket.socket) -> bool:
    """Whether this user is at the other end: anyone may connect to an abstract socket, or have taken its name."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid()


# -- what Ray starts --------------------------------------------------------------------------------------------------


def start_server() -> int | None:
    """Start the server, unless this raylet has one; its process id, if it was started here."""
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        try:
            listener.bind(name())
        except OSError:  # somebody else's name by now
            return None
        listener.listen(64)
        # Ray gives a worker one thread before it imports torch, which looks only then
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        os.set_inheritable(listener.fileno(), True)
        return os.posix_spawn(
            sys.executable, [sys.executable, __file__, "--serve", str(listener.fileno())], environment
        )


def asked(arguments: list[str], files: tuple[int, ...] = (0, 1, 2), group: int = 0) -> int | None:
    """Have one forked.

    Args:
        arguments: of Python: a script, or ``-m`` and a module whose ``begin`` is called, and those of its own.
        files: of this process: the fork's standard ones, and others, whose numbers ``begin`` gets.
        group: of processes, for the fork to be in; 0: one of its own.

    Returns:
        Its process id, if it is there.
    """
    what = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "group": group}
    message = json.dumps(what).encode()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(name())
            if not mine(connection):
                return None
            socket.send_fds(connection, [len(message).to_bytes(8, "big")], list(files))
            connection.sendall(message)
            return int.from_bytes(connection.recv(8), "big") or None
    except OSError:
        return None


def main(arguments: list[str]) -> None:
    """Become a worker: have one forked, or else be one."""
    server = start_server() if "RAY_RAYLET_PID" in os.environ else None
    if asked(arguments) is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    if server is not None:
        os.waitpid(server, 0)  # so that its forks are descendants of the raylet, as workers are


# -- the server -------------------------------------------------------------------------------------------------------


def preload() -> dict[str, str]:
    """Import what workers need; what importing it has set in the environment.

    What cannot be imported says so where it is needed.
    """
    import gc
    import importlib
    from types import SimpleNamespace

    before = dict(os.environ)
    gc.disable()
    import ray.actor

    # A class of actors draws its name from Ray's generator, which every fork would then have in the same state: two workers
    # that start at once would give their first objects one name, and Ray ends the second with an error of its own.
    ids = ray.actor.ActorClassID
    ray.actor.ActorClassID = SimpleNamespace(from_random=lambda: ids(os.urandom(ids.size())))
    for module in MODULES:
        try:
            importlib.import_module(module)
        except Exception as error:
            print(f"verl-cpu: {module} is not shared by Ray's workers: {error!r}", file=sys.stderr, flush=True)
    ray.actor.ActorClassID = ids
    gc.enable()
    gc.collect()
    gc.freeze()  # pages that nobody writes to stay shared
    return {key: value for key, value in os.environ.items() if before.get(key) != value}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def serve(listener: socket.socket) -> None:
    """Fork workers for as long as the raylet lives."""
    raylet = int(os.environ["RAY_RAYLET_PID"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    sys.path.pop(0)  # this file's folder, where `platform` is ours
    made = preload()
    listener.settimeout(1)
    while alive(raylet):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            connection.settimeout(60)
            try:
                what, files = received(connection)
            except OSError:
                continue
            if os.fork() == 0:
                listener.close()
                connection.sendall(os.getpid().to_bytes(8, "big"))
                connection.close()
                become(what, files, made)
            for file in files:
                os.close(file)


def received(connection: socket.socket) -> tuple[dict, list[int]]:
    """A request: the process that is to be, and its files."""
    if not mine(connection):
        raise PermissionError("another user's")
    head, files, _, _ = socket.recv_fds(connection, 8, 64)
    with connection.makefile("rb") as stream:
        return json.loads(stream.read(int.from_bytes(head, "big"))), files


def become(what: dict, files: list[int], made: dict[str, str]) -> None:
    """Be the process that was asked for, in the fork."""
    import importlib
    import runpy
    import traceback

    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, what["group"])  # the raylet ends a worker by its process group, which must be nobody else's
        for target, file in enumerate(files[:3]):
            os.dup2(file, target)
            os.close(file)
        os.chdir(what["folder"])
        os.environ.clear()
        os.environ.update({**made, **what["environment"]})
        reseed()
        script, *more = what["arguments"]
        if script == "-m":
            sys.argv = more
            importlib.import_module(more[0]).begin(*files[3:])
        else:
            sys.argv = [script, *more]
            sys.path.insert(0, os.path.dirname(script))
            runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def reseed() -> None:
    """numpy's global generator is seeded when it is imported; Python's own is anew in every fork."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        main(sys.argv[1:])
