#!/usr/bin/env python3
"""Plot one or more runs from their log.jsonl.

    plot.py out/mine                              -> out/mine/plot.png
    plot.py out/a out/b out/c --output compare.svg

A run is its output directory. Each quantity in a log gets a panel, each run a colour: training loss (faint, with a
running mean), validation loss, HellaSwag and other sets, BERT's two losses and accuracies, speed, gradient norm,
learning rate. Values that are not numbers (null, NaN) are skipped and, in the training loss, marked by a cross. If a
step is repeated, its last line counts; an incomplete line is skipped. A log may still be growing.

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

# Panels from the top left: title and what is drawn: member of the log, style, name in the panel's own legend. "mean":
# faint with a running mean. "median": the same with a running median, and outliers may leave the panel. "dots" and
# "dashed": measured only at some steps.
PANELS = [
    ("Training loss", [("loss", "mean", "")]),
    ("Validation loss", [("val_loss", "dots", "")]),
    ("Masked tokens: loss", [("mlm_loss", "mean", "training"), ("val_mlm_loss", "dashed", "validation")]),
    ("Next sentence: loss", [("nsp_loss", "mean", "training"), ("val_nsp_loss", "dashed", "validation")]),
    ("Validation accuracy", [("val_mlm_accuracy", "dots", "masked tokens"),
                             ("val_nsp_accuracy", "dashed", "next sentence")]),
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
    """One log: the values of every member by step."""

    def __init__(self, path):
        self.name, self.log = os.path.normpath(path), os.path.join(path, "log.jsonl")
        self.members = {}  # name -> {step: value, NaN where it was none}
        try:
            with open(self.log, encoding="utf-8", errors="replace") as f:
                for line in f:
                    self._read_line(line)
        except FileNotFoundError:
            raise UserError(f"{path}: holds no log.jsonl; -o of the trainer names the directory")
        except OSError as e:
            raise UserError(f"{self.log}: cannot be read: {e.strerror}")
        if not any(map(self.has, self.members)):
            raise UserError(f"{self.log}: holds no step yet, or is not a log of a run")

    def _read_line(self, line):
        try:
            entry = parse_json(line)
        except ValueError:
            return
        step = entry.get("step") if isinstance(entry, dict) else None
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
            return
        if "loss" in entry and step in self.members.get("loss", {}):
            for key, values in self.members.items():  # the run restarted before this step
                self.members[key] = {s: value for s, value in values.items() if s < step}
        for key, value in entry.items():
            if key != "step" and not isinstance(value, (bool, str, list, dict)):
                self.members.setdefault(key, {})[step] = to_number(value)

    def series(self, member):
        """Steps and values of a member, in order."""
        values = self.members.get(member, {})
        steps = sorted(values)
        return steps, [values[s] for s in steps]

    def has(self, member):
        return any(map(math.isfinite, self.members.get(member, {}).values()))


def to_number(value):
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


# ----------------------------------------------------------------------------------------------------------
# The picture


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
    if style in ("dots", "dashed"):
        line, marker = ("-", "o") if style == "dots" else ("--", "s")
        marker = marker if len(y) <= 60 else None
        plot.plot(x, y, color=color, linestyle=line, linewidth=1.5, marker=marker, markersize=3.5)
    elif style == "line" or len(y) < 100:
        plot.plot(x, y, color=color, linewidth=1.5, marker=single)
    else:  # enough points for a mean to be clearer than the points
        plot.plot(x, y, color=color, alpha=0.25, linewidth=0.7)
        places, smooth = smoothed(y, style)
        plot.plot(x[places], smooth, color=color, linewidth=1.5)
    return y


def fit_odd_values(plot, values):
    """Limits that hold all but a hundredth of the values at either end: one slow step must not flatten the others."""
    low, high = np.percentile(np.concatenate(values), [1, 99])
    margin = 0.15 * (high - low) or 0.05 * abs(high) or 1
    bottom, top = plot.get_ylim()
    plot.set_ylim(max(bottom, low - margin), min(top, high + margin))


def draw_panel(plot, panel, runs, colors):
    title, drawn = panel
    entries, odd = [], []
    for member, style, label in drawn:
        there = [(run, color) for run, color in zip(runs, colors) if run.has(member)]
        for run, color in there:
            steps, values = run.series(member)
            seen = draw_series(plot, np.array(steps, dtype=float), np.array(values), style, color)
            odd += [seen] if style == "median" else []
        if there and label:
            line, marker = {"dots": ("-", "o"), "dashed": ("--", "s")}.get(style, ("-", None))
            entries.append(Line2D([], [], color="#666", linestyle=line, marker=marker, markersize=3.5, label=label))
    plot.set_title(title, fontsize=10, loc="left", fontweight="bold")
    plot.grid(True, color="#e6e6e6", linewidth=0.7)
    plot.set_axisbelow(True)
    plot.tick_params(labelsize=8, labelbottom=True)
    plot.spines[["top", "right"]].set_visible(False)
    plot.set_xlabel("step", fontsize=9)
    if odd:
        fit_odd_values(plot, odd)
    if max(map(abs, plot.get_ylim())) >= 1e4:
        plot.yaxis.set_major_formatter(EngFormatter(sep=""))  # 1.5M
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
    """The panels with data."""
    panels = [*PANELS]
    panels[EVALUATIONS_AFTER:EVALUATIONS_AFTER] = evaluation_panels({m for run in runs for m in run.members})
    return [p for p in panels if any(run.has(m) for m, _, _ in p[1] for run in runs)]


def draw(runs, output):
    if not matplotlib:
        raise UserError("the Python package 'matplotlib' is missing; install it with: pip install matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "plot"  # the same log gives the same file
    import matplotlib.pyplot as plt

    panels = panels_of(runs)
    colors = [matplotlib.colormaps["tab10" if len(runs) <= 10 else "tab20"](i % 20) for i in range(len(runs))]
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    legend_height = 0.2 * len(runs) + 0.15
    height = 3.0 * rows + legend_height
    figure, plots = plt.subplots(rows, columns, figsize=(4.6 * columns, height), squeeze=False, sharex=True)
    for plot, panel in zip(plots.ravel(), panels):
        draw_panel(plot, panel, runs, colors)
    for plot in plots.ravel()[len(panels) :]:
        plot.set_visible(False)
    names = [Line2D([], [], color=color, linewidth=2.5) for color in colors]
    figure.legend(names, [run.name for run in runs], loc="upper center", frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 1 - legend_height / height), h_pad=1.5, w_pad=1.2)
    kind = output.rpartition(".")[2].lower()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with replacing(output) as f:  # the whole file or nothing, because plots are viewed during a run
        figure.savefig(f, format=kind, dpi=130, metadata=undated)
    print(f"{output}: {len(panels)} panels of {len(runs)} {'run' if len(runs) == 1 else 'runs'}")


def main(arguments):
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's output directory")
    parser.add_argument("--output", metavar="FILE", help=".png, .svg or .pdf (default: plot.png in the first RUN)")
    options = parser.parse_args(arguments)
    output = options.output or os.path.join(options.runs[0], "plot.png")
    if output.rpartition(".")[2].lower() not in FORMATS:
        raise UserError(f"--output {output}: must end in .{', .'.join(FORMATS)}")
    draw([Run(path) for path in options.runs], output)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
