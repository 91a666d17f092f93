"""Tiny language models in Hugging Face's format, and a training of them without FSDP.

It is run by the Python that has transformers. Importing that takes seconds, so ranks
are forked from a process that has done it: each line of its input is a script with its
arguments, a folder, and the variables of each rank, whose output goes to rank-N.log.
"""

import json
import sys
from itertools import pairwise

import numpy as np
import torch
import torch.distributed.checkpoint
from fork_ranks import serve
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

VOCABULARY = 259  # odd: ranks get parts of different sizes
CHAT = """{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""


def make(kind: str, folder: str, dtype: str = "float32", dropout: str = "0") -> None:
    """Save a model: Llama (untied, in several files) or Qwen3 (tied)."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
    sizes |= {"initializer_range": 0.1, "attention_dropout": float(dropout)}
    if kind == "llama":
        rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0}
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 32}
        config = LlamaConfig(**sizes, tie_word_embeddings=False, rope_parameters=rope)
    elif kind == "opt":  # its attention does not look at positions
        config = OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=32)
    else:
        config = Qwen3Config(**sizes, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config.temperature = 0.6  # is in no other file
    model.generation_config.do_sample = True
    model.save_pretrained(folder, max_shard_size="30KB")
    letters = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({letter: n for n, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)


def train(folder: str, trained: str, size: str, epochs: str, rate: str) -> None:
    """Train as main.py does, with each document by itself; print as it does.

    Then print how far the weights are from those of a folder, and what that is.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), float(rate), betas=(0.9, 0.95))
    samples = np.load("samples.npy").astype(np.int64)
    steps = len(samples) // int(size)
    total = steps * int(epochs)
    for step in range(total):
        order = np.random.default_rng(step // steps).permutation(len(samples))
        first = step % steps * int(size)
        batch = samples[order[first : first + int(size)]]
        loss = 0
        for sample in batch:
            starts = [*np.flatnonzero(sample[2] == 0), sample.shape[1]]
            assert starts[0] == 0
            for start, end in pairwise(starts):
                tokens, targets, _ = torch.from_numpy(sample[:, start:end])
                logits = model(tokens.unsqueeze(0)).logits[0]
                loss = loss + F.cross_entropy(logits, targets, reduction="sum")
        loss = loss / (batch[:, 1] != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = float(rate) * min((step + 1) / 10, 1 - step / total)
        optimizer.step()
        print(f"Step {step}: loss {loss:.4f}, gradient norm {norm:.4f}")
    other = AutoModelForCausalLM.from_pretrained(trained)
    mine, others = model.state_dict(), other.state_dict()
    assert mine.keys() == others.keys()
    far = max((mine[name] - others[name].float()).abs().max().item() for name in mine)
    text = AutoTokenizer.from_pretrained(trained).decode([86, 84, 70, 83])
    with safe_open(f"{trained}/model-00001-of-00001.safetensors", "pt") as file:
        (dtype,) = {str(file.get_tensor(name).dtype) for name in file.keys()}
    print(json.dumps([far, dtype, other.generation_config.temperature, text]))


if __name__ == "__main__":
    assert fully_shard  # imported before the ranks are forked
    actions = {"make": make, "train": train}
    if len(sys.argv) == 1:
        serve()
    else:
        actions[sys.argv[1]](*sys.argv[2:])
