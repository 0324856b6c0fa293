"""Converts a large synthetic checkpoint, and measures speed compared with `cp`, peak memory, and resuming after kills.

    python benchmarks/convert_checkpoint.py --gigabytes 2 --kills 50

Every conversion runs in a process of its own. Conversions take turns with `cp`, which copies the same files on the same
disk. Both count as done when the operating system has the data, which may not be on the disk yet. The source is in the
page cache.

On a virtual machine, `cp` of 2 GB took anything from 0.5 s to 3 s, because the machine had to ask its host for memory.
Before each run, the program therefore writes and frees as much memory as the result needs.

Peak memory includes about 220 MB for Python and torch.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
SHARD_LAYERS = 24
LAYOUTS = ("gptq", "gptq-act-order", "awq", "compressed-tensors")
CODES_PER_WORD, GROUP = 8, 128


def layer_tensors(layout: str, K: int, N: int, seed: int) -> dict[str, torch.Tensor]:
    """Returns the tensors of a layer, with random 4-bit words. Only the sizes matter for this benchmark."""
    generator = torch.Generator().manual_seed(seed)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator)

    scales = torch.rand(K // GROUP, N, generator=generator).half()
    if layout == "compressed-tensors":
        shape = torch.tensor([N, K])
        packed = words(N, K // CODES_PER_WORD)
        return {"weight_packed": packed, "weight_scale": scales.t().contiguous(), "weight_shape": shape}
    if layout == "awq":
        packed, zeros = words(K, N // CODES_PER_WORD), words(K // GROUP, N // CODES_PER_WORD)
        return {"qweight": packed, "qzeros": zeros, "scales": scales}
    groups = torch.arange(K, dtype=torch.int32) // GROUP
    if layout == "gptq-act-order":
        groups = groups[torch.randperm(K, generator=generator)]
    zeros = torch.full((K // GROUP, N // CODES_PER_WORD), 0x77777777, dtype=torch.int32)
    return {"qweight": words(K // CODES_PER_WORD, N), "qzeros": zeros, "scales": scales, "g_idx": groups}


def make_checkpoint(path: Path, layout: str, total: int, K: int, N: int) -> int:
    """Writes shards until there are `total` bytes. Returns the number of bytes."""
    path.mkdir(parents=True)
    settings = {"quant_method": layout.partition("-act")[0], "bits": 4, "group_size": GROUP}
    settings |= {"sym": True, "desc_act": "act-order" in layout} if "gptq" in layout else {}
    weights = {"num_bits": 4, "group_size": GROUP}
    settings |= {"config_groups": {"group_0": {"weights": weights}}} if layout == "compressed-tensors" else {}
    (path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    places: dict[str, str] = {}
    size = shard = 0
    while size < total:
        shard += 1
        tensors = {f"norm.{shard}.weight": torch.ones(K)}
        for i in range(SHARD_LAYERS):
            made = layer_tensors(layout, K, N, 1000 * shard + i)
            tensors |= {f"layers.{shard}.{i}.{role}": tensor for role, tensor in made.items()}
        file = f"model-{shard:05d}.safetensors"
        save_file(tensors, path / file)
        places |= dict.fromkeys(tensors, file)
        size += (path / file).stat().st_size
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return size


def start(source: Path, destination: Path, shard_mb: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "torch_marlin_metal", "convert", str(source), str(destination)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*command, "--shard-mb", str(shard_mb)], env=environment, stdout=subprocess.DEVNULL)


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def fetch_memory(nbytes: int) -> None:
    """Writes to memory in another process. The machine then has this much free memory without asking its host."""
    subprocess.run([sys.executable, "-S", "-c", f"b'1' * {nbytes}"], check=True)


def convert(source: Path, destination: Path, shard_mb: int) -> tuple[float, float, float, int]:
    """Converts in a new process.

    Returns the seconds of the process, the seconds and CPU seconds of the conversion in it, and the peak resident size.
    """
    began = time.perf_counter()
    command = [sys.executable, __file__, "--measure", str(source), str(destination), "--shard-mb", str(shard_mb)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"the conversion failed: {done.stderr}")
    inside, cpu, peak, fetching = json.loads(done.stdout)
    return seconds - fetching, inside, cpu, peak


def measure(source: Path, destination: Path, shard_mb: int) -> None:
    """Runs in the child process: converts as the command line does, without a progress bar."""
    from torch_marlin_metal.convert import open_reader, write_checkpoint

    began = time.perf_counter()
    fetch_memory(size_of(source))
    fetching = time.perf_counter() - began
    began, cpu = time.perf_counter(), time.process_time()
    write_checkpoint(open_reader(source), destination, max_shard_bytes=shard_mb * 10**6)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    # In the parent, ru_maxrss of a child is at least the parent's own size. The child therefore measures itself.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if Path("/proc/self/status").exists():
        status = Path("/proc/self/status").read_text()
        peak = 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
    print(json.dumps([seconds, cpu, peak, fetching]))


def digest(path: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file."""
    found = {}
    for file in sorted(path.iterdir()):
        with file.open("rb") as stream:
            found[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def kill_and_resume(source: Path, work: Path, shard_mb: int, kills: int, seconds: float, seed: int) -> tuple[int, int]:
    """Kills conversions at random points, `kills` times.

    Returns the number of kills, and of the runs that kept finished shards.
    """
    convert(source, work / "whole", shard_mb)
    expected = digest(work / "whole")
    shutil.rmtree(work / "whole")
    rng = random.Random(seed)
    done = resumed = 0
    while done < kills:
        destination = work / "killed"
        while not destination.exists():
            resumed += any((work / "killed.partial").glob("model-*.safetensors"))
            child = start(source, destination, shard_mb)
            try:
                child.wait(rng.uniform(0, seconds))
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
                child.wait()
                done += 1
            else:
                if child.returncode:
                    sys.exit(f"a resumed conversion failed with status {child.returncode}")
        if (destination / ".torch_marlin_metal.json").exists():  # killed before the journal was removed
            convert(source, destination, shard_mb)
        if digest(destination) != expected:
            sys.exit(f"after {done} kills the result differs from that of one run")
        leftovers = sorted(file.name for file in work.iterdir() if file.name.startswith(("killed.", ".killed")))
        if leftovers:
            sys.exit(f"left behind: {leftovers}")
        shutil.rmtree(destination)
    return done, resumed


def compare(source: Path, work: Path, shard_mb: int, rounds: int) -> tuple[dict[str, float], int]:
    """Returns the median seconds of interleaved rounds, and the peak resident size."""
    runs: dict[str, list[float]] = {name: [] for name in ("cp", "cp CPU", "process", "conversion", "conversion CPU")}
    peak = 0
    for _ in range(rounds):
        fetch_memory(size_of(source))
        began = time.perf_counter()
        _, status, usage = os.wait4(subprocess.Popen(["cp", "-r", source, work / "copy"]).pid, 0)
        if status:
            sys.exit(f"cp failed with status {status}")
        runs["cp"].append(time.perf_counter() - began)
        runs["cp CPU"].append(usage.ru_utime + usage.ru_stime)
        shutil.rmtree(work / "copy")
        os.sync()
        process, conversion, cpu, resident = convert(source, work / "converted", shard_mb)
        runs["process"].append(process)
        runs["conversion"].append(conversion)
        runs["conversion CPU"].append(cpu)
        peak = max(peak, resident)
        shutil.rmtree(work / "converted")
        os.sync()
    return {name: statistics.median(values) for name, values in runs.items()}, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--layouts", nargs="+", default=["gptq"], choices=LAYOUTS)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of cp and convert; medians are shown")
    parser.add_argument("--kills", type=int, default=0, help="SIGKILLs in all, at random points")
    parser.add_argument("--kn", type=int, nargs=2, default=[4096, 8192], help="K and N of the layers")
    parser.add_argument("--shard-mb", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="where to work; a temporary directory otherwise")
    parser.add_argument("--measure", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure, options.shard_mb)
        return
    headings = ("layout", "GB", "cp", "conversion", "throughput", "by CPU time", "with start", "peak RSS", "kills")
    caption = "throughput: in cp's, by medians of seconds and of CPU seconds; with start: Python's and torch's"
    table = Table(*headings, caption=caption)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for layout in options.layouts:
            work = Path(folder) / layout
            source = work / "source"
            size = make_checkpoint(source, layout, int(options.gigabytes * 1e9), *options.kn)
            os.sync()
            seconds, peak = compare(source, work, options.shard_mb, options.rounds)
            kills = ""
            if options.kills:
                limit = 1.2 * seconds["process"]
                done, resumed = kill_and_resume(source, work, options.shard_mb, options.kills, limit, options.seed)
                kills = f"{done}, {resumed} resumed, equal"
            row = [layout, f"{size / 1e9:.2f}", f"{seconds['cp']:.2f} s", f"{seconds['conversion']:.2f} s"]
            ratios = [seconds["cp"] / seconds["conversion"], seconds["cp CPU"] / seconds["conversion CPU"]]
            row += [*(f"{ratio:.2f}" for ratio in ratios), f"{seconds['process']:.2f} s"]
            table.add_row(*row, f"{peak / 1e6:.0f} MB", kills)
            shutil.rmtree(work)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
