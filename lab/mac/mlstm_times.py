"""Times the mLSTM: one call for a whole sequence, and one call for each token. Prints one JSON object.

python -m lab.mac.mlstm_times --device mps > mlstm.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.cli.bench import describe_machine
from torch_marlin_metal.gpu.tuning.chains import synchronize
from torch_marlin_metal.ops.mlstm import MLSTMState, mlstm

TOKENS = (64, 128, 256, 512)
HEADS, DK, DV = 4, 128, 256  # sizes of a layer with about a hundred million parameters
METHODS = ("chunkwise", "token by token")


def _inputs(S: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, S, D, generator=generator, device="cpu").to(device, dtype) for D in (DK, DK, DV))
    i, f = (torch.randn(1, HEADS, S, generator=generator, device="cpu").to(device) + offset for offset in (0, 3))
    return q, k, v, i, f


def _chunkwise(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    return mlstm(q, k, v, i, f)[0]


def _token_by_token(*inputs: Tensor) -> Tensor:
    state: MLSTMState | None = None
    outputs = []
    for t in range(inputs[0].shape[2]):
        q, k, v, i, f = (x[:, :, t : t + 1] for x in inputs)
        h, state = mlstm(q, k, v, i, f, state)
        outputs.append(h)
    return torch.cat(outputs, 2)


def _forward(method: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    with torch.no_grad():
        method(*inputs)


def _training(method: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    torch.autograd.grad(method(*leaves).float().sum(), leaves)


def _seconds(run: Callable[..., None], method: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> float:
    device = inputs[0].device
    synchronize(device)
    begin = time.perf_counter()
    run(method, inputs)
    synchronize(device)
    return time.perf_counter() - begin


def measure_mlstm(device: str, dtype: torch.dtype, tokens: tuple[int, ...], rounds: int) -> list[Any]:
    """Times the two ways to run an mLSTM in turns, chunkwise and token by token, forward and with the gradient.

    Returns:
        For each pass and length, returns the median seconds of one call, including the device's work, and the speedup
        of `chunkwise`.

    Raises:
        RuntimeError: the results of the two ways differ by more than rounding.
    """
    methods: dict[str, Callable[..., Tensor]] = dict(zip(METHODS, (_chunkwise, _token_by_token), strict=True))
    results: list[Any] = []
    for name, run in (("forward", _forward), ("forward and backward", _training)):
        for S in tokens:
            inputs = _inputs(S, dtype, device)
            with torch.no_grad():
                found = [method(*inputs).float() for method in methods.values()]
            error = float((found[0] - found[1]).abs().max() / found[1].abs().max())
            if error > max(1e-4, 8 * torch.finfo(dtype).eps):
                raise RuntimeError(f"the two ways differ by {error:.1e} at S {S}")
            for method in methods.values():  # kernels are compiled at the first call
                run(method, inputs)
            times: dict[str, list[float]] = {way: [] for way in methods}
            for _ in range(rounds):
                for way, method in methods.items():
                    times[way].append(_seconds(run, method, inputs))
            ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
            seconds = {way: statistics.median(values) for way, values in times.items()}
            results.append({"pass": name, "S": S, "seconds": seconds, "times_faster": ratio})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"], help="of q, k and v")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths of the sequences")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    found = measure_mlstm(given.device, getattr(torch, given.dtype), tuple(given.tokens), given.rounds)
    print(json.dumps({"machine": describe_machine(given.device), "rounds": given.rounds, "results": found}, indent=1))


if __name__ == "__main__":
    main()
