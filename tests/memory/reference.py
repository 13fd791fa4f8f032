"""The memory baseline and the draw by spread as slow loops over prompts, written from the formulas alone."""

from __future__ import annotations

import math


class SlowMemory:
    """One entry a prompt: w, m, latest mean, strength of the prior."""

    def __init__(self, sources, decay=0.9, strength=4.0, by_source=True, centre=None):
        self.sources, self.decay = list(sources), decay
        self.by_source, self.centre = by_source, centre
        self.w, self.m = [0.0] * len(sources), [0.0] * len(sources)
        self.latest: list[float | None] = [None] * len(sources)
        self.strength = [strength] * len(sources)
        self.end_step()

    def end_step(self):
        """The priors of the next step."""
        seen = [x for x in self.latest if x is not None]
        if self.centre is None:
            everyone = sum(seen) / len(seen) if seen else math.nan
        else:
            everyone = (2 * self.centre + sum(seen)) / (2 + len(seen))
        self.prior = {}
        for source in set(self.sources):
            own = [x for x, s in zip(self.latest, self.sources, strict=True) if s == source and x is not None]
            self.prior[source] = (2 * everyone + sum(own)) / (2 + len(own)) if self.by_source else everyone

    def value(self, prompt):
        k = self.strength[prompt]
        return (self.w[prompt] + k * self.prior[self.sources[prompt]]) / (self.m[prompt] + k)

    def visit(self, prompt, values, weight=1.0):
        self.w[prompt] = self.decay * self.w[prompt] + weight * sum(values)
        self.m[prompt] = self.decay * self.m[prompt] + weight * len(values)
        self.latest[prompt] = sum(values) / len(values)
        self.strength[prompt] *= self.decay


def middle(values):
    """The median of the values, and of their non-zero distances from it."""

    def median(x):
        x = sorted(x)
        return (x[(len(x) - 1) // 2] + x[len(x) // 2]) / 2

    centre = median(values)
    away = [abs(x - centre) for x in values if x != centre]
    return centre, median(away) if away else math.inf


def clip(x, limit):
    return max(-limit, min(limit, x))


class SlowBaseline:
    """Advantages of one step after another; a step is a list of (prompt, rewards, weight of its evidence)."""

    def __init__(self, memory, shrink=4.0, scale="running"):
        self.memory, self.shrink, self.scale = memory, shrink, scale
        self.squares, self.sizes = [], []  # of steps with differences: mean square; Σ |d|, Σ d²

    def usual(self):
        if not self.squares:
            return 0.0
        weight = [0.9**k for k in range(len(self.squares))][::-1]
        square = sum(w * q for w, q in zip(weight, self.squares, strict=True)) / sum(weight)
        kept = [0.99**k for k in range(len(self.sizes))][::-1]
        absolute, squared = (sum(k * s[i] for k, s in zip(kept, self.sizes, strict=True)) for i in (0, 1))
        return max(math.sqrt(square), squared / absolute / 4)

    def stand_in(self, groups, prompt, reward, centre, limit):
        """The mean of the batch's other rewards, those of the source shrunk to it like a prior."""
        source = self.memory.sources
        counted = [(source[p], centre + clip(r - centre, limit)) for p, rewards, _ in groups for r in rewards]
        counted.remove((source[prompt], centre + clip(reward - centre, limit)))
        everyone = sum(r for _, r in counted) / len(counted)
        own = [r for s, r in counted if s == source[prompt]]
        return (2 * everyone + sum(own)) / (2 + len(own)) if self.memory.by_source else everyone

    def step(self, groups):
        before = [self.memory.value(prompt) for prompt, _, _ in groups]
        everything = [r for _, rewards, _ in groups for r in rewards]
        centre, distance = middle(everything)
        off = []
        for v, (prompt, rewards, _) in zip(before, groups, strict=True):
            for i, r in enumerate(rewards):
                value = v
                if math.isnan(value):  # nothing known yet: the batch's other rollouts
                    if len(everything) == 1:  # there is no other: no lesson, and no measure of how far values are off
                        off.append(None)
                        continue
                    value = self.stand_in(groups, prompt, r, centre, 8 * distance)
                others = rewards[:i] + rewards[i + 1 :]
                if math.isnan(v):
                    others = [centre + clip(x - centre, 8 * distance) for x in others]
                elif self.usual():
                    others = [v + clip(x - v, 8 * self.usual()) for x in others]
                b = (sum(others) + self.shrink * value) / (len(others) + self.shrink) if others else value
                off.append(0.0 if abs(r - b) <= max(1e-6, 1e-6 * abs(r)) else r - b)
        limit = 8 * (self.usual() or distance)
        for v, (prompt, rewards, weight) in zip(before, groups, strict=True):
            at = centre if math.isnan(v) else v
            self.memory.visit(prompt, [at + clip(r - at, limit) for r in rewards], weight)
        self.memory.end_step()
        known = [clip(a, limit) for a in off if a is not None]
        if any(known):
            self.squares.append(sum(a * a for a in known) / len(known))
            self.sizes.append((sum(abs(a) for a in known), sum(a * a for a in known)))
        off = [0.0 if a is None else a for a in off]
        if self.scale == "none":
            return off
        if self.scale == "whiten":
            mean = sum(off) / len(off)
            deviation = math.sqrt(sum((a - mean) ** 2 for a in off) / len(off)) + 1e-8
            return [(a - mean) / deviation for a in off]
        return [clip(a / self.usual(), 8) if a else 0.0 for a in off]
