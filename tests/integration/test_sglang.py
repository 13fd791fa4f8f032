"""Aborting under SGLang: its own lock, loop and ``generate_request`` under verl's own server; only the scheduler is a stand-in.

SGLang needs CUDA to be imported, so the functions that matter are taken out of its wheel's source, which is fetched once.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import subprocess
import sys
import types
import typing
import zipfile
from unittest.mock import MagicMock

import pytest
import verl  # noqa: F401  (its plugins, before SGLang is mocked)

from tests.e2e.harness import ASSETS
from verl_adaptive.integration import sglang

VERSION = "0.5.12"
MANAGER = "sglang/srt/managers/tokenizer_manager.py"
METHODS = ("generate_request", "abort_request", "pause_generation", "continue_generation")


@pytest.fixture(scope="module")
def source():
    """Files of SGLang's, by path in its wheel."""
    folder = ASSETS / f"sglang-{VERSION}"
    if not list(folder.glob("*.whl")):
        words = f"-m pip download --quiet --no-deps --only-binary=:all: sglang=={VERSION} --dest".split()
        if subprocess.run([sys.executable, *words, str(folder)], capture_output=True, timeout=600).returncode:
            pytest.skip(f"sglang {VERSION} cannot be fetched")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return {name: wheel.read(name).decode() for name in (MANAGER, "sglang/srt/utils/aio_rwlock.py")}


@pytest.fixture(scope="module")
def verls():
    """verl's module of the server, with whatever it imports of SGLang's mocked."""
    before = set(sys.modules)

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] != "sglang":
                return None
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

        def create_module(self, spec):
            made = MagicMock(__version__="0.5.12", __spec__=spec, __path__=[])
            made.__name__ = spec.name
            return made

        def exec_module(self, module):
            return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
        yield importlib.import_module(sglang.SERVER_MODULE)
    for name in set(sys.modules) - before:
        if "sglang" in name:
            del sys.modules[name]


class Scheduler:
    """Generates until it is told to abort, and is done with that a moment later."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Event] = {}

    def send_pyobj(self, request):
        if getattr(request, "abort_all", False):
            asyncio.get_running_loop().call_later(0.05, self.end, list(self.running))
        return asyncio.sleep(0)

    def end(self, requests: list[str]) -> None:
        for request in requests:
            if (done := self.running.pop(request, None)) is not None:
                done.set()


def manager_of(source: dict[str, str]) -> type:
    """``TokenizerManager``, of which these methods are SGLang's."""
    (cls,) = (
        node
        for node in ast.parse(source[MANAGER]).body
        if isinstance(node, ast.ClassDef) and node.name == "TokenizerManager"
    )
    taken = [node for node in cls.body if getattr(node, "name", "") in METHODS]
    assert len(taken) == len(METHODS)
    lock: dict = {}
    exec(source["sglang/srt/utils/aio_rwlock.py"], lock)
    names = {**vars(typing), "asyncio": asyncio, "fastapi": MagicMock(), "AbortReq": types.SimpleNamespace}
    for name in ("GenerateReqInput", "EmbeddingReqInput", "PauseGenerationReqInput", "ContinueGenerationReqInput"):
        names[name] = type(name, (), {})
    exec(ast.unparse(ast.Module(taken, [])), names)

    class Manager:
        def __init__(self) -> None:
            self.is_pause, self.is_pause_cond, self.model_update_lock = False, asyncio.Condition(), lock["RWLock"]()
            self.rid_to_state: dict = {}
            self.enable_metrics, self.tokenizer = False, None
            self.send_to_scheduler = self.scheduler = Scheduler()
            self.server_args = types.SimpleNamespace(language_only=False, tokenizer_worker_num=1)
            self.auto_create_handle_loop = self._set_default_priority = self._init_req_state = MagicMock()
            self.request_logger = MagicMock()

        async def _validate_and_resolve_lora(self, obj) -> None:
            return None

        async def _tokenize_one_request(self, obj):
            await asyncio.sleep(0)
            return obj

        def _send_one_request(self, obj) -> None:
            self.scheduler.running[obj.rid] = asyncio.Event()

        async def _wait_one_response(self, obj, request):
            await self.scheduler.running[obj.rid].wait()
            yield {"output_ids": [7], "meta_info": {"finish_reason": {"type": "abort"}}}

        async def release_memory_occupation(self, obj, request) -> None:
            assert not self.scheduler.running, "release_memory_occupation should be called only when server is idle."

    for name in METHODS:
        setattr(Manager, name, names[name])
    return Manager


def server_of(verls, source):
    server = object.__new__(verls.SGLangHttpServer)
    vars(server).update(
        config=MagicMock(
            max_model_len=100, response_length=50, prompt_length=50, enable_rollout_routing_replay=False, mtp=None
        ),
        model_config=MagicMock(lora_rank=0, lora={}),
        rollout_mode=verls.RolloutMode.HYBRID,
        **dict(node_rank=0, replica_rank=0, global_steps=1, _disaggregation_role="null", _pd_decode_peers=[]),
        tokenizer_manager=manager_of(source)(),
    )
    verls.GenerateReqInput = MagicMock
    verls.PauseGenerationReqInput = types.SimpleNamespace
    return server


@pytest.mark.parametrize("kept", [True, False])
def test_no_request_outlives_an_abort(verls, source, kept, caplog) -> None:
    """64 calls are cancelled, as Ray does it, and the server is paused and put to sleep; without the shield it is busy."""
    sglang.keep_requests(types.ModuleType("another verl's"))  # plain verl imports it under the plugin, too
    assert "has no SGLangHttpServer" in caplog.text
    shielded = verls.SGLangHttpServer.generate
    assert hasattr(shielded, "__wrapped__"), "the plugin has not seen verl's import of the server"

    async def abort() -> None:
        server = server_of(verls, source)
        generate = shielded if kept else shielded.__wrapped__
        calls = [asyncio.ensure_future(generate(server, [1, 2], {}, f"r{i}")) for i in range(64)]
        while len(server.tokenizer_manager.scheduler.running) < 64:
            await asyncio.sleep(0.01)
            assert not any(call.done() for call in calls), calls[0]
        for call in calls:
            call.cancel()
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in done)  # Ray has its places back at once
        await server.abort_all_requests()
        await server.sleep()
        await server.resume_generation()
        late = asyncio.ensure_future(generate(server, [1], {}, "next"))
        await asyncio.sleep(0.05)
        assert list(server.tokenizer_manager.scheduler.running) == ["next"]
        server.tokenizer_manager.scheduler.end(["next"])
        assert (await late).token_ids == [7]

    if kept:
        asyncio.run(abort())
    else:
        with pytest.raises(AssertionError, match="only when server is idle"):
            asyncio.run(abort())
