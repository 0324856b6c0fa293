"""The mLSTM of xLSTM models: operators, cell and layer."""

from torch_marlin_metal.ops.mlstm import MLSTMState, mlstm, mlstm_output, mlstm_states, mlstm_step
from torch_marlin_metal.xlstm.layer import MLSTMCell, MLSTMLayer

__all__ = ["MLSTMCell", "MLSTMLayer", "MLSTMState", "mlstm", "mlstm_output", "mlstm_states", "mlstm_step"]
