"""Training engines that cannot be installed here: their own ``forward_backward_batch``, on CPU tensors.

Megatron, VeOmni and torchtitan need packages for GPUs. The functions in which verl's engines make loss denominators and
micro batches, and scale the loss, are read out of verl's files and run as they are, under verl's own ``ppo_loss``, its
micro batches and a real (single-process) gloo group. What stands in for the rest is here and small: a model, and
Megatron's schedule, which divides each micro batch's loss by their number, or every gradient by the tokens
(megatron-core, ``pipeline_parallel/schedules.py`` and ``distributed/finalize_model_grads.py``).
"""

from __future__ import annotations

import ast
import contextlib
import json
import textwrap
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import verl
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine import utils as engine_utils
from verl.workers.utils.losses import ppo_loss

from tests.integration.test_gradient import Step, configured, defaults, passes  # noqa: F401  (a fixture)
from tests.integration.test_refusals import composed
from verl_adaptive.integration.checks import why_not_skip_zero, zero_rows
from verl_adaptive.integration.layout import micro_size

ENGINES = Path(verl.__file__).parent / "workers" / "engine"


def own(engine: str, cls: str, names: tuple[str, ...], **world: object) -> type:
    """A class with methods of a verl engine, compiled from its file without importing it.

    Args:
        engine: folder under ``verl/workers/engine``.
        cls: the class that has the methods.
        names: of the methods.
        world: what they find beside verl's own helpers.
    """
    text = (ENGINES / engine / "transformer_impl.py").read_text()
    (found,) = (n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == cls)
    methods = {n.name: n for n in found.body if isinstance(n, ast.FunctionDef)}
    source = "\n".join(textwrap.indent(textwrap.dedent(_source(text, methods[name])), "    ") for name in names)
    space: dict[str, object] = {
        "torch": torch,
        "tu": tu,
        "partial": partial,
        "nullcontext": contextlib.nullcontext,
        # without the group, over which it would agree on a number of micro batches, on an accelerator
        "prepare_micro_batches": lambda dp_group, **options: engine_utils.prepare_micro_batches(**options),
        "postprocess_batch_func": lambda output_lst, indices, data: {},
        "detach_tree": lambda tree: tree,
        "get_device_id": lambda: "cpu",
        **world,
    }
    exec(compile(f"from __future__ import annotations\nclass Engine:\n{source}\n", engine, "exec"), space)
    return space["Engine"]  # type: ignore[return-value]


def _source(text: str, node: ast.FunctionDef) -> str:
    return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group of one process: the engines reduce their token counts over it."""
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


class Made:
    """What the engines' methods ask of themselves, in one process.

    Args:
        step: rows and model.
        group: of the one process.
    """

    enable_routing_replay = False
    ulysses_sequence_parallel_size = 1

    def __init__(self, step: Step, group: object) -> None:
        self.step, self.group = step, group
        self.engine_config = SimpleNamespace(
            tensor_parallel_size=1, ep_size=1, context_parallel_size=1, dynamic_context_parallel=False,
            pad_bshd_to_minibatch_max=False, use_remove_padding=True,
        )  # fmt: skip
        self.model_config = SimpleNamespace(mtp=SimpleNamespace(enable=False))
        self.trainer = SimpleNamespace(train_context=contextlib.nullcontext)
        self.tf_config = SimpleNamespace(calculate_per_token_loss=False)
        self.module = [None]
        self.model_fwd_context = self.model_bwd_context = contextlib.nullcontext()  # verl 0.9.0's VeOmni asks for these

    def get_data_parallel_group(self) -> object:
        return self.group

    def get_data_parallel_size(self) -> int:
        return 1

    def log_probs(self, micro: TensorDict) -> dict:
        return {"log_probs": self.step.actor.log_probs(micro["input_ids"].values())}


class Direct(Made):
    """Engines that call ``backward`` themselves: FSDP, VeOmni, torchtitan, automodel."""

    def _gradient_sync_context(self, **_: object):
        return contextlib.nullcontext()

    def forward_step(self, micro: TensorDict, loss_function, forward_only: bool):
        loss, _ = loss_function(model_output=self.log_probs(micro), data=micro)
        return loss, {}


class Scheduled(Made):
    """Megatron: its schedule calls ``backward``."""

    def prepare_model_outputs(self, output: dict, data: TensorDict) -> dict:
        return output

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def forward_step(self, batches, model, logits_processor_func, postprocess_micro_batch_func):
        micro = next(batches)
        return self.log_probs(micro), partial(postprocess_micro_batch_func, data=micro)

    def schedule(self):
        """megatron-core's, for one stage and one rank."""

        def run(*, forward_step_func, data_iterator, model, num_microbatches, forward_only, **_):
            tokens = 0
            for _number in range(num_microbatches):
                output, loss_func = forward_step_func(data_iterator, model[0])
                made = loss_func(output)
                if len(made) == 3:  # per token: a sum, and what to divide all gradients by
                    loss, count, _ = made
                    tokens += int(count)
                else:
                    loss = made[0] / num_microbatches
                loss.backward()
            if tokens:
                for parameter in self.step.actor.parameters():
                    parameter.grad /= tokens
            return [{}]

        return run


class Shown(Step):
    """A step whose gradient an engine of verl's makes.

    Args:
        make: the engine for a step.
        equal: groups of equal size.
    """

    def __init__(self, make, *, equal: bool) -> None:
        super().__init__(equal=equal)
        self.engine = make(self)

    def gradient(self, ranks, config, *, sequences, dynamic):
        actor_config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        (rows,) = ranks
        nested = {n: torch.nested.as_nested_tensor([r[n] for r in rows], layout=torch.jagged) for n in rows[0]}
        data = TensorDict(nested, batch_size=len(rows))
        tu.assign_non_tensor(
            data,
            use_dynamic_bsz=dynamic,
            max_token_len_per_gpu=60,
            micro_batch_size_per_gpu=micro_size(len(rows), 4),
            global_batch_size=sequences,
        )
        self.actor.zero_grad()
        self.engine.forward_backward_batch(data, partial(ppo_loss, actor_config))
        return torch.cat([p.grad.flatten() for p in self.actor.parameters()])


def engine(name: str, group: object):
    """How to make an engine of verl's for a step."""
    if name.startswith("megatron"):

        def megatron(step: Step):
            holder: list[Scheduled] = []
            methods = ("forward_backward_batch", "_routed_num_tokens")
            mpu = SimpleNamespace(
                get_virtual_pipeline_model_parallel_world_size=lambda: None,
                is_pipeline_last_stage=lambda ignore_virtual: True,
            )
            world = {
                "mpu": mpu,
                "RouterReplayHelper": SimpleNamespace(is_r2_record_action=lambda config: False),  # in verl 0.9.0
                "_check_dcp_unsupported_features": lambda *a, **k: None,
                "make_batch_generator": lambda batches, vpp_size: iter(batches),
                "get_forward_backward_func": lambda: holder[0].schedule(),  # noqa: PLW0108  (made below)
            }
            base = own("megatron", "MegatronEngine", methods, **world)
            last = own("megatron", "MegatronEngineWithLMHead", ("postprocess_micro_batch_func",), DCP_SAMPLE_IDS="x")
            made = type("Megatron", (base, last, Scheduled), {})(step, group)
            made.tf_config.calculate_per_token_loss = name == "megatron, by tokens"
            holder.append(made)
            return made

        return megatron
    cls = {"fsdp": "FSDPEngine", "veomni": "VeOmniEngine", "torchtitan": "TorchTitanEngine"}[name]
    state = SimpleNamespace(get_parallel_state=lambda: SimpleNamespace(ulysses_size=1))
    base = own(name, cls, ("forward_backward_batch",), parallel_state=state)
    return lambda step: type(cls, (base, Direct), {})(step, group)


ALL = ["fsdp", "veomni", "torchtitan", "megatron", "megatron, by tokens"]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", ALL)
def test_leaving_rows_out_changes_no_gradient_under(name, mode, group, defaults):  # noqa: F811
    config = configured(defaults, actor_rollout_ref__actor__loss_agg_mode=mode)
    for dynamic, equal in ((True, True), (False, False)):
        step = Shown(engine(name, group), equal=equal)
        assert passes(step.compare(config, ranks=1, dynamic=dynamic)), (dynamic, equal)


@pytest.mark.parametrize("name", ALL)
def test_without_their_tokens_it_would_change_under(name, group, defaults, monkeypatch):  # noqa: F811
    """That the engine takes its denominator from where the missing tokens are written."""
    step = Shown(engine(name, group), equal=True)
    layout = step.layout(1)
    layout.zero_row_tokens[:] = 0
    monkeypatch.setattr(step, "layout", lambda ranks: layout)
    assert not passes(step.compare(defaults, ranks=1, dynamic=True))


@pytest.mark.parametrize("name", ["fsdp", "veomni", "torchtitan", "megatron"])
def test_nothing_else_reads_the_values_of_the_loss_mask_in(name):
    """Reads of ``loss_mask`` in an engine's files: its sum, and its shape; Megatron's goes to multi-token prediction only."""
    reads = []
    for path in sorted((ENGINES / name).glob("*.py")):
        lines = path.read_text().splitlines()
        found = ast.walk(ast.parse("\n".join(lines)))
        at = sorted(node.lineno for node in found if isinstance(node, ast.Constant) and node.value == "loss_mask")
        reads += [lines[number - 1].strip() for number in at]
    expected = {
        "fsdp": ['batch_num_tokens = data["loss_mask"].sum().to(get_device_id())'],
        "veomni": ['batch_num_tokens = data["loss_mask"].sum().to(get_device_id())'],
        "torchtitan": [
            'batch_num_tokens = data["loss_mask"].sum().to(get_device_id())',
            'loss_mask = micro_batch["loss_mask"]',  # for its rows' lengths: torch.ones_like
        ],
        "megatron": [
            'loss_mask = data["loss_mask"]',
            'loss_mask = batch["loss_mask"].to(bool)',  # for multi-token prediction, which is refused
            '"loss_mask": loss_mask,',
            'loss_mask = model_inputs["loss_mask"]',
            '"loss_mask": loss_mask,',
        ],
    }
    assert reads == expected[name]


# -- what is decided -----------------------------------------------------------------------------------------------

DENSE = {"model_type": "qwen2", "num_hidden_layers": 2}
MOE = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
BIASED = {"model_type": "deepseek_v3", "n_routed_experts": 256}
PICTURES = {"model_type": "qwen3_vl_moe", "text_config": {"num_experts": 128}}
ROUTER = "+actor_rollout_ref.actor.megatron.override_transformer_config."


@pytest.mark.parametrize(
    ("strategy", "model", "overrides", "reason"),
    [
        ("dp", MOE, [], ""),
        ("veomni", DENSE, [], ""),
        ("veomni", MOE, [], ""),
        ("torchtitan", DENSE, [], ""),
        ("torchtitan", MOE, [], "follows the load of its experts"),
        ("torchtitan", None, [], "whether the model has experts is not known"),
        ("megatron", DENSE, [], ""),
        ("megatron", MOE, [], ""),
        ("megatron", None, [], "whether the model has experts is not known"),
        ("megatron", BIASED, [], "model_type=deepseek_v3 may follow the load"),
        ("megatron", PICTURES, [], "model_type=qwen3_vl_moe may follow the load"),
        ("megatron", MOE, [f"{ROUTER}moe_router_load_balancing_type=aux_loss"], "balancing_type=aux_loss; none turns"),
        ("megatron", DENSE, [f"{ROUTER}moe_router_load_balancing_type=aux_loss"], ""),
        ("megatron", MOE, [f"{ROUTER}moe_z_loss_coeff=0.001"], "moe_z_loss_coeff=0.001"),
        ("megatron", MOE, [f"{ROUTER}moe_expert_capacity_factor=1.5"], "moe_expert_capacity_factor=1.5"),
        ("megatron", MOE, ["actor_rollout_ref.actor.megatron.vanilla_mbridge=true"], "balancing loss"),
        (
            "megatron",
            DENSE,
            ["actor_rollout_ref.actor.megatron.dynamic_context_parallel=true"],
            "ranks share one batch",
        ),
        ("megatron", DENSE, ["actor_rollout_ref.model.mtp.enable=true"], "multi-token prediction"),
        ("dp", DENSE, ["actor_rollout_ref.actor.strategy=fsdp_turbo"], "not for actor.strategy=fsdp_turbo"),
    ],
)
def test_where_rows_stay(strategy, model, overrides, reason, tmp_path):
    if model is not None:
        (tmp_path / "config.json").write_text(json.dumps(model))
    words = [f"model_engine={strategy}", f"actor_rollout_ref.model.path={tmp_path}", *overrides]
    config = composed("+adaptive=grpo", *words)
    assert (why_not_skip_zero(config) == "") == (reason == "")
    assert reason in why_not_skip_zero(config)
    left_out, said = zero_rows(config, None)
    assert left_out == (reason == "") and reason in said
