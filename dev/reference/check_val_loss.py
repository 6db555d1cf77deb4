"""Validation loss of a GPT-2 directory with transformers, on the same windows as our trainer.

    python3 dev/reference/check_val_loss.py MODEL_DIR VAL.bin T WINDOWS [LOSS]

Windows of T + 1 tokens with stride T from the start of one shard, in float32. With LOSS, our own result, the exit
status is 0 only if both agree within 0.5 %. Run with torch 2.11, transformers 5.17.
"""
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

directory, shard, T, windows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
tokens = np.fromfile(shard, dtype=np.uint16, offset=1024).astype(np.int64)
windows = min(windows, (len(tokens) - 1) // T)
total = 0.0
with torch.no_grad():
    for w in range(windows):
        window = torch.from_numpy(tokens[w * T : w * T + T + 1]).to(device)
        logits = model(window[None, :-1]).logits[0].float()
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="mean").item()
loss = total / windows
print(f"RESULT check_val_loss windows={windows} T={T} loss={loss:.6f}")
if len(sys.argv) > 5:
    ours = float(sys.argv[5])
    print(f"RESULT check_val_loss_difference ours={ours:.6f} relative={abs(ours - loss) / loss:.6f} tol=0.005")
    sys.exit(abs(ours - loss) > 0.005 * loss)
