#!/usr/bin/env python3
"""HellaSwag as llm.c's evaluation file, without a network.

    hellaswag.py --local hellaswag_val.jsonl --vocab DIR --out hellaswag_val.bin

Needs Python 3.8 or later and the package `tokenizers`. --vocab is a directory as for prepare_gpt2.py. A line of FILE is
an example: "ctx", "endings" (any number), "label".

An ending is encoded with a space before it, separately from its context. Contexts are used as they are, as llm.c uses
"ctx". --lm-eval builds them from a line of jsonl like lm-evaluation-harness: the activity, a colon, "ctx_a" and "ctx_b"
with a capital letter, without text in brackets, also in endings. Such a set also has the characters of each ending, by
which acc_norm divides, as in the harness; llm.c cannot read it.
"""
import re
import sys

from choices import parse, read_jsonl, text_of, write
from documents import UserError, run


def without_brackets(text):
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def label_of(value, endings, where):
    text = str(value).strip()
    if not re.fullmatch(r"\d{1,5}", text) or int(text) >= len(endings):
        raise UserError(f"{where}: its label is {text!r}, but there are {len(endings)} endings, from 0 on")
    return int(text)


def examples(options):
    for where, example in read_jsonl(options.local):
        endings = example.get("endings")
        if not isinstance(endings, list) or not endings or not all(isinstance(e, str) for e in endings):
            raise UserError(f"{where}: its 'endings' are not a list of strings")
        if options.lm_eval:
            activity, a, b = (text_of(example, key, where) for key in ("activity_label", "ctx_a", "ctx_b"))
            context = without_brackets(f"{activity}: {a} {b.capitalize()}")
            endings = [without_brackets(e) for e in endings]
        else:
            context = text_of(example, "ctx", where)
        yield context, [f" {e}" for e in endings], label_of(example.get("label"), endings, where)


def add_options(parser):
    parser.add_argument("--lm-eval", action="store_true", help="contexts as lm-evaluation-harness makes them")


if __name__ == "__main__":
    sys.exit(run(lambda a: parse(__doc__, add_options, a), lambda o: write(o, examples(o), o.lm_eval), sys.argv[1:]))
