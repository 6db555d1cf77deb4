#!/usr/bin/env python3
"""A Hugging Face directory of GPT-2 as llm.c's files: a checkpoint and the list of tokens.

    export_llmc.py DIR OUT.bin [--version 3|5] [--tokens FILE]

Needs Python 3.8 or later and numpy. DIR holds config.json and model.safetensors, as this project's trainers and
transformers write them. Version 3 (the default) is float32, which keeps every bit of weights that are stored as F32,
F16 or BF16. Version 5 is bfloat16: each weight is rounded to the nearest of its 8 significant bits, ties to even, as
torch does; what has been BF16 stays as it is.

The tokens of DIR's tokenizer go to gpt2_tokenizer.bin next to OUT.bin (or to --tokens), where llm.c and this project's
trainer look for them; a DIR without a tokenizer gives no such file, and none of another model may be there.

The format can hold one kind of model, so others are refused: a head of its own, a hidden size of the MLP that is not 4
* n_embd, another activation than gelu_new, another epsilon than 1e-5. The vocabulary is padded with rows of zeros to a
multiple of 128.
"""
import json
import os
import struct
import sys

from model_dir import END_OF_TEXT, Parser, UserError, Weights, config_expect, config_number, read_json, run, write_file
from user_error import need, refuse_foreign

np = need("numpy")
MAGIC_WEIGHTS, MAGIC_TOKENS = 20240326, 20240328
TOKENS_FILE = "gpt2_tokenizer.bin"
# The tensors of a block in the order of the file, each a weight and a bias; those of linear layers have a "c_".
BLOCK = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


# ----------------------------------------------------------------------------------------------------------
# The model


def read_config(path):
    """(positions, vocabulary, layers, heads, channels) of a model that the format can hold."""
    config = read_json(path)
    if not isinstance(config, dict) or config.get("model_type") != "gpt2":
        raise UserError(f'{path}: key "model_type" is not "gpt2"')
    keys = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")
    sizes = [config_number(config, path, key) for key in keys]
    channels = sizes[4]
    if channels % sizes[3]:
        raise UserError(f"{path}: {channels} channels cannot be cut into {sizes[3]} heads")
    if config_number(config, path, "n_inner", 4 * channels) != 4 * channels:
        raise UserError(f'{path}: key "n_inner": llm.c\'s files hold 4 * n_embd = {4 * channels} only')
    fixed = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "tie_word_embeddings": (True,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    config_expect(config, path, fixed, "llm.c's files")
    return sizes


def tensors_of(sizes):
    """(name in DIR, shape in llm.c's file, whether DIR has the transpose) of all tensors, in the order of the file."""
    positions, vocabulary, layers, _, channels = sizes
    yield "transformer.wte.weight", (vocabulary, channels), False
    yield "transformer.wpe.weight", (positions, channels), False
    widths = {"attn.c_attn": 3 * channels, "mlp.c_fc": 4 * channels}
    for name, kind in ((name, kind) for name in BLOCK for kind in ("weight", "bias")):
        wide, narrow = widths.get(name, channels), 4 * channels if name == "mlp.c_proj" else channels
        is_matrix = "c_" in name and kind == "weight"  # [in, out] in DIR
        for layer in range(layers):
            yield f"transformer.h.{layer}.{name}.{kind}", (wide, narrow) if is_matrix else (wide,), is_matrix
    yield "transformer.ln_f.weight", (channels,), False
    yield "transformer.ln_f.bias", (channels,), False


def to_bfloat16(values):
    """float32 -> bfloat16, as uint16: to nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(values).view("<u4")
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # the sum cannot wrap but for a NaN
    return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2")


def write_weights(f, directory, version):
    sizes = read_config(os.path.join(directory, "config.json"))
    positions, vocabulary, layers, _, channels = sizes
    padded = (vocabulary + 127) // 128 * 128
    weights = Weights(directory, "transformer.")

    def put(values):
        f.write((to_bfloat16(values) if version == 5 else values).tobytes())

    f.write(struct.pack("<8i", MAGIC_WEIGHTS, version, *sizes, padded).ljust(1024, b"\0"))
    wte = weights.get("transformer.wte.weight", (vocabulary, channels))
    if weights.find("lm_head.weight"):
        head = weights.get("lm_head.weight", (vocabulary, channels))
        if not np.array_equal(head.view("<u4"), wte.view("<u4")):
            raise UserError(f"{weights.path}: its lm_head.weight is not its wte.weight; llm.c's files hold one for both")
    for name, shape, is_turned in tensors_of(sizes):
        put(weights.get(name, shape[::-1]).T if is_turned else weights.get(name, shape))
        if name == "transformer.wte.weight":
            put(np.zeros((padded - vocabulary, channels), "<f4"))
    return f"{layers} layers, {channels} channels, {vocabulary} tokens, {positions} positions, version {version}"


# ----------------------------------------------------------------------------------------------------------
# The tokens


def byte_alphabet():
    """character -> byte: printable Latin-1 stands for itself, the other bytes are U+0100 and up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(others)}}


def read_tokens(directory):
    """(tokens as bytes, number of the one that ends a text, file), or None where there is no tokenizer."""
    for name in ("tokenizer.json", "vocab.json", "encoder.json"):
        path = os.path.join(directory, name)
        if os.path.exists(path):
            break
    else:
        return None
    tree, added = read_json(path), []
    try:
        if name == "tokenizer.json":
            kinds = json.dumps([tree.get("decoder"), tree.get("pre_tokenizer")])
            if '"ByteLevel"' not in kinds:
                raise UserError(f"{path}: is not a byte-level tokenizer as GPT-2's")
            added = [(t["content"], t["id"]) for t in tree.get("added_tokens") or []]
            tree = tree["model"]["vocab"]
        spelled = list(tree.items())
    except (AttributeError, KeyError, TypeError):
        raise UserError(f"{path}: holds no tokens with their ids")
    alphabet, tokens = byte_alphabet(), {}
    for token, i in spelled:
        if all(c in alphabet for c in token):
            tokens[i] = bytes(alphabet[c] for c in token)
        else:
            tokens[i] = token.encode("utf-8")
    tokens.update((i, token.encode("utf-8")) for token, i in added)
    if sorted(tokens, key=str) != sorted(range(len(tokens)), key=str):
        raise UserError(f"{path}: its ids are not 0 .. {len(tokens) - 1}; llm.c's list has no gaps")
    for i in range(len(tokens)):
        if not 0 < len(tokens[i]) < 256:
            raise UserError(f"{path}: token {i} has {len(tokens[i])} bytes; llm.c's list allows 1 to 255")
    ends = [i for i, token in tokens.items() if token == END_OF_TEXT.encode()]
    if not ends:
        raise UserError(f"{path}: has no {END_OF_TEXT}, whose number llm.c's list must give")
    return [tokens[i] for i in range(len(tokens))], ends[0], path


def write_tokens(f, tokens, end_of_text):
    f.write(struct.pack("<4I", MAGIC_TOKENS, 2, len(tokens), end_of_text).ljust(1024, b"\0"))
    f.write(b"".join(bytes([len(token)]) + token for token in tokens))
    return f"{len(tokens)} tokens"


# ----------------------------------------------------------------------------------------------------------
# Command line


def main(arguments):
    parser = Parser(__doc__)
    parser.add_argument("directory", metavar="DIR", help="Hugging Face directory")
    parser.add_argument("out", metavar="OUT.bin", help="the checkpoint")
    parser.add_argument("--version", type=int, choices=(3, 5), default=3, help="3: float32, 5: bfloat16")
    parser.add_argument("--tokens", metavar="FILE", help=f"the list of tokens (default: {TOKENS_FILE} next to OUT.bin)")
    options = parser.parse_args(arguments)
    if not options.out.endswith(".bin"):
        raise UserError(f"{options.out}: the checkpoint's name must end with .bin, or trainers do not recognise it")
    found = read_tokens(options.directory)
    target = options.tokens or os.path.join(os.path.dirname(options.out), TOKENS_FILE)
    if not found and os.path.exists(target):
        raise UserError(
            f"{target}: would be taken for the tokens of {options.out}, but {options.directory} holds no tokenizer; "
            "remove it, or choose another directory for OUT.bin"
        )
    if os.path.realpath(target) == os.path.realpath(options.out):
        raise UserError(f"--tokens {target}: is OUT.bin too; choose another name")
    for path, magic in ((options.out, MAGIC_WEIGHTS), (target, MAGIC_TOKENS)):
        refuse_foreign(path, struct.pack("<I", magic))
    write_file(options.out, write_weights, options.directory, options.version)
    if found:
        write_file(target, write_tokens, found[0], found[1])
    else:
        print(f"{options.directory}: holds no tokenizer, so {target} is not written")


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
