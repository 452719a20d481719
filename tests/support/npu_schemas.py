"""The schemas of torch_npu's attention operators, word for word as its 2.13.0 wheel prints them.

tests_on/npu compares them with the wheel that is installed there.
"""

from __future__ import annotations

_FA = (
    "Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
    "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, "
)
_GRAD = (
    "Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, *, Tensor? pse=None, "
    "Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? softmax_sum=None, "
    "Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., float keep_prob=1., "
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, "
)
_REST = 'int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None'
SCHEMAS: dict[str, str] = {
    "npu_fusion_attention": (
        f"({_FA}int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, {_REST}, "
        "Tensor? dropout_mask=None, int seed=0, int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
    "npu_fusion_attention_grad": (
        f"({_GRAD}int seed=0, int offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, "
        f"int[]? actual_seq_kvlen=None, {_REST}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "npu_fusion_attention_v3": (
        f"({_FA}SymInt[]? prefix=None, Tensor? actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, {_REST}) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "npu_fusion_attention_grad_v3": (
        f"({_GRAD}Tensor? seed=None, Tensor? offset=None, SymInt[]? prefix=None, Tensor? actual_seq_qlen=None, "
        f"Tensor? actual_seq_kvlen=None, {_REST}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "npu_fused_infer_attention_score": (
        "(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, Tensor? atten_mask=None, "
        "SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None, "
        "Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
        "Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, "
        "Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, "
        "Tensor? value_antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None, "
        "Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, "
        "SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None, "
        "Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1., int pre_tokens=2147483647, "
        "int next_tokens=2147483647, str input_layout=\"BSH\", int num_key_value_heads=0, int sparse_mode=0, "
        "int inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0, "
        "int value_antiquant_mode=0, bool softmax_lse_flag=False) -> (Tensor, Tensor)"
    ),
    "npu_prompt_flash_attention": (
        "(Tensor query, Tensor key, Tensor value, *, Tensor? padding_mask=None, Tensor? atten_mask=None, "
        "Tensor? pse_shift=None, int[]? actual_seq_lengths=None, Tensor? deq_scale1=None, Tensor? quant_scale1=None, "
        "Tensor? deq_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, int num_heads=1, "
        "float scale_value=1., int pre_tokens=2147483647, int next_tokens=0, str input_layout=\"BSH\", "
        "int num_key_value_heads=0, int[]? actual_seq_lengths_kv=None, int sparse_mode=0) -> Tensor"
    ),
}  # fmt: skip
"""By name. The last one is never emitted, and met in graphs."""
