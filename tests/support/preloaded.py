"""Imports torch and what models of transformers need, once for all forks of a server; nothing of this package.

While transformers is imported, it asks torch for devices, and torch would remember that there are none. A fork could
then no longer create the software Metal device. During the imports, two functions that always answer "no" and "none"
therefore take the place of torch's.
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
    """Lets transformers ask torch again. A fork that needs the software Metal device creates it before this call."""
    attention._is_torch_mps_available = is_torch_mps_available()
