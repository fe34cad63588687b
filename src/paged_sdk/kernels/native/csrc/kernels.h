// Declares the entry points that exist once per ISA level.
#pragma once

#include "abi.h"

namespace paged {

struct KernelTable {
  bool (*gains_in_hadamard)(int32_t format);
  int (*linear)(const paged_linear_args& args);
  int (*head_product)(const paged_head_product_args& args);
  int (*experts)(const paged_experts_args& args);
  int (*route)(const paged_route_args& args);
  int (*attention)(const paged_attention_args& args);
  int (*decoder)(const paged_decoder_args& args);
  int (*quantize)(const paged_quantize_args& args);
  int (*quantize_groups)(const paged_quantize_groups_args& args);
  int (*rows)(const paged_rows_args& args);
  int (*norm)(const paged_norm_args& args);
  int (*argmax)(const paged_argmax_args& args);
  int (*draw)(const paged_draw_args& args);
  int (*logprobs)(const paged_logprobs_args& args);
  int (*short_conv)(const paged_short_conv_args& args);
  int (*gated_delta)(const paged_gated_delta_args& args);
  int (*mamba2)(const paged_mamba2_args& args);
  int (*pack_dense)(const paged_dense_args& args);
};

extern const KernelTable kPortableKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvxVnniKernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kAvx512Bf16Kernels;
extern const KernelTable kAmxKernels;
#elif defined(__aarch64__)
extern const KernelTable kNeonDotProductKernels;
extern const KernelTable kNeonI8mmKernels;
#endif

}  // namespace paged
