"""acc and acc_norm of a GPT-2 directory on a multiple-choice set with transformers, as llmc/choices/multiple_choice.h counts.

    python3 dev/reference/check_choices.py MODEL_DIR SET.bin T [ACC ACC_NORM]

SET.bin is written by dev/data/hellaswag.py or lambada.py. T is the trainer's -t, to which contexts are cut. Float32,
each ending in its own sequence. For a set of clozes (one ending) the second number is the perplexity. With ACC and
ACC_NORM, our own results, the exit status is 0 only if acc and acc_norm are within one example of them, and the
perplexity within 0.1 %. Run with torch 2.11, transformers 5.17.
"""
import math
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

directory, path, T = sys.argv[1], sys.argv[2], int(sys.argv[3])
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
words = np.fromfile(path, dtype="<u2", offset=1024).tolist()
examples, at = int(np.fromfile(path, dtype="<i4", count=3)[2]), 0


def take(n):
    global at
    at += n
    return words[at - n : at]


def scores(context, ending):
    """The loss of each token of the ending, and whether all of them are the most likely ones."""
    tokens = torch.tensor(context + ending, device=device)[-(T + 1) :]
    logits = model(tokens[None, :-1], logits_to_keep=len(ending)).logits[0].float()
    targets = tokens[-len(ending) :]
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none"), (logits.argmax(-1) == targets).all()


right = right_norm = loss = clozes = 0
with torch.no_grad():
    for _ in range(examples):
        _, _, _, label, endings = take(5)
        context = take(take(1)[0])
        results = [scores(context, take(take(1)[0])) for _ in range(endings)]
        sums = torch.stack([losses.double().sum() for losses, _ in results])
        means = torch.stack([losses.double().mean() for losses, _ in results])
        right += int(results[0][1]) if endings == 1 else int(sums.argmin().item() == label)
        right_norm += int(means.argmin().item() == label)
        loss, clozes = loss + sums[0].item(), clozes + (endings == 1)
acc, second = right / examples, right_norm / examples
name, tolerance = "acc_norm", 1.001 / examples
if clozes == examples:
    name, second = "perplexity", math.exp(loss / examples)
    tolerance = 0.001 * second
print(f"RESULT check_choices examples={examples} T={T} acc={acc:.6f} {name}={second:.6f}")
if len(sys.argv) > 4:
    ours = float(sys.argv[4]), float(sys.argv[5])
    good = abs(ours[0] - acc) <= 1.001 / examples and abs(ours[1] - second) <= tolerance
    print(f"RESULT check_choices_difference ours={ours[0]:.6f} {ours[1]:.6f} {'good' if good else 'BAD'}")
    sys.exit(not good)
