"""JSON lines, each {"text": …} or {"messages": […]}, to samples.npy for main.py."""

import json
import os
import sys
from array import array

import numpy as np
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
length = int(sys.argv[3])  # tokens of a sample
tokens, targets, positions = array("i"), array("i"), array("i")
for number, line in enumerate(open(sys.argv[2], "rb"), 1):
    if not line.strip():
        continue
    try:
        document, prompt = json.loads(line.decode("utf-8-sig")), []
        if "text" in document:
            ids = [*tokenizer.encode(document["text"]), tokenizer.eos_token_id]
        else:  # the last message is learned, the others are its prompt
            chat = document["messages"]
            apply = tokenizer.apply_chat_template
            prompt = apply(chat[:-1], add_generation_prompt=True, return_dict=False)
            ids = apply(chat, return_dict=False)
    except Exception as error:  # of several kinds
        raise SystemExit(f"pack.py: error: line {number}: {error!r}") from None
    if ids[: len(prompt)] != prompt:
        raise SystemExit(f"pack.py: error: line {number}: no prompt at its beginning")
    # A target is the next token, or -100, from which nothing is learned.
    first = max(len(prompt), 1)
    targets.extend([-100] * (first - 1) + ids[first:] + [-100])
    # Positions begin at 0 in each document, and in each sample.
    positions.extend(min(i, (len(tokens) + i) % length) for i in range(len(ids)))
    tokens.extend(ids)
count = len(tokens) // length
if count == 0:
    raise SystemExit(f"pack.py: error: {len(tokens)} tokens are no sample of {length}")
samples = np.stack([tokens, targets, positions])[:, : count * length]
np.save("partial.npy", samples.reshape(3, count, length).transpose(1, 0, 2))
os.replace("partial.npy", "samples.npy")  # a job may be reading the old one
print(f"{count} samples of {length} tokens in samples.npy")
