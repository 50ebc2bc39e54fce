"""Section `plots`: pictures of what the other sections left in a folder; needs matplotlib.

python benchmarks/gpu/plots.py benchmarks/results/gpu
"""

import json
import sys
from pathlib import Path


def main(folder: Path) -> int:
    written = folder / "model.json"
    if not written.is_file():
        print("no model.json: nothing to plot")
        return 0
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plots")
        return 0
    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = json.loads(written.read_text(encoding="utf-8"))
    figure, (verify, draft, policy) = pyplot.subplots(1, 3, figsize=(15, 4.2))
    table = found.get("step_table", {})
    if "rows" in table:
        verify.plot(table["rows"], table["verify_ms"], marker="o", markersize=3)
        verify.set(xlabel="rows of a target step", ylabel="ms", title="verification", xscale="log", ylim=0)
        draft.plot(table["requests"], table["draft_ms"], marker="o", markersize=3)
        draft.set(xlabel="requests", ylabel="ms", title="drafting a block of 7", xscale="log", ylim=0)
    rows = found.get("policies")
    if isinstance(rows, list):
        for name in rows[0]["tokens_per_s"]:
            rates = [row["tokens_per_s"][name] / row["requests"] for row in rows]
            style = {"linewidth": 2.5, "color": "black"} if name == "adaptive" else {"linewidth": 1}
            policy.plot([row["requests"] for row in rows], rates, label=name, **style)
        policy.set(
            xlabel="requests", ylabel="tokens/s/request", title="made-up acceptance", xscale="log", ylim=0
        )
        policy.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "model.svg")
    print(folder / "model.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
