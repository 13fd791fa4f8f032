"""verl's training set as the engine sees it: positions in a stream, and the rows behind them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import Dataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.stats.keys import Identity


class NumberedDataset(Dataset):
    """verl's dataset, whose items come with their position.

    Without ``read`` the items are not read at all: only their positions come. A dataset that has a state keeps it in the
    loader's, as in verl.
    """

    def __init__(self, dataset: Dataset, *, read: bool) -> None:
        self.dataset, self.read = dataset, read
        for name in ("state_dict", "load_state_dict"):  # torchdata's Stateful: both, or the loader asks for neither
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, dict | None]:
        return int(index), self.dataset[index] if self.read else None


class _Loader(StatefulDataLoader):
    """Goes on where another loader had stopped, with as many workers: the state's form, and verl's order, depend on them.

    Another trainer mode or sampler reads whole batches, or positions alone; ``data.dataloader_num_workers`` may have changed.

    Attributes:
        weights_saved: called when verl asks for the state: of a checkpoint, the weights are written by then.
        twice: made without workers where verl's loader has some, whose order it keeps. A resume may give it workers.
    """

    num_workers: int
    next_iter_state: dict[str, Any] | None
    twice = False
    weights_saved: Callable[[], None] = staticmethod(lambda: None)

    def state_dict(self) -> dict[str, Any]:
        self.weights_saved()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        workers = state_dict.get("_snapshot", {}).get("_main_snapshot", {}).get("_num_workers", 0)
        if workers != self.num_workers:
            self.num_workers, self.prefetch_factor = workers, 2 if workers else None
        super().load_state_dict(state_dict)
        if hasattr(self.dataset, "load_state_dict"):
            super().state_dict()  # gives the data set its own now; else with the first fetch, which a pool never makes

    def _get_iterator(self) -> Any:
        if self.twice and not self.num_workers and self.next_iter_state is None:
            iter(self.batch_sampler)  # torchdata makes two where it has workers, and each draws a permutation
        try:
            return super()._get_iterator()
        except StopIteration:  # of a resume with a data set that ends before the position reached
            pass
        except AssertionError:
            # of a sampler that has no use for the state: torch's own, with data.shuffle=false after true
            if not isinstance(self.sampler, SequentialSampler):
                raise
        self.next_iter_state = None
        return super()._get_iterator()


def _keep_items(items: list) -> list:
    """Collate into a plain list: prompts are batched when they are sent, not when they are read."""
    return items


class DataloaderPrompts:
    """verl's prompt order, through verl's own sampler and a stateful dataloader, as a :class:`PromptStream`.

    Args:
        dataset: verl's training set.
        sampler: verl's sampler for it (``create_rl_sampler``).
        chunk: prompts per fetch; verl's batch for plain epoch order, 1 for gated streams: of those only the positions
            come, and a prompt is read (with its images) once it is admitted.
        workers: ``data.dataloader_num_workers``, which read whole fetches ahead; the order of prompts depends on whether
            there are any.

    Attributes:
        loader: the dataloader; verl checkpoints it.
        held: rows that have been read, by position: what was read ahead, and of groups that are open, for their top-ups, or
            may train.
    """

    def __init__(self, dataset: Dataset, sampler: Any, *, chunk: int, workers: int) -> None:
        self.dataset = dataset
        whole = chunk > 1
        self.size = len(dataset) // chunk * chunk if whole else len(dataset)  # of a pass
        self.loader = _Loader(
            dataset=NumberedDataset(dataset, read=whole),
            batch_size=chunk,
            num_workers=workers if whole else 0,
            drop_last=whole,  # verl drops an epoch's last incomplete batch
            collate_fn=_keep_items,
            sampler=sampler,
        )
        self.loader.twice = workers > 0 and not whole
        self._iterator: Iterator | None = None
        self.held: dict[int, dict] = {}

    def take(self, count: int) -> np.ndarray:
        """Next positions, at least ``count`` of them; whole fetches, so perhaps more."""
        taken: list[int] = []
        while len(taken) < count:
            for index, item in self._fetch():
                taken.append(index)
                if item is not None:
                    self.held[index] = item
        return np.array(taken, dtype=np.int64)

    def _fetch(self) -> list[tuple[int, dict | None]]:
        try:
            if self._iterator is None:
                self._iterator = iter(self.loader)
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)

    def item(self, index: int) -> dict:
        """The row at a position: the one already read, or read now (gated, after a resume, from a pool)."""
        if index not in self.held:
            self.held[index] = self.dataset[index]
        return self.held[index]

    def drop(self, positions: Iterable[int]) -> None:
        """Drop the rows at these positions."""
        for index in positions:
            self.held.pop(index, None)

    def forget(self, living: Collection[int] = ()) -> None:
        """A step is over: drop the rows that were read but for those at these positions."""
        self.held = {index: self.held[index] for index in set(living) & self.held.keys()}


def refuse_own_numbers(columns: Iterable[str]) -> None:
    """Refuse a training set whose columns tell verl how many rollouts a prompt gets: the policy would overwrite it."""
    if "__rollout_n__" in columns:
        raise AdaptiveError(
            "data.train_files: the training set has a column __rollout_n__, by which verl sets a prompt's rollouts; under a "
            "preset adaptive/allocator says how many each gets. Take the column out, or leave +adaptive out"
        )


def identity_columns(
    dataset: Any, identity: Identity
) -> tuple[Callable[[], Iterable[dict]], Callable[[str], list[str]]]:
    """How to read what makes a prompt's identity.

    Args:
        dataset: verl's dataset; an ``RLHFDataset`` holds a Hugging Face dataset in ``dataframe``, which is read without
            decoding images. A class of one's own may give other rows than that: its items are read, and one that has a
            state (torchdata's Stateful) gets it back afterwards.
        identity: :func:`verl_adaptive.integration.facts.identity_of`.

    Returns:
        A function that gives the rows anew, and one that gives a column as text.
    """
    if getattr(type(dataset), "__getitem__", None) is RLHFDataset.__getitem__ and len(dataset.dataframe) == len(
        dataset
    ):
        frame = dataset.dataframe

        def column(name: str) -> list[str]:
            return [str(v) for v in frame[name]] if name in frame.column_names else [""] * len(frame)

        return lambda: frame, column

    media = list(identity.media.values())
    stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")

    def items() -> Iterator[dict]:
        state = copy.deepcopy(dataset.state_dict()) if stateful else None
        try:
            for index in range(len(dataset)):
                item = dataset[index]
                if identity.prompt_key not in item:
                    item = {**item, identity.prompt_key: item.get("raw_prompt")}
                elif not set(media) & item.keys() and (shown := _shown(item)):
                    item = {**item, media[0]: shown}
                yield item
        finally:
            if stateful:
                dataset.load_state_dict(state)

    return items, lambda name: [str(item.get(name, "")) for item in items()]


def _shown(item: Mapping[str, Any]) -> list[Any]:
    """Images, videos and audios of an item whose columns verl has moved into the messages, as it does."""
    contents = [message.get("content") for message in item.get("raw_prompt") or [] if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    shown = [part for part in parts if isinstance(part, Mapping) and part.get("type") not in (None, "text")]
    beside = item.get("multi_modal_data")
    return [*shown, beside] if beside else shown
