"""A tiny model that looks at pictures, and prompts with pictures; made from nothing.

    python -m tests.e2e.images FOLDER

makes ``FOLDER/{train,val}.parquet`` and ``FOLDER/model/``: a Qwen2.5-VL of 0.3 million parameters, its processor included,
that says a square's colour, unreliably. Every prompt has the same words; only its picture tells it from another.
"""

from __future__ import annotations

import compileall
import importlib.util
import io
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from tests.e2e.harness import ASSETS, environment
from verl_adaptive.integration.selftest.tiny import BEGIN, END, PAD

QUESTION = "<image>colour?"
COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}
#: Share of the teacher's answers that name any colour at all: red teaches nothing any more, the others do.
SLIPS = {"red": 0.0, "green": 0.5, "blue": 0.5}
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SIDE, PATCH = 32, 8  # pixels; two by two patches are a token, and 2 x 2 tokens a picture

#: As the text model's, with pictures in the content.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def torchvision_folder() -> Path | None:
    """What PYTHONPATH needs for torchvision, which verl, vLLM and transformers want for pictures; none if it is installed.

    The package index has builds for CUDA alone, whose compiled operators a CPU build of torch cannot load. Nothing here
    calls one, but registering their shapes fails without: two are declared, and Python's half of it works. PyTorch's own
    index has whole CPU builds.
    """
    if importlib.util.find_spec("torchvision"):
        return None
    folder = ASSETS / "torchvision"
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run(
            [*pip, "--only-binary=:all:", "--dest", str(folder), "torchvision==0.28.0"], check=True, timeout=600
        )
        (wheel,) = folder.glob("torchvision-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder, [name for name in packed.namelist() if not name.endswith(".so")])
        with (folder / "torchvision" / "extension.py").open("a") as extension:
            extension.write(DECLARED)
        compileall.compile_dir(folder / "torchvision", quiet=2)
        (folder / "complete").touch()
    return folder


DECLARED = """

_declared = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def images() -> tuple[Path, dict[str, str]]:
    """The folder with model and data, made once and kept; and what the environment of a run needs."""
    extra = torchvision_folder()
    env = {"PYTHONPATH": str(extra)} if extra else {}
    folder = ASSETS / "images"
    if not (folder / "model" / "config.json").exists():
        command = [sys.executable, "-m", "tests.e2e.images", str(folder)]
        subprocess.run(command, env=environment(**env), check=True, timeout=600)
    return folder, env


def square(rng: random.Random, colour: str) -> Any:
    """A picture all of one shade of a colour."""
    from PIL import Image

    return Image.new("RGB", (SIDE, SIDE), tuple(value + rng.randrange(-30, 30) for value in COLOURS[colour]))


def write_rows(path: Path, count: int, seed: int) -> None:
    """Write prompts in verl's format, of which no two pictures are alike."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng, rows, seen = random.Random(seed), [], set()
    while len(rows) < count:
        colour = list(COLOURS)[len(rows) % len(COLOURS)]
        picture = square(rng, colour)
        if (shade := picture.getpixel((0, 0))) in seen:
            continue
        seen.add(shade)
        packed = io.BytesIO()
        picture.save(packed, "PNG")
        rows.append(
            {
                "data_source": "squares",
                "prompt": [{"role": "user", "content": QUESTION}],
                "images": [{"bytes": packed.getvalue()}],
                "ability": "none",
                "reward_model": {"style": "rule", "ground_truth": colour},
                "extra_info": {"index": len(rows)},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)


def make_processor(out: Path) -> Any:
    """Write and return a processor: byte-level tokenizer, pictures and videos."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2_5_VLProcessor, Qwen2Tokenizer
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    vision = (VISION_START, VISION_END, IMAGE, VIDEO)
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), PAD, BEGIN, END, *vision]
    tokenizer = Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # none is there
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[BEGIN, *vision],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    shape = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2}
    pixels = {"shortest_edge": SIDE**2, "longest_edge": (2 * SIDE) ** 2}  # vLLM tries the largest at start
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size=pixels, **shape),
        tokenizer,
        Qwen2VLVideoProcessor(size=pixels, max_frames=4, **shape),
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(out)
    return processor


def make_model(out: Path, processor: Any, *, lessons: int = 150, batch: int = 48) -> None:
    """Write a model that was taught colours by a teacher who errs.

    Args:
        out: folder to write to.
        processor: its processor.
        lessons: updates.
        batch: pictures of an update.
    """
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = processor.tokenizer
    word = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 512},
            **{"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.08},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]},
            **{"bos_token_id": None, "eos_token_id": word(END), "pad_token_id": word(PAD)},
        },
        vision_config={
            **{"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "fullatt_block_indexes": [0]},
            **{"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64},
        },
        image_token_id=word(IMAGE),
        video_token_id=word(VIDEO),
        vision_start_token_id=word(VISION_START),
        vision_end_token_id=word(VISION_END),
        eos_token_id=word(END),
        pad_token_id=word(PAD),
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = word(END)
    model.generation_config.pad_token_id = word(PAD)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION.split(">")[1]}]}]
    text = processor.apply_chat_template(asked, add_generation_prompt=True)
    rng = random.Random(0)
    asks = len(processor(text=[text], images=[square(rng, "red")])["input_ids"][0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(lessons):
        shown = rng.choices(list(COLOURS), k=batch)
        said = [rng.choice(list(COLOURS)) if rng.random() < SLIPS[colour] else colour for colour in shown]
        inputs = processor(
            text=[f"{text}{answer}{END}" for answer in said],
            images=[square(rng, colour) for colour in shown],
            padding=True,
            return_tensors="pt",
        )
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        labels[:, :asks] = -100
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.2f}, {sum(p.numel() for p in model.parameters()):,} parameters")
    model.save_pretrained(out)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.parquet", 96, seed=1)
    write_rows(folder / "val.parquet", 12, seed=2)
    make_model(folder / "model", make_processor(folder / "model"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
