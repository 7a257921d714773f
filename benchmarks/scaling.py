"""What a step costs on G processes with N images: a model fitted to what was measured, its table and its picture.

    python benchmarks/scaling.py --out docs            # scaling.json, scaling.png, the tables of scaling.md
    torchrun --nproc-per-node 3 benchmarks/scaling.py --count      # bytes of a real step on the CPU against the formula

Times of the loss come from docs/benchmarks/loss.json and docs/log.md, that of the network from step-sgd.json; what
could not be measured on one GPU is an assumption, named in ASSUMED and printed in docs/scaling.md.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from measuring import save

BENCHMARKS = Path(__file__).parents[1] / "docs" / "benchmarks"
# Not measured here: one machine, one GPU.
ASSUMED = {
    "images/s of ResNet-50 at 224 px on one GPU, forward and backward": 3000.0,
    "GB/s that a GPU sends and receives inside a machine": 300.0,
    "GB/s that a GPU sends and receives between machines": 40.0,
    "µs a collective takes by itself": 25.0,
    "ps an image of the data set takes to be drawn or not, when rows are sampled": 25.0,
    "GB of a GPU's memory that a bank may take": 100.0,
}
EAGER_MS = 24.3  # docs/log.md, "The step": ResNet-18 at 32 px, batch 512, not compiled: most of it is launching kernels
ROW_BYTES = 2  # bfloat16
SIZES = (1_281_167, 14_000_000, 100_000_000)  # ImageNet, ImageNet-21k, and beyond
DIMS = (256, 2048)
SAMPLED = 10_000  # rows, as in the code released with the paper


class Net(NamedTuple):
    name: str
    parameters: int  # with a head of 2048-2048-D
    microseconds: float  # an image, forward and backward
    norm_layers: int
    norm_channels: int
    size: int  # px


class Case(NamedTuple):
    images: int
    dim: int
    batch: int
    processes: int
    machines: int
    net: Net
    sampled: int = 0


def fitted(dim: int) -> tuple[float, float, float]:
    """The loss over rows of `dim` takes a ms and c ps a cosine -> a, c, and the largest error of the fit as a share.

    Least squares of relative errors over the rows of loss.json that are too large for their cosines to be kept.
    """
    rows = json.loads((BENCHMARKS / "loss.json").read_text())["rows"]
    rows = [r for r in rows if r["dim"] == dim and not r["kept_cosines"]]
    times = np.array([r["loss_ms"] for r in rows])
    cosines = np.array([r["images"] * r["batch"] for r in rows], float) / 1e9
    terms = np.stack([np.ones_like(cosines), cosines], 1) / times[:, None]
    (a, c), *_ = np.linalg.lstsq(terms, np.ones(len(rows)), rcond=None)
    if a < 0:  # no time is less than none
        a, c = 0.0, np.linalg.lstsq(terms[:, 1:], np.ones(len(rows)), rcond=None)[0][0]
    return float(a), float(c), float(np.abs(terms @ (a, c) - 1).max())


def loss_ms(rows: float, batch: int, dim: int) -> float:
    a, c, _ = fitted(dim)
    return a + c * rows * batch / 1e9


def nets() -> dict[str, Net]:
    step = json.loads((BENCHMARKS / "step-sgd.json").read_text())
    small = step["stages"]["network forward and backward"] * 1e3 / step["settings"]["batch_size"]
    large = 1e6 / ASSUMED["images/s of ResNet-50 at 224 px on one GPU, forward and backward"]
    return {
        "small": Net("ResNet-18, 32 px", 16_900_000, small, 20, 4_800 + 4_096, 32),
        "large": Net("ResNet-50, 224 px", 32_400_000, large, 53, 26_560 + 4_096, 224),
    }


def volume(case: Case, row_bytes: int = ROW_BYTES) -> dict[str, float]:
    """Bytes that each process receives in a step of sid, by ring collectives; gathered parts count once, sums twice."""
    g, b, d = case.processes, case.batch, case.dim
    share = (g - 1) / g
    return {
        "features gathered": (g - 1) * -(-b // g) * d * 4,  # parts of one length
        "own and mixed rows": 2 * 2 * share * b * d * row_bytes,
        "statistics of the softmax": (g - 1) * 7 * b * 4,
        "dz": 2 * share * b * d * 4,
        "neighbour's image for CutMix": 3 * case.net.size**2 * 4 if g > 1 else 0,
        "batch norm": ((g - 1) * 3 + 2 * share * 2) * case.net.norm_channels * 4,
        "gradients of the network": 2 * share * case.net.parameters * 4,
    }


def step(case: Case) -> dict[str, float]:
    """Milliseconds by part. Gradients travel under the backward pass: what is longer than half of it is waited for."""
    rows = min(case.sampled, case.images) if case.sampled else case.images
    network = case.net.microseconds * case.batch / case.processes / 1e3
    floor = EAGER_MS if case.processes > 1 else 0.0  # several processes do not compile and capture the step
    loss = loss_ms(rows / case.processes, case.batch, case.dim)
    if case.sampled:
        loss += (
            case.images * ASSUMED["ps an image of the data set takes to be drawn or not, when rows are sampled"] / 1e9
        )
    where = "between machines" if case.machines > 1 else "inside a machine"
    speed = ASSUMED[f"GB/s that a GPU sends and receives {where}"] * 1e6  # bytes a millisecond
    parts = volume(case)
    gradients = parts.pop("gradients of the network") / speed
    collectives = (6 + 2 * case.net.norm_layers) if case.processes > 1 else 0
    waits = sum(parts.values()) / speed + collectives * ASSUMED["µs a collective takes by itself"] / 1e3
    network = max(network, floor)
    return {
        "network": network,
        "loss over the bank": loss,
        "collectives": waits + max(0.0, gradients - network / 2),
    }


def memory(case: Case) -> dict[str, float]:
    """GB a process: its part of the bank; weights with gradient, momentum and a copy in bfloat16."""
    return {
        "bank": case.images / case.processes * case.dim * ROW_BYTES / 1e9,
        "network": case.net.parameters * 14 / 1e9,
        "pack on disk, all": case.images * 3 * (case.net.size * 8 // 7) ** 2 / 1e9,
    }


def break_even(net: Net, dim: int, share: float) -> float:
    """Images for which the exact loss takes `share` of the network's time: N·c = share·τ, whatever B and G are."""
    return share * net.microseconds * 1e6 / fitted(dim)[1]


def fewest(images: int, dim: int) -> int:
    """GPUs whose memory holds the bank."""
    room = ASSUMED["GB of a GPU's memory that a bank may take"] * 1e9
    return max(1, -(-images * dim * ROW_BYTES // int(room)))


def rows() -> list[dict]:
    large, small = nets()["large"], nets()["small"]
    cases = [Case(50_000, 256, 512, g, 1, small) for g in (1, 8)]
    for images in SIZES:
        cases += [
            Case(images, dim, 64 * max(8, processes), processes, -(-processes // 8), large)
            for dim in DIMS
            for processes in (1, 8, 64)
        ]
        cases.append(Case(images, 256, 512, 8, 1, large, SAMPLED))
    out = []
    for case in cases:
        parts = step(case)
        whole = sum(parts.values())
        out.append(
            {
                **{k: v for k, v in case._asdict().items() if k != "net"},
                "network_name": case.net.name,
                "milliseconds": parts,
                "images_per_second": case.batch / whole * 1e3,
                "hours_per_epoch": case.images / case.batch * whole / 3.6e6,
                "received_mb": {k: v / 1e6 for k, v in volume(case).items()},
                "gb": memory(case),
                "fits": memory(case)["bank"] <= ASSUMED["GB of a GPU's memory that a bank may take"],
            }
        )
    return out


def table(found: list[dict]) -> str:
    lines = [
        "| N | D | network | B | GPUs | network, ms | loss, ms | collectives, ms | images/s | an epoch | "
        "received, MB (of it gradients) | bank a GPU, GB |",
        "| " + " | ".join(["---"] * 12) + " |",
    ]
    for r in found:
        parts, received = r["milliseconds"], r["received_mb"]
        lines.append(
            f"| {r['images']:,} | {r['dim']}{', 10,000 sampled' * bool(r['sampled'])} | {r['network_name']} | "
            f"{r['batch']:,} | {r['processes']} | {parts['network']:.1f} | {parts['loss over the bank']:.2f} | "
            f"{parts['collectives']:.1f} | {r['images_per_second']:,.0f} | {hours(r['hours_per_epoch'])} | "
            f"{sum(received.values()):.0f} ({received['gradients of the network']:.0f}) | "
            f"{r['gb']['bank']:.2f}{'' if r['fits'] else ', does not fit'} |"
        )
    return "\n".join(lines)


def hours(value: float) -> str:
    if value < 1 / 60:
        return f"{value * 3600:.1f} s"
    return f"{value * 60:.1f} min" if value < 1 else f"{value:.1f} h"


def even_table() -> str:
    lines = ["| network | D | loss = 10 % of the network | loss = network |", "| --- | --- | --- | --- |"]
    for net in nets().values():
        for dim in DIMS:
            tenth, whole = (f"N = {break_even(net, dim, s) / 1e6:.1f} million" for s in (0.1, 1.0))
            lines.append(f"| {net.name} | {dim} | {tenth} | {whole} |")
    return "\n".join(lines)


def need_table() -> str:
    lines = [
        "| images | D | bank in all | GPUs that hold it | pack at 256 px | an epoch on 8 GPUs, all rows | "
        "the same, 10,000 rows | on 64, all rows |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    large = nets()["large"]
    for images in SIZES:
        for dim in DIMS:
            few = max(8, fewest(images, dim))

            def epoch(case: Case) -> str:
                return hours(case.images / case.batch * sum(step(case).values()) / 3.6e6)

            exact, drawn = (epoch(Case(images, dim, 64 * few, few, 1, large, s)) for s in (0, SAMPLED))
            lines.append(
                f"| {images:,} | {dim} | {images * dim * ROW_BYTES / 1e9:.1f} GB | {fewest(images, dim)} | "
                f"{memory(Case(images, dim, 1, 1, 1, large))['pack on disk, all'] / 1e3:.2f} TB | {exact} | {drawn} | "
                f"{epoch(Case(images, dim, 4096, 64, 8, large))} |"
            )
    return "\n".join(lines)


def assumptions() -> str:
    measured = [
        f"the loss over rows of {dim} takes {a:.2f} ms and {c:.2f} ps a cosine (loss.json; the fit is {error:.0%} off)"
        for dim in DIMS
        for a, c, error in [fitted(dim)]
    ]
    measured += [
        f"an image of 32 px through ResNet-18 takes {nets()['small'].microseconds:.1f} µs (step-sgd.json)",
        f'a step that is not compiled, as on several processes, takes {EAGER_MS} ms at least (log.md, "The step")',
    ]
    guessed = [f"{value:g} {name}" for name, value in ASSUMED.items()]
    return "\n".join(["Measured:", "", *(f"- {m}" for m in measured), "", "Assumed:", "", *(f"- {g}" for g in guessed)])


def picture(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    large = nets()["large"]
    counts = np.logspace(5, 8, 60).astype(int)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    left.axhline(large.microseconds, color="black", label="ResNet-50 at 224 px")
    for dim, colour in zip(DIMS, ("tab:blue", "tab:orange"), strict=True):
        left.plot(counts, counts * fitted(dim)[1] / 1e6, color=colour, label=f"exact loss, D = {dim}")
    key = ASSUMED["ps an image of the data set takes to be drawn or not, when rows are sampled"]
    drawn = SAMPLED * fitted(256)[1] / 1e6 + 8 * counts * key / 512 / 1e6
    left.plot(counts, drawn, "--", color="tab:blue", label="10,000 rows, D = 256 (8 GPUs, batch 512)")
    left.set(xscale="log", yscale="log", xlabel="images N", ylabel="µs an image, on one GPU")
    left.set_title("the loss against the network: no matter B and G", fontsize=10)
    left.legend(fontsize=8)
    sizes = [1, 2, 4, 8, 16, 32, 64, 128]
    for images, colour in zip(SIZES, ("tab:green", "tab:blue", "tab:red"), strict=True):
        for sampled, style in ((0, "-"), (SAMPLED, "--")):
            speeds = []
            for g in sizes:
                case = Case(images, 256, 64 * max(8, g), g, -(-g // 8), large, sampled)
                speeds.append(case.batch / sum(step(case).values()) * 1e3)
            label = f"N = {images:,}{', 10,000 rows' * bool(sampled)}"
            right.plot(sizes, speeds, style, color=colour, label=label)
    right.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="images/s", xticks=sizes, xticklabels=sizes)
    right.set_title("D = 256, at least 64 images a GPU", fontsize=10)
    right.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write(folder: Path) -> None:
    found = rows()
    save(
        {"assumed": ASSUMED, "fitted": {dim: fitted(dim) for dim in DIMS}, "rows": found},
        folder / "benchmarks" / "scaling.json",
    )
    picture(folder / "benchmarks" / "scaling.png")
    document = folder / "scaling.md"
    text = document.read_text()
    made = {"needs": need_table(), "steps": table(found), "even": even_table(), "assumptions": assumptions()}
    for name, content in made.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + content + "\n" + end + rest.partition(end)[2]
    document.write_text(text)


def count() -> None:
    """A real step of sid on a few CPU processes: the bytes that its collectives bring, beside the formula.

    Gradients of the network are left out: DistributedDataParallel sends them from C++.
    """
    import torch
    import torch.distributed as dist

    from onecrop.build import build_method
    from onecrop.choices import resolve
    from onecrop.data import Loader, load
    from onecrop.data.sources import Request
    from onecrop.distributed import joined
    from onecrop.nets.norms import share_norms
    from onecrop.optim import OPTIMIZERS
    from onecrop.recipe import Recipe
    from onecrop.step import TrainStep

    received = dict.fromkeys(("all_reduce", "all_gather_into_tensor", "all_to_all_single"), 0.0)
    with joined() as group:
        cpu = torch.device("cpu")
        images = load("shapes", request=Request(subset=203, image_size=16))
        recipe = Recipe(data="shapes", backbone="tiny", batch_size=50).override({"dim": 64, "hidden": 32})
        method = build_method(resolve(recipe, images, cpu), len(images))
        share_norms(method, group, 50, cpu)
        optimizer = OPTIMIZERS["sgd"].build(method.parameters(), torch.tensor(0.1), 0.9, 0.0)
        step = TrainStep(method, optimizer, Loader(images, 50, cpu, 0, group), 0, fast=False)
        honest = {name: getattr(dist, name) for name in received}

        def counting(name: str):
            factor = {"all_reduce": 2 * (group.size - 1) / group.size, "all_to_all_single": 1}
            factor["all_gather_into_tensor"] = (group.size - 1) / group.size  # the first tensor is the whole

            def call(tensor: torch.Tensor, *rest, **more):
                received[name] += factor[name] * tensor.numel() * tensor.element_size()
                return honest[name](tensor, *rest, **more)

            return call

        for name in received:
            setattr(dist, name, counting(name))
        step(0, 0.1, 0.0)
        net = Net("tiny, 16 px", 0, 0.0, 6, 32 + 64 + 128 + 256 + 2 * 32, 16)
        expected = volume(Case(203, 64, 50, group.size, 1, net), row_bytes=4)
        print(json.dumps({"counted": received, "formula": expected}, indent=2))
        print(f"counted {sum(received.values()):,.0f} bytes, formula {sum(expected.values()):,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the docs folder to write into")
    parser.add_argument("--count", action="store_true", help="count the bytes of a real step, under torchrun")
    args = parser.parse_args()
    if args.count:
        count()
    elif args.out:
        write(args.out)
    else:
        print(table(rows()), even_table(), need_table(), assumptions(), sep="\n\n")


if __name__ == "__main__":
    main()
