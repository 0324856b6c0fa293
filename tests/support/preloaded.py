"""What the fork server imports: torch and what a model of transformers needs, and nothing of this package."""

import gc

gc.disable()  # the passes of the collector take a third of the time of these imports

import accelerate.utils.modeling  # noqa: E402, F401
import torch.distributed.tensor  # noqa: E402, F401
import transformers.conversion_mapping  # noqa: E402
import transformers.loss.loss_utils  # noqa: E402
import transformers.modeling_gguf_pytorch_utils  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402
import transformers.quantizers  # noqa: E402
import transformers.trainer_utils  # noqa: E402, F401

gc.freeze()
gc.enable()
