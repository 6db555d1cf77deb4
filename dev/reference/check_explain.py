#!/usr/bin/env python3
"""Compare every tensor that --explain writes with `transformers`.

    python dev/reference/check_explain.py USE_GPT2 USE_BERT [--model DIR [--text TEXT]]

Without --model, it makes small models with random weights: GPT-2 with tied weights; with three heads of 16, an untied
head and a vocabulary of 3; BERT with tied and with untied weights, with and without labels and a next-sentence head.
With --model, only that directory is compared, with USE_GPT2 or USE_BERT as its config.json says.

The reference is float32, eval(), attn_implementation="eager". Hooks take its tensors, retain_grad() their gradients.
ROWS names the counterpart of each tensor; a tensor without a row fails. Activations must agree within 1e-5 * max(1,
|reference|), gradients within 1e-5 of the largest absolute value of their tensor. (BERT's key biases have a gradient of
0 for any text; both sides' rounding must be within 1e-5 of the sum of its absolute terms.) Values that `transformers`
never has because the trainers fuse them (mean, rstd, lse, residual sums) are computed from the hooks'.

Needs torch, transformers, safetensors. Ends with `N passed, N failed`; exit status 1 if one failed.
"""
import argparse, json, os, re, subprocess, sys, tempfile
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
import transformers

TOLERANCE = 1e-5
passed = failed = 0


def verdict(name, why):
    global passed, failed
    passed, failed = passed + (not why), failed + bool(why)
    print(f"FAIL {name}: {why}" if why else f"ok {name}")


# ---------------------------------------------------------------------------------------------------------
# The reference: inputs and outputs of modules


class Reference:
    """A model with hooks on all of its modules. self["in", name] and self["out", name] are [T, ...]."""

    def __init__(self, model):
        self.model, self.tensors = model, {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self.hook("in", name))
            module.register_forward_hook(self.hook("out", name))

    def hook(self, side, name):
        def keep(module, inputs, outputs=None):
            value = inputs if side == "in" else outputs
            while isinstance(value, tuple) and value:
                value = value[0]
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                if value.requires_grad:
                    value.retain_grad()
                self.tensors[side, name] = value
        return keep

    def value(self, side, name):
        return self.tensors[side, name][0]

    def grad(self, side, name):
        x = self.tensors[side, name]
        return (torch.zeros_like(x) if x.grad is None else x.grad)[0]


def statistics(x, eps):
    return x.mean(-1), (x.var(-1, unbiased=False) + eps).rsqrt()


def log_sum(q, k, heads, causal):
    """log of the softmax's denominator [heads, T]."""
    T, C = q.shape
    q, k = (x.view(T, heads, C // heads).transpose(0, 1).double() for x in (q, k))
    scores = q @ k.transpose(1, 2) / (C // heads) ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    return scores.logsumexp(-1).float()


# ---------------------------------------------------------------------------------------------------------
# ROWS: for each tensor "h.L.NAME" or "NAME", the side and the module of its counterpart ({} is the layer), or a function
# of (run, layer). The gradient of a tensor is that of its counterpart.

GPT2 = {
    "embedded": ("in", "transformer.h.0.ln_1"),
    "h.ln1": ("out", "transformer.h.{}.ln_1"),
    "h.ln1_mean": lambda r, l: r.statistics("transformer.h.{}.ln_1", l)[0],
    "h.ln1_rstd": lambda r, l: r.statistics("transformer.h.{}.ln_1", l)[1],
    "h.qkv": ("out", "transformer.h.{}.attn.c_attn"),
    "h.att": ("in", "transformer.h.{}.attn.c_proj"),
    "h.lse": lambda r, l: log_sum(*r.reference.value("out", f"transformer.h.{l}.attn.c_attn").split(r.C, -1)[:2],
                                  r.heads, causal=True),
    "h.att_probs": lambda r, l: r.outputs.attentions[l][0],
    "h.attproj": ("out", "transformer.h.{}.attn.c_proj"),
    "h.mid": ("in", "transformer.h.{}.ln_2"),
    "h.ln2": ("out", "transformer.h.{}.ln_2"),
    "h.ln2_mean": lambda r, l: r.statistics("transformer.h.{}.ln_2", l)[0],
    "h.ln2_rstd": lambda r, l: r.statistics("transformer.h.{}.ln_2", l)[1],
    "h.fc_pre": ("out", "transformer.h.{}.mlp.c_fc"),
    "h.fc": ("out", "transformer.h.{}.mlp.act"),
    "h.fcproj": ("out", "transformer.h.{}.mlp.c_proj"),
    "h.out": ("out", "transformer.h.{}"),
    "lnf": ("out", "transformer.ln_f"),
    "lnf_mean": lambda r, l: r.statistics("transformer.ln_f", l)[0],
    "lnf_rstd": lambda r, l: r.statistics("transformer.ln_f", l)[1],
    "logits": ("out", "lm_head"),
    "losses": lambda r, l: r.losses(),
}
LAYER = "bert.encoder.layer.{}."
HEAD = "cls.predictions."
BERT = {
    "embedded": ("in", "bert.embeddings.LayerNorm"),
    "ln0": ("out", "bert.embeddings.LayerNorm"),
    "ln0_mean": lambda r, l: r.statistics("bert.embeddings.LayerNorm", l)[0],
    "ln0_rstd": lambda r, l: r.statistics("bert.embeddings.LayerNorm", l)[1],
    "h.qkv": ("out", [LAYER + f"attention.self.{x}" for x in ("query", "key", "value")]),
    "h.att": ("in", LAYER + "attention.output.dense"),
    "h.lse": lambda r, l: log_sum(*(r.reference.value("out", LAYER.format(l) + f"attention.self.{x}") for x in ("query", "key")),
                                  r.heads, causal=False),
    "h.att_probs": lambda r, l: r.outputs.attentions[l][0],
    "h.attproj": ("out", LAYER + "attention.output.dense"),
    "h.mid": ("in", LAYER + "attention.output.LayerNorm"),
    "h.ln1": ("out", LAYER + "attention.output.LayerNorm"),
    "h.ln1_mean": lambda r, l: r.statistics(LAYER + "attention.output.LayerNorm", l)[0],
    "h.ln1_rstd": lambda r, l: r.statistics(LAYER + "attention.output.LayerNorm", l)[1],
    "h.fc_pre": ("out", LAYER + "intermediate.dense"),
    "h.fc": ("out", LAYER + "intermediate"),
    "h.fcproj": ("out", LAYER + "output.dense"),
    "h.out": ("in", LAYER + "output.LayerNorm"),
    "h.ln2": ("out", LAYER + "output.LayerNorm"),
    "h.ln2_mean": lambda r, l: r.statistics(LAYER + "output.LayerNorm", l)[0],
    "h.ln2_rstd": lambda r, l: r.statistics(LAYER + "output.LayerNorm", l)[1],
    "masked": ("rows", "last"),  # the last layer's output; no other row of it has a gradient from the masked tokens
    "transform_pre": ("rows", HEAD + "transform.dense"),
    "transform": ("rows in", HEAD + "transform.LayerNorm"),
    "lnt": ("rows", HEAD + "transform.LayerNorm"),
    "lnt_mean": lambda r, l: r.statistics(HEAD + "transform.LayerNorm", l)[0][r.rows],
    "lnt_rstd": lambda r, l: r.statistics(HEAD + "transform.LayerNorm", l)[1][r.rows],
    "logits": ("rows", HEAD + "decoder"),
    "losses": lambda r, l: r.losses(),
}


class Run:
    """One text through the reference, as the page of --explain says it was run."""

    def __init__(self, model, page):
        self.page, self.heads, self.C = page, page["NH"], page["C"]
        self.causal = page["causal"]
        self.rows = torch.tensor(page["predicted"])
        self.table = GPT2 if self.causal else BERT
        self.eps = model.config.layer_norm_epsilon if self.causal else model.config.layer_norm_eps
        self.reference = Reference(model)
        self.last = LAYER.format(model.config.num_hidden_layers - 1) + "output.LayerNorm"
        ids = torch.tensor([page["tokens"]])
        targets = torch.tensor(page["targets"])
        self.targets = torch.where(targets < 0, -100, targets)
        if self.causal:
            self.outputs = model(ids, output_attentions=True)
            self.loss = self.token_losses().sum() / max(1, int((targets >= 0).sum()))
        else:
            self.outputs = model(ids, output_attentions=True)
            self.loss = self.token_losses().sum() / max(1, int((targets >= 0).sum()))
        model.zero_grad()
        if "why_no_loss" not in page:
            self.loss.backward()

    def token_losses(self):
        logits = self.outputs.logits[0] if self.causal else self.outputs.get("prediction_logits", self.outputs.get("logits"))[0]
        return F.cross_entropy(logits[self.rows], self.targets, reduction="none", ignore_index=-100)

    def losses(self):
        return self.token_losses().detach()

    def statistics(self, module, layer):
        return statistics(self.reference.value("in", module.format(layer)), self.eps)

    def counterpart(self, name):
        """The reference's tensor and the name of its counterpart; None if there is no row."""
        is_grad = name.startswith("grad.")
        plain = name[5:] if is_grad else name
        layer = re.match(r"h\.(\d+)\.(.*)", plain)
        key, l = ("h." + layer[2], layer[1]) if layer else (plain, None)
        row = self.table.get(key)
        if row is None or (callable(row) and is_grad):
            return None, None
        if callable(row):
            return row(self, int(l) if l else None), "computed"
        take = self.reference.grad if is_grad else self.reference.value
        side, modules = row[0], row[1] if isinstance(row[1], list) else [row[1]]
        modules = [self.last if m == "last" else m.format(l) for m in modules]
        value = torch.cat([take("in" if side.endswith("in") else "out", m) for m in modules], -1)
        if value.dim() == 1:  # of the pooler, a row for each sequence
            value = value[None]
        if side.startswith("rows"):
            value = value[self.rows]
        if side == "first":
            value = value[:1]
        return value, f"{'gradient of ' if is_grad else ''}{side} of {', '.join(modules)}"


# ---------------------------------------------------------------------------------------------------------
# Comparison


def difference(ours, theirs, is_grad):
    """Empty if they agree, else why not; and the error in units of the tolerance."""
    if ours.shape != theirs.shape:
        return f"shapes {list(ours.shape)} and {list(theirs.shape)}", 0
    theirs = theirs.detach()
    scale = theirs.abs().max().clamp(min=1e-30) if is_grad else theirs.abs().clamp(min=1)
    error = float(((ours - theirs).abs() / scale).max())
    return ("" if error <= TOLERANCE else f"differs by {error:.2e}"), error


def read_page(path):
    text = open(path, encoding="utf-8").read()
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])


def compare(name, program, directory, flags, show):
    with tempfile.TemporaryDirectory() as out:
        command = [program, "-e", directory, "-o", out, "--explain-tensors", "1"] + flags
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            verdict(name, f"exit status {done.returncode}: {done.stderr.strip()}")
            return
        page = read_page(f"{out}/explain/explain.html")
        ours = load_file(f"{out}/explain/activations.safetensors")
        has_loss = "why_no_loss" not in page
        gradients = load_file(f"{out}/explain/gradients.safetensors") if has_loss else {}
    kind = json.load(open(f"{directory}/config.json"))["architectures"][0]
    model = getattr(transformers, kind).from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    run = Run(model, page)
    worst = {False: 0, True: 0}
    for tensor, value in ours.items():
        theirs, counterpart = run.counterpart(tensor)
        is_grad = tensor.startswith("grad.")
        why, error = ("no row names its counterpart", 0) if theirs is None else difference(value, theirs, is_grad)
        worst[is_grad] = max(worst[is_grad], error)
        if why or show:
            print(f"  {'FAIL' if why else 'ok  '} {tensor:24} {str(list(value.shape)):18} {error:8.1e}  {counterpart}  {why}")
        if why:
            verdict(f"{name}: {tensor}", why)
    expected = {k for k in run.table if not k.startswith("h.")} | {
        k.replace("h.", f"h.{l}.", 1) for k in run.table if k.startswith("h.") for l in range(page["L"])}
    verdict(f"{name}: {len(ours)} tensors, none missing", ", ".join(sorted(expected - set(ours))))
    parameters = dict(model.named_parameters())
    for tensor, value in gradients.items():
        theirs = parameters.get(tensor)
        if theirs is not None and tensor.endswith("key.bias"):  # 0: the softmax ignores what is added to all keys
            terms = run.reference.grad("out", tensor[:-5]).abs().sum(0).max()
            error = float(torch.maximum(value.abs().max(), theirs.grad.abs().max()) / terms)
            why = "" if error <= TOLERANCE else f"is {error:.2e} of the sum of its absolute terms, not 0"
        else:
            why, error = ("no such parameter", 0) if theirs is None else difference(
                value, torch.zeros_like(theirs) if theirs.grad is None else theirs.grad, True)
        worst[True] = max(worst[True], error)
        if why:
            verdict(f"{name}: gradient of {tensor}", why)
    if has_loss:
        verdict(f"{name}: {len(gradients)} parameter gradients, none missing", ", ".join(sorted({n for n, p in parameters.items() if p.grad is not None} - set(gradients))))
        loss = page["loss"]
        verdict(f"{name}: loss {loss:.6f}", "" if abs(loss - float(run.loss)) <= TOLERANCE * max(1, loss) else f"differs from {float(run.loss):.6f}")
    verdict(f"{name}: largest error {worst[False]:.1e} of activations, {worst[True]:.1e} of gradients",
            "" if max(worst.values()) <= TOLERANCE else "too large")


# ---------------------------------------------------------------------------------------------------------
# Small models


def random_weights(model):
    """Larger than those of a new model, so that attention and GELU are far from linear."""
    torch.manual_seed(5)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, 1.0 if "ln_" in name and "weight" in name or "LayerNorm.weight" in name else 0.0, 0.15)
    return model


def make_gpt2(directory, vocabulary, merges, **config):
    c = transformers.GPT2Config(vocab_size=len(vocabulary), n_positions=64, bos_token_id=0, eos_token_id=0, **config)
    random_weights(transformers.GPT2LMHeadModel(c)).save_pretrained(directory)
    json.dump(vocabulary, open(f"{directory}/vocab.json", "w"))
    open(f"{directory}/merges.txt", "w").write("#version: 0.2\n" + "".join(m + "\n" for m in merges))


WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat dog ran ##s ##ning . , ! ?".split()


def make_bert(directory, kind="BertForPreTraining", **config):
    words = WORDS + [chr(c) for c in range(97, 123)] + ["##" + chr(c) for c in range(97, 123)]
    c = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=64, intermediate_size=80, **config)
    random_weights(getattr(transformers, kind)(c)).save_pretrained(directory)
    open(f"{directory}/vocab.txt", "w").write("".join(w + "\n" for w in words))
    json.dump({"do_lower_case": True}, open(f"{directory}/tokenizer_config.json", "w"))


def small_models(gpt2, bert):
    work = tempfile.TemporaryDirectory()
    path = lambda name: os.path.join(work.name, name)
    letters = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz.,Ġ")}
    letters |= {"th": len(letters), "the": len(letters) + 1}
    make_gpt2(path("tied"), letters, ["t h", "th e"], n_layer=3, n_head=4, n_embd=64)
    make_gpt2(path("three"), {"a": 0, "b": 1, "c": 2}, [], n_layer=2, n_head=3, n_embd=48, tie_word_embeddings=False)
    yield "GPT-2, tied", gpt2, path("tied"), ["--explain", "the cat sat on the mat, the dog ran."]
    yield "GPT-2, three heads of 16, untied, 3 tokens", gpt2, path("three"), ["--explain", "abccabacbbca"]
    yield "GPT-2, one token", gpt2, path("tied"), ["--explain", "the"]
    make_bert(path("bert"), num_hidden_layers=3, num_attention_heads=4, hidden_size=64)
    make_bert(path("bert3"), num_hidden_layers=2, num_attention_heads=3, hidden_size=48, tie_word_embeddings=False)
    make_bert(path("mlm"), "BertForMaskedLM", num_hidden_layers=2, num_attention_heads=2, hidden_size=32, hidden_act="gelu_new")
    yield "BERT, tied", bert, path("bert"), ["--explain", "the cat [MASK=sat] on a [MASK]. a [MASK=dog] runs!"]
    yield "BERT, three heads of 16, untied, one text", bert, path("bert3"), ["--explain", "the [MASK=cat] sat on the mat."]
    yield "BERT, no label", bert, path("bert"), ["--explain", "the [MASK] sat on the mat."]
    yield "BERT, no next-sentence head", bert, path("mlm"), ["--nsp", "0", "--explain", "the [MASK=cat] sat on the [MASK=mat]."]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("gpt2"), parser.add_argument("bert")
    parser.add_argument("--model"), parser.add_argument("--text")
    parser.add_argument("--show", action="store_true", help="print the table of counterparts")
    a = parser.parse_args()
    torch.set_num_threads(2)
    if a.model:
        is_bert = json.load(open(f"{a.model}/config.json"))["model_type"] == "bert"
        text = a.text or ("The [MASK=cat] sat on the [MASK]." if is_bert else "The cat sat on the mat.")
        cases = [(a.model, a.bert if is_bert else a.gpt2, a.model, ["--explain", text])]
    else:
        cases = small_models(a.gpt2, a.bert)
    for name, program, directory, flags in cases:
        compare(name, program, directory, flags, a.show)
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
