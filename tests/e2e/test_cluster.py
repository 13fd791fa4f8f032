"""Several nodes: the driver lands where Ray puts it, and after a node is lost, somewhere else (docs/install.md#several-nodes)."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.faults import DRIVER, MODES
from tests.e2e.harness import balanced, environment, groups_of, optimizer_updates, train, trains
from verl_adaptive.stats import open_run, read_snapshot
from verl_cpu import ENVIRONMENT_DEFAULTS

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(5400)]


class Cluster:
    """Ray nodes on loopback, each with a folder of its own for temporary files.

    Args:
        folder: where these folders go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, ""
        # Ray's own clusters ask for a token since 2.60, and every process that connects has to know it
        self.environ = {**ENVIRONMENT_DEFAULTS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.nodes: dict[str, subprocess.Popen] = {}

    def start(self, name: str, **resources: int) -> None:
        """Start a node; the first is the head."""
        # short: the path of a socket may have 107 characters
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--temp-dir={self.folder / name}"]
        command += [f"--num-{kind}={count}" for kind, count in resources.items()]
        port = 20_000 + os.getpid() % 20_000
        if self.nodes:
            command += [f"--address={self.address}"]
        else:
            self.address = f"127.0.0.1:{port}"
            command += ["--head", f"--port={port}", "--include-dashboard=false"]
        env = environment(**self.environ)
        with open(self.folder / f"{name}.log", "w") as log:
            self.nodes[name] = subprocess.Popen(
                [*command, "--node-ip-address=127.0.0.1", "--disable-usage-stats"],
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait(len(self.nodes))

    def wait(self, count: int) -> None:
        """Until the cluster itself counts so many nodes."""
        code = f"import ray; ray.init(address={self.address!r}, logging_level='ERROR'); "
        code += "print(sum(n['Alive'] for n in ray.nodes()))"
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            env = {**os.environ, **self.environ}
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, env=env)
            if done.stdout.strip() == str(count):
                return
            time.sleep(1)
        raise TimeoutError(f"the cluster does not have {count} nodes: {done.stdout}{done.stderr[-2000:]}")

    def kill(self, name: str) -> None:
        """A node is lost: everything on it gets SIGKILL at once."""
        node = psutil.Process(self.nodes.pop(name).pid)
        for process in [*node.children(recursive=True), node]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def find(self, title: str) -> tuple[str, psutil.Process] | tuple[None, None]:
        """A process of the cluster, and the node that it belongs to."""
        for name, node in self.nodes.items():
            for process in psutil.Process(node.pid).children(recursive=True):
                try:
                    if " ".join(process.cmdline()).startswith(title):
                        return name, process
                except psutil.NoSuchProcess:
                    continue
        return None, None

    def close(self) -> None:
        for name in list(self.nodes):
            self.kill(name)


@pytest.fixture
def cluster():
    with tempfile.TemporaryDirectory(prefix="va-", ignore_cleanup_errors=True) as folder:
        made = Cluster(Path(folder))
        yield made
        made.close()


def overrides(address: str, metrics: Path) -> tuple[str, ...]:
    return (
        "+adaptive=greso",
        f"+ray_kwargs.ray_init.address={address}",
        # a running cluster has its own slots, and Ray refuses to be told others
        "~ray_kwargs.ray_init.num_gpus",
        "ray_kwargs.ray_init.num_cpus=null",
        # what a process of the cluster has to know beyond what its node was started with
        f"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH={metrics}",
        "trainer.save_freq=1",
        "trainer.total_training_steps=3",
    )


class LoseNode(threading.Thread):
    """Kills the driver, and at once all of its node, when the first checkpoint is complete."""

    def __init__(self, cluster: Cluster, checkpoints: Path) -> None:
        super().__init__(daemon=True)
        self.cluster, self.marker = cluster, checkpoints / "latest_checkpointed_iteration.txt"
        self.home: str | None = None
        self.environ: dict[str, str] = {}
        self.over = threading.Event()

    def run(self) -> None:
        while not self.marker.exists():
            if self.over.wait(0.1):
                return
        self.home, driver = self.cluster.find(DRIVER)
        if self.home is not None:
            self.environ = driver.environ()
            os.kill(driver.pid, signal.SIGKILL)
            self.cluster.kill(self.home)


def test_the_driver_moves_to_another_node(cluster, tmp_path):
    """The driver's node is lost after a checkpoint; the same command goes on from it on the node that is left."""
    cluster.start("head", cpus=16, gpus=4)
    cluster.start("second", cpus=16)  # Ray keeps what needs no GPU away from nodes that have some
    checkpoints = tmp_path / "checkpoints"

    lost = LoseNode(cluster, checkpoints)
    lost.start()
    first = train(tmp_path, *overrides(cluster.address, tmp_path / "metrics-0.jsonl"), timeout=600, **cluster.environ)
    lost.over.set()
    lost.join(30)
    assert lost.home == "second", first.tail
    assert first.code not in (0, None)
    # a node's environment reaches the processes on it
    assert lost.environ["VERL_PLATFORM"] == "cpu" and lost.environ.items() >= ENVIRONMENT_DEFAULTS.items()

    saved = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    before, state, _ = read_snapshot(checkpoints / f"global_step_{saved}" / "adaptive")
    cluster.wait(1)  # until then Ray may put the next driver on the node that is gone
    second = train(tmp_path, *overrides(cluster.address, tmp_path / "metrics-1.jsonl"), timeout=600, **cluster.environ)
    assert second.code == 0, second.tail
    assert f"resumed at step {saved}: {int((before.col('visits') > 0).sum())} prompts known" in second.log
    assert [int(m["training/global_step"]) for m in second.steps] == list(range(saved + 1, 4))
    balanced(second, state["engine"]["total"])
    after, _, _ = read_snapshot(checkpoints / "global_step_3" / "adaptive")
    fresh = sum(second.series("adaptive/groups/finished_total"))
    assert after.col("visits").sum() == before.col("visits").sum() + fresh
    store = open_run(checkpoints / "adaptive")
    assert store.steps.column("step").to_pylist() == [1, 2, 3]
    assert len(groups_of(store)) == after.col("visits").sum()


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_a_run_spans_two_nodes(mode, cluster, tmp_path):
    """The nodes have no more devices than the run needs, so it is on both."""
    devices = 2 if mode == "separate_async" else 1
    cluster.start("head", cpus=16, gpus=devices)
    cluster.start("second", cpus=16, gpus=devices)
    apart = ("actor_rollout_ref.rollout.nnodes=2", "actor_rollout_ref.rollout.n_gpus_per_node=1")
    run = train(
        tmp_path,
        *overrides(cluster.address, tmp_path / "metrics-0.jsonl"),
        *MODES[mode],
        *("trainer.nnodes=2", "trainer.n_gpus_per_node=1", "adaptive.record=true"),
        *("actor_rollout_ref.actor.use_dynamic_bsz=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32"),
        *(apart if mode == "separate_async" else ()),
        timeout=900,
        **cluster.environ,
    )
    trains(run, 3)
    assert optimizer_updates(run, 3) == 6
