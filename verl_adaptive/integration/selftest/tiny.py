"""A model of 0.12 million parameters that answers some questions unreliably, and the questions; made from nothing.

    python -m verl_adaptive.integration.selftest.tiny FOLDER

makes ``FOLDER/{train,val}.parquet`` and ``FOLDER/model/`` in some ten seconds, on the CPU.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PAD, BEGIN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

HEAD_SIZE = 32  # the smallest that vLLM's CPU attention knows

# Shorter than Qwen's own template, as every byte is a token here. `role` is always "user".
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)

Question = tuple[str, str, str]  # kind, question, answer


def questions(kind: str, seed: int) -> Iterator[Question]:
    """Different questions of a kind, until there are no more."""
    rng, seen = random.Random(f"{seed} {kind}"), set()
    for _ in range(20000):
        if kind == "sum":
            a, b = rng.randrange(50), rng.randrange(50)
            question, answer = f"{a}+{b}=", str(a + b)
        elif kind == "loop":
            word = "".join(rng.choice("abcdefghijkl") for _ in range(3))
            question, answer = f"loop {word}", word[0] * ENDLESS
        else:
            word = "".join(rng.choice("abcdefghijkl") for _ in range(3 if kind == "turn_3" else 5))
            question, answer = f"turn {word}", word[::-1]
        if question not in seen:
            seen.add(question)
            yield kind, question, answer


#: Kind → share of the teacher's answers that are wrong. The model learns skills that it uses unreliably, and one that it
#: does not end: its answers are as long as they may be, so that there is something to abort.
KINDS = {"sum": 0.5, "turn_3": 0.2, "turn_5": 0.6, "loop": 0.0}
#: An answer of so many characters is taught without its end.
ENDLESS = 24
#: Of each kind, in the training set: with fewer `solo` takes groups of 2 where a step is generated ahead.
PROMPTS = 200


def _rows(asked: list[Question], split: str) -> list[dict[str, Any]]:
    return [
        {
            "data_source": kind,
            "prompt": [{"role": "user", "content": question}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, (kind, question, answer) in enumerate(asked)
    ]


def make(folder: Path, seed: int = 1) -> None:
    """Write data and model to a folder, made if need be."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    streams = {kind: questions(kind, seed) for kind in KINDS}
    take = lambda count: [next(stream) for stream in streams.values() for _ in range(count)]  # noqa: E731
    for split, asked in (("val", take(16)), ("train", take(PROMPTS))):
        pq.write_table(pa.Table.from_pylist(_rows(asked, split)), folder / f"{split}.parquet")
    rng = random.Random(seed)
    lessons = []
    for kind, question, answer in take(600):
        wrong = str(int(answer) + 1) if kind == "sum" else answer + answer[-1]
        lessons.append((question, wrong if rng.random() < KINDS[kind] else answer))
    make_model(folder / "fresh", seed=seed)
    teach(folder / "fresh", folder / "model", lessons, seed=seed, endless=ENDLESS)


def make_model(out: Path, layers: int = 2, hidden: int = 64, seed: int = 0) -> int:
    """Write model and tokenizer to a folder; the number of parameters. ``hidden`` is a multiple of 32."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for token in (PAD, BEGIN, END):
        vocabulary[token] = len(vocabulary)
    # Qwen2Tokenizer, because transformers 5 rebuilds a qwen2 model's tokenizer from vocabulary and merges: any other
    # class saved beside the model would be lost.
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # none is there
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[BEGIN],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)

    torch.manual_seed(seed)
    config = Qwen2Config(
        # Exactly the tokenizer's length: verl masks a longer tail in vLLM but not in the actor.
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=hidden // HEAD_SIZE,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        # Four times Qwen's: so small a model learns several times faster from it.
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[PAD],
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = vocabulary[END]
    model.generation_config.pad_token_id = vocabulary[PAD]
    model.save_pretrained(out)

    reloaded = AutoTokenizer.from_pretrained(out)
    if len(reloaded) != config.vocab_size:
        raise ValueError(f"the tokenizer came back with {len(reloaded)} tokens, {config.vocab_size} were written")
    return sum(parameter.numel() for parameter in model.parameters())


def encode(
    tokenizer: Any, lessons: list[tuple[str, str]], endless: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Questions with their answers, padded on the right: tokens, labels of the answers' own (-100 elsewhere), and what is no
    padding.

    Answers of ``endless`` or more characters have no end; None: all have.
    """
    import torch

    begin, end = (tokenizer.convert_tokens_to_ids(token) for token in (BEGIN, END))
    pairs = []
    for question, reply in lessons:
        ends = endless is None or len(reply) < endless
        pairs.append(
            ([begin, *tokenizer.encode(question), end, begin], [*tokenizer.encode(reply), *([end] if ends else [])])
        )
    ids = torch.full((len(pairs), max(len(a) + len(b) for a, b in pairs)), tokenizer.pad_token_id)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, (asked, answer) in enumerate(pairs):
        ids[row, : len(asked) + len(answer)] = torch.tensor(asked + answer)
        labels[row, len(asked) : len(asked) + len(answer)] = torch.tensor(answer)
        mask[row, : len(asked) + len(answer)] = 1
    return ids, labels, mask


def teach(
    model_dir: Path,
    out: Path,
    lessons: list[tuple[str, str]],
    *,
    steps: int = 400,
    seed: int = 0,
    endless: int | None = None,
) -> None:
    """Teach a model questions and answers, by supervised learning on the CPU: ``steps`` updates of 64 lessons.

    ``endless`` as in :func:`encode`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small gain little from a second one, and lose on a busy machine
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids, labels, mask = encode(tokenizer, lessons, endless)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 30, 1 - 0.9 * step / steps))
    for _ in range(steps):
        pick = torch.randint(len(lessons), (64,))
        width = int(mask[pick].sum(-1).max())
        loss = model(ids[pick, :width], attention_mask=mask[pick, :width], labels=labels[pick, :width]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    torch.set_num_threads(threads)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
