"""The signatures of flash-attn-4 4.0.0b36 (flash_attn/cute/interface.py and block_sparsity.py)."""

from __future__ import annotations


def _names(text: str) -> list[str]:
    return text.split()


FORWARD = _names(
    "q k v qv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k min_seqlen_k page_table "
    "softmax_scale causal softcap window_size_left window_size_right learnable_sink tile_mn mma_pv_is_rs "
    "intra_wg_overlap num_threads num_splits pack_gqa _arch score_mod mask_mod block_sparse_tensors return_lse out lse "
    "aux_tensors aux_scalars q_descale k_descale v_descale gather_kv_indices scheduler_metadata seqlen_k_per_split "
    "disable_scheduler_metadata gather_bwd_recompute_p"
)
BACKWARD = _names(
    "q k v out dout lse softmax_scale causal softcap window_size_left window_size_right m_block_size n_block_size "
    "num_threads pack_gqa num_stages_Q num_stages_dO SdP_swapAB dKV_swapAB dQ_swapAB AtomLayoutMSdP AtomLayoutNdKV "
    "AtomLayoutMdQ V_in_regs cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k deterministic dq "
    "dk dv score_mod score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors dlse learnable_sink"
)
BLOCKS = _names(
    "mask_block_cnt mask_block_idx full_block_cnt full_block_idx cu_total_m_blocks cu_block_idx_offsets block_size "
    "dq_write_order dq_write_order_full spt"
)
