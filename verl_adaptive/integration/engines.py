"""Under which training engines a row of zero advantage may be left out of training, and why not under others.

A left-out row's tokens stay in the loss denominator: verl's engines divide by the sum of the minibatch's ``loss_mask``,
of which one row carries the missing tokens (:meth:`.trainer.AdaptiveMixin._carry_zero_rows`). That is right where

* the engine takes ``batch_num_tokens`` from that sum, of all ranks, before it cuts micro batches;
* nothing else reads the values of ``loss_mask``;
* nothing but the loss depends on which tokens went through the model.

The first two were verified for every engine below on CPU tensors, with verl's own code (tests/integration/test_engines.py);
``scripts/check_verl.py`` says when that code changes. The third fails with multi-token prediction, and for a mixture of
experts whose router learns from the load, by a loss of its own or by a bias.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

#: Mixtures of experts whose router has no bias that follows the load (Megatron's ``moe_router_enable_expert_bias``).
UNBIASED = frozenset({"mixtral", "qwen2_moe", "qwen3_moe"})

#: Megatron's options with which tokens of other rows change a row's gradient, or the router.
_ROUTER = ("moe_z_loss_coeff", "moe_router_enable_expert_bias", "moe_expert_capacity_factor", "moe_input_jitter_eps")


def keeps_rows(config: Any) -> str:
    """Why the actor's engine needs rows of zero advantage; empty: it does not."""
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy in ("fsdp", "fsdp2", "veomni"):
        return ""  # a router's own loss never reaches verl's: only log-probs are taken from the model's output
    if strategy == "torchtitan":
        model = model_of(config)
        if model is None:
            return _unknown(config, strategy)
        return "torchtitan's router follows the load of its experts, so every row counts" if _experts(model) else ""
    if strategy == "megatron":
        return _megatron(config)
    return (
        "the loss denominators were verified for fsdp, fsdp2, megatron, veomni and torchtitan, not for "
        f"actor.strategy={strategy}"
    )


def _megatron(config: Any) -> str:
    actor, mtp = config.actor_rollout_ref.actor, config.actor_rollout_ref.model.get("mtp") or {}
    settings = actor.get("megatron") or {}
    if mtp.get("enable", False):
        return "multi-token prediction (model.mtp.enable) adds a separate loss on every row"
    if settings.get("dynamic_context_parallel", False):
        return "with actor.megatron.dynamic_context_parallel=true ranks share one batch, for which nothing was verified"
    model = model_of(config)
    if model is None:
        return _unknown(config, "megatron")
    if not _experts(model):
        return ""
    kind, options = model.get("model_type"), settings.get("override_transformer_config") or {}
    if kind not in UNBIASED:
        return f"the router of model_type={kind} may follow the load of its experts, so every row counts"
    balancing = options.get("moe_router_load_balancing_type")
    # verl gives Megatron-Bridge `none`; what the older mbridge takes is its own
    if (balancing or ("none" if not settings.get("vanilla_mbridge", False) else "mbridge's own")) != "none":
        return (
            "the router's balancing loss acts on every row (actor.megatron.override_transformer_config."
            f"moe_router_load_balancing_type={balancing}; none turns it off)"
        )
    for name in _ROUTER:
        if options.get(name):
            return (
                f"actor.megatron.override_transformer_config.{name}={options.get(name)} makes the router look at "
                "every row"
            )
    return ""


def _unknown(config: Any, strategy: str) -> str:
    return (
        f"whether the model has experts is not known (model.path={config.actor_rollout_ref.model.path} has no "
        f"config.json here), and under {strategy} their router may look at every row"
    )


def _experts(model: dict[str, Any]) -> bool:
    """Whether a model's configuration, or that of its text part, counts experts."""
    parts = [model, *(part for part in model.values() if isinstance(part, dict))]
    return any("expert" in name and isinstance(n, int) and n > 1 for part in parts for name, n in part.items())


def model_of(config: Any) -> dict[str, Any] | None:
    """The model's ``config.json``, from its folder or from the cache of downloads; None if it is not here."""
    path = config.actor_rollout_ref.model.get("path")
    if not path:
        return None
    file = os.path.join(os.path.expanduser(str(path)), "config.json")
    if not os.path.isfile(file):
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(str(path), "config.json")
        except HFValidationError:  # a path, of another machine perhaps
            return None
        if not isinstance(found, str):
            return None
        file = found
    try:
        read = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) else None
