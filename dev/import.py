#!/usr/bin/env python3
"""A checkpoint of nanoGPT or llm.c as a Hugging Face directory of GPT-2, which train_gpt2 -e and transformers read.

    import.py ckpt.pt OUT       nanoGPT's: needs torch; with bias=False, biases of zero are written
    import.py model.bin OUT     llm.c's: version 3, float32, or 5, bfloat16, without the padding of its vocabulary

Needs Python 3.8 or later and numpy. Every bit of the weights is kept. A vocabulary that nanoGPT has padded keeps its
size, such as 50304, because the padding's logits are part of every softmax there. gpt2_tokenizer.bin next to an llm.c
checkpoint is copied. Of another tokenizer copy the files: vocab.json and merges.txt, or tokenizer.json.

nanoGPT's GELU has been the exact one (nn.GELU) since June 2023. A checkpoint does not say which one it was trained with:
give --activation gelu_new for an older one.
"""
import json
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
        raise UserError(f"{path}: is not a checkpoint of nanoGPT: {str(e).splitlines()[0] if str(e) else type(e).__name__}")
    sizes = [config_number(arguments, path, key) for key in SIZES]
    bias, dropout = arguments.pop("bias", True), arguments.pop("dropout", 0.0)
    for key in [key for key, value in arguments.items() if key not in SIZES and value]:
        raise UserError(f"{path}: model_args: {key!r} is {arguments[key]!r}; GPT-2 has no such part")
    found = {}
    for name, shape, _ in tensors_of(sizes):
        if name.endswith(".bias") and not bias and name not in tensors:
            found[name] = np.zeros(shape, "<f4")
        elif name not in tensors or tuple(tensors[name].shape) != shape:
            raise UserError(f'{path}: tensor "{name}" is missing, or its shape is not the {list(shape)} of model_args')
        else:
            found[name] = tensors[name].float().numpy()
    head = tensors.get("lm_head.weight")
    if head is None or np.array_equal(head.float().numpy(), found["transformer.wte.weight"]):
        tensors.pop("lm_head.weight", None)  # it is tied
    for name in [name for name in tensors if name not in found and not name.endswith(".attn.bias")]:  # but for masks
        raise UserError(f'{path}: tensor "{name}" is not part of GPT-2, whose head is tied to wte.weight')
    return sizes, dropout, found


def read_llmc(path):
    """(sizes, 0, {name: array}); bfloat16 as uint16."""
    header = np.fromfile(path, "<i4", 256).tolist()
    if len(header) < 256 or header[0] != MAGIC_WEIGHTS or header[1] not in (3, 5):
        raise UserError(f"{path}: is not a checkpoint of llm.c of version 3 or 5, nor a .pt file of nanoGPT")
    sizes, padded, at, found = header[2:7], header[7], 1024, {}
    if not all(0 < n < 1 << 24 for n in (*sizes, padded)) or padded < sizes[1] or sizes[4] % sizes[3]:
        raise UserError(f"{path}: its header gives impossible sizes: {header[2:8]}")
    data, width = np.memmap(path, np.uint8, "r"), 4 if header[1] == 3 else 2
    for name, shape, _ in tensors_of(sizes):
        rows = padded if name.endswith("wte.weight") else shape[0]
        end = at + rows * (shape[1] if len(shape) > 1 else 1) * width
        if end > len(data):
            raise UserError(f"{path}: is truncated, or its header is damaged")
        values = data[at:end].view("<f4" if width == 4 else "<u2")
        found[name], at = values.reshape(rows, *shape[1:])[: shape[0]], end
    if at != len(data):
        raise UserError(f"{path}: is longer than its header says, or that is damaged")
    return sizes, 0.0, found


def convert(options):
    path, out = options.checkpoint, options.out
    is_llmc = not path.endswith(".pt")
    if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise UserError(f"{out}: exists and is not an empty directory; choose another")
    with open(path, "rb"):  # whatever reads it, an error names the file
        sizes, dropout, tensors = read_llmc(path) if is_llmc else read_nanogpt(path)
    T, V, L, NH, C = sizes
    if C % NH:
        raise UserError(f"{path}: {C} channels cannot be cut into {NH} heads")
    end = 50256 if V > 50256 else None  # <|endoftext|> of GPT-2's vocabulary
    config = {
        "activation_function": options.activation or ("gelu_new" if is_llmc else "gelu"),
        "architectures": ["GPT2LMHeadModel"],
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end),
        **{"layer_norm_epsilon": 1e-5, "model_type": "gpt2", "tie_word_embeddings": True},
        **{"n_positions": T, "vocab_size": V, "n_layer": L, "n_head": NH, "n_embd": C},
    }
    os.makedirs(out, exist_ok=True)
    for name, _, is_turned in tensors_of(sizes):
        values = tensors[name].T if is_turned else tensors[name]
        tensors[name] = "F32" if values.itemsize == 4 else "BF16", values.shape, values
    write_file(os.path.join(out, "model.safetensors"), write_safetensors, tensors)
    write_atomically(os.path.join(out, "config.json"), json.dumps(config, indent=2) + "\n")
    tokens = os.path.join(os.path.dirname(path), TOKENS_FILE)
    if is_llmc and os.path.exists(tokens):
        shutil.copy(tokens, out)


def main(arguments):
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", metavar="CKPT", help="ckpt.pt of nanoGPT, or a .bin file of llm.c")
    parser.add_argument("out", metavar="OUT", help="the directory to write")
    parser.add_argument("--activation", choices=("gelu", "gelu_new"), help="default: gelu for nanoGPT, gelu_new for llm.c")
    convert(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
