"""Loss honesty: leaving out rows of zero advantage, and padding, change no gradient, under verl's own ``ppo_loss``.

A tiny model stands for the actor; the rest is verl's: its configuration with its defaults, its nested rows, its cut
into micro batches (fixed and dynamic), its loss. The reference is every row in plain GRPO's minibatches; against it
stands what the layout sends: fewer rows, padding rows, and denominators as the trainer writes them. Lengths differ,
every minibatch is several micro batches, and every pair of ``loss_agg_mode`` and ``loss_mode`` that
``why_not_skip_zero`` lets through is tried.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, compute_grpo_outcome_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.losses import ppo_loss

from tests.integration.common import composed
from tests.integration.test_layout import even
from verl_adaptive.advantages.memory import MemoryBaseline
from verl_adaptive.advantages.verl import Verl
from verl_adaptive.config import RunFacts
from verl_adaptive.groups import Groups
from verl_adaptive.integration.checks import why_not_skip_zero, zero_rows
from verl_adaptive.integration.layout import PAD, Layout, Pass, micro_size, plan
from verl_adaptive.integration.rows import padding_row
from verl_adaptive.progress import Progress
from verl_adaptive.rng import Draw
from verl_adaptive.stats.keys import KEY_DTYPE
from verl_adaptive.stats.table import StatsTable

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSSES = sorted(POLICY_LOSS_REGISTRY)
VOCAB, LONGEST, GROUPS, UPDATES, EOS = 11, 12, 8, 2, 1
KEY = "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def defaults():
    """verl's own configuration, as ``main_ppo`` composes it."""
    return composed(
        "algorithm.adv_estimator=grpo",
        f"{KEY}.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=8",
    )


def configured(defaults, **options):
    config = OmegaConf.merge(defaults)
    for name, value in options.items():
        OmegaConf.update(config, name.replace("__", "."), value)
    return config


class Actor(torch.nn.Module):
    """Token logits from the token before: enough to have gradients everywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCAB, 16, dtype=torch.float64)
        self.head = torch.nn.Linear(16, VOCAB, dtype=torch.float64)

    def log_probs(self, packed: torch.Tensor) -> torch.Tensor:
        """Of each next token in a packed sequence, as verl's engines give them: float64 ``(tokens,)``."""
        logits = self.head(torch.tanh(self.embed(packed))).log_softmax(-1)
        return logits.gather(-1, packed.roll(-1)[:, None])[:, 0]


class Step:
    """A step's rows: groups of rollouts, of which some are all right or all wrong."""

    def __init__(self, *, equal: bool) -> None:
        rng = np.random.default_rng(5)
        sizes = np.full(GROUPS, 8) if equal else rng.integers(2, 12, size=GROUPS)
        self.equal, self.group = equal, np.repeat(np.arange(GROUPS), sizes)
        count = len(self.group)
        rate = np.tile([0.5, 0.0, 0.6, 1.0], GROUPS // 4)  # every minibatch has groups of both kinds
        self.reward = (rng.random(count) < rate[self.group]).astype(np.float32)
        self.length = rng.integers(1, LONGEST + 1, size=count)
        prompt = rng.integers(1, 6, size=GROUPS)[self.group]
        self.actor = Actor()
        noise = torch.Generator().manual_seed(1)
        self.rows = []
        for i in range(count):
            ids = torch.tensor(rng.integers(0, VOCAB, size=prompt[i] + self.length[i]))
            mask = torch.ones(self.length[i], dtype=torch.int64)
            mask[: self.length[i] // 4] = 0  # as tool output has it
            old = self.actor.log_probs(ids).detach()[-self.length[i] - 1 : -1]
            old = old + 0.3 * torch.randn(self.length[i], generator=noise, dtype=torch.float64)
            self.rows.append(
                {
                    "input_ids": ids,
                    "attention_mask": torch.ones_like(ids),
                    "position_ids": torch.arange(len(ids)),
                    "prompts": ids[: prompt[i]],
                    "responses": ids[prompt[i] :],
                    "response_mask": mask,
                    "loss_mask": mask,
                    "old_log_probs": old,
                    "ref_log_prob": old + 0.3 * torch.randn(self.length[i], generator=noise, dtype=torch.float64),
                    "rollout_log_probs": old + 0.2 * torch.randn(self.length[i], generator=noise, dtype=torch.float64),
                }
            )
        padded = torch.nn.utils.rnn.pad_sequence([r["response_mask"] for r in self.rows], batch_first=True)
        rewards = torch.zeros(padded.shape)
        rewards[torch.arange(count), torch.tensor(self.length) - 1] = torch.tensor(self.reward)
        advantage, _ = compute_grpo_outcome_advantage(rewards, padded, np.array([f"g{g}" for g in self.group]))
        for row, values in zip(self.rows, advantage, strict=True):
            row["advantages"] = values[: len(row["responses"])].double()
        flat = np.array([len(set(self.reward[self.group == g])) == 1 for g in range(GROUPS)])
        assert flat.any() and not flat.all()
        self.trains = ~flat[self.group]
        self.tokens = np.array([int(r["loss_mask"].sum()) for r in self.rows])

    def weigh(self, which: np.ndarray, *, normalize: bool) -> None:
        """Importance weights of these rows, from verl's rollout correction."""
        pad = lambda name: torch.nn.utils.rnn.pad_sequence([self.rows[i][name] for i in which], batch_first=True)  # noqa: E731
        weights, _, _ = compute_rollout_correction_and_rejection_mask(
            pad("old_log_probs"), pad("rollout_log_probs"), pad("response_mask"), "token", 2.0, normalize
        )
        for i, values in zip(which, weights.batch["rollout_is_weights"], strict=True):
            self.rows[i]["rollout_is_weights"] = values[: self.length[i]]

    def padding(self) -> dict:
        row, _ = padding_row({**self.rows[0]}, {}, EOS, short=True)
        zero = torch.zeros(1, dtype=torch.float64)
        row.update(old_log_probs=zero, advantages=zero, ref_log_prob=zero)
        if "rollout_is_weights" in row:
            row["rollout_is_weights"] = zero
        return {name: row[name].to(value.dtype) for name, value in self.rows[0].items()}

    def gradient(self, ranks: list[list[dict]], config, *, sequences: float, dynamic: bool) -> torch.Tensor:
        """Of one update, as verl's FSDP engine makes it: micro batches one after another, ranks averaged."""
        actor_config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        tokens = float(sum(row["loss_mask"].sum() for rows in ranks for row in rows))
        self.actor.zero_grad()
        for rows in ranks:
            data = TensorDict(
                {
                    name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged)
                    for name in rows[0]
                },
                batch_size=len(rows),
            )
            tu.assign_non_tensor(
                data,
                use_dynamic_bsz=dynamic,
                max_token_len_per_gpu=60,
                micro_batch_size_per_gpu=micro_size(len(rows), 4),
                batch_num_tokens=tokens,
                global_batch_size=sequences,
                dp_size=len(ranks),
            )
            cut, _ = prepare_micro_batches(data)
            assert len(cut) > 1  # or nothing is tried
            for micro in cut:
                out = {"log_probs": self.actor.log_probs(micro["input_ids"].values())}
                loss, _ = ppo_loss(actor_config, out, micro)
                (loss / len(ranks)).backward()
        return torch.cat([p.grad.flatten() for p in self.actor.parameters()])

    def layout(self, ranks: int) -> Layout:
        return plan(
            self.group,
            np.array([len(r["input_ids"]) for r in self.rows]),
            np.where(self.trains, 0, self.tokens),
            self.trains,
            ranks=ranks,
            updates=UPDATES,
            partition=even,
            passes=[Pass(ranks, "actor", 4)],
        )

    def compare(self, config, *, ranks: int, dynamic: bool, normalize: bool | None = None, forgo: bool = False):
        """(ours, verl's) for each minibatch; ``forgo``: verl's without any term of the rows that ours leaves out."""
        layout = self.layout(ranks)
        assert layout.updates == UPDATES
        lean_rows = np.flatnonzero(self.trains)
        pairs = []
        for c, members in enumerate(np.array_split(np.arange(GROUPS), UPDATES)):
            if normalize is not None:
                self.weigh(lean_rows, normalize=normalize)
            sent = layout.order[layout.positions(c)]
            assert (sent != PAD).sum() < np.isin(self.group, members).sum()
            rows = [dict(self.rows[i]) if i != PAD else self.padding() for i in sent]
            denominator_row = int(np.flatnonzero(layout.positions(c) == layout.denominator_row(c))[0])
            rows[denominator_row]["loss_mask"] = rows[denominator_row]["loss_mask"].clone()
            rows[denominator_row]["loss_mask"][0] += int(layout.zero_row_tokens[c])
            share = len(rows) // ranks
            lean = self.gradient(
                [rows[r * share : (r + 1) * share] for r in range(ranks)],
                config,
                sequences=layout.sequences / layout.updates,
                dynamic=dynamic,
            )
            if normalize is not None:
                self.weigh(np.arange(len(self.rows)), normalize=normalize)
            whole = [dict(self.rows[i]) for i in np.flatnonzero(np.isin(self.group, members))]
            for row, trains in zip(whole, self.trains[np.isin(self.group, members)], strict=True):
                if forgo and not trains:
                    row["response_mask"] = torch.zeros_like(row["response_mask"])
            whole += [self.padding()] * (-len(whole) % (4 * ranks))
            share = len(whole) // ranks
            full = self.gradient(
                [whole[r * share : (r + 1) * share] for r in range(ranks)],
                config,
                # equal groups: verl's own ppo_mini_batch_size * n; else every sequence of the step weighs the same
                sequences=float(8 * len(members)) if self.equal else len(self.rows) / UPDATES,
                dynamic=dynamic,
            )
            assert full.abs().max() > 1e-5
            pairs.append((lean, full))
        return pairs


@pytest.fixture(scope="module")
def steps():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of tiny operations
    yield {equal: Step(equal=equal) for equal in (True, False)}
    torch.set_num_threads(threads)


def passes(pairs) -> bool:
    return all(torch.allclose(lean, full, rtol=1e-6, atol=1e-9) for lean, full in pairs)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("mode", "factor"), [*((mode, None) for mode in MODES), (MODES[-1], LONGEST)])
def test_what_is_let_through_changes_no_gradient(defaults, steps, mode, loss, factor):
    config = configured(
        defaults,
        actor_rollout_ref__actor__loss_agg_mode=mode,
        actor_rollout_ref__actor__policy_loss__loss_mode=loss,
        actor_rollout_ref__actor__loss_scale_factor=factor,
    )
    refused = why_not_skip_zero(config)
    looks_at_rows = loss in ("bypass_mode", "clip_cov", "dro", "geo_mean", "kl_cov")
    assert bool(refused) == (looks_at_rows or (mode.endswith("norm") and factor is None))
    if refused:
        pytest.skip(refused)
    shapes = [(2, False, False)] + [(1, True, True)] * (loss == "vanilla")  # the rows' layout knows no loss
    for ranks, dynamic, equal in shapes:
        assert passes(steps[equal].compare(config, ranks=ranks, dynamic=dynamic)), (ranks, dynamic, equal)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({f"{KEY}.loss_agg_mode": "seq-mean-token-sum-norm"}, r"loss_scale_factor=<a number"),
        ({f"{KEY}.policy_loss.loss_mode": "geo_mean"}, "loss_mode=geo_mean looks at every row"),
    ],
)
@pytest.mark.parametrize(("dynamic", "equal"), [(False, False), (True, True)])
def test_what_is_refused_would_change_it(defaults, steps, options, reason, dynamic, equal):
    config = configured(defaults, **options)
    assert reason in why_not_skip_zero(config)
    assert not passes(steps[equal].compare(config, ranks=1, dynamic=dynamic))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_penalty_loses_what_the_rows_left_out_would_add(defaults, steps, mode, dynamic):
    """``adaptive.skip_zero_advantage=true`` beside a KL loss: the policy's gradient, and the penalty of the rest."""
    config = configured(defaults, actor_rollout_ref__actor__use_kl_loss=True)
    config = configured(config, actor_rollout_ref__actor__loss_agg_mode=mode)
    assert not zero_rows(config, None)[0] and zero_rows(config, True)[0]
    assert passes(steps[True].compare(config, ranks=1, dynamic=dynamic, forgo=True))
    assert not passes(steps[True].compare(config, ranks=1, dynamic=dynamic))  # so it is said, and never the default


@pytest.mark.parametrize("normalize", [False, True])
def test_weights_of_rollout_correction(defaults, normalize):
    """Left alone they change nothing; normalised over the batch they do."""
    correction = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": normalize}
    config = configured(defaults, algorithm__rollout_correction=correction)
    assert ("rollout_is_batch_normalize" in why_not_skip_zero(config)) == normalize
    made = Step(equal=True).compare(config, ranks=1, dynamic=True, normalize=normalize)
    assert passes(made) is not normalize


def test_the_loss_of_sao_is_the_papers():
    """verl's V1 trainers leave ``rollout_correction.loss_type`` and its band to the actor's loss, which else clips as PPO does."""
    from verl_adaptive.integration import composing

    words = ("+adaptive=sao", "algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_dynamic_bsz=true")
    config = composing.compose(composing.Command.parse(words))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    ratio = torch.tensor([[1.0, 1.5, 0.5, 0.1, 5.0]])
    old = torch.full((1, 5), 0.15).log()
    new = (old + ratio.log()).requires_grad_()
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=5.0, global_batch_size=1.0, loss_scale_factor=None)
    loss, _ = POLICY_LOSS_REGISTRY[actor.policy_loss.loss_mode](
        old_log_prob=old,
        log_prob=new,
        advantages=torch.tensor([[1.0, 1.0, -1.0, 1.0, -1.0]]),
        response_mask=torch.ones(1, 5, dtype=torch.bool),
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
    )
    loss.backward()
    # A times the ratio, over all tokens; nothing of a token whose ratio left [0.2, 4]
    assert torch.allclose(new.grad, torch.tensor([[-1.0, -1.5, 0.5, 0.0, 0.0]]) / 5)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("loss", ["reinforce", "ppo_clip"])
def test_padding_with_a_token_of_no_advantage_changes_no_gradient_of_bypass_mode(defaults, steps, loss, mode):
    """The loss fails on a micro batch of padding alone, which dynamic micro batches make where rows are long."""
    correction = {"loss_type": loss, "rollout_is": "token", "rollout_is_threshold": "0.2_4.0"}
    config = configured(defaults, actor_rollout_ref__actor__loss_agg_mode=mode)
    config = configured(config, actor_rollout_ref__actor__policy_loss__loss_mode="bypass_mode")
    OmegaConf.update(config, f"{KEY}.policy_loss.rollout_correction", correction, force_add=True)
    step = steps[True]
    rows = step.rows[:16]
    alone = {**dict(rows[3]), "advantages": torch.zeros_like(rows[3]["advantages"])}
    alone["loss_mask"] = alone["response_mask"] = torch.zeros_like(rows[3]["response_mask"])
    whole = step.gradient([rows], config, sequences=16.0, dynamic=False).clone()
    with pytest.raises(ValueError, match="at least one valid token"):  # passing means that no padding needs a token
        step.gradient([[*rows, *[alone] * 4]], config, sequences=16.0, dynamic=False)
    token = {**alone, "response_mask": alone["response_mask"].clone()}
    token["response_mask"][0] = 1
    padded = step.gradient([[*rows, *[token] * 4]], config, sequences=16.0, dynamic=False)
    assert torch.allclose(padded, whole, rtol=1e-9, atol=1e-12) and whole.abs().max() > 1e-5


@pytest.mark.parametrize("reward", [0.3, 0.7])
def test_flat_rewards_have_an_advantage_in_float32_and_none_with_us(reward):
    """What docs/faq.md says of verl's GRPO."""
    rewards, mask = torch.full((8, 1), reward), torch.ones(8, 1)
    advantage, _ = compute_grpo_outcome_advantage(rewards, mask, np.array(["g"] * 8))
    assert 0.02 < float(advantage.abs().max()) < 0.07
    assert Verl().zero(Groups.from_lists([0], [rewards[:, 0].double().numpy()]), np.ones(8, dtype=bool)).all()


def test_thinned_rows_have_the_whole_batch_s_gradient_in_the_mean(defaults):
    """Over draws of ``memory.thin``, under verl's clipped loss; the rest of a draw's rows has advantage 0."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    step, roles = Step(equal=True), [MemoryBaseline({"thin": thin}) for thin in (0.0, 1.0)]
    keys = np.zeros(len(step.rows), dtype=KEY_DTYPE)
    keys["lo"] = np.arange(len(keys))
    for role in roles:
        table = StatsTable()
        rows = table.rows_for(keys)
        role.bind(table, RunFacts(batch=len(rows), n=1, steps=1, prompts=len(rows)))
        for number in (1, 2):  # the first step has no scale yet
            progress = Progress(step=number, batch=len(rows), draw=Draw(0, number))
            role.observe(Groups.from_lists(rows, step.reward[:, None].tolist()), progress)
            role.end_step(progress)
    config = configured(defaults, actor_rollout_ref__actor__loss_agg_mode="token-mean")

    def gradient(role, draw: int) -> torch.Tensor:
        groups = Groups.from_lists(
            rows, step.reward[:, None].tolist(), submission=draw * len(rows) + np.arange(len(rows))
        )
        advantage = role.compute(groups.reward, groups.group_of, groups)
        made = [
            dict(row, advantages=torch.full_like(row["advantages"], a))
            for row, a in zip(step.rows, advantage, strict=True)
        ]
        return step.gradient([made], config, sequences=float(len(rows)), dynamic=False).clone()

    whole, draws = gradient(roles[0], 0), torch.stack([gradient(roles[1], draw) for draw in range(40)])
    torch.set_num_threads(threads)
    error = (draws.var(0).sum() / len(draws)).sqrt()  # expected distance of the mean
    assert (draws.mean(0) - whole).norm() < 1.5 * error
    assert (draws[0] - whole).norm() > 4 * error and whole.norm() > 4 * error
