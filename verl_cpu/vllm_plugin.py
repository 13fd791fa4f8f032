"""vLLM plugin (entry point group ``vllm.general_plugins``): let vLLM's linear layers be loaded more than once.

On CPU, vLLM repacks the weight of every linear layer after loading and then replaces the parameter by an empty one
(``model_executor/layers/linear.py``, ``UnquantizedLinearMethod.process_weights_after_loading``). verl loads new weights
after every training step: into the empty parameter that fails, inside the vLLM worker, and verl's sender waits for ever.
Keep the parameter; verl calls ``process_weights_after_loading`` after each sync, which repacks it.
"""

from __future__ import annotations

from typing import Any

from verl_cpu import requested


def register() -> None:
    """Keep linear weights, in this process. Does nothing unless ``VERL_PLATFORM=cpu``; may be called several times."""
    if not requested():
        return
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    UnquantizedLinearMethod.process_weights_after_loading = _repack_and_keep_weight


def _repack_and_keep_weight(self: Any, layer: Any) -> None:
    """What vLLM does, but with ``remove_weight=False``."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
