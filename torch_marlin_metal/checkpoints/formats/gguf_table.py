"""Names in transformers for the tensors of GGUF files.

scripts/gguf_table.py makes this file from gguf 0.19.0 and transformers 5.23.0. A name that begins with a dot belongs
to a block: ".attn_k" is "blk.0.attn_k", and ".mlp" is "model.layers.0.mlp", or with "@transformer.h" behind the model
type "transformer.h.0.mlp". Names without .weight or .bias stand for both.
"""

# The names that most architectures have.
COMMON = """\
.attn_gate=.linear_attn.in_proj_z
.attn_k=.self_attn.k_proj
.attn_k_b=.self_attn.kv_b_proj
.attn_k_norm=.self_attn.k_norm
.attn_kv_a_mqa=.self_attn.kv_a_proj_with_mqa
.attn_kv_a_norm=.self_attn.kv_a_layernorm
.attn_kv_b=.self_attn.kv_b_proj
.attn_norm=.input_layernorm
.attn_output=.self_attn.o_proj
.attn_q=.self_attn.q_proj
.attn_q_a=.self_attn.q_a_proj
.attn_q_a_norm=.self_attn.q_a_layernorm
.attn_q_b=.self_attn.q_b_proj
.attn_q_norm=.self_attn.q_norm
.attn_qkv=.linear_attn.in_proj_qkv
.attn_v=.self_attn.v_proj
.exp_probs_b.bias=.mlp.gate.e_score_correction_bias
.ffn_down=.mlp.down_proj
.ffn_down_exps=.mlp.experts.down_proj
.ffn_down_shexp=.mlp.shared_experts.down_proj
.ffn_gate=.mlp.gate_proj
.ffn_gate_inp=.mlp.gate
.ffn_gate_inp_shexp=.mlp.shared_expert_gate
.ffn_gate_shexp=.mlp.shared_experts.gate_proj
.ffn_norm=.post_attention_layernorm
.ffn_up=.mlp.up_proj
.ffn_up_shexp=.mlp.shared_experts.up_proj
.inp_gate=.per_layer_input_gate
.post_attention_norm=.post_attention_layernorm
.post_ffw_norm=.post_feedforward_layernorm
.post_norm=.post_per_layer_input_norm
.proj=.per_layer_projection
.shortconv.conv=.conv.conv
.shortconv.in_proj=.conv.in_proj
.shortconv.out_proj=.conv.out_proj
.ssm_a=.linear_attn.A_log
.ssm_alpha=.linear_attn.in_proj_a
.ssm_beta=.linear_attn.in_proj_b
.ssm_conv1d=.linear_attn.conv1d
.ssm_d=.mamba.D
.ssm_dt.bias=.linear_attn.dt_bias
.ssm_in=.mamba.in_proj
.ssm_norm=.linear_attn.norm
.ssm_out=.linear_attn.out_proj
output=lm_head
output_norm=model.norm
per_layer_model_proj=model.per_layer_model_projection
per_layer_proj_norm=model.per_layer_projection_norm
per_layer_token_embd=model.embed_tokens_per_layer
position_embd=transformer.wpe
token_embd=model.embed_tokens
token_embd_norm=model.embedding_norm
token_types=embeddings.token_type_embeddings
"""
# Architecture in the file, model type of transformers, and the names that differ from COMMON.
TABLE = """\
llama llama
llama4 llama4_text .ffn_down=.feed_forward.down_proj .ffn_down_exps=.feed_forward.experts.down_proj
  .ffn_down_shexp=.feed_forward.shared_expert.down_proj .ffn_gate=.feed_forward.gate_proj
  .ffn_gate_inp=.feed_forward.router .ffn_gate_shexp=.feed_forward.shared_expert.gate_proj
  .ffn_up=.feed_forward.up_proj .ffn_up_shexp=.feed_forward.shared_expert.up_proj
qwen2 qwen2
qwen2moe qwen2_moe .ffn_down_shexp=.mlp.shared_expert.down_proj .ffn_gate_shexp=.mlp.shared_expert.gate_proj
  .ffn_up_shexp=.mlp.shared_expert.up_proj
qwen3 qwen3
qwen3moe qwen3_moe
qwen35 qwen3_5_text
qwen35moe qwen3_5_moe_text .ffn_down_shexp=.mlp.shared_expert.down_proj .ffn_gate_shexp=.mlp.shared_expert.gate_proj
  .ffn_up_shexp=.mlp.shared_expert.up_proj
gpt-oss gpt_oss .attn_sinks.weight=.self_attn.sinks .ffn_gate_inp=.mlp.router
gemma gemma
gemma2 gemma2 .ffn_norm=.pre_feedforward_layernorm
gemma3 gemma3_text .ffn_norm=.pre_feedforward_layernorm
gemma4 gemma4_text .ffn_down_exps=.experts.down_proj .ffn_down_exps.scale=.router.per_expert_scale
  .ffn_gate_inp=.router.proj .ffn_gate_inp.scale=.router.scale .ffn_norm=.pre_feedforward_layernorm
  .layer_output_scale.weight=.layer_scalar .post_ffw_norm_1=.post_feedforward_layernorm_1
  .post_ffw_norm_2=.post_feedforward_layernorm_2 .pre_ffw_norm_2=.pre_feedforward_layernorm_2
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
granitemoe granitemoe .ffn_down_exps=.block_sparse_moe.experts.down_proj .ffn_gate_inp=.block_sparse_moe.router
arcee arcee
olmo olmo
seed_oss seed_oss
ernie4_5 ernie4_5
exaone4 exaone4
glm4 glm4 .ffn_up=.mlp.gate_up_proj .post_attention_norm=.post_self_attn_layernorm .post_ffw_norm=.post_mlp_layernorm
glm4moe glm4_moe
lfm2 lfm2 .attn_k_norm=.self_attn.k_layernorm .attn_norm=.operator_norm .attn_output=.self_attn.out_proj
  .attn_q_norm=.self_attn.q_layernorm .ffn_down=.feed_forward.w2 .ffn_gate=.feed_forward.w1 .ffn_norm=.ffn_norm
  .ffn_up=.feed_forward.w3
dots1 dots1
minimax-m2 minimax_m2 .exp_probs_b.bias=.mlp.e_score_correction_bias
hunyuan-dense hunyuan_v1_dense .attn_k_norm=.self_attn.key_layernorm .attn_q_norm=.self_attn.query_layernorm
deepseek2 deepseek_v3
qwen3next qwen3_next .attn_qkv=.linear_attn.in_proj_qkvz .ffn_down_shexp=.mlp.shared_expert.down_proj
  .ffn_gate_shexp=.mlp.shared_expert.gate_proj .ffn_up_shexp=.mlp.shared_expert.up_proj
  .ssm_ba=.linear_attn.in_proj_ba .ssm_in=.linear_attn.in_proj_qkvz
qwen2vl qwen2
qwen3vl qwen3
qwen3vlmoe qwen3_moe
ernie4_5-moe ernie4_5_moe .exp_probs_b.bias=.mlp.gate.moe_statics.e_score_correction_bias
lfm2moe lfm2_moe .attn_k_norm=.self_attn.k_layernorm .attn_norm=.operator_norm .attn_output=.self_attn.out_proj
  .attn_q_norm=.self_attn.q_layernorm .exp_probs_b.bias=.feed_forward.expert_bias .ffn_down=.feed_forward.w2
  .ffn_down_exps=.feed_forward.experts.down_proj .ffn_gate=.feed_forward.w1 .ffn_gate_inp=.feed_forward.gate
  .ffn_norm=.ffn_norm .ffn_up=.feed_forward.w3
granitehybrid granitemoehybrid .ffn_down=.shared_mlp.output_linear .ffn_down_exps=.block_sparse_moe.experts.down_proj
  .ffn_down_shexp=.shared_mlp.output_linear .ffn_gate=.shared_mlp.input_linear .ffn_gate_inp=.block_sparse_moe.router
  .ffn_gate_shexp=.shared_mlp.input_linear .ssm_a=.mamba.A_log .ssm_conv1d=.mamba.conv1d .ssm_dt.bias=.mamba.dt_bias
  .ssm_norm=.mamba.norm .ssm_out=.mamba.out_proj
nemotron_h nemotron_h .attn_k=.mixer.k_proj .attn_norm=.norm .attn_output=.mixer.o_proj .attn_q=.mixer.q_proj
  .attn_v=.mixer.v_proj .ffn_down=.mixer.down_proj .ffn_up=.mixer.up_proj .ssm_a=.mixer.A_log
  .ssm_conv1d=.mixer.conv1d .ssm_d=.mixer.D .ssm_dt.bias=.mixer.dt_bias .ssm_in=.mixer.in_proj .ssm_norm=.mixer.norm
  .ssm_out=.mixer.out_proj output_norm=model.norm_f token_embd=model.embeddings
mistral3 ministral3
mistral4 mistral4
gemma3n gemma3n_text .altup_correct_coef=.altup.correction_coefs
  .altup_correct_scale.weight=.altup.correct_output_scale .altup_predict_coef=.altup.prediction_coefs
  .altup_router=.altup.modality_router .altup_router_norm=.altup.router_norm .ffn_norm=.pre_feedforward_layernorm
  .laurel_l=.laurel.linear_left .laurel_post_norm=.laurel.post_laurel_norm .laurel_r=.laurel.linear_right
  altup_proj=model.altup_projections altup_unembd_proj=model.altup_unembed_projections
phimoe phimoe .ffn_gate_inp=.mlp.router
afmoe afmoe .attn_gate=.self_attn.gate_proj .exp_probs_b.bias=.mlp.expert_bias .ffn_gate_inp=.mlp.router.gate
  .ffn_norm=.pre_mlp_layernorm .post_ffw_norm=.post_mlp_layernorm
exaone-moe exaone_moe
hunyuan-moe hunyuan_v1_moe .attn_k_norm=.self_attn.key_layernorm .attn_q_norm=.self_attn.query_layernorm
  .ffn_down_shexp=.mlp.shared_mlp.down_proj .ffn_gate_inp=.mlp.gate.wg .ffn_gate_shexp=.mlp.shared_mlp.gate_proj
  .ffn_up_shexp=.mlp.shared_mlp.up_proj
falcon-h1 falcon_h1 .ffn_down=.feed_forward.down_proj .ffn_gate=.feed_forward.gate_proj
  .ffn_norm=.pre_ff_layernorm.weight .ffn_up=.feed_forward.up_proj .ssm_a=.mamba.A_log .ssm_conv1d=.mamba.conv1d
  .ssm_dt.bias=.mamba.dt_bias .ssm_norm=.mamba.norm .ssm_out=.mamba.out_proj output_norm=model.final_layernorm
gpt2 gpt2@transformer.h .attn_norm=.ln_1 .attn_output=.attn.c_proj .attn_qkv=.attn.c_attn .ffn_down=.mlp.c_proj
  .ffn_norm=.ln_2 .ffn_up=.mlp.c_fc output_norm=transformer.ln_f token_embd=transformer.wte
gptneox gpt_neox@gpt_neox.layers .attn_output=.attention.dense .attn_qkv=.attention.query_key_value
  .ffn_down=.mlp.dense_4h_to_h .ffn_up=.mlp.dense_h_to_4h output_norm=gpt_neox.final_layer_norm
  token_embd=gpt_neox.embed_in
falcon falcon@transformer.h .attn_norm=.ln_mlp .attn_norm_2=.ln_attn .attn_output=.self_attention.dense
  .attn_qkv=.self_attention.query_key_value .ffn_down=.mlp.dense_4h_to_h .ffn_up=.mlp.dense_h_to_4h
  output_norm=transformer.ln_f token_embd=transformer.word_embeddings
bloom bloom@transformer.h .attn_output=.self_attention.dense .attn_qkv=.self_attention.query_key_value
  .ffn_down=.mlp.dense_4h_to_h .ffn_up=.mlp.dense_h_to_4h output_norm=transformer.ln_f
  token_embd=transformer.word_embeddings token_embd_norm=transformer.word_embeddings_layernorm
mpt mpt@transformer.blocks .attn_norm=.norm_1 .attn_output=.attn.out_proj .attn_qkv=.attn.Wqkv
  .ffn_down=.ffn.down_proj .ffn_norm=.norm_2 .ffn_up=.ffn.up_proj output_norm=transformer.norm_f
  token_embd=transformer.wte
mamba mamba@backbone.layers .attn_norm=.norm .ssm_a=.mixer.A_log .ssm_conv1d=.mixer.conv1d .ssm_d=.mixer.D
  .ssm_dt=.mixer.dt_proj .ssm_dt.bias=.mixer.dt_proj.bias .ssm_in=.mixer.in_proj .ssm_out=.mixer.out_proj
  .ssm_x=.mixer.x_proj output_norm=backbone.norm_f token_embd=backbone.embeddings
mamba2 mamba2@backbone.layers .attn_norm=.norm .ssm_a=.mixer.A_log .ssm_conv1d=.mixer.conv1d .ssm_d=.mixer.D
  .ssm_dt.bias=.mixer.dt_bias .ssm_in=.mixer.in_proj .ssm_norm=.mixer.norm .ssm_out=.mixer.out_proj
  output_norm=backbone.norm_f token_embd=backbone.embeddings
jamba jamba .ffn_down=.feed_forward.down_proj .ffn_down_exps=.feed_forward.experts.down_proj
  .ffn_gate=.feed_forward.gate_proj .ffn_gate_inp=.feed_forward.router .ffn_norm=.pre_ff_layernorm
  .ffn_up=.feed_forward.up_proj .ssm_a=.mamba.A_log .ssm_b_norm=.mamba.b_layernorm .ssm_c_norm=.mamba.c_layernorm
  .ssm_conv1d=.mamba.conv1d .ssm_dt=.mamba.dt_proj .ssm_dt.bias=.mamba.dt_proj.bias .ssm_dt_norm=.mamba.dt_layernorm
  .ssm_out=.mamba.out_proj .ssm_x=.mamba.x_proj output_norm=model.final_layernorm
starcoder gpt_bigcode@transformer.h .attn_norm=.ln_1 .attn_output=.attn.c_proj .attn_qkv=.attn.c_attn
  .ffn_down=.mlp.c_proj .ffn_norm=.ln_2 .ffn_up=.mlp.c_fc output_norm=transformer.ln_f token_embd=transformer.wte
minicpm3 minicpm3
apertus apertus .attn_norm=.attention_layernorm .ffn_norm=.feedforward_layernorm
bitnet bitnet .attn_sub_norm=.self_attn.attn_sub_norm .ffn_sub_norm=.mlp.ffn_sub_norm
chatglm glm .ffn_up=.mlp.gate_up_proj
jais2 jais2
glm-dsa glm_moe_dsa .indexer.attn_k=.self_attn.indexer.wk .indexer.attn_q_b=.self_attn.indexer.wq_b
  .indexer.k_norm=.self_attn.indexer.k_norm .indexer.proj=.self_attn.indexer.weights_proj
bert bert@encoder.layer .attn_k=.attention.self.key .attn_output=.attention.output.dense
  .attn_output_norm=.attention.output.LayerNorm .attn_q=.attention.self.query .attn_v=.attention.self.value
  .ffn_down=.output.dense .ffn_up=.intermediate.dense .layer_output_norm=.output.LayerNorm
  position_embd=embeddings.position_embeddings token_embd=embeddings.word_embeddings
  token_embd_norm=embeddings.LayerNorm
nomic-bert nomic_bert@layers .attn_output_norm=.post_attention_layernorm .layer_output_norm=.post_mlp_layernorm
  token_embd=embeddings.word_embeddings token_embd_norm=embeddings.LayerNorm
modern-bert modernbert@layers .attn_norm=.attn_norm .attn_output=.attn.Wo .attn_qkv=.attn.Wqkv .ffn_down=.mlp.Wo
  .ffn_norm=.mlp_norm .ffn_up=.mlp.Wi output_norm=final_norm token_embd=embeddings.tok_embeddings
  token_embd_norm=embeddings.norm
eurobert eurobert@layers output_norm=norm token_embd=embed_tokens
t5encoder t5@encoder.block .attn_k=.layer.0.SelfAttention.k .attn_norm=.layer.0.layer_norm
  .attn_o=.layer.0.SelfAttention.o .attn_q=.layer.0.SelfAttention.q
  .attn_rel_b=.layer.0.SelfAttention.relative_attention_bias .attn_v=.layer.0.SelfAttention.v
  .ffn_down=.layer.1.DenseReluDense.wo .ffn_gate=.layer.1.DenseReluDense.wi_0 .ffn_norm=.layer.1.layer_norm
  .ffn_up=.layer.1.DenseReluDense.wi_1 enc.output_norm=encoder.final_layer_norm token_embd=shared
"""
