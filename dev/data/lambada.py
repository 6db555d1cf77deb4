#!/usr/bin/env python3
"""LAMBADA as an evaluation file in llm.c's format, without a network.

    lambada.py --local lambada_test.jsonl --vocab DIR --out lambada_test.bin

Needs Python 3.8 or later and the package `tokenizers`. --vocab is a directory as for prepare_gpt2.py. A line of FILE is
an object with the key "text" (--text-key). An example has one ending, the last word with the space before it. It counts
if the model would have written every token of it.
"""
import sys

from choices import parse, read_jsonl, text_of, write
from documents import UserError, run


def examples(options):
    for where, example in read_jsonl(options.local):
        context, space, word = text_of(example, options.text_key, where).rstrip().rpartition(" ")
        if not space or not context:
            raise UserError(f"{where}: its text has no two words")
        yield context, [space + word], 0


def add_options(parser):
    parser.add_argument("--text-key", default="text", metavar="KEY", help="of the lines (default: text)")


if __name__ == "__main__":
    sys.exit(run(lambda a: parse(__doc__, add_options, a), lambda o: write(o, examples(o)), sys.argv[1:]))
