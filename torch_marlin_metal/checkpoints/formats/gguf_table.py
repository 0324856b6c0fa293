"""Names of transformers for the tensors of GGUF files.

scripts/gguf_table.py makes this file from gguf 0.19.0 and transformers 5.23.0. A name that begins with a dot belongs
to a block: ".attn_k" is "blk.0.attn_k", and ".mlp" is "model.layers.0.mlp"; "{}" is the number of the block in other
names. Names without .weight or .bias stand for both.
"""

# The names that most architectures have.
COMMON = """\
.attn_gate=.linear_attn.in_proj_z
.attn_k=.self_attn.k_proj
.attn_k_norm=.self_attn.k_norm
.attn_norm=.input_layernorm
.attn_output=.self_attn.o_proj
.attn_q=.self_attn.q_proj
.attn_q_norm=.self_attn.q_norm
.attn_qkv=.linear_attn.in_proj_qkv
.attn_v=.self_attn.v_proj
.exp_probs_b.bias=.mlp.gate.e_score_correction_bias
.ffn_down=.mlp.down_proj
.ffn_down_exps=.mlp.experts.down_proj
.ffn_down_shexp=.mlp.shared_expert.down_proj
.ffn_gate=.mlp.gate_proj
.ffn_gate_inp=.mlp.gate
.ffn_gate_inp_shexp=.mlp.shared_expert_gate
.ffn_gate_shexp=.mlp.shared_expert.gate_proj
.ffn_norm=.post_attention_layernorm
.ffn_up=.mlp.up_proj
.ffn_up_shexp=.mlp.shared_expert.up_proj
.post_attention_norm=.post_attention_layernorm
.post_ffw_norm=.post_feedforward_layernorm
.ssm_a=.linear_attn.A_log
.ssm_alpha=.linear_attn.in_proj_a
.ssm_beta=.linear_attn.in_proj_b
.ssm_conv1d=.linear_attn.conv1d
.ssm_dt.bias=.linear_attn.dt_bias
.ssm_norm=.linear_attn.norm
.ssm_out=.linear_attn.out_proj
output=lm_head
output_norm=model.norm
token_embd=model.embed_tokens
"""
# Architecture in the file, model type of transformers, and the names that differ from COMMON.
TABLE = """\
llama llama
llama4 llama4_text .ffn_down=.feed_forward.down_proj .ffn_down_exps=.feed_forward.experts.down_proj
  .ffn_down_shexp=.feed_forward.shared_expert.down_proj .ffn_gate=.feed_forward.gate_proj
  .ffn_gate_inp=.feed_forward.router .ffn_gate_shexp=.feed_forward.shared_expert.gate_proj
  .ffn_up=.feed_forward.up_proj .ffn_up_shexp=.feed_forward.shared_expert.up_proj
qwen2 qwen2
qwen2moe qwen2_moe
qwen3 qwen3
qwen3moe qwen3_moe
qwen35 qwen3_5_text
qwen35moe qwen3_5_moe_text
gpt-oss gpt_oss .attn_sinks.weight=.self_attn.sinks .ffn_gate_inp=.mlp.router
gemma gemma
gemma2 gemma2 .ffn_norm=.pre_feedforward_layernorm
gemma3 gemma3_text .ffn_norm=.pre_feedforward_layernorm
gemma4 gemma4_text .ffn_down_exps=.experts.down_proj .ffn_down_exps.scale=.router.per_expert_scale
  .ffn_gate_inp=.router.proj .ffn_gate_inp.scale=.router.scale .ffn_norm=.pre_feedforward_layernorm
  .inp_gate=.per_layer_input_gate .layer_output_scale.weight=.layer_scalar
  .post_ffw_norm_1=.post_feedforward_layernorm_1 .post_ffw_norm_2=.post_feedforward_layernorm_2
  .post_norm=.post_per_layer_input_norm .pre_ffw_norm_2=.pre_feedforward_layernorm_2 .proj=.per_layer_projection
  per_layer_model_proj=model.per_layer_model_projection per_layer_proj_norm=model.per_layer_projection_norm
  per_layer_token_embd=model.embed_tokens_per_layer
phi2 phi .attn_output=.self_attn.dense .ffn_down=.mlp.fc2 .ffn_up=.mlp.fc1 output_norm=model.final_layernorm
phi3 phi3 .attn_qkv=.self_attn.qkv_proj .ffn_up=.mlp.gate_up_proj
starcoder2 starcoder2 .ffn_down=.mlp.c_proj .ffn_up=.mlp.c_fc
stablelm stablelm
olmo2 olmo2
olmoe olmoe
command-r cohere
granite granite
smollm3 smollm3
nemotron nemotron
cohere2 cohere2
granitemoe granitemoe .ffn_down_exps=.block_sparse_moe.experts.down_proj
  .ffn_gate_inp.weight=.block_sparse_moe.router.weight
arcee arcee
olmo olmo
seed_oss seed_oss
ernie4_5 ernie4_5
exaone4 exaone4
glm4 glm4 .ffn_up=.mlp.gate_up_proj .post_attention_norm=.post_self_attn_layernorm .post_ffw_norm=.post_mlp_layernorm
glm4moe glm4_moe .ffn_down_shexp=.mlp.shared_experts.down_proj .ffn_gate_shexp=.mlp.shared_experts.gate_proj
  .ffn_up_shexp=.mlp.shared_experts.up_proj
lfm2 lfm2 .attn_k_norm=.self_attn.k_layernorm .attn_norm=.operator_norm .attn_output=.self_attn.out_proj
  .attn_q_norm=.self_attn.q_layernorm .ffn_down=.feed_forward.w2 .ffn_gate=.feed_forward.w1 .ffn_norm=.ffn_norm
  .ffn_up=.feed_forward.w3 .shortconv.conv=.conv.conv .shortconv.in_proj=.conv.in_proj
  .shortconv.out_proj=.conv.out_proj token_embd_norm=model.embedding_norm
dots1 dots1 .ffn_down_shexp=.mlp.shared_experts.down_proj .ffn_gate_shexp=.mlp.shared_experts.gate_proj
  .ffn_up_shexp=.mlp.shared_experts.up_proj
minimax-m2 minimax_m2 .exp_probs_b.bias=.mlp.e_score_correction_bias
hunyuan-dense hunyuan_v1_dense .attn_k_norm=.self_attn.key_layernorm .attn_q_norm=.self_attn.query_layernorm
"""
