"""A plugin of pytest: verl's patched hooks, in the place of what they would delete of ours."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module takes the names."""
    from verl.trainer.ppo.padding_utils import SYNTHETIC_PADDING_SEQ_LEN, construct_minimal_padding_template
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.workers.rollout.llm_server import LLMServerClient

    from verl_adaptive.integration import abort, facts, rows

    def padding_row(source: dict, tag: dict, eos: int, *, short: bool) -> tuple[dict, dict]:
        if "multi_modal_inputs" in source.keys() and source["multi_modal_inputs"]:  # noqa: SIM118  # a TensorDict, too
            return rows._masked(source, tag)  # stays: the patch is about the length
        short = short and source["position_ids"].dim() == 1  # what _get_padding_seq_len knows by the processor
        length = 2 if short else SYNTHETIC_PADDING_SEQ_LEN
        return construct_minimal_padding_template(source, tag, eos, seq_len=length)

    def media_columns(data: dict) -> dict[str, str]:
        dataset = RLHFDataset.__new__(RLHFDataset)
        for kind in ("image", "video", "audio"):
            setattr(dataset, f"{kind}_key", data.get(f"{kind}_key", f"{kind}s"))
        return dataset.media_keys

    rows.padding_row = padding_row
    facts.media_columns = media_columns
    abort.CancellingClient = LLMServerClient
