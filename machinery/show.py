"""Tables and figures, and the statistics under them: numpy and pandas do the arithmetic."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

Panel = tuple[str, str, str, Callable]  # title, x label, y label, draw(axes)


def print_table(head: list[str], rows: list[list[object]]) -> None:
    """A Markdown table with aligned columns; floats to three digits."""
    cells = [head, ["---"] * len(head)]
    for row in rows:
        cells.append([f"{one:.3g}" if isinstance(one, float) else str(one) for one in row])
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("| " + " | ".join(padded) + " |")


def import_pyplot() -> object:
    """matplotlib's pyplot, drawing into files. Raises ValueError where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("Figures need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: object, out: str) -> None:
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(out, dpi=130)
    except OSError as error:
        Path(out).unlink(missing_ok=True)
        raise OSError(f"{out} could not be written ({error}).") from error
    import_pyplot().close(figure)
    print(f"Wrote {out}")


def figure(out: str, panels: list[Panel]) -> None:
    """A row of panels as a PNG."""
    plt = import_pyplot()
    size = (5 * len(panels), 3.8)
    fig, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for ax, (title, x, y, draw) in zip(axes[0], panels, strict=True):
        draw(ax)
        ax.set(title=title, xlabel=x, ylabel=y)
        ax.spines[["top", "right"]].set_visible(False)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, fontsize=8)
    save_figure(fig, out)


def trailing_mean(values: Sequence[float], window: int = 25) -> np.ndarray:
    return pd.Series(values).rolling(window, min_periods=1).mean().to_numpy()


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """The correlation of ranks, ties by their average rank."""
    return pd.Series(x).rank().corr(pd.Series(y).rank())


def interval(values: Sequence[float], draws: int = 1000) -> str:
    """Bootstrap 95% interval of the mean, as text."""
    rng = np.random.default_rng(0)
    means = rng.choice(np.asarray(values, dtype=float), (draws, len(values))).mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{low:.2f} to {high:.2f}"
