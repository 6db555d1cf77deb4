#!/usr/bin/env python3
"""Evaluate a model directory of train_bert with transformers, on held-out sequences as train_bert draws them.

    make build/test_bert
    build/test_bert batches 'data/builtin/bert/val.bin' 64 200 0 /tmp/batches.safetensors out/quickstart-bert
    python3 dev/reference/check_bert.py /tmp/batches.safetensors out/quickstart-bert

Prints both losses on the same sequences and ends with status 1 if they differ by more than --tolerance. --dtype and
--device are those of transformers. It loads the class that config.json names: a model trained with --nsp 0 is a
BertForMaskedLM, without a next-sentence head.
"""

import argparse
import sys

import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining
from transformers.utils import logging

CLASSES = {"BertForPreTraining": BertForPreTraining, "BertForMaskedLM": BertForMaskedLM}


def main():
    parser = argparse.ArgumentParser(description="Evaluate a BERT directory by transformers.")
    parser.add_argument("batches")
    parser.add_argument("model")
    parser.add_argument("--tolerance", type=float, default=0.005, help="of the relative difference (default: 0.005)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    logging.disable_progress_bar()
    data = {name: tensor.to(args.device) for name, tensor in load_file(args.batches).items()}
    names = BertConfig.from_pretrained(args.model).architectures or ["none"]
    if names[0] not in CLASSES:
        sys.exit(f"{args.model}: config.json: architectures: {names[0]} is not one of {', '.join(CLASSES)}")
    predicts_next = names[0] == "BertForPreTraining"
    model, info = CLASSES[names[0]].from_pretrained(args.model, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[what]:
            sys.exit(f"{args.model}: {what}: {sorted(info[what])}")
    model = model.to(args.device, getattr(torch, args.dtype)).eval()

    starts = data["cu_seqlens"].tolist()
    rows, targets = data["masked_rows"].long(), data["targets"].long()
    sums, right = [0.0, 0.0], [0, 0]
    with torch.no_grad():
        for i, (begin, end) in enumerate(zip(starts, starts[1:])):
            out = model(input_ids=data["tokens"][None, begin:end], token_type_ids=data["types"][None, begin:end])
            here = (rows >= begin) & (rows < end)
            of_tokens = out.prediction_logits if predicts_next else out.logits
            logits, wanted = of_tokens[0, rows[here] - begin].float(), targets[here]
            sums[0] += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
            right[0] += (logits.argmax(-1) == wanted).sum().item()
            if predicts_next:
                following, label = out.seq_relationship_logits.float(), data["next_targets"][i : i + 1].long()
                sums[1] += torch.nn.functional.cross_entropy(following, label, reduction="sum").item()
                right[1] += (following.argmax(-1) == label).sum().item()
    counts = [len(rows), len(starts) - 1]
    worst = 0.0
    for k, name in enumerate(("masked tokens", "next sentence")[: 2 if predicts_next else 1]):
        ours, theirs = data["losses"][k].item(), sums[k] / counts[k]
        worst = max(worst, abs(ours - theirs) / abs(theirs))
        print(f"{name}: train_bert {ours:.6f}, transformers {theirs:.6f}, {100 * right[k] / counts[k]:.2f} % right "
              f"of {counts[k]}")
    print(f"largest relative difference {worst:.2e}, allowed {args.tolerance:g}")
    sys.exit(worst > args.tolerance)


if __name__ == "__main__":
    main()
