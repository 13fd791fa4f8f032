"""Workers of Ray's on the CPU platform are forks of one process: what Ray would have started, in the same place."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from verl_cpu import engine, worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")

#: In Ray's place: its script's last line is what the raylet waits for.
SCRIPT = """
import json, os, random, sys
import numpy, ray
def told(found):
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)
if __name__ == "__main__":
    print("to its own output")
    told({
        "arguments": sys.argv, "folder": os.getcwd(), "first": sys.path[0], "mark": os.environ.get("MARK"),
        "set": os.environ.get("SET_BY_IMPORTING"), "threads": os.environ.get("OMP_NUM_THREADS"), "pid": os.getpid(),
        "parent": os.getppid(), "shared": "imported_before" in sys.modules,
        "random": [random.random(), numpy.random.random(), ray.ObjectRef.from_random().hex()], "group": os.getpgrp(),
    })
    sys.exit(3)
"""


@pytest.fixture
def raylet():
    """A process that lives for as long as workers may."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def start(raylet, tmp_path):
    """Starts a worker by a copy of the file that imports little; what it tells, and its output."""
    copy = tmp_path / "package" / "worker.py"
    copy.parent.mkdir()
    (copy.parent / "numpy.py").write_text("raise ImportError('not the one of this name beside the file')")
    source = Path(worker.__file__).read_text()
    modules = source[source.index("MODULES = (") : source.index(")\n", source.index("MODULES = (")) + 1]
    copy.write_text(source.replace(modules, 'MODULES = ("numpy", "imported_before", "not_there")'))
    (tmp_path / "imported_before.py").write_text(
        "import os, ray\nos.environ['SET_BY_IMPORTING'] = 'yes'\n@ray.remote\nclass Actor: pass\n"
    )
    script = tmp_path / "scripts" / "default_worker.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    started = []

    def one(mark: str) -> tuple[dict, str]:
        folder = tmp_path / mark
        folder.mkdir()
        found = folder / "found.json"
        env = {**os.environ, "RAY_RAYLET_PID": str(raylet.pid), "PYTHONPATH": str(tmp_path), "MARK": mark}
        env.pop("OMP_NUM_THREADS", None)
        with open(folder / "output", "w") as output:
            command = [sys.executable, "-I", "-S", str(copy), str(script), str(found), "--more"]
            started.append(subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output))
        deadline = time.monotonic() + 120
        while not found.exists() or not found.read_text().endswith("}"):
            assert time.monotonic() < deadline, (folder / "output").read_text()
            time.sleep(0.05)
        return json.loads(found.read_text()), (folder / "output").read_text()

    yield one
    raylet.kill()
    raylet.wait()
    for process in started:
        process.wait(60)  # the first one has the server for a child, and that ends with the raylet


def test_a_worker_is_a_fork_with_an_environment_of_its_own(start, tmp_path) -> None:
    first, said = start("one")
    second, _ = start("two")
    assert "to its own output" in said and "not_there is not shared by Ray's workers" in said
    script = str(tmp_path / "scripts" / "default_worker.py")
    for found, mark in ((first, "one"), (second, "two")):
        assert found["arguments"] == [script, str(tmp_path / mark / "found.json"), "--more"]
        assert found["folder"] == str(tmp_path / mark) and found["mark"] == mark
        assert found["first"] == os.path.dirname(script)
        assert found["shared"] and found["set"] == "yes"
        assert found["group"] == found["pid"]  # Ray ends a worker by its group: no other may be in it
        assert found["threads"] is None  # one is the server's; a worker is told by Ray
    assert first["parent"] == second["parent"] and first["pid"] != second["pid"]
    assert "--serve" in psutil.Process(first["parent"]).cmdline()
    assert not {*first["random"]} & {*second["random"]}


def test_the_server_ends_with_the_raylet(start, raylet) -> None:
    found, _ = start("one")
    server = psutil.Process(found["parent"])
    raylet.kill()
    raylet.wait()
    server.wait(30)


def test_what_no_server_can_have_forked_is_started_as_ever(start, raylet, monkeypatch) -> None:
    """The name is taken, by one who hangs up."""
    monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(worker.name())
        taken.listen()
        taken.settimeout(60)
        import threading

        def hang_up() -> None:
            connection, _ = taken.accept()
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        found, _ = start("one")
        thread.join(60)
    assert found["parent"] == os.getpid() and not found["shared"]
    assert found["mark"] == "one"


def tell(path: str, held: Connection) -> None:
    """In another process: where it is, before it waits for a word."""
    found = {"parent": os.getppid(), "group": os.getpgrp(), "shared": "imported_before" in sys.modules}
    Path(path).write_text(json.dumps({**found, "folder": os.getcwd(), "arguments": sys.argv[1:]}))
    held.send(held.recv())
    time.sleep(600)


def engine_in(tmp_path: Path) -> tuple[dict, BaseProcess]:
    """A process that is made as vLLM makes its engine's and its worker's, and what it tells."""
    path = tmp_path / "engine.json"
    mine, other = engine.CONTEXT.Pipe()
    process = engine.CONTEXT.Process(target=tell, args=(str(path), other), name="EngineCore")
    process.start()
    other.close()
    mine.send("a word")
    assert mine.poll(120) and mine.recv() == "a word"  # by the file that it was given
    assert process.is_alive() and process.exitcode is None
    return json.loads(path.read_text()), process


def test_the_engine_of_a_worker_is_a_fork_too(start, raylet, tmp_path, monkeypatch) -> None:
    """In its parent's group, and seen by it to end."""
    first, _ = start("one")
    monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
    found, process = engine_in(tmp_path)
    assert found["parent"] == first["parent"] and found["group"] == os.getpgrp() and found["shared"]
    assert found["folder"] == os.getcwd() and found["arguments"] == sys.argv[1:]
    process.terminate()
    process.join(60)
    assert not process.is_alive() and process.exitcode == 1
    for _ in range(600):  # its files are closed before it is gone
        if not psutil.pid_exists(process.pid):
            return
        time.sleep(0.1)
    raise AssertionError(f"{process.pid} is still there")


def test_an_engine_that_nobody_can_fork_is_spawned(raylet, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
    found, process = engine_in(tmp_path)
    assert found["parent"] == os.getpid() and not found["shared"]
    process.terminate()
    process.join(60)
    assert process.exitcode == -signal.SIGTERM
