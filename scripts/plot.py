#!/usr/bin/env python3
"""Plot one or more runs from their log.jsonl.

    plot.py out/mine                              -> out/mine/plot.png
    plot.py out/a out/b out/c --x tokens --output compare.svg

A run is its output directory or a log.jsonl. Each quantity in a log gets a panel, each run a colour: training loss
(faint, with a running mean), validation loss, HellaSwag and other sets, BERT's two losses and accuracies, speed,
gradient norm, learning rate. Values that are not numbers (null, NaN) are skipped and, in the training loss, marked by a
cross. If a step is repeated, its last line counts; an incomplete line is skipped. A log may still be growing.

Needs `matplotlib`.
"""
import math
import os
import sys

try:
    import matplotlib
    import numpy as np
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter
except ImportError:
    matplotlib = None

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "dev"))
from user_error import Parser, UserError, parse_json, replacing, run  # noqa: E402

FORMATS = "png", "svg", "pdf"

# Panels from the top left: title and what is drawn: member of the log, style, name in the panel's own legend. "mean": faint
# with a running mean. "median": the same with a running median, and outliers may leave the panel. "dots" and "dashed":
# measured only at some steps.
PANELS = [
    ("Training loss", [("loss", "mean", "")]),
    ("Validation loss", [("val_loss", "dots", "")]),
    ("Masked tokens: loss", [("mlm_loss", "mean", "training"), ("val_mlm_loss", "dashed", "validation")]),
    ("Next sentence: loss", [("nsp_loss", "mean", "training"), ("val_nsp_loss", "dashed", "validation")]),
    ("Validation accuracy", [("val_mlm_accuracy", "dots", "masked tokens"),
                             ("val_nsp_accuracy", "dashed", "next sentence")]),
    ("Sequences per second", [("seq_s", "median", "")]),
    ("Tokens per second", [("tok_s", "median", "")]),
    ("Gradient norm", [("grad_norm", "median", "")]),
    ("Learning rate", [("lr", "line", "")]),
]
EVALUATIONS_AFTER = 2  # of these panels there is one for each evaluation set, and for each val_... that has none below
SET_NAMES = {"hellaswag": "HellaSwag", "lambada": "LAMBADA"}
SMOOTH_POINTS = 500  # at so many places of a curve the running mean or median is taken


# ----------------------------------------------------------------------------------------------------------
# Logs


class Run:
    """One log: the values of every member by step, and the times of the steps."""

    def __init__(self, path):
        self.log = os.path.join(path, "log.jsonl") if os.path.isdir(path) else path
        self.name = path
        self.members = {}  # name -> {step: value, NaN where it was none}
        objects = 0
        try:
            with open(self.log, encoding="utf-8", errors="replace") as f:
                for line in f:
                    objects += self._read_line(line)
        except FileNotFoundError:
            what = "holds no log.jsonl; -o of the trainer names the directory" if self.log != path else "no such file"
            raise UserError(f"{path}: {what}")
        except OSError as e:
            raise UserError(f"{self.log}: cannot be read: {e.strerror}")
        if objects == 0 and os.path.getsize(self.log) > 0:
            raise UserError(f"{self.log}: no line is a JSON object; it is not a log of a run")
        self._measure()

    def _read_line(self, line):
        """Whether the line is a complete object."""
        try:
            entry = parse_json(line)
        except ValueError:
            return False
        if not isinstance(entry, dict):
            return False
        step = entry.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
            return True
        if "loss" in entry and step in self.members.get("loss", {}):
            self._go_back(step)
        for key, value in entry.items():
            if key != "step" and not isinstance(value, (bool, str, list, dict)):
                self.members.setdefault(key, {})[step] = to_number(value)
        return True

    def _go_back(self, step):
        """The run restarted before this step: drop everything from there on."""
        for values in self.members.values():
            for s in [s for s in values if s >= step]:
                del values[s]

    def _measure(self):
        """Tokens and hours at every step, summed over steps; steps missing in the log count like their neighbours."""
        self.steps, self.tokens, self.hours = [0], [0.0], [0.0]
        for step in sorted(self.members.get("loss", {})):
            seconds = self.members.get("ms", {}).get(step, math.nan) / 1e3
            tokens = self.members.get("tok_s", {}).get(step, math.nan) * seconds
            if step == 0 or not (math.isfinite(tokens) and seconds >= 0):
                continue
            count = step - self.steps[-1]
            self.steps.append(step)
            self.tokens.append(self.tokens[-1] + count * tokens)
            self.hours.append(self.hours[-1] + count * seconds / 3600)

    def series(self, member):
        """Steps and values of a member, in order."""
        values = self.members.get(member, {})
        steps = sorted(values)
        return steps, [values[s] for s in steps]

    def has(self, member):
        return any(math.isfinite(v) for v in self.series(member)[1])


def to_number(value):
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def give_names(runs):
    """The shortest end of each path that tells the runs apart."""
    parts = [os.path.normpath(os.path.abspath(os.path.dirname(r.log) or ".")).split(os.sep) for r in runs]
    files = {r.log for r in runs if os.path.basename(r.log) != "log.jsonl"}
    parts = [p + [os.path.basename(r.log)] if r.log in files else p for p, r in zip(parts, runs)]
    for run, mine in zip(runs, parts):
        depth = 1
        while depth < len(mine) and sum(p[-depth:] == mine[-depth:] for p in parts) > 1:
            depth += 1
        run.name = "/".join(mine[-depth:])


def read_runs(paths):
    runs = []
    for path in paths:
        run = Run(path)
        if any(run.has(member) for member in run.members):
            runs.append(run)
        elif len(paths) > 1:
            print(f"warning: {run.log}: holds no step yet; skipped", file=sys.stderr)
        else:
            raise UserError(f"{run.log}: holds no step yet")
    if not runs:
        raise UserError(f"{paths[0]} and the others: hold no step yet")
    give_names(runs)
    return runs


# ----------------------------------------------------------------------------------------------------------
# The picture


class Axis:
    """The x axis: steps, tokens or time."""

    def __init__(self, kind, runs):
        self.kind = kind
        for run in runs:
            if kind != "step" and len(run.steps) < 2:
                raise UserError(f"{run.log}: has no step with tok_s and ms, which --x {kind} needs; give --x step")
        longest = max(run.hours[-1] for run in runs)
        self.unit, self.scale = ("hours", 1) if longest >= 2 else ("minutes", 60)
        self.label = {"step": "step", "tokens": "training tokens", "hours": f"{self.unit} of training steps"}[kind]

    def of(self, run, steps):
        if self.kind == "step":
            return np.array(steps, dtype=float)
        along = run.tokens if self.kind == "tokens" else [h * self.scale for h in run.hours]
        return np.interp(steps, run.steps, along)


def smoothed(values, style):
    """Places and the running mean or median there: over 1/25 of the run, narrower at its steep beginning."""
    at = np.unique(np.linspace(0, len(values) - 1, SMOOTH_POINTS).astype(int))
    reach = np.minimum(len(values) // 50, at)
    take = np.mean if style == "mean" else np.median
    return at, np.array([take(values[i - r : i + r + 1]) for i, r in zip(at, reach)])


def draw_series(plot, x, y, style, color):
    """Draw one member of one run; returns the values that are numbers."""
    finite = np.isfinite(y)
    x, y, lost = x[finite], y[finite], x[~finite]
    if len(lost) and style == "mean":
        plot.plot(lost, np.full(len(lost), 0.97), "x", color=color, transform=plot.get_xaxis_transform(), clip_on=False)
    single = "o" if len(y) == 1 else None
    if style in ("mean", "median"):
        is_noisy = len(y) >= 100  # enough points for a mean to be clearer than the points
        plot.plot(x, y, color=color, alpha=0.25 if is_noisy else 1, linewidth=0.7 if is_noisy else 1.4, marker=single)
        if is_noisy:
            places, smooth = smoothed(y, style)
            plot.plot(x[places], smooth, color=color, linewidth=1.5)
    elif style == "line":
        plot.plot(x, y, color=color, linewidth=1.5, marker=single)
    else:
        line, marker = ("-", "o") if style == "dots" else ("--", "s")
        marker = marker if len(y) <= 60 else None
        plot.plot(x, y, color=color, linestyle=line, linewidth=1.5, marker=marker, markersize=3.5)
    return y


def fit_odd_values(plot, values):
    """Limits that hold all but a hundredth of the values at either end: one slow step must not flatten the others."""
    low, high = np.percentile(np.concatenate(values), [1, 99])
    margin = 0.15 * (high - low) or 0.05 * abs(high) or 1
    bottom, top = plot.get_ylim()
    plot.set_ylim(max(bottom, low - margin), min(top, high + margin))


def draw_panel(plot, panel, runs, colors, axis):
    title, drawn = panel
    entries, odd = [], []
    for member, style, label in drawn:
        there = [(run, color) for run, color in zip(runs, colors) if run.has(member)]
        for run, color in there:
            steps, values = run.series(member)
            seen = draw_series(plot, axis.of(run, steps), np.array(values), style, color)
            odd += [seen] if style == "median" else []
        if there and label:
            line, marker = {"dots": ("-", "o"), "dashed": ("--", "s")}.get(style, ("-", None))
            entries.append(Line2D([], [], color="#666", linestyle=line, marker=marker, markersize=3.5, label=label))
    plot.set_title(title, fontsize=10, loc="left", fontweight="bold")
    plot.grid(True, color="#e6e6e6", linewidth=0.7)
    plot.set_axisbelow(True)
    plot.tick_params(labelsize=8, color="#999")
    plot.spines[["top", "right"]].set_visible(False)
    plot.spines[["left", "bottom"]].set_color("#999")
    plot.margins(x=0.02)
    if odd:
        fit_odd_values(plot, odd)
    for along, limits in ((plot.xaxis, plot.get_xlim()), (plot.yaxis, plot.get_ylim())):
        if max(map(abs, limits)) >= 1e4:
            along.set_major_formatter(EngFormatter(sep=""))  # 1.5M
    if entries:
        plot.legend(handles=entries, fontsize=8, frameon=False, handlelength=2.5)


def evaluation_panels(members):
    """Of sets (NAME_acc with NAME_acc_norm, NAME_perplexity), and of validation that no other panel shows."""
    panels, shown = [], {member for _, drawn in PANELS for member, _, _ in drawn}
    for member in sorted(members - shown):
        name, _, kind = member.rpartition("_")
        title = SET_NAMES.get(name, name)
        if kind == "acc":
            panels.append((f"{title} accuracy", [(member, "dots", "acc"), (f"{member}_norm", "dashed", "acc_norm")]))
        elif kind == "perplexity":
            panels.append((f"{title} perplexity", [(member, "dots", "")]))
        elif member.startswith("val_"):
            panels.append((f"Validation: {member[4:]}", [(member, "dots", "")]))
    return panels


def panels_of(runs):
    """The panels with data: speed in sequences/s if every run logs them, else in tokens/s."""
    speed = "tok_s" if all(run.has("seq_s") for run in runs) else "seq_s"
    panels = [p for p in PANELS if p[1][0][0] != speed]
    panels[EVALUATIONS_AFTER:EVALUATIONS_AFTER] = evaluation_panels({m for run in runs for m in run.members})
    return [p for p in panels if any(run.has(m) for m, _, _ in p[1] for run in runs)]


def draw(runs, options):
    if not matplotlib:
        raise UserError("the Python package 'matplotlib' is missing; install it with: pip install matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "plot"  # the same log gives the same file
    import matplotlib.pyplot as plt

    panels, axis = panels_of(runs), Axis(options.x, runs)
    colors = [matplotlib.colormaps["tab10" if len(runs) <= 10 else "tab20"](i % 20) for i in range(len(runs))]
    columns = len(panels) if len(panels) <= 2 else 2 if len(panels) <= 4 else 3
    rows = -(-len(panels) // columns)
    width, name_width = 4.6 * columns, 0.75 + 0.085 * max(len(run.name) for run in runs)
    legend_columns = max(1, min(len(runs), int(width / name_width)))
    legend_height = 0.2 * -(-len(runs) // legend_columns) + 0.15
    height = 3.0 * rows + legend_height
    figure, plots = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, sharex=True)
    plots = plots.ravel()
    for plot, panel in zip(plots, panels):
        draw_panel(plot, panel, runs, colors, axis)
    for i, plot in enumerate(plots):
        plot.set_visible(i < len(panels))
        plot.tick_params(labelbottom=True)
        if i + columns >= len(panels):
            plot.set_xlabel(axis.label, fontsize=9)
    names = [Line2D([], [], color=color, linewidth=2.5) for color in colors]
    figure.legend(names, [run.name for run in runs], loc="upper center", ncols=legend_columns, frameon=False,
                  fontsize=9, bbox_to_anchor=(0.5, 1))
    figure.tight_layout(rect=(0, 0, 1, 1 - legend_height / height), h_pad=1.5, w_pad=1.2)
    write_picture(figure, options.output)
    plt.close(figure)
    print(f"{options.output}: {len(panels)} panels of {len(runs)} {'run' if len(runs) == 1 else 'runs'}")


def write_picture(figure, path):
    """Write the whole file or nothing, because plots are viewed during a run."""
    kind = path.rsplit(".", 1)[1].lower()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with replacing(path) as f:
        figure.savefig(f, format=kind, dpi=130, metadata=undated)


# ----------------------------------------------------------------------------------------------------------
# Command line


def parse(arguments):
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's output directory, or its log.jsonl")
    parser.add_argument("--output", metavar="FILE", help=".png, .svg or .pdf (default: plot.png in the folder of the first log)")
    parser.add_argument("--x", choices=("step", "tokens", "hours"), default="step", help="the x axis (default: step)")
    options = parser.parse_args(arguments)
    if options.output is not None and options.output.rpartition(".")[2].lower() not in FORMATS:
        raise UserError(f"--output {options.output}: must end in .{', .'.join(FORMATS)}")
    return options


def main(arguments):
    options = parse(arguments)
    runs = read_runs(options.runs)
    options.output = options.output or os.path.join(os.path.dirname(runs[0].log), "plot.png")
    draw(runs, options)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
