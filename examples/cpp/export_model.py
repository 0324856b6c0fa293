"""Compiles a small 4-bit model with AOTInductor for run_model.cpp, and prints the output that run_model must reproduce.

python examples/cpp/export_model.py model.pt2
python examples/cpp/export_model.py --prefix-path    # CMake's CMAKE_PREFIX_PATH
"""

import argparse
from pathlib import Path

import torch

import torch_marlin_metal as tmm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", default="model.pt2")
    parser.add_argument("--prefix-path", action="store_true")
    options = parser.parse_args()
    if options.prefix_path:
        print(f"{Path(tmm.__file__).parent / 'cpp'};{torch.utils.cmake_prefix_path}")
        return
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).eval()
    tmm.quantize_model(model, "uint4b8", group_size=64, progress=False)
    x = torch.linspace(-1, 1, 3 * 256).view(3, 256)
    with torch.inference_mode():
        exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=1, max=64)},))
        torch._inductor.aoti_compile_and_package(exported, package_path=str(Path(options.package).resolve()))
        print("model", *(f"{value:.9g}" for value in model(x).flatten().tolist()))


if __name__ == "__main__":
    main()
