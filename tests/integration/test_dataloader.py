"""The prompt stream: what is read, and where it goes on after a restart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Sampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from verl_adaptive.integration.dataloader import DataloaderPrompts, NumberedDataset, _keep_items, identity_columns
from verl_adaptive.stats.keys import Identity

SIZE = 30


class Rows(Dataset):
    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict:
        self.read.append(int(index))
        return {"number": int(index)}


def shuffled(rows: Rows) -> RandomSampler:
    return RandomSampler(rows, generator=torch.Generator().manual_seed(7))


def test_a_gated_stream_reads_what_is_admitted_and_nothing_else():
    rows = Rows()
    stream = DataloaderPrompts(rows, shuffled(rows), chunk=1, workers=4)
    seen = stream.take(20)
    assert rows.read == []
    admitted = seen[::5].tolist()
    assert [stream.item(i)["number"] for i in admitted] == admitted == rows.read


def test_a_row_is_read_once_while_its_group_is_open():
    rows = Rows()
    stream = DataloaderPrompts(rows, shuffled(rows), chunk=8, workers=0)
    first, second = stream.take(8)[:2].tolist()
    for living in ([first, second], [first], [first]):  # a top-up in each of three steps
        assert stream.item(first)["number"] == first
        stream.forget(living)
    assert len(rows.read) == 8 and list(stream.held) == [first]
    assert stream.item(second)["number"] == second and len(rows.read) == 9
    stream.forget()
    assert not stream.held


def test_whole_batches_are_read_ahead_once():
    rows = Rows()
    stream = DataloaderPrompts(rows, shuffled(rows), chunk=8, workers=0)
    seen = stream.take(8).tolist()
    assert [stream.item(i)["number"] for i in seen] == seen == rows.read
    assert stream.take(17).tolist() != seen and len(stream.take(1)) == 8
    assert stream.size == 24  # verl drops the last 6 of each pass, which therefore has no more


@pytest.mark.parametrize("workers", [0, 2])
def test_prompts_that_are_taken_one_by_one_have_verls_order(workers):
    """Asynchronous trainers and gates had another permutation than verl's loader, and than ``grpo`` in ``sync``."""
    rows = Rows()
    verls = StatefulDataLoader(
        *(NumberedDataset(rows, read=False), 1),
        num_workers=workers,
        collate_fn=_keep_items,
        sampler=shuffled(rows),
        drop_last=True,
    )
    expected = [index for _ in range(3) for items in verls for index, _ in items]
    assert DataloaderPrompts(rows, shuffled(rows), chunk=1, workers=workers).take(3 * SIZE).tolist() == expected


@pytest.mark.parametrize(("chunk", "workers"), [(1, 0), (1, 2), (8, 0)])
def test_a_stream_goes_on_where_it_stopped(chunk, workers):
    rows = Rows()
    stream = DataloaderPrompts(rows, shuffled(rows), chunk=chunk, workers=workers)
    stream.take(8)
    state = stream.loader.state_dict()
    expected = [stream.take(8)[:8] for _ in range(6)]  # into the second epoch
    other = DataloaderPrompts(rows, shuffled(rows), chunk=chunk, workers=workers)
    other.loader.load_state_dict(state)
    assert all(np.array_equal(e, other.take(8)[:8]) for e in expected)


@pytest.mark.parametrize(("size", "before"), [(1, 2), (5, 2), (5, 0), (1, 0)])
@pytest.mark.parametrize(("chunk", "now"), [(1, 0), (1, 3), (5, 0), (5, 3)])
def test_the_state_of_another_loader_is_understood(chunk, size, before, now):
    """Of another trainer mode or sampler, of another ``data.dataloader_num_workers``, of verl's own trainer."""
    rows = Rows()
    old = StatefulDataLoader(
        *(NumberedDataset(rows, read=True), size),
        num_workers=before,
        collate_fn=_keep_items,
        sampler=shuffled(rows),
        drop_last=True,
    )
    iterator = iter(old)
    for _ in range(10 // size):
        next(iterator)
    state = old.state_dict()
    expected = [i for items in (*iterator, *old) for i, _ in items]
    assert len(expected) == 2 * SIZE - 10
    if chunk == 1 and now and not before:  # as the state of a stream, whose next pass has the order of workers
        expected = expected[: SIZE - 10]
    stream = DataloaderPrompts(rows, shuffled(rows), chunk=chunk, workers=now)
    stream.loader.load_state_dict(state)
    found: list[int] = []
    while len(found) < len(expected):
        found += stream.take(1).tolist()
    assert found == expected
    assert stream.loader.state_dict()  # and written again


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.parametrize(("size", "sampler"), [(20, shuffled), (SIZE, SequentialSampler)], ids=["fewer rows", "order"])
def test_a_resume_on_another_data_set_or_in_another_order_begins_a_pass(size, sampler, chunk, workers, reads):
    """adaptive.resume.allow=[dataset] offers the one, ``data.shuffle=false`` is the other: torchdata's iterator of fewer rows ends
    before it has begun, and its assertion about the order ended the run when the model was loaded.

    A sampler that picks from the pool reads nothing, and a checkpoint asks for the loader's state all the same.
    """
    rows, now = Rows(), Rows(size)
    stream = DataloaderPrompts(rows, shuffled(rows), chunk=chunk, workers=workers)
    stream.take(24)  # more than the fewer rows are
    other = DataloaderPrompts(now, sampler(now), chunk=chunk, workers=workers)
    other.loader.load_state_dict(stream.loader.state_dict())
    assert reads or other.loader.state_dict()
    found = other.take(16)[:16].tolist() + other.take(1).tolist()
    assert max(found) < size and (sampler is shuffled or found[:16] == list(range(16)))


class Counting(Rows):
    """A data set with a state of its own (``data.custom_cls``, torchdata's Stateful)."""

    count = 0

    def __getitem__(self, index):
        self.count += 1
        return {"count": self.count}

    def state_dict(self) -> dict:
        return {"count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]


@pytest.mark.parametrize(
    ("chunk", "workers", "reads"), [(8, 0, True), (8, 1, True), (1, 0, True), (1, 0, False)], ids=str
)
def test_a_data_set_keeps_its_state(chunk, workers, reads):
    """verl's loader checkpoints it; ours had it begin anew. A sampler that picks from the pool reads without the loader."""
    made = []
    for _ in range(2):
        rows = Counting()
        stream = DataloaderPrompts(rows, SequentialSampler(rows), chunk=chunk, workers=workers)
        if made:
            stream.loader.load_state_dict(made[0])
        places = stream.take(8)[:8].tolist() if reads else range(8)
        counts = [stream.item(i)["count"] for i in places]
        made.append(stream.loader.state_dict())
    assert counts == list(range(9, 17))


def test_a_data_set_begins_training_in_the_state_that_it_was_made_in():
    """Which prompts there are is read off the items of a class of one's own: a curriculum by visits began three passes later."""
    rows = Counting()
    read, column = identity_columns(rows, Identity())
    assert next(iter(read()))["count"] == 1
    assert [item["count"] for item in read()] == list(range(1, SIZE + 1)) and len(column("data_source")) == SIZE
    assert rows.count == 0
    assert DataloaderPrompts(rows, SequentialSampler(rows), chunk=1, workers=0).item(0) == {"count": 1}


class Stages(Sampler):
    """A curriculum of one's own, which goes on with the same stages only."""

    def __init__(self, stages: int) -> None:
        self.stages = stages

    def __iter__(self):
        return iter(range(SIZE))

    def state_dict(self) -> dict:
        return {"stages": self.stages}

    def load_state_dict(self, state: dict) -> None:
        assert state["stages"] == self.stages, "other stages"


def test_what_a_sampler_of_ones_own_refuses_is_refused():
    stream = DataloaderPrompts(Rows(), Stages(3), chunk=8, workers=0)
    stream.take(8)
    other = DataloaderPrompts(Rows(), Stages(4), chunk=8, workers=0)
    other.loader.load_state_dict(stream.loader.state_dict())
    with pytest.raises(AssertionError, match="other stages"):
        other.take(8)
