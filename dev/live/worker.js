"use strict";
// The page's worker: writes the stories with dev/data/builtin_corpus.c, trains dev/ladder/gpt2_in_one_file.c on them,
// and between two steps answers the page. Both programs are WebAssembly and find their files in `files`.
const BLOCKS = 20000, QUESTIONS = 200, T = 64, TOP = 5;
const files = new Map();  // path: {bytes, length}
const encoded = text => new TextEncoder().encode(text);
const text_of = bytes => new TextDecoder().decode(bytes);
const file = name => files.get("data/builtin/" + name).bytes.subarray(0, files.get("data/builtin/" + name).length);
const range = n => Array.from({length: n}, (_, i) => i);

// ---------------------------------------------------------------------------------------------------------
// WASI: files in memory, below one open directory

// The functions that a module imports: those with something to do; all others succeed. program.memory is set later.
function wasi(module, program, args) {
    const open = [0, 1, 2, 3].map(() => ({path: "", at: 0})), NO_FILE = 44, NOT_OPEN = 8;
    const view = () => new DataView(program.memory.buffer);
    const bytes = (at, n) => new Uint8Array(program.memory.buffer, at, n), path_at = (at, n) => text_of(bytes(at, n));
    const put = (...pairs) => (pairs.forEach(([at, x]) => view().setUint32(at, x, true)), 0);
    const each = (list, n, f) => range(n).reduce((sum, i) =>
        sum + f(bytes(view().getUint32(list + 8 * i, true), view().getUint32(list + 8 * i + 4, true))), 0);
    function write(fd, from) {
        if (fd < 3) return program.printed += text_of(from), from.length;
        const f = files.get(open[fd].path), end = open[fd].at + from.length;
        if (end > f.bytes.length) {
            const more = new Uint8Array(Math.max(end, 2 * f.bytes.length));
            more.set(f.bytes), f.bytes = more;
        }
        f.bytes.set(from, open[fd].at);
        open[fd].at = end, f.length = Math.max(f.length, end);
        return from.length;
    }
    function read(fd, to) {
        const f = files.get(open[fd].path), {at} = open[fd];
        const part = f.bytes.subarray(at, Math.min(f.length, at + to.length));
        to.set(part), open[fd].at += part.length;
        return part.length;
    }
    const api = {
        args_sizes_get: (count, size) => put([count, args.length], [size, args.join(" ").length + 1]),
        args_get: (list, at) => args.forEach((word, i) => {
            put([list + 4 * i, at]);
            bytes(at, word.length + 1).set(encoded(word + "\0")), at += word.length + 1;
        }) ?? 0,
        fd_prestat_get: (fd, out) => fd === 3 ? put([out, 0], [out + 4, 1]) : NOT_OPEN,
        fd_prestat_dir_name: (fd, at) => (bytes(at, 1)[0] = "/".charCodeAt(0), 0),
        fd_fdstat_get: (fd, out) => (bytes(out, 24).fill(255), put([out, fd === 3 ? 3 : 4])),
        fd_seek: (fd, offset, whence, out) => {
            const f = open[fd];
            f.at = Number(offset) + [0, f.at, files.get(f.path)?.length][whence];
            return put([out, f.at], [out + 4, 0]);
        },
        fd_write: (fd, list, n, out) => put([out, each(list, n, part => write(fd, part))]),
        fd_read: (fd, list, n, out) => put([out, each(list, n, part => read(fd, part))]),
        path_open: (fd, _, at, n, flags, rights, inherited, status, out) => {
            const path = path_at(at, n), CREATE = 1, TRUNCATE = 8;
            if (flags & CREATE && !files.has(path) || flags & TRUNCATE)
                files.set(path, {bytes: new Uint8Array(1024), length: 0});
            return put([out, open.push({path, at: 0}) - 1]);
        },
        path_filestat_get: (fd, flags, at, n, out) => {
            const found = files.get(path_at(at, n));
            bytes(out, 64).fill(0);  // what is no file is a directory
            return put([out + 16, found ? 4 : 3], [out + 32, found ? found.length : 0]);
        },
        path_rename: (fd, at, n, to_fd, to, to_n) => {
            const path = path_at(at, n);
            if (!files.has(path)) return NO_FILE;
            return files.set(path_at(to, to_n), files.get(path)), files.delete(path), 0;
        },
        proc_exit: code => { throw Object.assign(new Error(program.printed.trim()), {code}); },
    };
    for (const {name} of WebAssembly.Module.imports(module)) api[name] ??= () => 0;
    return api;
}

async function load(module, args, page) {
    const program = {printed: ""};
    const instance = await WebAssembly.instantiate(module, {wasi_snapshot_preview1: wasi(module, program, args), page});
    return Object.assign(program, instance.exports);
}

async function write_stories(module) {
    try {
        (await load(module, ["builtin_corpus", "data/builtin", "1", String(BLOCKS)]))._start();
    } catch (end) {
        if (end.code !== 0) throw end;
    }
}

// ---------------------------------------------------------------------------------------------------------
// Tokens: byte-level BPE. A token below 256 is a byte, then one token a merge, then <|endoftext|>.

let tokenizer;
function read_tokenizer() {
    const names = [], code = {}, pieces = [], merges = new Map();
    for (let b = 0, shifted = 256; b < 256; b++) {
        const is_printable = b >= 33 && b <= 126 || b >= 161 && b <= 172 || b >= 174;
        names.push(String.fromCharCode(is_printable ? b : shifted++));
        code[names[b]] = b, pieces.push([b]);
    }
    const id = JSON.parse(text_of(file("vocab.json")));
    text_of(file("merges.txt")).trim().split("\n").slice(1).forEach((line, rank) => {
        const [left, right] = line.split(" ");
        merges.set(`${id[left]} ${id[right]}`, {rank, id: id[left + right]});
    });
    for (const [name, i] of Object.entries(id)) pieces[i] = [...name].map(c => code[c]);
    tokenizer = {merges, pieces, end: id["<|endoftext|>"]};
}
const piece = id => id === tokenizer.end ? "<|endoftext|>" : text_of(Uint8Array.from(tokenizer.pieces[id]));
function encode(text) {
    const words = text.match(/'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu) ?? [];
    return words.flatMap(word => {
        const ids = [...encoded(word)];
        for (;;) {
            const found = ids.map((id, i) => tokenizer.merges.get(`${id} ${ids[i + 1]}`));
            const best = found.reduce((a, b, i) => b && (a < 0 || b.rank < found[a].rank) ? i : a, -1);
            if (best < 0) return ids;
            ids.splice(best, 2, found[best].id);
        }
    });
}

// ---------------------------------------------------------------------------------------------------------
// The model

let gpt2, module_of_model, size, V, seconds, done, total, questions;

// A tensor's values and derivatives, in the program's memory; both change with the next step.
function tensor(name) {
    new Uint8Array(gpt2.memory.buffer, gpt2.tokens(), name.length + 1).set(encoded(name + "\0"));
    const [v, d, mean, , n] = new Uint32Array(gpt2.memory.buffer, gpt2.find(), 5);
    return {v: new Float32Array(gpt2.memory.buffer, v, n), d: new Float32Array(gpt2.memory.buffer, d, n), mean};
}
const put_tokens = ids => new Int32Array(gpt2.memory.buffer, gpt2.tokens(), ids.length).set(ids);
const best_of = row => row.reduce((best, x, i) => x > row[best] ? i : best, 0);
// The most likely token after each of these.
function greedy(ids) {
    const logits = tensor("logits").v;
    put_tokens(ids), gpt2.predict(ids.length);
    return ids.map((_, t) => best_of(logits.subarray(t * V, (t + 1) * V)));
}

// Which functions run: their time, and their order while `order` is a list.
const calls = [], spent = {}, name_at = new Map();
let order = null;
const page = {
    enter(at) {
        if (!name_at.has(at)) {
            const bytes = new Uint8Array(gpt2.memory.buffer, at, 40);
            name_at.set(at, text_of(bytes.subarray(0, bytes.indexOf(0))));
        }
        const name = name_at.get(at);
        calls.push({name, since: performance.now(), inside: 0}), order?.push(name);
    },
    leave() {
        const {name, since, inside} = calls.pop(), ms = performance.now() - since;
        spent[name] ??= [0, 0];
        spent[name][0] += ms, spent[name][1] += ms - inside;  // with and without the functions that it calls
        if (calls.length) calls[calls.length - 1].inside += ms;
        if (order && calls.length) order.push(calls[calls.length - 1].name);
    },
};

async function start({seed, L, C, NH, steps}) {
    gpt2 = await load(module_of_model, [], page);
    calls.length = 0, name_at.clear();
    for (const name in spent) delete spent[name];
    gpt2._initialize(), gpt2.start(seed, L, C, NH, steps);
    size = {L, C, NH}, total = steps, done = seconds = 0;
    V = tensor("wte.weight").v.length / C;
}

function read_exam() {
    const words = new Uint16Array(file("exam.bin").slice().buffer, 1024);
    questions = [];
    for (let at = 0; questions.length < QUESTIONS; at += words[at + 1] / 2) {
        const asked = words[at + 5], answer = at + 7 + asked, end = answer + words[answer - 1];
        questions.push({asked, ids: [...words.subarray(at + 6, answer - 1), ...words.subarray(answer, end)]});
    }
}
// The part of the questions whose answers are, token by token, the most likely ones.
function exam() {
    const is_right = ({asked, ids}) => {
        const said = greedy(ids);
        return ids.every((id, t) => t < asked || said[t - 1] === id);
    };
    return questions.filter(is_right).length / questions.length;
}

function story() {
    gpt2.printed = "";
    gpt2.text();
    return gpt2.printed.trim();
}

function one_step(losses) {
    const since = performance.now();
    losses.push(gpt2.step());
    seconds += (performance.now() - since) / 1000, done++;
}
const report = more => postMessage({progress: {done, total, seconds, spent, tokens: 4 * T, ...more}});

// Train until all steps are done or stop() is called. The page is heard every 50 ms.
let is_running, training;
async function train() {
    is_running = true;
    while (is_running && done < total) {
        const until = performance.now() + 50, losses = [], more = {losses};
        while (done < total && performance.now() < until) {
            one_step(losses);
            if (done % 100 === 0 || done === total) more.exam = exam();
            if (done % 25 === 0 || done === 1 || done === total) {
                more.story = story();
                break;
            }
        }
        report(more);
        await new Promise(resolve => setTimeout(resolve));
    }
}
const stop = () => (is_running = false, training);

// One step, and which functions it called, in their order.
function step_slowly() {
    const losses = [];
    if (done === total) return;
    order = [];
    one_step(losses);
    report({losses, order});
    order = null;
}

// ---------------------------------------------------------------------------------------------------------
// A look inside, as data of the page of --explain (apps/explain/files.h)

function base64(array) {
    const bytes = new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
    let text = "";
    for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
    return btoa(text);
}
const norm = x => Math.sqrt(x.reduce((sum, a) => sum + a * a, 0));
// The ops of a layer: name, formula, what it writes, what it reads. x: the residual stream.
const LAYER = [
    ["layernorm", "ln1 = (x - mean) * rstd * w + b", "ln1", "x"],
    ["linear", "qkv = ln1 w^T + b", "qkv", "ln1"],
    ["attention", "att = softmax(q k^T / sqrt(HS)) v, of earlier tokens", "att", "qkv"],
    ["linear", "proj = att w^T + b", "proj", "att"],
    ["residual", "mid = x + proj", "mid", "proj"],
    ["layernorm", "ln2 = (mid - mean) * rstd * w + b", "ln2", "mid"],
    ["linear", "fc = ln2 w^T + b", "fc", "ln2"],
    ["gelu", "gelu = fc / 2 * (1 + tanh(...))", "gelu", "fc"],
    ["linear", "fcproj = gelu w^T + b", "fcproj", "gelu"],
    ["residual", "out = mid + fcproj", "out", "fcproj"]];
const PARAMETERS = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"];
const parameter_names = () => ["wte.weight", "wpe.weight", ...range(size.L).flatMap(l =>
    PARAMETERS.flatMap(name => [`h.${l}.${name}.weight`, `h.${l}.${name}.bias`])), "ln_f.weight", "ln_f.bias"];

function softmax(row) {
    const most = row.reduce((a, b) => Math.max(a, b)), e = Array.from(row, x => Math.exp(x - most));
    const sum = e.reduce((a, b) => a + b);
    return e.map(x => x / sum);
}
// After the embeddings and after each layer: the most likely tokens, and the probability of the right one.
function lens(n, targets) {
    const id = [], p = [], target = [];
    for (let l = 0; l <= size.L; l++) {
        gpt2.lens(l, n);
        const logits = tensor("logits").v;
        for (let t = 0; t < n; t++) {
            const all = softmax(logits.subarray(t * V, (t + 1) * V));
            const top = range(V).sort((a, b) => all[b] - all[a]).slice(0, TOP);
            id.push(...top), p.push(...top.map(i => all[i])), target.push(targets[t] < 0 ? NaN : all[targets[t]]);
        }
    }
    return {used: id, last: target.slice(-n), top: TOP, lens_layers: size.L + 1, lens_id: base64(Int32Array.from(id)),
        lens_p: base64(Float32Array.from(p)), lens_target: base64(Float32Array.from(target))};
}

// All ops, forward and backward, and the tensors that they wrote, for n tokens.
function ops_and_tensors(n, losses) {
    const {L, C} = size, tensors = [], ops = [];
    const add = (name, layer, all) => {
        const columns = {logits: V, qkv: 3 * C, fc: 4 * C, gelu: 4 * C, losses: 1}[name.split(".").pop()] ?? C;
        const values = all.slice(0, n * columns), whole = norm(values);
        return tensors.push({name, layer, ndim: 2, rows: n, columns, norm: whole, rms: whole / Math.sqrt(values.length),
            min: Math.min(...values), max: Math.max(...values), high: 1, wide: 1, values: base64(values)}) - 1;
    };
    const put = (direction, op, layer, formula, ...made) =>
        ops.push({op: `${op}_${direction}`, direction, layer, formula, shapes: `${n} tokens`, tensors: made});
    const rows = [["embedding", "embedded = wte[token] + wpe[position]", "embedded", null, -1]];
    for (let l = 0; l < L; l++)
        for (const [op, formula, y, x] of LAYER)
            rows.push([op, formula, `h.${l}.${y}`, x !== "x" ? `h.${l}.${x}` : l ? `h.${l - 1}.out` : "embedded", l]);
    rows.push(["layernorm", "lnf = (x - mean) * rstd * w + b", "lnf", `h.${L - 1}.out`, -1]);
    rows.push(["linear", "logits = lnf wte^T", "logits", "lnf", -1]);
    for (const [op, formula, y, , layer] of rows) put("forward", op, layer, formula, add(y, layer, tensor(y).v));
    put("forward", "cross_entropy", -1, "losses = -log(softmax(logits)[next token])", add("losses", -1, losses));
    put("backward", "cross_entropy", -1, "grad.logits = (softmax(logits) - onehot(next token)) / tokens",
        add("grad.logits", -1, tensor("logits").d));
    for (const [op, , y, x, layer] of rows.reverse())
        if (x) put("backward", op, layer, `grad.${x} += from grad.${y}`, add("grad." + x, layer, tensor(x).d));
        else put("backward", op, layer, `grad of wte and of wpe += grad.${y}`);
    return {ops, tensors};
}

// The text continued with the most likely tokens.
function continued(ids) {
    ids = [...ids];
    while (ids.length < T) {
        const next = greedy(ids)[ids.length - 1];
        if (next === tokenizer.end) break;
        ids.push(next);
    }
    return ids.slice(1).map(piece).join("");
}

function look(text) {
    const {L, C, NH} = size, ids = [tokenizer.end, ...encode(text)].slice(0, T), n = ids.length;
    if (n < 2) return {why: "Type a word."};
    put_tokens(ids);
    const loss = gpt2.look(n), targets = [...ids.slice(1), -1], names = parameter_names();
    const parameters = names.map(name => ({name: "transformer." + name, norm: norm(tensor(name).v),
        grad_norm: norm(tensor(name).d), layer: name.startsWith("h.") ? Number(name.split(".")[1]) : -1}));
    const row_norms = name => Float32Array.from(range(n), t => norm(tensor(name).v.subarray(t * C, (t + 1) * C)));
    const stream = ["embedded", ...range(L).flatMap(l => [`h.${l}.mid`, `h.${l}.out`])];
    // prob [NH, n, n]; what is later than the token is not computed.
    const maps = range(L).map(l => Uint8Array.from(tensor(`h.${l}.prob`).v.subarray(0, NH * n * n),
        (p, i) => i % n > Math.floor(i / n) % n ? 0 : Math.round(255 * Math.sqrt(p))));
    const {used, last, ...seen} = lens(n, targets);
    const losses = Float32Array.from(last, p => p > 0 ? -Math.log(p) : 0);
    const data = {model: `${done} steps in this page`, device: "WebAssembly", precision: "fp32", L, NH, C, V, T: n,
        parameter_count: names.reduce((sum, name) => sum + tensor(name).v.length, 0), causal: true, loss, tokens: ids,
        vocabulary: Object.fromEntries([...ids, ...used].map(id => [id, piece(id)])), predicted: range(n), targets,
        attention: {side: 1, layers: maps.map(base64)}, parameters, ...seen, ...ops_and_tensors(n, losses),
        residual: stream.map(name => ({name, norms: base64(row_norms(name))}))};
    return {loss, continued: continued(ids), data};
}

// ---------------------------------------------------------------------------------------------------------
// The model as a Hugging Face directory, in a .zip file whose members are not compressed

// GPT-2's matrices named c_... are [in, out] in the file and [out, in] in memory.
function safetensors() {
    const header = {__metadata__: {format: "pt"}}, parts = [], {C} = size;
    let end = 0;
    for (const name of parameter_names()) {
        const {v} = tensor(name), IC = /mlp\.c_proj/.test(name) ? 4 * C : C, rest = v.length / IC;
        const is_transposed = /\.c_\w+\.weight$/.test(name), from = i => i % rest * IC + Math.floor(i / rest);
        const values = Float32Array.from(v, (x, i) => is_transposed ? v[from(i)] : x);
        const shape = is_transposed ? [IC, rest] : /^w/.test(name) ? [rest, C] : [v.length];
        header["transformer." + name] = {dtype: "F32", shape, data_offsets: [end, end += 4 * v.length]};
        parts.push(new Uint8Array(values.buffer));
    }
    const text = JSON.stringify(header), json = encoded(text + " ".repeat(-text.length & 7));
    return [new Uint8Array(new BigUint64Array([BigInt(json.length)]).buffer), json, ...parts];
}

function config() {
    const {L, C, NH} = size;
    return {architectures: ["GPT2LMHeadModel"], model_type: "gpt2", n_ctx: T, bos_token_id: tokenizer.end,
        eos_token_id: tokenizer.end, n_layer: L, n_head: NH, n_embd: C, n_inner: 4 * C, n_positions: T, vocab_size: V,
        activation_function: "gelu_new", layer_norm_epsilon: 1e-5, initializer_range: 0.02, embd_pdrop: 0,
        attn_pdrop: 0, resid_pdrop: 0, tie_word_embeddings: true, dtype: "float32"};
}

const CRC = Uint32Array.from(range(256), n => range(8).reduce(c => c & 1 ? c >>> 1 ^ 0xedb88320 : c >>> 1, n));
function zip(members) {
    const parts = [], directory = [];
    let at = 0, listed = 0;
    // Numbers of 2 bytes, and in lists of 4
    const record = (...fields) => Uint8Array.from(fields.flatMap(x => Array.isArray(x) ?
        [x[0], x[0] >>> 8, x[0] >>> 16, x[0] >>> 24] : [x, x >>> 8]));
    for (const [name, chunks] of members) {
        const path = encoded(name), bytes = new Uint8Array(chunks.reduce((sum, c) => sum + c.length, 0));
        chunks.reduce((i, c) => (bytes.set(c, i), i + c.length), 0);
        const crc = ~bytes.reduce((c, b) => c >>> 8 ^ CRC[(c ^ b) & 255], -1) >>> 0;
        // version, flags, method: none, time, date: 1980-01-01, checksum, both sizes, length of the name, nothing more
        const same = [20, 0, 0, 0, 33, [crc], [bytes.length], [bytes.length], path.length, 0];
        const local = record([0x04034b50], ...same), entry = record([0x02014b50], 20, ...same, 0, 0, 0, [0], [at]);
        parts.push(local, path, bytes), directory.push(entry, path);
        at += local.length + path.length + bytes.length, listed += entry.length + path.length;
    }
    const end = record([0x06054b50], 0, 0, members.length, members.length, [listed], [at], 0);
    return new Blob([...parts, ...directory, end], {type: "application/zip"});
}
function save() {
    const names = ["vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"];
    const made = [["config.json", [encoded(JSON.stringify(config()))]], ["model.safetensors", safetensors()]];
    for (const name of names) made.push([name, [file(name)]]);
    return zip(made.map(([name, chunks]) => ["gpt2_live/" + name, chunks]));
}

// ---------------------------------------------------------------------------------------------------------
// What the page asks for. Each answer has the name of its question.

const answers = {
    async load({corpus, model}) {
        module_of_model = await WebAssembly.compile(model);
        await write_stories(await WebAssembly.compile(corpus));
        read_tokenizer(), read_exam();
        const words = tokenizer.pieces.map((_, id) => piece(id)).filter(word => /^ \w{2,}$/.test(word)).join("");
        const entropy = Number(text_of(file("val_entropy.txt")).split(/\s/)[1]);
        return {entropy, questions: QUESTIONS, chance: new Int32Array(file("exam.bin").buffer)[4] / 1e6, words};
    },
    async start(settings) {
        await stop();
        await start(settings);
        if (!settings.is_slow) training = train();
        return {};
    },
    pause: async () => (await stop(), {}),
    go_on: async () => (await stop(), training = train(), {}),
    step_slowly: async () => (await stop(), step_slowly(), {}),
    look, save,
};
onmessage = async ({data: [name, argument]}) => {
    try {
        postMessage({[name]: await answers[name](argument)});
    } catch (error) {
        postMessage({error: `${name}: ${error.message}`});
    }
};
