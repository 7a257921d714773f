"""The exact loss over a bank of N images: time against its matrix products, memory, and the dense form with autograd.

    python benchmarks/loss.py [--out docs/benchmarks/loss.json] [--picture docs/benchmarks/loss.png]

The floor of a row is the products alone, in the same blocks and the same run: two where the cosines are kept (N small),
three where they are recomputed. On a GPU both are captured as graphs, as in training.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring import save

from onecrop.device import choose_device, choose_precision, describe
from onecrop.losses import instance, instance_loss, sqrt_kl

SETTINGS = {"temperature": 0.2, "kl_temperature": 1.0, "kl_weight": 20.0}
ON_GPU = [(10**4, 2048), (50_000, 2048), (10**5, 2048), (300_000, 2048), (1_281_167, 2048)]
ON_GPU += [(10**4, 256), (50_000, 256), (300_000, 256), (1_281_167, 256), (14_000_000, 256)]
ON_CPU = [(5000, 128), (50_000, 128), (500_000, 128)]


def milliseconds(work, repeats=7) -> float:
    if not torch.cuda.is_available():
        work()
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            work()
            times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def extra_memory(work) -> int | None:
    if not torch.cuda.is_available():
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(num_images: int, dim: int, batch: int, device: torch.device) -> dict:
    dtype = getattr(torch, choose_precision(device))
    rows = torch.empty(num_images, dim, device=device, dtype=dtype)
    for part in rows.split(500_000):
        part.copy_(F.normalize(torch.randn(part.shape, device=device, dtype=dtype), dim=1))
    z = F.normalize(torch.randn(batch, dim, device=device), dim=1).requires_grad_()
    target = torch.arange(batch, device=device)
    operand = z.detach().to(dtype)
    dense = batch * num_images <= instance.DENSE_ELEMENTS

    def products() -> None:
        for block in instance._blocks(batch, num_images, device):
            c = operand @ rows[block].T
            if not dense:
                c = operand @ rows[block].T
            c @ rows[block]

    def streamed() -> None:
        out = instance_loss(z, rows, target, **SETTINGS)
        (out.cross_entropy + 20.0 * out.sqrt_kl).backward()

    def autograd() -> None:
        c = (z.to(dtype) @ rows.T).float()
        loss = F.cross_entropy(c / 0.2, target) + 20.0 * sqrt_kl(c).mean()
        loss.backward()

    row = {"images": num_images, "dim": dim, "batch": batch, "kept_cosines": dense}
    row["products_ms"] = milliseconds(products)
    row["loss_ms"] = milliseconds(streamed)
    row["ratio"] = row["loss_ms"] / row["products_ms"]
    row["extra_bytes"] = extra_memory(streamed)
    try:
        row["dense_autograd_ms"] = milliseconds(autograd, repeats=3)
        row["dense_autograd_extra_bytes"] = extra_memory(autograd)
    except torch.OutOfMemoryError:
        row["dense_autograd_ms"] = None  # does not fit
    z.grad = None
    return row


def picture(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4.2), layout="constrained")
    for number, (key, label) in enumerate(
        (("products_ms", "matrix products"), ("loss_ms", "ours"), ("dense_autograd_ms", "dense autograd"))
    ):
        for dim, line in zip(sorted({row["dim"] for row in rows}, reverse=True), ("-", "--"), strict=False):
            kept = [row for row in rows if row.get(key) and row["dim"] == dim]
            x, y = [r["images"] for r in kept], [r[key] for r in kept]
            axis.plot(x, y, line, color=f"C{number}", marker="o", label=f"{label}, D = {dim}")
    axis.set(xscale="log", yscale="log", xlabel="images in the bank", ylabel="ms, loss and gradient")
    axis.set_title(f"batch {rows[0]['batch']}")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, help="[512; on a CPU 128]")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path, help="draw the rows of --out, which may lie there already")
    args = parser.parse_args()
    if args.picture and args.out and args.out.exists():
        picture(json.loads(args.out.read_text())["rows"], args.picture)
        return
    device = choose_device("auto")
    rows = []
    gpu = device.type == "cuda"
    for num_images, dim in ON_GPU if gpu else ON_CPU:
        rows.append(measure(num_images, dim, args.batch_size or (512 if gpu else 128), device))
        print(json.dumps(rows[-1]), flush=True)
    result = {"device": describe(device), "torch": torch.__version__, "rows": rows}
    save(result, args.out)
    if args.picture:
        picture(rows, args.picture)


if __name__ == "__main__":
    main()
