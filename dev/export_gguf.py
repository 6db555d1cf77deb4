#!/usr/bin/env python3
"""A Hugging Face directory of GPT-2 or BERT as a GGUF file, for llama.cpp, ollama and what is built on them.

    export_gguf.py DIR OUT.gguf [--type f32|f16|bf16|q8_0] [--pool mean|cls]

Needs Python 3.8 or later, numpy and the package `gguf`. DIR holds config.json, model.safetensors (or its shards) and
the tokenizer, as this project's trainers and transformers write them.

--type is that of matrices and of the token embeddings. f32, the default, keeps every bit of weights that are stored as
F32, F16 or BF16; q8_0 has blocks of 32 values with one scale. Vectors, positions and token types stay f32.

GPT-2 needs a byte-level BPE (tokenizer.json, or vocab.json with merges.txt) and the tanh form of GELU. BERT needs a
WordPiece (vocab.txt or tokenizer.json); its pooler and heads are left out, and --pool says how llama.cpp makes one
vector of a text: the mean of its tokens (the default) or that of [CLS]. llama.cpp computes BERT's GELU in its tanh
form, which moves a vector by a few 1e-4, and it splits words of more than 100 characters, which are [UNK] here.

What GGUF or llama.cpp cannot express is refused by name.
"""
import os
import sys
from itertools import count

from export_llmc import byte_alphabet
from model_dir import END_OF_TEXT, Parser, UserError, Weights, config_expect, config_number, read_json, replacing, run
from user_error import need, refuse_foreign

np = need("numpy")

BLOCK_VALUES = 32  # of q8_0
WORD_BEGINS = "\u2581"
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
# A part of a name in the GGUF file, that in DIR, and the shape of the weight in DIR: C channels, F of the MLP, T
# positions, V tokens, 3: 3 C, 2: token types. Matrices of GPT-2's blocks are [in, out] in DIR and [out, in] in GGUF.
# What is no embedding has a bias too.
GPT2_TENSORS = [("token_embd", "wte", "VC"), ("position_embd", "wpe", "TC"), ("output_norm", "ln_f", "C")]
GPT2_BLOCK = [
    ("attn_norm", "ln_1", "C"),
    ("attn_qkv", "attn.c_attn", "C3"),
    ("attn_output", "attn.c_proj", "CC"),
    ("ffn_norm", "ln_2", "C"),
    ("ffn_up", "mlp.c_fc", "CF"),
    ("ffn_down", "mlp.c_proj", "FC"),
]
BERT_TENSORS = [
    ("token_embd", "embeddings.word_embeddings", "VC"),
    ("position_embd", "embeddings.position_embeddings", "TC"),
    ("token_types", "embeddings.token_type_embeddings", "2C"),
    ("token_embd_norm", "embeddings.LayerNorm", "C"),
]
BERT_BLOCK = [
    ("attn_q", "attention.self.query", "CC"),
    ("attn_k", "attention.self.key", "CC"),
    ("attn_v", "attention.self.value", "CC"),
    ("attn_output", "attention.output.dense", "CC"),
    ("attn_output_norm", "attention.output.LayerNorm", "C"),
    ("ffn_up", "intermediate.dense", "FC"),
    ("ffn_down", "output.dense", "CF"),
    ("layer_output_norm", "output.LayerNorm", "C"),
]
FLOAT32_TENSORS = "position_embd.weight", "token_types.weight"
BUFFERS = ".attn.bias", ".attn.masked_bias", "embeddings.position_ids"  # ends of names of what is no weight
LARGEST = {"f16": 65504, "bf16": 3.3895314e38, "q8_0": 127 * 65504}  # q8_0: 127 times the scale of a block, in f16


# ----------------------------------------------------------------------------------------------------------
# Tokenizers: {"model", "tokens", "types", and keys of their own}


def read_lines(path):
    try:
        with open(path, encoding="utf-8-sig", newline="\n") as f:
            text = f.read()
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read: {e}")
    return [line.rstrip("\r") for line in (text[:-1] if text.endswith("\n") else text).split("\n")]


def in_order(ids, path, vocab_size, spell):
    """(tokens by their numbers, their types) for {token: number}; numbers without a token are named [PAD...]."""
    for token, i in ids.items():
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size:
            raise UserError(f"{path}: token {token!r} has the number {i!r}; config.json's vocab_size is {vocab_size}")
    if len(set(ids.values())) != len(ids):
        raise UserError(f"{path}: two tokens have the same number")
    tokens, types = [None] * vocab_size, [UNUSED] * vocab_size
    for token, i in ids.items():
        tokens[i], types[i] = spell(token), NORMAL
    known = {token: i for i, token in enumerate(tokens) if token is not None}
    for i, token in enumerate(tokens):
        if token is None:
            tokens[i] = next(t for t in (f"[PAD{i}{'_' * n}]" for n in count()) if t not in known)
        elif known[token] != i:
            raise UserError(f"{path}: tokens {i} and {known[token]} are both {token!r} in GGUF's spelling")
    return tokens, types


def expect(part, fixed, path, what):
    for key, value in fixed.items():
        if (part or {}).get(key, value) != value:
            raise UserError(f'{path}: the {what}\'s "{key}" is {part[key]!r}, which GGUF cannot express; only {value!r}')


def read_bpe_json(path):
    """(numbers of tokens, merges, added tokens) of a tokenizer.json that splits as GPT-2's."""
    tree = read_json(path)
    try:
        pre, model, added = tree.get("pre_tokenizer") or {}, tree["model"], tree.get("added_tokens") or []
        expect(tree, {"normalizer": None}, path, "tokenizer")
        expect({"type": None, **pre}, {"type": "ByteLevel"}, path, "pre_tokenizer")
        expect({"add_prefix_space": True, **pre}, {"add_prefix_space": False, "use_regex": True}, path, "pre_tokenizer")
        expect(model, {"type": "BPE"}, path, "model")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
            if model.get(key):
                raise UserError(f'{path}: the model\'s "{key}" is {model[key]!r}, which GGUF cannot express')
        for token in added:
            expect(token, {"single_word": False, "lstrip": False, "rstrip": False}, path, f'token {token["content"]}')
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        return dict(model["vocab"]), merges, {t["content"]: t for t in added}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{path}: is not a tokenizer of byte-level BPE")


def read_chat(directory, ids):
    """(chat template or None, number of the token that ends a text or an answer)"""
    path, alone = (os.path.join(directory, name) for name in ("tokenizer_config.json", "chat_template.jinja"))
    settings = read_json(path) if os.path.exists(path) else {}
    settings = settings if isinstance(settings, dict) else {}
    end, template = settings.get("eos_token"), settings.get("chat_template")
    end = end.get("content") if isinstance(end, dict) else end
    if os.path.exists(alone):
        path, template = alone, "\n".join(read_lines(alone))
    if isinstance(template, list):
        template = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}.get("default")
    if not isinstance(template, (str, type(None))):
        raise UserError(f"{path}: its chat template is not a text")
    return template, ids.get(end, ids[END_OF_TEXT]) if isinstance(end, str) else ids[END_OF_TEXT]


def read_bpe(directory, vocab_size):
    path = os.path.join(directory, "tokenizer.json")
    if os.path.exists(path):
        ids, merges, added = read_bpe_json(path)
    else:
        names = ("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")
        pairs = [[os.path.join(directory, name) for name in pair] for pair in names]
        pairs = [pair for pair in pairs if all(map(os.path.exists, pair))]
        if not pairs:
            raise UserError(f"{directory}: holds neither tokenizer.json nor vocab.json with merges.txt")
        path, ids = pairs[0][0], read_json(pairs[0][0])
        if not isinstance(ids, dict):
            raise UserError(f"{path}: is not an object of tokens and their numbers")
        merges = [line for line in read_lines(pairs[0][1]) if line and not line.startswith("#version")]
        added = {END_OF_TEXT: {"id": ids.get(END_OF_TEXT), "special": True}}
    for token, entry in added.items():
        ids[token] = entry["id"]
    if not isinstance(ids.get(END_OF_TEXT), int):
        raise UserError(f"{path}: has no {END_OF_TEXT}, where llama.cpp ends a text")
    missing = [c for c in byte_alphabet() if c not in ids]
    if missing:
        raise UserError(f"{path}: has no token {missing[0]!r}; llama.cpp drops bytes without one")
    tokens, types = in_order(ids, path, vocab_size, str)
    for entry in added.values():
        types[entry["id"]] = CONTROL if entry.get("special") else USER_DEFINED
    # llama.cpp insists on merges. This one never takes place: no word contains the token that ends a text.
    merges = merges or [f"{END_OF_TEXT} {END_OF_TEXT}"]
    template, end = read_chat(directory, ids)
    special = {"eos_token_id": end, "bos_token_id": ids[END_OF_TEXT]}
    return {"model": "gpt2", "tokens": tokens, "types": types, "merges": merges, "special": special, "template": template}


def read_wordpiece(directory, vocab_size):
    lines, whole = (os.path.join(directory, name) for name in ("vocab.txt", "tokenizer.json"))
    rules = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
    if os.path.exists(lines):
        path, listed = lines, read_lines(lines)
        ids = {token: i for i, token in enumerate(listed)}
        if len(ids) != len(listed):
            raise UserError(f"{path}: a token is there twice")
    elif os.path.exists(whole):
        path, tree = whole, read_json(whole)
        try:
            normalizer, model, ids = tree["normalizer"], tree["model"], dict(tree["model"]["vocab"])
            fixed = {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
            expect({"type": "WordPiece", **model}, {"type": "WordPiece", **fixed}, path, "model")
            expect(normalizer, {"type": "BertNormalizer", "clean_text": True}, path, "normalizer")
            expect(tree["pre_tokenizer"], {"type": "BertPreTokenizer"}, path, "pre_tokenizer")
            rules["do_lower_case"] = normalizer["lowercase"]
            rules["strip_accents"] = normalizer.get("strip_accents")
            rules["tokenize_chinese_chars"] = normalizer.get("handle_chinese_chars", True)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UserError(f"{path}: is not a tokenizer of BERT's WordPiece")
    else:
        raise UserError(f"{directory}: holds neither vocab.txt nor tokenizer.json")
    settings = os.path.join(directory, "tokenizer_config.json")
    if os.path.exists(settings):
        given = read_json(settings)
        rules.update((key, given[key]) for key in rules if isinstance(given, dict) and key in given)
    expect(rules, {"tokenize_chinese_chars": True}, directory, "tokenizer")
    missing = [token for token in BERT_SPECIAL if token not in ids]
    if missing:
        raise UserError(f"{path}: has no {missing[0]}")
    byte_order = [token for token, i in sorted(ids.items(), key=lambda item: item[1])][:256]
    if set(byte_order) == set(byte_alphabet()):
        raise UserError(f"{path}: is a vocabulary of bytes, which llama.cpp's WordPiece does not know")

    def spell(token):
        if token in BERT_SPECIAL:
            return token
        return token[2:] if token.startswith("##") and len(token) > 2 else WORD_BEGINS + token

    tokens, types = in_order(ids, path, vocab_size, spell)
    for token in BERT_SPECIAL:
        types[ids[token]] = CONTROL
    keys = {"bos": "[CLS]", "cls": "[CLS]", "seperator": "[SEP]", "padding": "[PAD]", "unknown": "[UNK]", "mask": "[MASK]"}
    special = {f"{key}_token_id": ids[token] for key, token in keys.items()}  # GGUF's spelling
    lower = bool(rules["do_lower_case"])
    accents = lower if rules["strip_accents"] is None else bool(rules["strip_accents"])
    if not (lower and accents):
        print(
            f"{directory}: keeps upper case or accents; a llama.cpp that does not read tokenizer.ggml.normalizer.lowercase "
            "makes all text lower-case"
        )
    if accents:
        print(f"{directory}: strips accents; llama.cpp does that differently for Korean and for vowel signs of Indic scripts")
    flags = {"lowercase": lower, "strip_accents": accents}
    return {"model": "bert", "tokens": tokens, "types": types, "special": special, "normalizer": flags}


# ----------------------------------------------------------------------------------------------------------
# Models: {"sizes", "rows", "keys"}


def read_sizes(config, path, names):
    """{letter: size} from {letter: key of config.json}."""
    sizes = {letter: config_number(config, path, key) for letter, key in names.items()}
    if sizes["C"] % sizes["H"]:
        raise UserError(f'{path}: {sizes["C"]} channels cannot be cut into {sizes["H"]} heads')
    sizes["3"] = 3 * sizes["C"]
    return sizes


def epsilon_of(config, path, key, fallback):
    value = config.get(key, fallback)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise UserError(f'{path}: key "{key}": {value!r} is not a number from 0 to 1')
    return float(value)


def rows_of(tensors, block, layers, prefix, folder, is_turned):
    """(name in the GGUF file, name in DIR, letters of its shape there, whether it is turned) of all tensors."""
    parts = [(a, prefix + b, letters, False) for a, b, letters in tensors]
    for layer in range(layers):
        parts += [(f"blk.{layer}.{a}", f"{prefix}{folder}.{layer}.{b}", letters, is_turned) for a, b, letters in block]
    rows = []
    for a, b, letters, turned in parts:
        rows.append((a + ".weight", b + ".weight", letters, turned and len(letters) == 2))
        if not a.endswith(("embd", "types")):
            rows.append((a + ".bias", b + ".bias", letters[-1] if turned else letters[0], False))
    return rows


def describe_gpt2(config, path, weights):
    fixed = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True, False),
    }
    config_expect(config, path, fixed, "GGUF")
    names = {"L": "n_layer", "H": "n_head", "C": "n_embd", "T": "n_positions", "V": "vocab_size"}
    sizes = read_sizes(config, path, names)
    sizes["F"] = config_number(config, path, "n_inner", 4 * sizes["C"])
    rows = rows_of(GPT2_TENSORS, GPT2_BLOCK, sizes["L"], "transformer.", "h", True)
    if not config.get("tie_word_embeddings", True):
        rows.append(("output.weight", "lm_head.weight", "VC", False))
    elif weights.find("lm_head.weight"):
        head, wte = (weights.get(name, (sizes["V"], sizes["C"])) for name in ("lm_head.weight", "transformer.wte.weight"))
        if head.tobytes() != wte.tobytes():
            raise UserError(f'{path}: key "tie_word_embeddings": is true, but the file\'s lm_head.weight is not wte.weight')
    epsilon = epsilon_of(config, path, "layer_norm_epsilon", 1e-5)
    return sizes, rows, epsilon


def describe_bert(config, path, weights):
    fixed = {
        "hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh"),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    }
    config_expect(config, path, fixed, "GGUF")
    names = {"L": "num_hidden_layers", "H": "num_attention_heads", "C": "hidden_size", "F": "intermediate_size"}
    sizes = read_sizes(config, path, {**names, "T": "max_position_embeddings", "V": "vocab_size"})
    sizes["2"] = config_number(config, path, "type_vocab_size", 2)
    rows = rows_of(BERT_TENSORS, BERT_BLOCK, sizes["L"], "bert.", "encoder.layer", False)
    # Older files have other names for what scales and shifts.
    for i, (a, b, shape, is_turned) in enumerate(rows):
        old = b.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        if not weights.find(b) and weights.find(old):
            rows[i] = (a, old, shape, is_turned)
    return sizes, rows, epsilon_of(config, path, "layer_norm_eps", 1e-12)


# ----------------------------------------------------------------------------------------------------------
# Writing


class Row:
    """A tensor of the file: its source, and how it is stored."""

    def __init__(self, row, sizes, chosen):
        self.name, self.source, letters, self.is_turned = row
        self.shape = tuple(sizes[letter] for letter in letters)
        self.stored = self.shape[::-1] if self.is_turned else self.shape
        self.kind = chosen if len(self.shape) == 2 and self.name not in FLOAT32_TENSORS else "f32"
        if self.kind == "q8_0" and self.stored[-1] % BLOCK_VALUES:
            raise UserError(
                f"--type q8_0: tensor {self.source} has rows of {self.stored[-1]} values; only a multiple of "
                f"{BLOCK_VALUES} can be cut into blocks"
            )

    def announce(self, writer):
        import gguf

        qtype = gguf.GGMLQuantizationType[self.kind.upper()]
        block, size = gguf.GGML_QUANT_SIZES[qtype]
        as_bytes = (*self.stored[:-1], self.stored[-1] // block * size)
        total = int(np.prod(as_bytes, dtype=np.int64))
        writer.add_tensor_info(self.name, as_bytes, np.dtype(np.uint8), total, raw_dtype=qtype)

    def encode(self, weights):
        import gguf

        values = weights.get(self.source, self.shape)
        if not np.isfinite(values).all():
            raise UserError(f"tensor {self.source}: holds values that are not finite (NaN or infinity)")
        if np.abs(values).max() > LARGEST.get(self.kind, np.inf):
            raise UserError(f"tensor {self.source}: holds {np.abs(values).max():g}, too large for {self.kind}; take f32")
        values = np.ascontiguousarray(values.T if self.is_turned else values)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[self.kind.upper()])


def add_keys(writer, arch, sizes, epsilon, options, tokenizer):
    import gguf

    file_types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_name(os.path.basename(os.path.abspath(options.directory)))
    writer.add_file_type(gguf.LlamaFileType[file_types[options.type]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(sizes["T"])
    writer.add_embedding_length(sizes["C"])
    writer.add_block_count(sizes["L"])
    writer.add_feed_forward_length(sizes["F"])
    writer.add_head_count(sizes["H"])
    writer.add_layer_norm_eps(epsilon)
    if arch == "bert":
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType[(options.pool or "mean").upper()])
        writer.add_token_type_count(sizes["2"])
    writer.add_tokenizer_model(tokenizer["model"])
    writer.add_token_list(tokenizer["tokens"])
    writer.add_token_types(tokenizer["types"])
    if arch == "gpt2":
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(tokenizer["merges"])
        writer.add_add_bos_token(False)
        if tokenizer["template"] is not None:
            writer.add_chat_template(tokenizer["template"])
    for key, i in tokenizer["special"].items():
        writer.add_uint32(f"tokenizer.ggml.{key}", i)
    for key, value in tokenizer.get("normalizer", {}).items():
        writer.add_bool(f"tokenizer.ggml.normalizer.{key}", value)


def export(options):
    import gguf

    path = os.path.join(options.directory, "config.json")
    config = read_json(path)
    arch = config.get("model_type") if isinstance(config, dict) else None
    if arch not in ("gpt2", "bert"):
        raise UserError(f'{path}: key "model_type" is {arch!r}; only "gpt2" and "bert" are exported')
    if options.pool and arch != "bert":
        raise UserError(f"--pool {options.pool}: is for BERT, but {path} describes {arch}")
    weights = Weights(options.directory, "transformer." if arch == "gpt2" else "bert.")
    sizes, rows, epsilon = (describe_gpt2 if arch == "gpt2" else describe_bert)(config, path, weights)
    tokenizer = (read_bpe if arch == "gpt2" else read_wordpiece)(options.directory, sizes["V"])
    rows = [Row(row, sizes, options.type) for row in rows]
    with replacing(options.out) as f:
        writer = gguf.GGUFWriter(f.name, arch)
        add_keys(writer, arch, sizes, epsilon, options, tokenizer)
        for row in rows:
            row.announce(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for row in rows:
            writer.write_tensor_data(row.encode(weights))
        writer.close()
    used = {weights.find(row.source) for row in rows} | {weights.find("lm_head.weight")}
    left = sorted({".".join(name.split(".")[:2]) for name in set(weights.files) - used if not name.endswith(BUFFERS)})
    if left:
        print(f"{options.directory}: GGUF has no place for {', '.join(left)}; left out")
    print(
        f"{options.out}: {arch}, {len(rows)} tensors in {options.type}, {sizes['L']} layers, {sizes['C']} channels, "
        f"{len(tokenizer['tokens'])} tokens, {sizes['T']} positions"
    )


# ----------------------------------------------------------------------------------------------------------
# Command line


def main(arguments):
    parser = Parser(__doc__)
    parser.add_argument("directory", metavar="DIR", help="Hugging Face directory")
    parser.add_argument("out", metavar="OUT.gguf", help="the file to write")
    parser.add_argument("--type", choices=("f32", "f16", "bf16", "q8_0"), default="f32", help="of matrices (default: f32)")
    parser.add_argument("--pool", choices=("mean", "cls"), help="BERT: one vector of a text (default: mean)")
    options = parser.parse_args(arguments)
    if not options.out.endswith(".gguf"):
        raise UserError(f"{options.out}: the file's name must end with .gguf, or llama.cpp does not recognise it")
    need("gguf")
    refuse_foreign(options.out, b"GGUF")
    export(options)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
