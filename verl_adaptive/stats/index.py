"""From key to row: an open-addressing hash index whose every operation works on whole arrays of keys.

Slots hold row numbers only (4 bytes each, at most two thirds full); the keys themselves stay in the table. Collisions
probe at triangular distances, which visit every slot of a power-of-two table.
"""

from __future__ import annotations

import numpy as np

_EMPTY = np.uint32(0xFFFFFFFF)
_CHUNK = 1 << 18  # keys at a time: the temporaries stay in the processor's cache
_M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


class KeyIndex:
    """Maps the keys of a growing array to their positions in it; keys are never removed."""

    def __init__(self) -> None:
        self._slots = np.full(8, _EMPTY, dtype=np.uint32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def _home(self, keys: np.ndarray) -> np.ndarray:
        # Content keys are uniform already; a user's own may not be, and one multiplication more costs nothing.
        shift = np.uint64(64 - len(self._slots).bit_length() + 1)
        mixed = (keys["hi"] ^ (keys["lo"] * _M1)) * _M2
        mixed ^= mixed >> np.uint64(32)
        return ((mixed * _M1) >> shift).astype(np.int64)

    def lookup(self, keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Rows of ``wanted``, -1 where unknown.

        Args:
            keys: the indexed keys, position = row.
            wanted: keys to find, shape ``(n,)``.

        Returns:
            int64 ``(n,)``.
        """
        out = np.full(len(wanted), -1, dtype=np.int64)
        if not self._count:
            return out
        mask = len(self._slots) - 1
        for begin in range(0, len(wanted), _CHUNK):
            part = wanted[begin : begin + _CHUNK]
            found = out[begin : begin + _CHUNK]
            pending, at, probe = np.arange(len(part)), self._home(part), 0
            while len(pending):
                row = self._slots[at]
                taken = row != _EMPTY
                pending, at, row = pending[taken], at[taken], row[taken]
                there, here = keys[row], part[pending]
                same = (there["hi"] == here["hi"]) & (there["lo"] == here["lo"])
                found[pending[same]] = row[same]
                probe += 1
                pending, at = pending[~same], (at[~same] + probe) & mask
        return out

    def append(self, keys: np.ndarray) -> None:
        """Index ``keys[len(index):]``, which must be new and different from each other.

        Raises:
            ValueError: more rows than row numbers of 32 bits.
        """
        if len(keys) >= int(_EMPTY):
            raise ValueError(f"a table holds at most {int(_EMPTY) - 1} prompts")
        if 3 * len(keys) > 2 * len(self._slots):
            size = 1 << int(3 * len(keys) // 2).bit_length()
            self._slots = np.full(size, _EMPTY, dtype=np.uint32)
            self._count = 0
        mask = len(self._slots) - 1
        for begin in range(self._count, len(keys), _CHUNK):
            part = keys[begin : begin + _CHUNK]
            row = np.arange(begin, begin + len(part), dtype=np.uint32)
            at, probe = self._home(part), 0
            while len(row):
                free = self._slots[at] == _EMPTY
                self._slots[at[free]] = row[free]  # of several rows that want one slot, one gets it
                lost = self._slots[at] != row
                probe += 1
                row, at = row[lost], (at[lost] + probe) & mask
        self._count = len(keys)
