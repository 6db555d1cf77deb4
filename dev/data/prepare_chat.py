#!/usr/bin/env python3
"""Conversations into token shards for tuning GPT-2: only answers count for the loss.

    prepare_chat.py --local FILE... --model DIR --out OUT         DIR: a model to tune, with its tokenizer
    prepare_chat.py --local FILE... --vocab DIR --out OUT         DIR: a tokenizer, for a new model

Needs Python 3.8 or later and the packages `tokenizers` and `numpy`. A line of a file (.gz .xz .bz2 .zst too), or an
element of the array in a .json file, is one of

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}
    {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}       as ShareGPT has it
    {"instruction": "Translate.", "input": "Hello", "output": "Hallo"}                             as Alpaca has it

The first message may have the role system. Then user and assistant take turns, and the last message is the assistant's.
Of ShareGPT and Alpaca, answers before a question, questions after the last answer and conversations without an answer
are left out; an input follows its instruction after an empty line. The first of these becomes

    <|endoftext|><|system|>...<|end|><|user|>Hello<|end|><|assistant|>Hi<|end|>

where the names in <| |> are special tokens. Those that the tokenizer lacks get the next ids. If a text contains one, it
is encoded as ordinary text. The template is written into tokenizer_config.json as `chat_template`, so that
`transformers`' apply_chat_template gives the same ids (but it takes special tokens in a text for real ones).

The targets that count for the loss are the tokens of answers and the <|end|> after each, without the answers that have
"weight": 0 or "train": false. Conversations are packed into
rows of --tokens tokens and none crosses a row's end; the rest of a row is filled with <|endoftext|>. Train with
--doc-mask 1, and with -t --tokens or a multiple. A conversation longer than a row is cut after the last answer that
fits; if not even its first answer does, it is skipped.

Writes train_000000.bin ... and val_000000.bin ... (shards with a mask: llmc/data/shards.h), tokenizer.json and
tokenizer_config.json; with --model also OUT/model, the model with a row for each new token in its embedding (and in its
head, if that is not tied): the mean of the other rows. What an earlier run wrote, listed in prepared.json, is replaced or
removed; other files of these names are an error. The last conversations are for validation: --val-fraction of them.
"""
import itertools
import json
import os
import struct
import sys
from array import array

from documents import Parser, UserError, end, fraction, need, positive, read_json, read_json_values, run
from export_llmc import tensors_of, to_bfloat16
from model_dir import DTYPES, Weights, config_number, write_safetensors
from prepare_gpt2 import END_OF_TEXT, MAGICS, Vocabulary, make_tokenizer
from work import Output, Work, library_threads, write_atomically

np = need("numpy")
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
TOKENS = [SYSTEM, USER, ASSISTANT, END]
TEMPLATE = (
    "{{ '<|endoftext|>' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}  # ShareGPT's
ROW_TOKENS = 1024  # without a model
SHARD_TOKENS = 100_000_000
AT_ONCE = 1024  # conversations that are encoded at a time
OPEN_ROWS = 64  # that a conversation may still go into


# ----------------------------------------------------------------------------------------------------------
# Conversations


def converted(chat):
    """The messages of a conversation as ShareGPT or Alpaca has it, from its first question to its last answer."""
    if "conversations" in chat:
        turns = chat["conversations"] if isinstance(chat["conversations"], list) else [None]
        turns = [turn if isinstance(turn, dict) else {} for turn in turns]
        roles = [str(turn.get("from", turn.get("role"))) for turn in turns]
        messages = [{"content": t.get("value"), **t, "role": ROLES.get(role, role)} for t, role in zip(turns, roles)]
    else:
        asked, more, answer = (str(chat.get(key) or "") for key in ("instruction", "input", "output"))
        asked += f"\n\n{more}" if more.strip() else ""
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}][: 1 + bool(answer.strip())]
    first = 1 if messages and messages[0]["role"] == "system" else 0
    while messages[first:] and messages[first]["role"] == "assistant":
        del messages[first]
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    return messages


def messages_of(chat):
    """[(role, content, whether it counts for the loss)] of a conversation, checked; none if it has no answer."""
    if not isinstance(chat, dict) or not {"messages", "conversations", "instruction"} & chat.keys():
        raise UserError("is not an object with the key 'messages' (or 'conversations', or 'instruction')")
    messages = chat["messages"] if "messages" in chat else converted(chat)
    if not messages and "messages" not in chat:
        return []
    if not isinstance(messages, list) or not messages:
        raise UserError("'messages' is not a list of messages")
    found = []
    for i, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"message {i} has no role")
        role, content = message["role"], message.get("content")
        if not isinstance(content, str):
            raise UserError(f"message {i}: its content is not a string")
        before = found[-1][0] if found else None
        expected = {None: ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user",)}[before]
        if role not in expected:
            where = f"after {before}" if before else "at the beginning"
            raise UserError(f"message {i} is of the role {role!r} {where}; expected: {' or '.join(expected)}")
        if role == "assistant" and not content.strip():
            raise UserError(f"message {i}: the answer is empty")
        counts = role == "assistant"
        for name, values in (("weight", (0, 1)), ("train", (False, True))):
            value = message.get(name)
            if value is not None and (isinstance(value, bool) != (name == "train") or value not in values):
                raise UserError(f"message {i}: its {name} is {json.dumps(value)}; allowed: {json.dumps(values)[1:-1]}")
            counts = counts and value != values[0]
        found.append((role, content.encode("utf-8", "replace").decode("utf-8"), counts))  # half of a surrogate pair
    if found[-1][0] != "assistant":
        raise UserError(f"message {len(found)} has no answer")
    return found


def read_conversations(paths):
    without = 0
    for where, chat in (value for path in paths for value in read_json_values(path)):
        try:
            messages = messages_of(chat)
        except UserError as e:
            raise UserError(f"{where}: {e}")
        without += not messages
        if messages:
            yield messages
    if without:
        print(f"{without} conversations without an answer were left out")


class Encoder:
    """Conversations as (tokens, mask): of each token, whether it counts as a target."""

    def __init__(self, vocabulary, ids, most):
        self.tokenizer, self.ids, self.most = make_tokenizer(vocabulary.text), ids, most
        self.cut = self.answers_left_out = self.left_out = 0

    def encode_all(self, conversations):
        encode = getattr(self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch)
        while batch := list(itertools.islice(conversations, AT_ONCE)):
            yield from self._encode(batch, encode)

    def _encode(self, batch, encode):
        texts = iter(encode([content for c in batch for _, content, _ in c], add_special_tokens=False))
        for conversation in batch:
            tokens, mask = array("I", [self.ids[END_OF_TEXT]]), bytearray(1)
            fitting = answers = 0
            for role, _, counts in conversation:
                content = next(texts).ids
                tokens.append(self.ids[f"<|{role}|>"])
                tokens.extend(content)
                tokens.append(self.ids[END])
                mask += b"\0" + bytes([counts]) * (len(content) + 1)
                if role == "assistant":
                    is_fitting = len(tokens) <= self.most
                    fitting = len(tokens) if is_fitting else fitting
                    answers += not is_fitting
            self.left_out += not fitting
            if fitting:
                self.cut += answers > 0
                self.answers_left_out += answers
                yield tokens[:fitting], mask[:fitting]


# ----------------------------------------------------------------------------------------------------------
# Rows and shards


def pack(conversations, length, filler):
    """(tokens, mask) of rows of this length. A conversation goes into the first row that has room."""
    rows = []  # [tokens left, tokens of each conversation, mask of each]

    def finished(left, tokens, mask):
        return np.concatenate([*tokens, np.full(left, filler, "<u4")]), np.concatenate([*mask, np.zeros(left, "u1")])

    for tokens, mask in conversations:
        row = next((r for r in rows if r[0] >= len(tokens)), None)
        if row is None:
            if len(rows) == OPEN_ROWS:
                fullest = min(range(OPEN_ROWS), key=lambda i: rows[i][0])
                yield finished(*rows.pop(fullest))
            row = [length, [], []]
            rows.append(row)
        row[0] -= len(tokens)
        row[1].append(tokens)
        row[2].append(mask)
    for row in rows:
        yield finished(*row)


def write_shard(path, rows, length, filler, width):
    """Rows, and one <|endoftext|>: the last row's last target."""
    tokens = np.concatenate([row for row, _ in rows] + [np.array([filler], "<u4")])
    mask = np.concatenate([counts for _, counts in rows] + [np.zeros(1, "u1")])
    magic, version = (MAGICS[0], 1) if width == 2 else (MAGICS[1], 7)
    with open(path, "wb") as f:
        header = struct.pack("<6I", magic, version, len(tokens) & 0xFFFFFFFF, len(tokens) >> 32, 1, length)
        f.write(header.ljust(1024, b"\0") + tokens.astype(f"<u{width}").tobytes())
        f.write(np.packbits(mask, bitorder="little").tobytes())
        f.flush()
        os.fsync(f.fileno())


def write_shards(folder, prefix, conversations, options, filler, width):
    """Names of the shards, and the number of rows in them."""
    most, rows = max(1, SHARD_TOKENS // options.tokens), pack(conversations, options.tokens, filler)
    names, total = [], 0
    while shard := list(itertools.islice(rows, most)):
        names.append(f"{prefix}_{len(names):06d}.bin")
        write_shard(os.path.join(folder, names[-1]), shard, options.tokens, filler, width)
        total += len(shard)
    return names, total


# ----------------------------------------------------------------------------------------------------------
# Tokenizer and model


def extended_tokenizer(directory, vocabulary):
    """({name: text} of the tokenizer's files with the special tokens, their ids, the size of the vocabulary)."""
    path = os.path.join(directory, "tokenizer.json")
    tree = json.loads(vocabulary.copies.get("tokenizer.json", vocabulary.text))
    settings = os.path.join(directory, "tokenizer_config.json")
    config = read_json(settings) if os.path.isfile(settings) else {}
    if not isinstance(config, dict):
        raise UserError(f"{settings}: is not an object of settings")
    if config.get("chat_template", TEMPLATE) != TEMPLATE or os.path.exists(os.path.join(directory, "chat_template.jinja")):
        raise UserError(f"{directory}: its tokenizer has a chat template of its own; only this script's is supported")
    try:
        known, added = dict(tree["model"]["vocab"]), {t["content"]: t for t in tree.get("added_tokens") or []}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{path}: is not a tokenizer with a vocabulary and added tokens")
    ids, size = {}, vocabulary.size
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for name in [END_OF_TEXT] + TOKENS:
        if name in added and not added[name].get("special"):
            raise UserError(f"{path}: {name} is not a special token there")
        if name not in added:
            id = vocabulary.end_of_text if name == vocabulary.separator else known.get(name, size)
            size = max(size, id + 1)
            added[name] = {"id": id, "content": name, **form}
        ids[name] = added[name]["id"]
    tree["added_tokens"] = sorted(added.values(), key=lambda t: t["id"])
    config.pop("added_tokens_decoder", None)
    config.update(
        {"bos_token": END_OF_TEXT, "eos_token": END, "pad_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    )
    config.update({"add_prefix_space": False, "chat_template": TEMPLATE})
    config.setdefault("tokenizer_class", "GPT2Tokenizer")
    texts = {
        "tokenizer.json": json.dumps(tree, ensure_ascii=False) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }
    return texts, ids, size


def row_length(options):
    """--tokens, which the model's positions limit; without it as many as the model has."""
    if not options.model:
        return options.tokens or ROW_TOKENS
    path = os.path.join(options.model, "config.json")
    config = read_json(path)
    positions = config.get("n_positions") if isinstance(config, dict) else None
    if not isinstance(positions, int) or positions < 1:
        raise UserError(f'{path}: key "n_positions": {positions!r} is not a number of positions; is it a GPT-2?')
    if (options.tokens or 0) > positions:
        raise UserError(f"--tokens {options.tokens}: the model has {positions} positions; give at most that many")
    return options.tokens or positions


def with_rows(file, name, first, size):
    """The bytes of a tensor of V rows, of which those from `first` to below `size`, old ones or not, become the mean of
    those before."""
    dtype, shape, begin, end = file.place(name)
    rows = file.bytes[file.data + begin : file.data + end].reshape(shape[0], -1)
    mean = file.get(name, shape)[:first].mean(axis=0, dtype=np.float64).astype(np.float32)
    mean = to_bfloat16(mean) if dtype == "BF16" else mean.astype(DTYPES[dtype])
    new = np.tile(mean.view(np.uint8), (size - first, 1))
    return np.concatenate([rows[:first], new, rows[size:]])


def write_model(directory, folder, known, size, eos):
    """The model of a directory in another one. Of its vocabulary of `size`, the tokens from `known` on are new; the
    model may have rows for them already, which no token had. `eos`: the token that ends an answer."""
    config = read_json(os.path.join(directory, "config.json"))
    V, L = (config_number(config, "config.json", key) for key in ("vocab_size", "n_layer"))
    weights = Weights(directory, "transformer.")
    for name, _, _ in tensors_of((1, V, L, 1, 1)):
        if not weights.find(name):
            raise UserError(f'{weights.path}: tensor "{name}" is missing; the file is damaged or of another model')
    tensors, first = {}, min(known, V)
    for name in sorted(weights.files):
        file = weights.files[name]
        dtype, shape, begin, end = file.place(name)
        data = file.bytes[file.data + begin : file.data + end]
        if name.endswith(("wte.weight", "lm_head.weight")) and size > first:
            if dtype not in DTYPES or shape[:1] != [V]:
                raise UserError(f'{file.path}: tensor "{name}": has not the {V} rows of config.json, or another dtype')
            data = with_rows(file, name, first, size)
            shape = [len(data), *shape[1:]]
        tensors[name] = dtype, shape, data
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        write_safetensors(f, tensors)
        f.flush()
        os.fsync(f.fileno())
    config["vocab_size"], config["eos_token_id"] = max(V, size), eos
    write_atomically(os.path.join(folder, "config.json"), json.dumps(config, indent=2) + "\n")


# ----------------------------------------------------------------------------------------------------------
# Command line


def prepare(options):
    directory = options.model or options.vocab
    vocabulary = Vocabulary(directory)
    texts, ids, size = extended_tokenizer(directory, vocabulary)
    options.tokens = row_length(options)
    with Work(options, {}, ["tokens", "mask"]) as work:
        output = Output(options.out, "prepare_chat.py", r"tokenizer(_config)?\.json|model(/.*)?")
        encoder, lengths, answers = Encoder(vocabulary, ids, options.tokens), [], 0
        with library_threads():
            for tokens, mask in encoder.encode_all(read_conversations(options.local)):
                work.files["tokens"].write(tokens.tobytes())
                work.files["mask"].write(mask)
                lengths.append(len(tokens))
                answers += sum(mask)
        count = len(lengths)
        if encoder.left_out or encoder.cut:
            print(
                f"longer than {options.tokens} tokens: {encoder.cut} conversations were cut at a turn "
                f"({encoder.answers_left_out} answers left out), {encoder.left_out} were left out"
            )
        if count == 0:
            raise UserError(f"{options.local[0]}: no conversation in the input that fits into {options.tokens} tokens")
        if answers == 0:
            raise UserError(f"{options.local[0]}: no answer in the input counts for the loss; all have weight 0 or train false")
        held_out = max(1, round(options.val_fraction * count)) if options.val_fraction else 0
        if held_out >= count:
            raise UserError(f"--val-fraction {options.val_fraction}: {count} conversations cannot be divided so; give more")
        width = 2 if size <= 65536 else 4
        tokens, mask, ends = work.array("tokens", "<u4"), work.array("mask", "u1"), np.cumsum(lengths)

        def conversations(first, last):
            for end, length in zip(ends[first:last], lengths[first:last]):
                yield tokens[end - length : end], mask[end - length : end]

        parts = ("val", conversations(count - held_out, count)), ("train", conversations(0, count - held_out))
        written = [write_shards(work.folder, *part, options, ids[END_OF_TEXT], width) for part in parts]
        names, rows = [name for w in written for name in w[0]], sum(w[1] for w in written)
        if options.model:
            os.mkdir(work.path("model"))
            write_model(options.model, work.path("model"), vocabulary.size, size, ids[END])
            names += ["model/config.json", "model/model.safetensors"]
            texts.update({f"model/{name}": text for name, text in texts.items()})
        for name, text in texts.items():
            write_atomically(work.path(name), text)
        output.publish(work.folder, names + list(texts))
    total = sum(lengths)
    print(
        f"{options.out}: {count - held_out} conversations for training, {held_out} for validation; {total} tokens, {answers} of "
        f"them count for the loss; {rows} rows of {options.tokens}, {100 * total / rows / options.tokens:.1f} % full; "
        f"vocabulary of {size}, {size - vocabulary.size} new"
    )


def parse(arguments):
    parser = Parser(__doc__)
    parser.add_argument("--local", nargs="+", required=True, metavar="FILE", help="conversations, see above")
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--model", metavar="DIR", help="model to tune: a Hugging Face directory with its tokenizer")
    tokenizer.add_argument("--vocab", metavar="DIR", help="directory of a tokenizer")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory of the shards")
    parser.add_argument("--tokens", type=positive, metavar="T", help="of a row (default: the model's positions, or 1024)")
    parser.add_argument("--val-fraction", type=fraction, default=0.01, metavar="F", help="default: 0.01")
    options = parser.parse_args(arguments)
    for path in options.local:
        if not os.path.isfile(path):
            raise UserError(f"{path}: no such file")
    for flag, path in (("--model", options.model), ("--vocab", options.vocab)):
        if path is not None and not os.path.isdir(path):
            raise UserError(f"{path}: no such directory ({flag})")
        outputs = map(os.path.realpath, (options.out, os.path.join(options.out, "model")))
        if path is not None and os.path.realpath(path) in outputs:
            raise UserError(f"{flag} {path}: would be overwritten; choose another --out")
    return options


if __name__ == "__main__":
    end(run(parse, prepare, sys.argv[1:]))
