"""Importing this module lets transformers' `from_pretrained` load packed checkpoints into `MarlinLinear` layers.

    import torch_marlin_metal.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained("a GPTQ, AWQ, compressed-tensors, ... directory")

`take_over.py` wraps the functions that select the loader of a checkpoint, and `config.py` defines `MarlinConfig`.
`quantizer.py` loads and saves directories: `packed_checkpoint.py` loads packed layers, `while_loading.py` quantizes
floats, and `stored.py` lists the layers in a directory. `saving.py` wraps the models' `save_pretrained`, `counting.py`
their `num_parameters`, `vocabulary.py` their `tie_weights`, and `trainer.py` a check in `Trainer`. `gguf.py` reads GGUF
files. When peft is imported, `integrations/with_peft.py` lets peft add adapters.
"""

from torch_marlin_metal.integrations.versions import require

require(__name__, "transformers", (5, 23), beside="accelerate")

from torch_marlin_metal.integrations import with_peft  # noqa: E402
from torch_marlin_metal.integrations.transformers import counting, saving, trainer, vocabulary  # noqa: E402
from torch_marlin_metal.integrations.transformers.config import MarlinConfig  # noqa: E402
from torch_marlin_metal.integrations.transformers.quantizer import MarlinQuantizer  # noqa: E402
from torch_marlin_metal.integrations.transformers.take_over import (  # noqa: E402
    restore,
    restored,
    take_over,
    taken_over,
)

take_over()
saving.install()
counting.install()
vocabulary.install()
trainer.install()
with_peft.start()

__all__ = ["MarlinConfig", "MarlinQuantizer", "restore", "restored", "take_over", "taken_over"]
