"""Make a tiny Qwen2 model with a byte-level tokenizer, from nothing.

    python examples/cpu/make_model.py --out DIR

No download: the vocabulary is the 256 bytes and three special tokens, the weights are random. About 0.12 million
parameters; ``warm_start.py`` teaches it the tasks' format and some of the answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

PAD, BEGIN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

HEAD_SIZE = 32  # the smallest that vLLM's CPU attention knows

# Shorter than Qwen's own template, as every byte is a token here. `role` is always "user".
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def make_model(out: Path, layers: int = 2, hidden: int = 64, seed: int = 0) -> int:
    """Write model and tokenizer.

    Args:
        out: Folder to write to.
        layers: Number of transformer layers.
        hidden: Width, a multiple of 32.
        seed: Seed of the random weights.

    Returns:
        The number of parameters.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for token in (PAD, BEGIN, END):
        vocabulary[token] = len(vocabulary)
    # Qwen2Tokenizer, because transformers 5 rebuilds a qwen2 model's tokenizer from vocabulary and merges: any other
    # class saved beside the model would be lost.
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token=None, eos_token=END, pad_token=PAD, additional_special_tokens=[BEGIN]
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
    assert len(reloaded) == config.vocab_size, (len(reloaded), config.vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    parameters = make_model(options.out, options.layers, options.hidden, options.seed)
    print(f"{parameters:,} parameters -> {options.out}")


if __name__ == "__main__":
    main()
