#!/usr/bin/env python3
"""Test --explain: the page, its numbers, the files of tensors, and the answers to texts that cannot be explained.

    python3 dev/test/explain.py TRAIN_GPT2 TRAIN_BERT        from the repository's root, with use_gpt2 and use_bert beside them

Small models are trained for a few steps. What the page says is computed again from the files of
tensors, the weights and the trainer's own validation loss; dev/reference/check_explain.py compares the tensors with
`transformers`. Needs only Python. Ends with `N passed, N failed`; exit status 1 if one failed.
"""
import base64, json, math, os, re, shutil, struct, subprocess, sys, tempfile

passed = failed = 0


def verdict(name, why):
    global passed, failed
    passed, failed = passed + (not why), failed + bool(why)
    print(f"FAIL {name}: {why}" if why else f"ok   {name}")


def run(program, *flags):
    """A trainer's run; with flags that use a model, one of the program beside it that has them."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if any(f in flags for f in ("--explain", "--explain-tensors", "--explain-next", "--evaluate")):
        program = os.path.join(os.path.dirname(program), os.path.basename(program).replace("train_", "use_"))
    return subprocess.run([program, *flags], capture_output=True, timeout=120, env=environment)


def read_page(path):
    text = open(path, encoding="utf-8").read()
    return text, json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])


def read_tensors(path):
    """{name: (shape, floats)} of a .safetensors file in F32."""
    raw = open(path, "rb").read()
    n = struct.unpack("<Q", raw[:8])[0]
    header, result = json.loads(raw[8 : 8 + n]), {}
    for name, t in header.items():
        if name != "__metadata__":
            begin, end = (8 + n + x for x in t["data_offsets"])
            result[name] = (t["shape"], struct.unpack(f"<{(end - begin) // 4}f", raw[begin:end]))
    return result


def numbers(text, kind):
    raw = base64.b64decode(text)
    return struct.unpack(f"<{len(raw) // struct.calcsize(kind)}{kind}", raw)


def row(tensor, i):
    shape, values = tensor
    return values[i * shape[-1] : (i + 1) * shape[-1]]


def difference(ours, theirs, tolerance):
    """Why two lists of numbers differ."""
    if len(ours) != len(theirs):
        return f"{len(ours)} numbers, not {len(theirs)}"
    scale = max(map(abs, theirs), default=1) or 1
    worst = max((abs(a - b) for a, b in zip(ours, theirs)), default=0)
    return "" if worst <= tolerance * scale else f"differs by {worst:.3g} of {scale:.3g}"


def add(*tensors):
    return [sum(x) for x in zip(*(t[1] for t in tensors))]


def sum_rows(tensor):
    (rows, columns), values = tensor
    return [math.fsum(values[c::columns]) for c in range(columns)]


# ---------------------------------------------------------------------------------------------------------
# The page


def largest_cell(tensor, r, c, high, wide):
    """Value and place of the element of the largest absolute value, the first of equal ones."""
    shape, values = tensor
    columns = shape[1] if len(shape) == 2 else 1
    places = [(i, k) for i in range(r * high, min((r + 1) * high, shape[0])) for k in range(c * wide, min((c + 1) * wide, columns))]
    i, k = max(places, key=lambda p: abs(values[p[0] * columns + p[1]]))
    return values[i * columns + k], (i - r * high) * wide + k - c * wide


def check_map(t, tensor):
    """Why a heat map does not show its tensor."""
    values, area = numbers(t["values"], "f"), t["high"] * t["wide"]
    rows, columns = -(-t["rows"] // t["high"]), -(-t["columns"] // t["wide"])
    if len(values) != rows * columns:
        return f"{len(values)} cells, not {rows} x {columns}"
    if rows > 1024 or columns > 128 or (t["columns"] > 1 and rows > 128):
        return f"{rows} x {columns} cells are too many"
    places = numbers(t["places"], "B" if area <= 256 else "H" if area <= 65536 else "I") if area > 1 else [0] * len(values)
    for i, (value, place) in enumerate(zip(values, places)):
        if (value, place) != largest_cell(tensor, i // columns, i % columns, t["high"], t["wide"]):
            return f"cell {i} has {value} at {place}, not {largest_cell(tensor, i // columns, i % columns, t['high'], t['wide'])}"
    return difference([t["norm"], t["min"], t["max"]], [math.sqrt(math.fsum(x * x for x in tensor[1])), min(tensor[1]), max(tensor[1])], 1e-6)


def check_attention(page, tensors):
    """Why the 8-bit maps do not show the probabilities, or why these are none."""
    T, causal = page["T"], page["causal"]
    for l, layer in enumerate(page["attention"]["layers"]):
        (NH, _, _), p = tensors[f"h.{l}.att_probs"]
        shown = []
        for h in range(NH):
            for q in range(T):
                weights = p[(h * T + q) * T : (h * T + q + 1) * T]
                if abs(math.fsum(weights) - 1) > 1e-5:
                    return f"layer {l}, head {h}, token {q}: the probabilities add up to {math.fsum(weights)}"
                if causal and any(weights[q + 1 :]):
                    return f"layer {l}, head {h}: token {q} attends to a later one"
                shown += weights
        bytes_ = base64.b64decode(layer)
        if len(bytes_) != len(shown):
            return f"layer {l}: {len(bytes_)} bytes, not {len(shown)}"
        worst = max(abs(b - 255 * math.sqrt(p)) for b, p in zip(bytes_, shown))
        if worst > 0.51:
            return f"layer {l}: a byte is off by {worst}"
    return ""


def check_lens(page, tensors, layers):
    """The guesses after the last layer are those of the logits."""
    n, top = len(page["predicted"]), page["top"]
    ids, p, target = numbers(page["lens_id"], "i"), numbers(page["lens_p"], "f"), numbers(page["lens_target"], "f")
    if page["lens_layers"] != layers + 1 or len(ids) != (layers + 1) * n * top or len(target) != (layers + 1) * n:
        return f"{len(ids)} guesses of {page['lens_layers']} layers"
    for i in range(n):
        logits, at = row(tensors["logits"], i), (layers * n + i) * top
        total = math.fsum(math.exp(x) for x in logits)
        best = sorted(range(len(logits)), key=lambda v: -logits[v])[:top]
        if list(ids[at : at + top]) != best:
            return f"row {i}: {ids[at : at + top]}, not {best}"
        why = difference(p[at : at + top], [math.exp(logits[v]) / total for v in best], 1e-5)
        y = page["targets"][i]
        if not why and y >= 0:
            why = difference([target[layers * n + i]], [math.exp(logits[y]) / total], 1e-5)
        if why:
            return f"row {i}: {why}"
    return ""


def check_ops(page, tensors):
    listed = [t["name"] for t in page["tensors"]]
    written = [listed[i] for op in page["ops"] for i in op["tensors"]]
    if sorted(written) != sorted(listed) or sorted(listed) != sorted(tensors):
        return f"tensors without an op or twice: {sorted(set(listed) ^ set(written))}"
    for op in page["ops"]:
        if not op.get("formula"):
            return f"{op['op']} has no formula"
    return ""


def explain(program, directory, out, *flags):
    done = run(program, "-e", directory, "-o", out, "--explain-tensors", "1", *flags)
    if done.returncode:
        return done.stderr.decode(), None, None, None, None
    text, page = read_page(f"{out}/explain/explain.html")
    tensors, gradients = (read_tensors(path) if os.path.exists(path) else {} for path in
                          (f"{out}/explain/activations.safetensors", f"{out}/explain/gradients.safetensors"))
    return "", text, page, tensors, gradients


def check_common(name, text, page, tensors, L):
    links = re.findall(r"(?:src|href)=\"(?!#|data:)[^\"]*\"", text)
    verdict(f"{name}: one file, without links", f"links {links}" if links or not text.rstrip().endswith("</html>") or len(text) > 20e6 else "")
    verdict(f"{name}: every op is described, every tensor is of one op", check_ops(page, tensors))
    bad = [(t["name"], why) for t in page["tensors"] if t["ndim"] < 3 for why in [check_map(t, tensors[t["name"]])] if why]
    verdict(f"{name}: heat maps", "; ".join(f"{n}: {why}" for n, why in bad[:3]))
    verdict(f"{name}: attention maps", check_attention(page, tensors))
    verdict(f"{name}: guesses after the last layer", check_lens(page, tensors, L))
    names = [r["name"] for r in page["residual"]]
    norms = [x for r in page["residual"] for x in numbers(r["norms"], "f")]
    want = [math.sqrt(math.fsum(x * x for x in row(tensors[n], t))) for n in names for t in range(page["T"])]
    verdict(f"{name}: norms of the residual stream", difference(norms, want, 1e-6) if len(names) == 2 * L + 1 else f"{names}")


def check_loss(name, page, tensors, rows):
    """The losses and grad.logits from the logits."""
    losses, gradient = [], []
    labels = sum(y >= 0 for y in page["targets"])
    for i in range(rows):
        logits, y = row(tensors["logits"], i), page["targets"][i]
        total = math.fsum(math.exp(x) for x in logits)
        losses.append(math.log(total) - logits[y] if y >= 0 else 0)
        gradient += [(math.exp(x) / total - (v == y)) / labels if y >= 0 else 0 for v, x in enumerate(logits)]
    verdict(f"{name}: losses of the tokens", difference(tensors["losses"][1], losses, 1e-5))
    verdict(f"{name}: the loss is their mean", difference([page["loss"]], [math.fsum(losses) / labels], 1e-6))
    verdict(f"{name}: gradient of the logits", difference(tensors["grad.logits"][1], gradient, 1e-5))


# ---------------------------------------------------------------------------------------------------------
# Models


def check_gpt2(program, model, work):
    name, L, words = "a language model", 2, "Anna takes the ball."
    why, text, page, tensors, gradients = explain(program, model, f"{work}/gpt2", "--explain", words)
    verdict(f"{name}: runs", why)
    if why:
        return
    T = page["T"]
    check_common(name, text, page, tensors, L)
    check_loss(name, page, tensors, T)
    weights = read_tensors(f"{model}/model.safetensors")
    wte, wpe = weights["transformer.wte.weight"], weights["transformer.wpe.weight"]
    embedded = [a + b for t, token in enumerate(page["tokens"]) for a, b in zip(row(wte, token), row(wpe, t))]
    verdict(f"{name}: embedded", difference(tensors["embedded"][1], embedded, 1e-6))
    verdict(f"{name}: tokens", "" if "".join(page["vocabulary"][str(t)] for t in page["tokens"]) == words else "not the text")
    for l in range(L):
        before = tensors["embedded"] if l == 0 else tensors[f"h.{l - 1}.out"]
        verdict(f"{name}: layer {l}, branches add up to the residual stream",
                difference(tensors[f"h.{l}.mid"][1], add(before, tensors[f"h.{l}.attproj"]), 1e-6)
                or difference(tensors[f"h.{l}.out"][1], add(tensors[f"h.{l}.mid"], tensors[f"h.{l}.fcproj"]), 1e-6))
        h = f"transformer.h.{l}."
        for bias, gradient in (("mlp.c_proj", "out"), ("mlp.c_fc", "fc_pre"), ("attn.c_proj", "mid"), ("attn.c_attn", "qkv")):
            verdict(f"{name}: gradient of {h}{bias}.bias", difference(gradients[h + bias + ".bias"][1], sum_rows(tensors[f"grad.h.{l}.{gradient}"]), 1e-5))
    verdict(f"{name}: gradient of wpe", difference(gradients["transformer.wpe.weight"][1][: T * 16], tensors["grad.embedded"][1], 1e-5))
    norms = [p["grad_norm"] for p in page["parameters"]]
    verdict(f"{name}: norms of parameter gradients",
            difference(norms, [math.sqrt(math.fsum(x * x for x in gradients[p["name"]][1])) for p in page["parameters"]], 1e-6))
    # The trainer's own loss of the same tokens.
    shard = f"{work}/shard.bin"
    header = struct.pack("<256i", 20240520, 1, T, *[0] * 253)
    open(shard, "wb").write(header + struct.pack(f"<{T}H", *page["tokens"]))
    done = run(program, "-e", model, "--evaluate", "1", "-i", shard, "-j", shard, "-b", "1", "-t", str(T - 1))
    own = re.search(rb"val loss ([0-9.]+)", done.stdout)
    verdict(f"{name}: the loss is that of --evaluate 1", difference([page["loss"]], [float(own[1])], 1e-4) if own else done.stderr.decode())

    markup = "a</script><!--b"
    why, text, page_of_markup, _, _ = explain(program, model, f"{work}/markup", "--explain", markup)
    verdict("a text does not end the page's script", why or (
        "" if "".join(page_of_markup["vocabulary"][str(t)] for t in page_of_markup["tokens"]) == markup
        and "<" not in text.split('type="application/json">')[1].split("</script>")[0] else "its data have <"))

    open(f"{work}/words", "w").write(words)
    # A loss scale, here 65536, divides out exactly.
    why, _, scaled, acts, grads = explain(program, model, f"{work}/scaled", "--explain", words, "--loss-scale", "65536")
    verdict("--loss-scale 65536: the same page and files", why or ("" if (scaled, acts, grads) == (page, tensors, gradients) else "others"))
    before = open(f"{work}/gpt2/explain/activations.safetensors", "rb").read()
    why, _, other, _, _ = explain(program, model, f"{work}/file", "--explain", f"@{work}/words")
    verdict("--explain @FILE: as --explain", why or ("" if before == open(f"{work}/file/explain/activations.safetensors", "rb").read() else "other tensors"))
    why, _, one, tensors, _ = explain(program, model, f"{work}/gpt2", "--explain", "A")
    verdict("one token: no backward pass, and the page says why",
            why or ("" if "no next one" in one.get("why_no_loss", "") and "loss" not in one and not any(t.startswith("grad.") for t in tensors) else "it has one"))
    verdict("one token: no gradients of an earlier text are left", "" if not os.path.exists(f"{work}/gpt2/explain/gradients.safetensors") else "there are")
    done = run(program, "-e", model, "-o", f"{work}/page_only", "--explain", words)
    run(program, "-e", model, "-o", f"{work}/gpt2", "--explain", "A")
    verdict("--explain-tensors 0: no tensors of an earlier text are left", "" if os.listdir(f"{work}/gpt2/explain") == ["explain.html"] else "there are")
    verdict("--explain-tensors 0: the page alone", "" if os.listdir(f"{work}/page_only/explain") == ["explain.html"] else "other files")


def check_resumed(gpt2, bert, work):
    """-y 1 restores the settings of the run in -o, of which the batch and fp8 must not reach --explain."""
    for name, program, words in (("gpt2", gpt2, "Anna takes the ball."), ("bert", bert, "Anna takes the [MASK=ball].")):
        for kind in ("plain", "fp8"):
            run_dir, files = f"{work}/resumed_{name}_{kind}", ("activations", "gradients")
            run(program, "-e", "L=2,C=16,NH=2,T=32", "-b", "3", "-x", "2", "-v", "0", "-s", "0", "-n", "0", "-o", run_dir,
                *(["--fp8", "1"] if kind == "fp8" else []))
            own = run(program, "-o", run_dir, "-y", "1", "--explain-tensors", "1", "--explain", words)
            run(program, "-e", run_dir, "-o", f"{run_dir}/other", "--explain-tensors", "1", "--explain", words)
            same = lambda f: open(f"{run_dir}/explain/{f}.safetensors", "rb").read() == open(f"{run_dir}/other/explain/{f}.safetensors", "rb").read()
            verdict(f"-y 1 of a {kind} run of {name}: the same tensors as with -e",
                    own.stderr.decode() if own.returncode else ", ".join(f for f in files if not same(f)))


def check_bert(program, model, work):
    name, L = "a masked language model", 2
    pair = ["--explain", "Anna takes the [MASK=ball]. Who has the [MASK]?", "--explain-second", "Anna has [MASK=the] ball."]
    why, text, page, tensors, gradients = explain(program, model, f"{work}/bert", *pair)
    verdict(f"{name}: runs", why)
    if why:
        return
    check_common(name, text, page, tensors, L)
    check_loss(name, page, tensors, 3)
    piece = page["vocabulary"]
    verdict(f"{name}: tokens, labels and segments", "" if [piece.get(str(t)) for t in page["targets"]] == ["ball", None, "the"]
            and [piece[str(page["tokens"][i])] for i in page["predicted"]] == ["[MASK]"] * 3
            and page["types"] == [0] * 12 + [1] * 6 else f"{page['tokens']} {page['targets']} {page['types']}")
    follows, label = tensors["next_logits"][1], 0
    verdict(f"{name}: loss of the pair", difference([page["next_loss"]], [math.log(sum(map(math.exp, follows))) - follows[label]], 1e-5))
    for l in range(L):
        before = tensors["ln0"] if l == 0 else tensors[f"h.{l - 1}.ln2"]
        verdict(f"{name}: layer {l}, sums before the layernorms",
                difference(tensors[f"h.{l}.mid"][1], add(before, tensors[f"h.{l}.attproj"]), 1e-6)
                or difference(tensors[f"h.{l}.out"][1], add(tensors[f"h.{l}.ln1"], tensors[f"h.{l}.fcproj"]), 1e-6))
        h = f"bert.encoder.layer.{l}."
        for bias, gradient in (("output.dense", "out"), ("intermediate.dense", "fc_pre"), ("attention.output.dense", "mid")):
            verdict(f"{name}: gradient of {h}{bias}.bias", difference(gradients[h + bias + ".bias"][1], sum_rows(tensors[f"grad.h.{l}.{gradient}"]), 1e-5))
    last = tensors[f"grad.h.{L - 1}.ln2"]
    verdict(f"{name}: gradient of the last layer's output", difference(
        [x for i in [0] + page["predicted"] for x in row(last, i)], list(tensors["grad.first"][1]) + list(tensors["grad.masked"][1]), 1e-6))
    _, _, other, flipped, _ = explain(program, model, f"{work}/bert", *pair, "--explain-next", "1")
    verdict("--explain-next 1: the other label, the same scores", "" if other["next_target"] == 1 and flipped["next_logits"] == tensors["next_logits"]
            and abs(other["next_loss"] - page["next_loss"]) > 1e-6 else "no")
    why, _, bare, tensors, _ = explain(program, model, f"{work}/bare", "--explain", "Anna takes the [MASK].")
    verdict("a bare [MASK]: predictions without a backward pass, and the page says why",
            why or ("" if "[MASK=word]" in bare.get("why_no_loss", "") and bare["lens_layers"] == L + 1 and "grad.logits" not in tensors else "it has one"))
    run(program, "-e", "L=2,C=16,NH=2,T=32", "-x", "1", "-v", "0", "-s", "0", "-n", "0", "-b", "8", "--nsp", "0", "-o", f"{work}/headless")
    why, _, headless, tensors, _ = explain(program, f"{work}/headless", f"{work}/headless", *pair)
    verdict("a model without a next-sentence head: left out, and the page says so",
            why or ("" if "no next-sentence head" in headless.get("why_no_next", "") and "next_loss" not in headless and "next_logits" not in tensors else "it has one"))
    refused("--explain-next 1 and such a model", "has no next-sentence head", program, "-e", f"{work}/headless", "-o", f"{work}/headless", *pair, "--explain-next", "1")
    why, _, alone, tensors, _ = explain(program, model, f"{work}/alone", "--nsp", "0", "--explain", "Anna takes the [MASK=ball].")
    verdict("--nsp 0: no next-sentence head", why or ("" if "next_logits" not in tensors and f"grad.h.{L - 1}.ln2" in tensors else "it has one"))


# ---------------------------------------------------------------------------------------------------------
# What is answered in a line


def refused(name, pattern, program, *flags):
    done = run(program, *flags)
    lines = done.stderr.decode(errors="replace").strip().split("\n")
    why = ""
    if done.returncode != 2:
        why = f"exit status {done.returncode}, not 2"
    elif len(lines) != 1 or not re.search(pattern, lines[0]):
        why = f"says {lines}"
    verdict(f"refused: {name}", why)


def check_refusals(gpt2, bert, model, bert_model, work):
    g, b, out = (gpt2, "-e", model), (bert, "-e", bert_model), ("-o", f"{work}/refused")
    open(f"{work}/none", "w"), open(f"{work}/latin", "wb").write(b"caf\xe9")
    refused("an empty text", "--explain '': is empty", *g, *out, "--explain", "")
    refused("an empty file", "none: is empty", *g, *out, "--explain", f"@{work}/none")
    refused("no such file", "cannot be read", *g, *out, "--explain", f"@{work}/absent")
    refused("a file that is not UTF-8", "byte 4 of the text is not UTF-8", *g, *out, "--explain", f"@{work}/latin")
    refused("a text that is not UTF-8", "byte 2 of the text is not UTF-8", *g, *out, "--explain", b"a\xff")
    refused("a long text", r"the text has \d+ tokens; the model takes 32", *g, *out, "--explain", "ball " * 40)
    refused("a long text for -t", r"the text has \d+ tokens; the model takes 4", *g, *out, "-t", "4", "--explain", "Anna takes the ball.")
    refused("--generate too", "does not combine", *g, *out, "--explain", "a", "--generate", "3")
    refused("--profile too", "--profile", *g, *out, "--explain", "a", "--profile", "1")
    refused("--fp8", "--fp8 1", *g, *out, "--explain", "a", "--fp8", "1")
    refused("-o ''", "-o, which is empty", *g, "-o", "", "--explain", "a")
    refused("--explain-tensors alone", "needs --explain", *g, *out, "--explain-tensors", "1")
    refused("a model without a tokenizer", "no tokenizer", gpt2, "-e", "L=1,C=16,NH=2,T=16", *out, "--explain", "a")
    refused("a second text that is not UTF-8", "--explain-second: byte 2 of the text is not UTF-8", *b, *out, "--explain", "a [MASK]", "--explain-second", b"a\xff")
    refused("a label of two tokens", r"\[MASK=ball the\]: is 2 tokens", *b, *out, "--explain", "Anna takes [MASK=ball the].")
    refused("a label without letters", r"\[MASK=\]: is 0 tokens", *b, *out, "--explain", "Anna takes [MASK=].")
    refused("an unknown label", r"\[MASK=\S+\]: is not in the vocabulary", *b, *out, "--explain", "Anna takes [MASK=\u4e2d].")
    refused("a label without its bracket", "no closing bracket", *b, *out, "--explain", "Anna takes [MASK=ball.")
    refused("a text without masks", "nothing to predict", *b, *out, "--explain", "Anna takes the ball.")
    refused("a long text for BERT", r"tokens with \[CLS\] and \[SEP\]; the model takes 32", *b, *out, "--explain", "ball " * 40 + "[MASK]")
    refused("--explain-next alone", "--explain-next: needs", *b, *out, "--explain-next", "1")
    refused("--explain-next 1 without a second text", "--explain-next 1: needs --explain-second", *b, *out, "--explain", "a [MASK]", "--explain-next", "1")
    refused("--explain-next 1 without the head", "no next-sentence head", *b, *out, "--nsp", "0", "--explain", "a [MASK]", "--explain-second", "a", "--explain-next", "1")
    refused("--fill too", "does not combine", *b, *out, "--explain", "a [MASK]", "--fill", "a [MASK]")


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    gpt2, bert = (os.path.abspath(p) for p in sys.argv[1:])
    with tempfile.TemporaryDirectory() as work:
        quiet = ("-x", "8", "-l", "1e-2", "-v", "0", "-s", "0", "-n", "0", "-b", "8")
        for program, name, corpus in ((gpt2, "m", "build/test_corpus/builtin"), (bert, "mb", "data/builtin/bert")):
            done = run(program, "-e", "L=2,C=16,NH=2,T=32", *quiet, "-i", f"{corpus}/train.bin", "-o", f"{work}/{name}")
            verdict(f"a model of {os.path.basename(program)}", done.stderr.decode() if done.returncode else "")
        check_gpt2(gpt2, f"{work}/m", work)
        check_resumed(gpt2, bert, work)
        check_bert(bert, f"{work}/mb", work)
        check_refusals(gpt2, bert, f"{work}/m", f"{work}/mb", work)
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
