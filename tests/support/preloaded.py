"""What the fork server imports: torch and what a model of transformers needs, and nothing of this package.

transformers asks torch for its devices while it is imported, and torch keeps its first answer. Here the answers are "no"
and "none" without torch being asked, so that a fork can still make the software Metal device.
"""

import gc

gc.disable()  # the passes of the collector take a third of the time of these imports

import torch  # noqa: E402

_asked = torch._C._mps_is_available, torch._C._accelerator_getAccelerator
torch._C._mps_is_available, torch._C._accelerator_getAccelerator = lambda: False, lambda: None

import accelerate.utils.modeling  # noqa: E402, F401
import torch.distributed.tensor  # noqa: E402
import transformers.conversion_mapping  # noqa: E402
import transformers.integrations.sdpa_attention as attention  # noqa: E402
import transformers.loss.loss_utils  # noqa: E402
import transformers.modeling_gguf_pytorch_utils  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402
import transformers.quantizers  # noqa: E402
import transformers.trainer_utils  # noqa: E402, F401
from transformers.utils.import_utils import is_torch_mps_available  # noqa: E402

torch._C._mps_is_available, torch._C._accelerator_getAccelerator = _asked
torch.backends.mps.is_available.cache_clear()
is_torch_mps_available.cache_clear()
gc.freeze()
gc.enable()


def ask_for_mps() -> None:
    """Gives transformers torch's answer. A fork that makes the device does so before this call."""
    attention._is_torch_mps_available = is_torch_mps_available()
