"""Show a federation as text and as a heat map of clients by classes, and the columns of a table as inputs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from redgrape.data.federation import Federation
from redgrape.errors import StorageError
from redgrape.reading.pictures import pyplot
from redgrape.reading.terminal import listed, paragraph, printable, table
from redgrape.runs import durable

if TYPE_CHECKING:
    from numpy.typing import NDArray

HOLDERS = "holders"
COLUMNS = ("column", "kind", "different", "missing", "inputs")  # of a table
SHOWN = 20  # above this many clients, classes or columns, a summary is shown


def describe(federation: Federation) -> str:
    """Sizes, head, middle and tail classes, the examples of each client, and the inputs if they are from a table. Large
    federations are summarised."""
    is_small = federation.num_clients <= SHOWN and federation.num_classes <= SHOWN
    clients = _classes_by_clients(federation) if is_small else _clients_in_brief(federation)
    columns = [] if federation.columns is None else [_columns(federation)]
    return "\n\n".join([_overview(federation), _classes(federation), clients, *columns])


def draw(federation: Federation, path: Path) -> None:
    """Draw a PNG of the training examples per client (rows) and class (columns), with class totals as bars on top."""
    plt = pyplot()
    from matplotlib.colors import ListedColormap, LogNorm

    counts = federation.client_counts
    clients, classes = counts.shape
    annotated = clients <= SHOWN and classes <= SHOWN
    map_width = float(np.clip((0.6 if annotated else 0.14) * classes, 5, 14))
    map_height = float(np.clip((0.36 if annotated else 0.12) * clients, 2, 12))

    figure = plt.figure(figsize=(map_width + 1.8, map_height + 2.4), layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.2, map_height])

    for group, colour in (("head", "#1f4e79"), ("middle", "#7a9cc0"), ("tail", "#c0392b")):
        members = list(getattr(federation.groups, group))
        top.bar(members, federation.class_counts[members], color=colour, label=group if members else None)
    top.set_yscale("log")
    top.set_ylim(bottom=0.7)
    top.yaxis.set_major_formatter("{x:g}")
    top.set_ylabel("examples")
    top.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize="small")
    top.spines[["top", "right"]].set_visible(False)
    top.tick_params(axis="x", length=0, labelbottom=False)

    norm = LogNorm(vmin=1, vmax=max(2, int(counts.max())))
    blues = ListedColormap(plt.colormaps["Blues"](np.linspace(0.25, 1, 256)))  # one example must not look like none
    image = below.imshow(np.ma.masked_equal(counts, 0), norm=norm, cmap=blues, aspect="auto", interpolation="nearest")
    if annotated:
        for (client, c), count in np.ndenumerate(counts):
            if count:
                colour = "white" if float(norm(float(count))) > 0.45 else "#222222"
                below.text(c, client, count, ha="center", va="center", fontsize=7, color=colour)
    _label_axis(below.xaxis, federation.class_names, map_width)
    _label_axis(below.yaxis, federation.client_names, map_height)
    if 0.08 * max(map(len, federation.class_names)) > map_width / classes:
        below.tick_params(axis="x", rotation=90)
    below.set_xlabel("class")
    below.set_ylabel("client")
    bar = figure.colorbar(image, ax=[top, below], label="examples (white: none)", format="{x:g}", aspect=30, shrink=0.8)
    bar.ax.minorticks_off()
    try:
        figure.savefig(durable.ordinary(path), dpi=150, format="png")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        plt.close(figure)


def _label_axis(axis: Any, names: list[str], inches: float) -> None:
    """A tick for every class or client if they fit, else for every 2nd, 5th, 10th ..."""
    room = max(1, int(inches / 0.13))
    step = next(s * 10**e for e in range(9) for s in (1, 2, 5) if len(names) <= room * s * 10**e)
    ticks = range(0, len(names), step)
    axis.set_ticks(ticks, [printable(names[i]) for i in ticks], fontsize=7, parse_math=False)


def _overview(federation: Federation) -> str:
    sizes = federation.client_counts.sum(axis=1)
    totals = federation.class_counts
    smallest = int(totals.min())
    ratio = f"{totals.max() / smallest:.4g}" if smallest else "unbounded, a class is empty"
    validation = 0 if federation.validation is None else len(federation.validation)
    facts = [
        ("training examples", f"{sizes.sum()}"),
        ("test, validation", f"{len(federation.test)}, {validation}"),
        ("clients", f"{federation.num_clients}, of {sizes.min()} to {sizes.max()} examples"),
        ("classes", f"{federation.num_classes}, of {smallest} to {totals.max()} examples, ratio {ratio}"),
        ("split", federation.fingerprint()[:16]),
    ]
    return listed(facts)


def _classes(federation: Federation) -> str:
    tests = federation.counts("test") or []
    rows, members_of = [], []
    for group in ("head", "middle", "tail"):
        members = getattr(federation.groups, group)
        counts = federation.class_counts[list(members)]
        of_group = holders(federation)[list(members)]
        held = f"{np.median(of_group):.1f} ({of_group.min():.1f} to {of_group.max():.1f})" if members else "–"
        rows.append([group, len(members), counts.sum(), sum(tests[c] for c in members), held])
        names = [f"{federation.class_names[c]} {federation.class_counts[c]}/{tests[c]}" for c in members[:SHOWN]]
        more = [f"and {len(members) - SHOWN} more"] if len(members) > SHOWN else []
        members_of.append((group, ", ".join(names + more)))
    sizes = table(("group", "classes", "examples", "test", HOLDERS), rows, "Classes by training examples")
    held = paragraph("Holders of a class: their effective number, n_c^2 / sum_k n_kc^2; median (least to most)")
    return f"{sizes}\n{held}\n\nMembers: examples/test\n{listed(members_of)}"


def holders(federation: Federation) -> NDArray[np.float64]:
    """The effective number of clients that hold each class, n_c^2 / sum_k n_kc^2: K if all hold alike, 1 if one holds
    all, 0 if nobody holds it."""
    counts = federation.client_counts.astype(np.float64)
    squares = np.square(counts).sum(axis=0)
    effective: NDArray[np.float64] = np.square(counts.sum(axis=0)) / np.maximum(squares, 1)
    return effective


def _classes_by_clients(federation: Federation) -> str:
    """A row for each class: there may be many clients, and names of classes are long."""
    counts = federation.client_counts
    rows = [
        [name, *(n or "." for n in of_class), of_class.sum(), f"{held:.1f}"]
        for name, of_class, held in zip(federation.class_names, counts.T, holders(federation), strict=True)
    ]
    rows.append(["all", *counts.sum(axis=1), counts.sum(), ""])
    return table(
        ["class", *federation.client_names, "all", HOLDERS], rows, "Training examples of each class and client"
    )


def _clients_in_brief(federation: Federation) -> str:
    counts = federation.client_counts
    prior = federation.class_counts / federation.class_counts.sum()
    sizes = counts.sum(axis=1)
    distance = np.abs(counts / np.maximum(sizes, 1)[:, None] - prior).sum(axis=1) / 2
    rows = []
    for what, values, form in (
        ("examples", sizes, "{:g}"),
        ("classes present", (counts > 0).sum(axis=1), "{:g}"),
        ("tail examples", counts[:, list(federation.groups.tail)].sum(axis=1), "{:g}"),
        ("distance to the global class mixture (total variation)", distance, "{:.2f}"),
    ):
        rows.append([what, *(form.format(f(values)) for f in (np.min, np.median, np.max))])
    title = f"The {federation.num_clients} clients in brief"
    return table(("of a client", "least", "median", "most"), rows, title)


def inputs(federation: Federation) -> list[dict[str, Any]]:
    """For each column of a table, over the training rows: the number of different values and of missing ones, and the
    number of inputs that it gives."""
    assert federation.columns is not None
    rows = np.concatenate([federation.train.take(part).rows for part in federation.parts])
    x = federation.train.x.numpy()
    found = []
    for column, start in federation.columns.places():
        own = x[rows, start : start + column.width]
        missing = own[:, -1].astype(bool) & column.can_be_missing
        different = len(np.unique(own[~missing, 0]) if column.categories is None else column.categories)
        kind = "constant" if different == 1 else "numbers" if column.categories is None else "categories"
        found.append((column.name, kind, different, int(missing.sum()), column.width))
    found += [(name, "empty", 0, len(rows), 0) for name in federation.empty_columns]
    return [dict(zip(COLUMNS, values, strict=True)) for values in found]


def _columns(federation: Federation) -> str:
    """Among many columns, those that are of no use or give most inputs."""
    found = inputs(federation)
    total = sum(column["inputs"] for column in found)
    title = f"Inputs: {total} from {len(found)} columns, over the training rows"
    if len(found) > SHOWN:
        found.sort(key=lambda column: (column["different"] > 1, -column["inputs"], -column["missing"]))
        others = found[SHOWN:]
        rest = [sum(column[figure] for column in others) for figure in ("missing", "inputs")]
        found = [*found[:SHOWN], dict(zip(COLUMNS, (f"and {len(others)} more", "", "", *rest), strict=True))]
    return table(COLUMNS, [list(column.values()) for column in found], title)
