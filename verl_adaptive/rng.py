"""Counter-based random numbers: a draw depends on what it is for, never on when it is asked.

Every number is a hash of (seed, purpose, step, prompt key, salt), so two runs that reach the same state draw the
same numbers whatever the order of arrival, and a resume needs no generator state. The mixer is the finaliser of
SplitMix64 (Steele, Lea, Flood 2014), applied once per word; it is a statistical generator, not a cryptographic one.
"""

from __future__ import annotations

import zlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_BLOCK = 1 << 14


def _mix(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> np.uint64(30))
    x = x * _M1
    x = x ^ (x >> np.uint64(27))
    x = x * _M2
    return x ^ (x >> np.uint64(31))


def unit(bits: np.ndarray) -> np.ndarray:
    """Uniform float64 in [0, 1) of 64 random bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Draw:
    """Random numbers for one (seed, step).

    Args:
        seed: the run's ``adaptive.seed``.
        step: the training step the decision belongs to.
    """

    def __init__(self, seed: int, step: int) -> None:
        self.seed = int(seed)
        self.step = int(step)

    def bits(self, purpose: str, key_hi: np.ndarray, key_lo: np.ndarray, salt: np.ndarray | int = 0) -> np.ndarray:
        """64 random bits per entry.

        Args:
            purpose: what the draw decides, for example ``"greso.gate"``; different purposes are independent.
            key_hi, key_lo: uint64 halves of the prompts' keys, shape ``(n,)``.
            salt: tells draws for the same prompt in the same step apart (stream position, rollout number).

        Returns:
            uint64 array of the broadcast shape.
        """
        words = (
            np.uint64(self.seed & 0xFFFFFFFFFFFFFFFF),
            np.uint64(zlib.crc32(purpose.encode())),
            np.uint64(self.step & 0xFFFFFFFFFFFFFFFF),
            np.asarray(key_hi, dtype=np.uint64),
            np.asarray(key_lo, dtype=np.uint64),
            np.asarray(salt).astype(np.uint64),
        )
        with np.errstate(over="ignore"):
            state = np.zeros((), dtype=np.uint64)
            for word in words:
                state = _mix((state + _GOLDEN) ^ word)
            return _mix(state + _GOLDEN)

    def again(self, purpose: str, state: np.ndarray, salt: int = 0) -> np.ndarray:
        """64 random bits per entry of ``state``, by one mixing each: for draws over whole pools, step after step.

        Args:
            purpose: as in :meth:`bits`.
            state: uint64 ``(n,)``, bits of every prompt that stay the same (:meth:`bits` of step 0, kept).
            salt: tells draws of the same step apart.

        Returns:
            uint64 ``(n,)``.
        """
        zero = np.zeros((), dtype=np.uint64)
        word = self.bits(purpose, zero, zero, salt)
        out, half = np.empty(len(state), dtype=np.uint64), np.empty(_BLOCK, dtype=np.uint64)
        for start in range(0, len(state), _BLOCK):  # so that both stay in the processor's cache
            x = out[start : start + _BLOCK]
            y = half[: len(x)]
            np.bitwise_xor(state[start : start + _BLOCK], word, out=x)
            for shift, factor in ((30, _M1), (27, _M2), (31, None)):
                np.right_shift(x, np.uint64(shift), out=y)
                np.bitwise_xor(x, y, out=x)
                if factor is not None:
                    np.multiply(x, factor, out=x)
        return out

    def uniform(self, purpose: str, key_hi: np.ndarray, key_lo: np.ndarray, salt: np.ndarray | int = 0) -> np.ndarray:
        """Uniform float64 in [0, 1), one per entry; arguments as :meth:`bits`."""
        return unit(self.bits(purpose, key_hi, key_lo, salt))
