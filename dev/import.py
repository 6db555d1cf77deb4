#!/usr/bin/env python3
"""A checkpoint of nanoGPT or llm.c as a Hugging Face directory of GPT-2, which train_gpt2 -e and transformers read.

    import.py ckpt.pt OUT       nanoGPT's: needs torch; with bias=False, biases of zero are written
    import.py model.bin OUT     llm.c's: version 3, float32, or 5, bfloat16, without the padding of its vocabulary

Needs Python 3.8 or later and numpy. Every bit of the weights is kept. A vocabulary that nanoGPT has padded, to 50304,
keeps that size: its logits are part of every softmax. gpt2_tokenizer.bin next to an llm.c checkpoint is copied; of
another tokenizer copy the files, vocab.json and merges.txt or tokenizer.json, to OUT.

nanoGPT's GELU has been the exact one (nn.GELU) since 2023. A checkpoint does not say which one it was trained with: give
--activation gelu_new for an older one.
"""
import json
import math
import os
import shutil
import sys

from export_llmc import MAGIC_WEIGHTS, TOKENS_FILE, tensors_of
from model_dir import Parser, UserError, config_number, need, run, unwrapped, write_file, write_safetensors
from user_error import write_atomically

np = need("numpy")
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")  # as nanoGPT calls them, in llm.c's order


def read_nanogpt(path):
    """(sizes, the probability of dropout, {name: array})."""
    torch = need("torch")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        arguments, tensors = dict(saved["model_args"]), unwrapped(dict(saved["model"]))
    except Exception as e:  # the library raises many kinds
        raise UserError(f"{path}: is not a checkpoint of nanoGPT: {type(e).__name__}: {str(e)[:100]}")
    sizes, found = [config_number(arguments, path, key) for key in SIZES], {}
    for key in [key for key, value in arguments.items() if key not in (*SIZES, "bias", "dropout") and value]:
        raise UserError(f"{path}: model_args: {key!r} is {arguments[key]!r}; GPT-2 has no such part")
    for name, shape, _ in tensors_of(sizes):
        has_no_bias = name.endswith(".bias") and not arguments.get("bias", True)
        tensor = tensors.pop(name, torch.zeros(shape) if has_no_bias else None)
        if tensor is None or tuple(tensor.shape) != shape:
            raise UserError(f'{path}: tensor "{name}" is missing, or its shape is not the {list(shape)} of model_args')
        found[name] = tensor.float().numpy()
    if np.array_equal(tensors.get("lm_head.weight"), found["transformer.wte.weight"]):
        del tensors["lm_head.weight"]
    for name in [name for name in tensors if not name.endswith(".attn.bias")]:  # that is a mask
        raise UserError(f'{path}: tensor "{name}" is not part of GPT-2, whose head is tied to wte.weight')
    return sizes, arguments.get("dropout", 0.0), found


def read_llmc(path):
    """(sizes, 0, {name: array}); bfloat16 as uint16."""
    header, at, found = np.fromfile(path, "<i4", 256).tolist(), 0, {}
    if len(header) < 256 or header[0] != MAGIC_WEIGHTS or header[1] not in (3, 5) or min(header[2:8]) < 1:
        raise UserError(f"{path}: is not a checkpoint of llm.c of version 3 or 5, nor a .pt file of nanoGPT")
    data = np.fromfile(path, "<f4" if header[1] == 3 else "<u2", offset=1024)
    for name, shape, _ in tensors_of(header[2:7]):
        rows = max(header[7], shape[0]) if name.endswith("wte.weight") else shape[0]
        size = rows * math.prod(shape[1:])
        if at + size > len(data):
            raise UserError(f"{path}: is truncated, or its header is damaged")
        found[name], at = data[at : at + size].reshape(rows, *shape[1:])[: shape[0]], at + size
    if at != len(data):
        raise UserError(f"{path}: is longer than its header says, or that is damaged")
    return header[2:7], 0.0, found


def main(arguments):
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", metavar="CKPT", help="ckpt.pt of nanoGPT, or a .bin file of llm.c")
    parser.add_argument("out", metavar="OUT", help="the directory to write")
    parser.add_argument("--activation", choices=("gelu", "gelu_new"), help="default: gelu for nanoGPT, gelu_new for llm.c")
    options = parser.parse_args(arguments)
    path, out, is_nanogpt = options.checkpoint, options.out, options.checkpoint.endswith(".pt")
    if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise UserError(f"{out}: exists and is not an empty directory; choose another")
    with open(path, "rb"):  # so that an error names it, whatever reads it
        sizes, dropout, tensors = read_nanogpt(path) if is_nanogpt else read_llmc(path)
    for name, _, is_turned in tensors_of(sizes):
        values = tensors[name].T if is_turned else tensors[name]
        tensors[name] = "F32" if values.itemsize == 4 else "BF16", values.shape, values
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "layer_norm_epsilon": 1e-5}
    config.update(zip(("n_positions", "vocab_size", "n_layer", "n_head", "n_embd"), sizes))
    config.update(dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout))
    config.update(dict.fromkeys(("bos_token_id", "eos_token_id"), 50256 if config["vocab_size"] > 50256 else None))
    config["activation_function"] = options.activation or ("gelu" if is_nanogpt else "gelu_new")
    os.makedirs(out, exist_ok=True)
    write_file(os.path.join(out, "model.safetensors"), write_safetensors, tensors)
    write_atomically(os.path.join(out, "config.json"), json.dumps(config, indent=2) + "\n")
    tokens = os.path.join(os.path.dirname(path), TOKENS_FILE)
    if not is_nanogpt and os.path.exists(tokens):
        shutil.copy(tokens, out)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
