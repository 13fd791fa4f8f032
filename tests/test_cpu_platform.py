"""The CPU platform: on only when asked for, loud when it fails. Each case has a process of its own, mostly a fork."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

from tests.forks import forks
from tests.programs import ran


def needs_verl(test):
    """Marks a test that is skipped where verl is not installed."""
    missing = importlib.util.find_spec("verl") is None
    return pytest.mark.verl(pytest.mark.skipif(missing, reason="verl is not installed")(test))


CLEARED = {
    "VERL_PLATFORM",
    "VLLM_PLUGINS",
    "TORCHDYNAMO_DISABLE",
    "TQ_NUM_THREADS",
    "VLLM_CPU_KVCACHE_SPACE",
    "RAY_metrics_report_interval_ms",
    "RAY_worker_register_timeout_seconds",
    "VERL_USE_EXTERNAL_PLUGINS",
}


def output(code: str, **environment: str) -> list[str]:
    """What code prints in an interpreter of its own, without the variables that matter here except those given."""
    env = {name: value for name, value in os.environ.items() if name not in CLEARED}
    done = ran(sys.executable, "-c", textwrap.dedent(code), timeout=240, env=env, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def on_the_platform():
    """Forks of a process that has imported verl on the platform."""
    with forks(["verl"], **dict.fromkeys(CLEARED, None) | {"VERL_PLATFORM": "cpu"}) as python:
        yield python


@pytest.fixture
def forked(on_the_platform, tmp_path):
    """The lines that code prints which begins where verl is imported on the platform."""

    def lines(code: str, **environment: str) -> list[str]:
        done = on_the_platform("-c", textwrap.dedent(code), cwd=tmp_path, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return lines


@pytest.fixture
def fresh(below_verl, tmp_path):
    """What becomes of code that imports verl, in a fork that has not, without the variables but those given."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = dict.fromkeys(CLEARED, None) | environment
        return below_verl("-c", textwrap.dedent(code), cwd=tmp_path, **env)

    return run


def test_importing_changes_nothing() -> None:
    code = """
        import os, sys
        before = dict(os.environ), len(sys.meta_path)
        import verl_cpu as cpu
        from verl_cpu import vllm_plugin
        cpu.register()
        vllm_plugin.register()
        print((dict(os.environ), len(sys.meta_path)) == before)
        print(sorted({"torch", "ray", "verl", "vllm"} & set(sys.modules)))
        """
    assert output(code) == ["True", "[]"]
    assert output(code, VERL_PLATFORM="nvidia") == ["True", "[]"]


@needs_verl
def test_not_registered_unless_asked_for(fresh) -> None:
    code = """
        import verl
        from verl.plugin.platform import PlatformRegistry
        print(PlatformRegistry.get("cpu"))
        """
    assert fresh(code).stdout.split() == ["None"]


@needs_verl
def test_registered_by_importing_verl(fresh) -> None:
    done = fresh(
        """
        import os, sys
        import verl
        from verl.plugin.platform import get_platform
        from verl.utils.distributed import initialize_global_process_group_ray
        platform = get_platform()
        print(platform.device_name, platform.communication_backend_name(), platform.current_device())
        print(platform.is_platform_available(), platform.is_available(), platform.device_module.is_available())
        print(os.environ["TORCHDYNAMO_DISABLE"], os.environ["VLLM_CPU_KVCACHE_SPACE"])
        print(hasattr(initialize_global_process_group_ray, "__wrapped__"), "verl.workers" in sys.modules)
        """,
        VERL_PLATFORM=" CPU ",
        TORCHDYNAMO_DISABLE="0",
    )
    assert done.stdout.splitlines() == ["cpu gloo cpu", "False True True", "0 1", "True False"], done.stderr


@needs_verl
@pytest.mark.ray
def test_workers_start_no_threads_that_export_metrics_of_ray() -> None:
    """By default each worker starts one every 10 s, and such threads have crashed workers."""
    code = """
        import verl
        import ray

        @ray.remote
        def started():
            import os, time
            threads, new = set(os.listdir("/proc/self/task")), []
            end = time.monotonic() + 12
            while time.monotonic() < end and "ray::IDLE" not in new:
                for thread in set(os.listdir("/proc/self/task")) - threads:
                    threads.add(thread)
                    try:
                        new.append(open(f"/proc/self/task/{thread}/comm").read().strip())
                    except (FileNotFoundError, ProcessLookupError):
                        pass  # gone already
            return [name for name in new if name == "ray::IDLE"]

        ray.init(num_cpus=1)
        often = {"env_vars": {"RAY_metrics_report_interval_ms": "2000"}}
        print(ray.get(started.remote()), ray.get(started.options(runtime_env=often).remote()))
        """
    assert output(code, VERL_PLATFORM="cpu")[-1] == "[] ['ray::IDLE']"  # the other one starts some: they would be seen


@needs_verl
@pytest.mark.parametrize(
    ("address", "forks"), [("", True), ("local", True), ("auto", False), ("ray://head:10001", False)]
)
def test_workers_are_forks_in_a_ray_of_the_drivers_own(address, forks, forked) -> None:
    """Ray's word for that, "local", was taken for a cluster elsewhere: each worker of a self-test imported verl anew."""
    code = """
        import verl
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
        print("py_executable" in get_ppo_ray_runtime_env())
        """
    assert forked(code, RAY_ADDRESS=address)[-1] == str(forks)


@needs_verl
def test_a_training_worker_gets_gloo_and_an_engine(forked) -> None:
    code = """
        import os, socket
        import verl
        import torch
        from verl.utils.distributed import initialize_global_process_group_ray
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            os.environ["DIST_INIT_METHOD"] = f"tcp://127.0.0.1:{s.getsockname()[1]}"
        for _ in range(2):  # actor and critic may share a process
            initialize_global_process_group_ray()
        print(torch.distributed.get_backend())
        from verl.workers.engine import EngineRegistry
        print(EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__)
        print(EngineRegistry.get_engine_cls("value_model", "fsdp2").__name__)
        from verl.workers.engine.fsdp import transformer_impl
        print(transformer_impl.CPUOffloadPolicy(pin_memory=True).pin_memory)
        """
    lines = forked(code, RANK="0", WORLD_SIZE="1")
    assert lines[-4:] == ["cpu:gloo", "FSDPEngineWithLMHead", "FSDPEngineWithValueHead", "False"]


@needs_verl
@pytest.mark.parametrize(
    ("vllm_plugins", "broken", "told"),
    [
        ("something_else", "", "VLLM_PLUGINS='something_else' leaves out 'verl_cpu'"),
        (None, "importlib.metadata.entry_points = lambda **_: []", "is not installed"),
        (None, "sys.modules['verl.plugin.platform.platform_manager'] = None", "ModuleNotFoundError"),
    ],
    ids=["vllm plugin forbidden", "vllm plugin missing", "another verl"],
)
def test_failure_is_loud(fresh, vllm_plugins: str | None, broken: str, told: str) -> None:
    environment = {} if vllm_plugins is None else {"VLLM_PLUGINS": vllm_plugins}
    done = fresh(
        f"""
        import importlib.metadata, sys
        import verl_cpu as cpu
        {broken}
        try:
            cpu.register()
        except Exception:
            print("swallowed, as verl does")
        print("went on")
        """,
        VERL_PLATFORM="cpu",
        **environment,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "verl-cpu: VERL_PLATFORM=cpu was asked for" in done.stderr
    assert told in done.stderr


def test_vllm_is_found_under_both_names(tmp_path: object) -> None:
    code = """
        import importlib.metadata as metadata, sys
        from verl_cpu.fixes import name_vllm
        sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry] + sys.argv[1:]
        sys.path.insert(0, {folder!r})
        name_vllm()
        name_vllm()
        try:
            print(metadata.version("vllm"))
        except metadata.PackageNotFoundError:
            print("absent")
        print(sum(type(finder).__name__ == "_VllmAliasFinder" for finder in sys.meta_path))
        """
    for installed, expected in (
        ({"vllm-cpu": "0.28.0"}, "0.28.0+cpu"),
        ({"vllm-cpu": "0.28.0", "vllm": "0.27.0+cpu"}, "0.27.0+cpu"),
        ({}, "absent"),
    ):
        folder = tmp_path / expected  # type: ignore[operator]
        folder.mkdir()
        for name, version in installed.items():
            info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        assert output(code.replace("{folder!r}", repr(str(folder)))) == [expected, "1"]


@needs_verl
def test_saved_weights_are_a_copy(forked) -> None:
    code = """
        import types
        import verl
        import torch
        from verl_cpu import fixes
        from verl.utils import fsdp_utils
        live = torch.ones(3)
        def save(model):
            return {"w": (live.detach().cpu(), None)}, "spec"
        fsdp_utils.fsdp2_sharded_save_to_cpu = save
        fixes.copy_saved_weights()
        state, spec = fsdp_utils.fsdp2_sharded_save_to_cpu(None)
        live.zero_()
        print(spec, state["w"][0].tolist())
        """
    assert forked(code)[-1] == "spec [1.0, 1.0, 1.0]"


@needs_verl
def test_two_runs_on_one_machine_do_not_share_a_socket(forked) -> None:
    """verl names it by Ray's job id, the same in every fresh cluster; and a transfer that stays silent ends."""
    code = """
        import asyncio, os, threading
        import verl
        import torch, zmq
        from verl_cpu import fixes
        from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer
        handle = f"ipc:///tmp/va-test-{os.getpid()}.sock"
        sender = transfer.BucketedWeightSender(zmq_handle=handle, bucket_size_mb=1, use_shm=True)
        receiver = transfer.BucketedWeightReceiver(zmq_handle=handle, device=torch.device("cpu"), use_shm=True)
        print(sender.zmq_handle == receiver.zmq_handle, sender.zmq_handle.endswith("-raylet-4711.sock"))
        got = {}
        thread = threading.Thread(target=receiver.receive_weights, args=(lambda pairs, last: got.update(
            (name, weight.clone()) for name, weight in pairs),))
        thread.start()
        asyncio.run(sender.async_send_weights(iter({"w": torch.arange(5.0)}.items())))
        thread.join(60)
        print(got["w"].tolist())
        fixes.WEIGHT_TRANSFER_TIMEOUT_MS = 500
        alone = transfer.BucketedWeightSender(zmq_handle=handle, bucket_size_mb=1, use_shm=True)
        silent = transfer.BucketedWeightReceiver(zmq_handle=handle, device=torch.device("cpu"), use_shm=True)
        for wait in (lambda: asyncio.run(alone.async_send_weights(iter({}.items()))), lambda: silent.receive_weights(None)):
            try:
                wait()
            except zmq.Again:
                print("gave up")
        """
    lines = forked(code, RAY_RAYLET_PID="4711")
    assert lines[-4:] == ["True True", "[0.0, 1.0, 2.0, 3.0, 4.0]", "gave up", "gave up"]


@needs_verl
def test_vllms_processes_sleep_while_they_wait_for_each_other(forked) -> None:
    """Between two looks for a message they give the processor away, which a yield alone does not; and find the message."""
    code = """
        import resource, threading
        import verl
        from vllm.distributed.device_communicators import shm_broadcast
        queue = shm_broadcast.MessageQueue(1, 1)
        reader = shm_broadcast.MessageQueue.create_from_handle(queue.export_handle(), 0)
        threading.Timer(0.2, queue.wait_until_ready).start()
        reader.wait_until_ready()
        queue.enqueue("first")
        print(reader.dequeue(timeout=30))
        looks, wait = 0, shm_broadcast.sched_yield
        def look():
            global looks
            looks += 1
            if looks == 200:
                threading.Thread(target=queue.enqueue, args=["second"]).start()
            wait()
        shm_broadcast.sched_yield = look
        given = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        print(reader.dequeue(timeout=30))
        # a pause that was over before it began, on a busy machine, gives nothing away
        print(looks < 2 * (resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - given))
        """
    assert forked(code)[-3:] == ["first", "second", "True"]


@needs_verl
def test_gloo_engine_sends_weights(forked) -> None:
    """Two processes' worth of engine in one: a master and a worker, in threads."""
    code = """
        import asyncio, threading
        import verl
        import torch
        from verl_cpu import gloo_engine
        gloo_engine.ray.util.get_node_ip_address = lambda: "127.0.0.1"
        from verl.checkpoint_engine.base import CheckpointEngineRegistry as Registry
        # odd sizes, several dtypes, one tensor larger than a bucket, one empty bucket tail
        weights = {
            "a": torch.arange(7, dtype=torch.float32), "b": torch.ones(3, dtype=torch.bfloat16),
            "c": torch.randn(40, 10), "d": torch.arange(5, dtype=torch.int64),
        }
        master = Registry.new("gloo", bucket_size=512, is_master=True)
        worker = Registry.new("gloo", bucket_size=512)
        for _ in range(2):  # an engine serves one sync after another
            metadata = [master.prepare(), worker.prepare()]
            of_trainer, of_rollout = type(master).build_topology(2, 1, metadata)
            assert of_trainer["rank"] == [0, -1]
            first = lambda kwargs: {name: values[0] for name, values in kwargs.items()}
            idle = Registry.new("gloo", bucket_size=512)
            idle.init_process_group(**{name: values[1] for name, values in of_trainer.items()})
            assert asyncio.run(idle.send_weights(iter(weights.items()))) == {}
            received = {}
            async def receive():
                async for name, weight in worker.receive_weights():
                    received[name] = weight.clone()
            def work():
                worker.init_process_group(**first(of_rollout))
                asyncio.run(receive())
            thread = threading.Thread(target=work)
            thread.start()
            master.init_process_group(**first(of_trainer))
            metrics = asyncio.run(master.send_weights(iter(weights.items())))
            thread.join(60)
            master.finalize(); worker.finalize()
            same = all(torch.equal(received[name], weight) for name, weight in weights.items())
            print(list(received) == list(weights), same, metrics)
        """
    assert forked(code)[-2:] == ["True True {'weight_sync/bytes': 1674}"] * 2


@needs_verl
def test_platform_preset_composes(forked) -> None:
    """verl's own configuration accepts the preset, and its dataclasses accept the values."""
    code = """
        import verl.trainer, os
        from hydra import compose, initialize_config_dir
        folder = os.path.join(os.path.dirname(verl.trainer.__file__), "config")
        with initialize_config_dir(folder, version_base=None):
            overrides = ["+adaptive/platform=cpu", "actor_rollout_ref.rollout.max_num_seqs=8"]
            config = compose("ppo_trainer", overrides=overrides)
        from verl.utils.config import omega_conf_to_dataclass
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        print(actor.strategy, actor.fsdp_config.strategy, actor.use_dynamic_bsz, config.actor_rollout_ref.ref.strategy)
        print(rollout.name, rollout.dtype, rollout.max_num_seqs, config.trainer.device)
        """
    assert forked(code)[-2:] == ["fsdp2 fsdp2 True fsdp2", "vllm float32 8 cpu"]
