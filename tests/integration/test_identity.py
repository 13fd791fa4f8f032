"""What makes a prompt's identity, read from verl's own dataset class: media under any column name, repeated rows."""

from __future__ import annotations

import io
import logging

import numpy as np
import pytest
from datasets import Dataset, Image, List
from PIL import Image as Pillow
from torch.utils.data import Dataset as TorchDataset
from verl.utils.dataset.rl_dataset import RLHFDataset

from tests.integration.common import composed
from verl_adaptive.errors import AdaptiveError
from verl_adaptive.integration.dataloader import identity_columns
from verl_adaptive.integration.facts import media_columns
from verl_adaptive.integration.inspect import _training_set
from verl_adaptive.integration.run_plan import RunPlan
from verl_adaptive.integration.run_store import RunStore
from verl_adaptive.stats import dataset_keys
from verl_adaptive.stats.keys import Identity


def picture(shade: int) -> dict:
    """An image as Parquet files of verl hold it."""
    file = io.BytesIO()
    Pillow.new("RGB", (4, 4), (shade, 0, 0)).save(file, format="PNG")
    return {"bytes": file.getvalue(), "path": None}


def row(text: str, **more) -> dict:
    return {
        "data_source": "math",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": "7"},
        **more,
    }


def opened(folder, rows: list[dict], images: str | None = None, **data) -> RunStore:
    """The store of a run on verl's dataset over these rows, of which one column may hold images."""
    table = Dataset.from_list(rows)
    table = table if images is None else table.cast_column(images, List(Image()))
    table.to_parquet(str(folder / "train.parquet"))
    words = {"data.train_batch_size": 2, "+data.cache_dir": folder, **{f"++data.{k}": v for k, v in data.items()}}
    words |= {"+adaptive": "grpo", "adaptive.store.enabled": "false", "actor_rollout_ref.actor.ppo_mini_batch_size": 2}
    words["actor_rollout_ref.rollout.name"] = "vllm"
    config = composed(*(f"{key}={value}" for key, value in words.items()))
    dataset = RLHFDataset(str(folder / "train.parquet"), tokenizer=None, config=config.data, processor=None)
    return RunStore(config, RunPlan.of(config), dataset)


@pytest.mark.parametrize("column", ["images", "pictures"])
def test_one_question_over_four_images_is_four_prompts(tmp_path, column):
    rows = [row("<image>What is this?", **{column: [picture(40 * i)]}) for i in range(4)]
    more = {} if column == "images" else {"image_key": column}
    store = opened(tmp_path, rows, images=column, **more)
    assert len(np.unique(store.row_of)) == 4
    plain = [{**{k: v for k, v in r.items() if k != column}, "images": r[column]} for r in rows]
    assert store.keys.tolist() == dataset_keys(plain).tolist()  # the column's name makes no difference


@pytest.mark.parametrize(("kind", "column"), [("video", "clips"), ("audio", "sounds")])
def test_videos_and_audios_by_their_paths(tmp_path, kind, column):
    rows = [row(f"<{kind}>What is this?", **{column: [f"/data/{i}.bin"]}) for i in range(3)]
    assert len(np.unique(opened(tmp_path, rows, **{f"{kind}_key": column}).row_of)) == 3


def test_a_text_prompts_key_is_what_it_was(tmp_path):
    rows = [row(f"{i} + 1?") for i in range(5)]
    store = opened(tmp_path, rows, image_key="pictures")
    assert store.keys.tolist() == dataset_keys(rows).tolist()


class Own(TorchDataset):
    """Somebody's own dataset class, whose items verl's has prepared: images are in the messages, the column is gone."""

    def __init__(self, items: list[dict]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict:
        return self.items[index]


def test_items_of_an_own_dataset_class_keep_their_images_apart():
    def item(shade: int | None) -> dict:
        parts = [] if shade is None else [{"type": "image", "image": Pillow.new("RGB", (4, 4), (shade, 0, 0))}]
        raw = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]
        return {**row("<image>What is this?"), "raw_prompt": raw}

    pictures = Identity(media_keys=media_columns({"image_key": "pictures"}))
    rows, _ = identity_columns(Own([item(0), item(9), item(9)]), pictures)
    keys = dataset_keys(rows(), pictures)
    assert keys[0] != keys[1] and keys[1] == keys[2]
    rows, _ = identity_columns(Own([item(None)]), pictures)
    assert dataset_keys(rows(), pictures) == dataset_keys([row("<image>What is this?")])
    rows, _ = identity_columns(Own([{"raw_prompt": "2 + 2?"}]), Identity("question"))
    assert dataset_keys(rows(), Identity("question")) == dataset_keys([{"prompt": "2 + 2?"}])
    no_table, more_than_it_has = [0], Dataset.from_list([row("1 + 1?"), row("2 + 2?")])
    for frame in (no_table, more_than_it_has):
        mine = Own([row("2 + 2?")])
        mine.dataframe = frame
        rows, column = identity_columns(mine, Identity())
        assert dataset_keys(rows(), Identity()) == dataset_keys([row("2 + 2?")]) and column("data_source") == ["math"]


class Reversed(RLHFDataset):
    """Gives the rows of its table in another order."""

    def __getitem__(self, item):
        return super().__getitem__(len(self) - 1 - item)


def test_a_class_of_ones_own_is_read_as_it_gives_its_rows(tmp_path):
    rows = [row("1 + 1?", data_source="easy"), row("2 + 2?", data_source="hard")]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "train.parquet"))
    config = composed(f"+data.cache_dir={tmp_path}").data
    dataset = Reversed(str(tmp_path / "train.parquet"), tokenizer=None, config=config, processor=None)
    found, column = identity_columns(dataset, Identity())
    assert dataset_keys(found()).tolist() == dataset_keys(rows[::-1]).tolist()
    assert column("data_source") == ["hard", "easy"]


def test_a_number_of_rollouts_in_the_data_is_refused(tmp_path):
    """It is verl's way to say how many a prompt gets, and would be overwritten."""
    config = composed(f"data.train_files={tmp_path}/train.parquet")
    for seen in (lambda rows: opened(tmp_path, rows), lambda rows: _training_set(config, None)):
        with pytest.raises(AdaptiveError, match=r"column __rollout_n__.*leave \+adaptive out"):
            seen([row(f"{i} + 1?", __rollout_n__=4) for i in range(4)])


@pytest.mark.parametrize(("repeated", "level"), [(0, None), (2, "INFO"), (3, "WARNING"), (9, "WARNING")])
def test_many_repeated_rows_are_said_once_with_their_number(tmp_path, caplog, repeated, level):
    """Ten rows; more than a fifth of them is a warning that says what helps where they are different prompts."""
    caplog.set_level(logging.INFO)
    store = opened(tmp_path, [row("1 + 1?")] * repeated + [row(f"{i} + 1?") for i in range(1, 11 - repeated)])
    said = [r for r in caplog.records if "training set" in r.getMessage()]
    assert [r.levelname for r in said] == ([] if level is None else [level])
    assert len(store.row_of) == 10 and len(np.unique(store.row_of)) == 10 - repeated
    if level == "WARNING":
        text = said[0].getMessage()
        assert f"{repeated} rows with an earlier one's prompt" in text and "data.image_key" in text and "id_key" in text


@pytest.mark.parametrize(
    ("beside", "named"),
    [
        ([{"extra_info": {"index": i, "seed": i}} for i in range(3)], "extra_info.seed"),
        ([{"extra_info": {"tools_kwargs": {"env": {"seed": i}}}} for i in range(3)], "extra_info.tools_kwargs.env"),
        ([{"extra_info": {"interaction_kwargs": {"name": n}}} for n in "aab"], "extra_info.interaction_kwargs.name"),
        ([{"agent_name": name} for name in ("single_turn_agent", "tool_agent", "tool_agent")], "agent_name"),
        ([{"extra_info": {"index": i, "split": f"{i}"}} for i in range(3)], None),
    ],
)
def test_rows_of_one_key_that_the_agent_loop_can_tell_apart_are_said(tmp_path, caplog, beside, named):
    """One pair is enough; position and split are book-keeping."""
    caplog.set_level(logging.WARNING)
    others = [row(f"{i} + 1?", **beside[0]) for i in range(20)]  # Arrow takes the columns from the first row
    opened(tmp_path, [*others, *(row("Go.", **b) for b in beside)])
    said = [r.getMessage() for r in caplog.records if "adaptive.id_key" in r.getMessage()]
    assert len(said) == (named is not None)
    if named is not None:
        assert f"differ in {named}," in said[0] and "rows 20 and " in said[0]
