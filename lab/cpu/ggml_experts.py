"""The experts of a mixture in ggml, for `cpu_experts.py`: two calls of `mul_mat_id`, as in llama.cpp."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lab.cpu.cpu_ggml import BLOCK, GGML_TYPE_F32, GGML_TYPE_Q4_0, Q4_0, Ggml

GGML_TYPE_I32, GGML_TYPE_MXFP4 = 26, 39
MXFP4 = np.dtype([("scale", np.uint8), ("codes", np.uint8, (BLOCK // 2,))])
# The formats that ggml also has. Q4_0 has groups of 32, so the scale of a larger group is repeated.
TYPES = {"uint4b8": (GGML_TYPE_Q4_0, Q4_0), "mxfp4": (GGML_TYPE_MXFP4, MXFP4)}


class Stack(NamedTuple):
    """The packed weights of all experts, in the layout of `moe_gemm`."""

    words: Tensor
    scales: Tensor
    weight_format: str
    group_size: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Returns K, N and the number of experts, the order of ggml's dimensions."""
        return 8 * self.words.shape[1], self.words.shape[2], self.words.shape[0]

    def blocks(self, expert: int) -> np.ndarray:
        """Returns one expert's weights as ggml's blocks [N, K / 32], which decode to the same values."""
        K, N, _ = self.sizes
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)[:, None]
        codes = ((self.words[expert, :, None] >> shifts) & 15).to(torch.uint8).view(K // BLOCK, 2, BLOCK // 2, N)
        scales = self.scales[expert].repeat_interleave(self.group_size // BLOCK, 0)[: K // BLOCK]
        made = np.empty((N, K // BLOCK), TYPES[self.weight_format][1])
        made["codes"] = (codes[:, 0] | codes[:, 1] << 4).permute(2, 0, 1).numpy()
        made["scale"] = (scales if scales.dtype == torch.uint8 else scales.half()).T.numpy()
        return made


class GgmlExperts:
    """The experts of a layer in one of ggml's layouts."""

    def __init__(self, ggml: Ggml, layout: int, stacks: "Stacks", top_k: int) -> None:
        self._ggml, self._top_k = ggml, top_k
        self._sizes = [stack.sizes for stack in stacks]
        context = ggml.context()
        self.weights = [
            ggml.call("new_tensor_3d", context, TYPES[stack.weight_format][0], *stack.sizes) for stack in stacks
        ]
        if not ggml.call("backend_alloc_ctx_tensors_from_buft", context, layout):
            raise MemoryError("ggml: no memory for the weights")
        self._graphs: dict[int, Any] = {}
        self._activations: Tensor | None = None

    def is_supported(self) -> bool:
        graph = self._graph(1)
        return all(self._ggml.call("backend_dev_supports_op", self._ggml.device(), product) for product in graph[-1])

    def fill(self, blocks: list[np.ndarray]) -> None:
        """Writes the weights that `blocks_of` returns."""
        for tensor, values in zip(self.weights, blocks, strict=True):
            self._ggml.call("backend_tensor_set", tensor, values.ctypes.data, 0, values.nbytes)

    def _graph(self, tokens: int) -> Any:
        """Returns the graph for a number of tokens, with its inputs, its result and its products."""
        if tokens in self._graphs:
            return self._graphs[tokens]
        ggml, context = self._ggml, self._ggml.context()
        (K, _, _), (_, N, _) = self._sizes
        x = ggml.call("new_tensor_3d", context, GGML_TYPE_F32, K, 1, tokens)
        ids = ggml.call("new_tensor_2d", context, GGML_TYPE_I32, self._top_k, tokens)
        factors = ggml.call("new_tensor_3d", context, GGML_TYPE_F32, 1, self._top_k, tokens)
        both = ggml.call("mul_mat_id", context, self.weights[0], x, ids)
        down = ggml.call("mul_mat_id", context, self.weights[1], ggml.call("swiglu", context, both), ids)
        rows = ggml.call("mul", context, down, factors)
        slots = [
            ggml.call("view_2d", context, rows, N, tokens, 4 * N * self._top_k, 4 * N * slot)
            for slot in range(self._top_k)
        ]
        total = slots[0]
        for slot in slots[1:]:
            total = ggml.call("add", context, total, slot)
        graph = ggml.call("new_graph", context)
        ggml.call("build_forward_expand", graph, total)
        ggml.call("backend_alloc_ctx_tensors_from_buft", context, ggml.call("backend_cpu_buffer_type"))
        self._graphs[tokens] = graph, x, ids, factors, total, (both, down)
        return self._graphs[tokens]

    def __call__(self, x: Tensor, routing: Any) -> Tensor:
        """Returns the experts' result `[T, H]` in fp32. Writes the activations to ggml only if they have changed."""
        ggml, tokens = self._ggml, len(x)
        graph, a, ids, factors, total, _ = self._graph(tokens)
        inputs = [(ids, routing.ids.to(torch.int32)), (factors, routing.weights.float())]
        if x is not self._activations:
            self._activations = x
            inputs.append((a, x.float()))
        for tensor, values in inputs:
            ggml.call("backend_tensor_set", tensor, values.contiguous().data_ptr(), 0, 4 * values.numel())
        if ggml.call("backend_graph_compute", ggml.backend, graph):
            raise RuntimeError("ggml: the graph was not computed")
        out = torch.empty(tokens, self._sizes[1][1])
        ggml.call("backend_tensor_get", total, out.data_ptr(), 0, 4 * out.numel())
        return out


Stacks = tuple[Stack, Stack]
Experts = Callable[[Tensor, Any], Tensor]


def blocks_of(stacks: Stacks) -> list[np.ndarray]:
    """Returns all experts as ggml's blocks, for each of the two weights."""
    return [np.stack([stack.blocks(expert) for expert in range(stack.sizes[2])]) for stack in stacks]


def layouts(ggml: Ggml, stacks: Stacks, blocks: list[np.ndarray], top_k: int) -> dict[str, Experts]:
    """Returns a GgmlExperts for each of ggml's layouts that supports `mul_mat_id`."""
    found: dict[str, Experts] = {}
    for name, layout in ggml.buffer_types().items():
        experts = GgmlExperts(ggml, layout, stacks, top_k)
        if experts.is_supported():
            experts.fill(blocks)
            found[f"ggml {name}"] = experts
    return found
