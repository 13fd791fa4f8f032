"""A real PostgreSQL server for the tests: on a free port of the loopback device, in a temporary directory."""

from __future__ import annotations

import ctypes
import glob
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid

import psycopg

__all__ = ["HOW_TO", "PostgresServer", "find_binaries"]

HOW_TO = (
    "the tests of the PostgreSQL journal need a PostgreSQL server's programs (initdb, postgres). Debian and Ubuntu: "
    "apt-get install postgresql; elsewhere put them on PATH. VERL_ADAPTIVE_SKIP_POSTGRES=1 skips these tests"
)


def find_binaries() -> str | None:
    """The folder of the newest ``initdb`` there is."""
    found = glob.glob("/usr/lib/postgresql/*/bin/initdb") + glob.glob("/usr/pgsql-*/bin/initdb")
    found.sort(key=lambda path: int("".join(filter(str.isdigit, path.split("/")[-3])) or 0))
    path = found[-1] if found else shutil.which("initdb")
    return os.path.dirname(os.path.realpath(path)) if path else None


def _account() -> tuple[int, int] | None:
    """User and group to run as: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return entry.pw_uid, entry.pw_gid
    raise RuntimeError("no account to run PostgreSQL under: neither postgres nor nobody")


def _die_with_parent() -> None:
    # If the test process is killed, its fixtures do not run: PR_SET_PDEATHSIG ends the server then.
    ctypes.CDLL(None).prctl(1, signal.SIGINT)


class PostgresServer:
    """Starts on entry, stops by process id on exit."""

    def __init__(self) -> None:
        binaries = find_binaries()
        if binaries is None:
            raise RuntimeError(HOW_TO)
        self._binaries = binaries
        self._as: dict[str, object] = {}
        account = _account()
        if account is not None:
            self._as = {"user": account[0], "group": account[1], "extra_groups": []}
        self.folder = tempfile.mkdtemp(prefix="verl-adaptive-postgres-")
        if account is not None:
            os.chown(self.folder, *account)
        self._data = os.path.join(self.folder, "data")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self._frozen: list[int] = []

    def __enter__(self) -> PostgresServer:
        try:
            initdb = [f"{self._binaries}/initdb", "-D", self._data, "-U", "tester", "-A", "trust", "-E", "UTF8", "-N"]
            done = subprocess.run(initdb, check=False, capture_output=True, text=True, cwd=self.folder, **self._as)
            if done.returncode:
                raise RuntimeError(f"initdb failed:\n{done.stdout}{done.stderr}")
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGQUIT)  # what it has in memory is thrown away with the folder
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Start the server, on the port it had before if it had one."""
        if not self.port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
        command = [f"{self._binaries}/postgres", "-D", self._data, "-p", str(self.port), "-k", self.folder]
        # Tests kill clients, not the machine: without fsync they are fast and mean the same.
        command += ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-c", "max_connections=50"]
        with open(os.path.join(self.folder, "log"), "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - it makes one system call
                **self._as,
            )
        deadline = time.monotonic() + 30
        while True:
            try:
                psycopg.connect(self._conninfo("postgres"), connect_timeout=2).close()
                return
            except psycopg.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    with open(os.path.join(self.folder, "log"), errors="replace") as log:
                        raise RuntimeError(f"PostgreSQL did not start: {error}\n{log.read()[-2000:]}") from error
                time.sleep(0.05)

    def freeze(self) -> None:
        """Stop every process of the server where it is; the kernel goes on accepting and acknowledging for it."""
        assert self._process is not None
        # The postmaster first, so that it starts nothing more.
        os.kill(self._process.pid, signal.SIGSTOP)
        self._frozen = [self._process.pid, *self._children()]
        for pid in self._frozen[1:]:
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        for pid in self._frozen:
            os.kill(pid, signal.SIGCONT)
        self._frozen = []

    def _children(self) -> list[int]:
        assert self._process is not None
        pid = self._process.pid
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server, its clients' connections with it."""
        if self._process is not None:
            self._process.send_signal(how)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _conninfo(self, database: str) -> str:
        return f"host=127.0.0.1 port={self.port} user=tester dbname={database}"

    def new_database(self) -> str:
        """The URL of a new, empty database."""
        name = f"t{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self._conninfo("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql+psycopg://tester@127.0.0.1:{self.port}/{name}"
