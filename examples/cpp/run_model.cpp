// Runs a model with 4-bit weights that export_model.py has compiled. The program does not use Python.
//
//   cmake -S examples/cpp -B build/cpp -DCMAKE_PREFIX_PATH="$(python examples/cpp/export_model.py --prefix-path)"
//   cmake --build build/cpp
//   python examples/cpp/export_model.py model.pt2 && build/cpp/run_model model.pt2
#include <ATen/ops/full.h>
#include <ATen/ops/linspace.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch_marlin_metal/ops.h>

#include <cstdio>
#include <exception>

namespace {

void print(const char* name, const at::Tensor& tensor) {
  std::printf("%s", name);
  const at::Tensor values = tensor.flatten().to(at::kFloat).contiguous();
  for (int64_t i = 0; i < values.numel(); ++i)
    std::printf(" %.9g", values.const_data_ptr<float>()[i]);
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::fprintf(stderr, "usage: run_model MODEL.pt2\n");
    return 2;
  }
  const at::Tensor x = at::linspace(-1, 1, 3 * 256).view({3, 256});
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  print("model", model.run({x}).at(0));

  // Calls a single operator. In uint4b8 the code 9 means the value 1, so each output is the sum of a row times 0.5.
  const torch_marlin_metal::Weight weight{.b_packed = at::full({32, 4}, -0x66666667, at::kInt),
                                          .scales = at::full({2, 4}, 0.5),
                                          .weight_format = "uint4b8",
                                          .group_size = 128};
  print("gemm", torch_marlin_metal::gemm(x, weight));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
