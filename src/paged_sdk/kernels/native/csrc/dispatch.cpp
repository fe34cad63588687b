// The exported functions: workspaces, and each kernel in the form that the caller chose by its instruction-set level.
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <cstdlib>
#include <new>

#include "kernels.h"
#include "pages.h"
#include "workspace.h"

namespace paged {
namespace {

struct Level {
  const char* name;
  const KernelTable* kernels;
  bool (*runs_here)();
};

#if defined(__x86_64__)
bool has_avx512_vnni() {
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#elif defined(__aarch64__)
#if defined(__linux__)
// The bits of the kernel's own interface, which headers older than the instructions do not name.
constexpr unsigned long kDotProduct = 1ul << 20, kI8mm = 1ul << 13, kBf16 = 1ul << 14;

bool has_dot_product() { return (getauxval(AT_HWCAP) & kDotProduct) != 0; }
bool has_i8mm() {
  const unsigned long features = getauxval(AT_HWCAP2);
  return has_dot_product() && (features & kI8mm) != 0 && (features & kBf16) != 0;
}
#elif defined(__APPLE__)
bool has_feature(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_dot_product() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() {
  return has_dot_product() && has_feature("hw.optional.arm.FEAT_I8MM") && has_feature("hw.optional.arm.FEAT_BF16");
}
#else
bool has_dot_product() { return false; }
bool has_i8mm() { return false; }
#endif
#endif

// Best first.
constexpr Level kLevels[] = {
#if defined(__x86_64__)
    {"avx512_bf16", &kAvx512Bf16Kernels, [] { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }},
    {"avx512_vnni", &kAvx512Kernels, has_avx512_vnni},
    {"avx_vnni", &kAvxVnniKernels,
     [] {
       return __builtin_cpu_supports("avxvnni") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
     }},
    {"avx2", &kAvx2Kernels,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }},
#elif defined(__aarch64__)
    {"neon_i8mm", &kNeonI8mmKernels, has_i8mm},
    {"neon_dotprod", &kNeonDotProductKernels, has_dot_product},
#endif
    {"portable", &kPortableKernels, [] { return true; }},
};
constexpr int kNumLevels = sizeof(kLevels) / sizeof(kLevels[0]);

}  // namespace

uint8_t* reserve(paged_workspace& workspace, size_t bytes) {
  if (workspace.data != nullptr && bytes <= workspace.capacity) return workspace.data;
  std::free(workspace.data);
  const size_t rounded = (bytes + bytes / 2 + 4096) & ~static_cast<size_t>(4095);  // a page even for no rows
  workspace.data = static_cast<uint8_t*>(std::aligned_alloc(4096, rounded));
  workspace.capacity = workspace.data != nullptr ? rounded : 0;
  return workspace.data;
}

}  // namespace paged

// The name of instruction-set level `level` (0 is the best), or null past the last.
PAGED_EXPORT const char* paged_level_name(int32_t level) {
  return level >= 0 && level < paged::kNumLevels ? paged::kLevels[level].name : nullptr;
}

PAGED_EXPORT int32_t paged_level_runs_here(int32_t level) { return paged::kLevels[level].runs_here(); }

PAGED_EXPORT paged_workspace* paged_workspace_new() { return new (std::nothrow) paged_workspace{}; }

PAGED_EXPORT void paged_workspace_delete(paged_workspace* workspace) {
  if (workspace == nullptr) return;
  std::free(workspace->data);
  delete workspace;
}

// Each kernel returns 0, or 1 when there is no memory for its scratch.
PAGED_EXPORT int32_t paged_linear(int32_t level, const paged_linear_args* args) {
  return paged::kLevels[level].kernels->linear(*args);
}

// As the others; 3: a token asks for an expert that there is not.
PAGED_EXPORT int32_t paged_experts(int32_t level, const paged_experts_args* args) {
  return paged::kLevels[level].kernels->experts(*args);
}

PAGED_EXPORT int32_t paged_attention(int32_t level, const paged_attention_args* args) {
  return paged::kLevels[level].kernels->attention(*args);
}

PAGED_EXPORT int32_t paged_decoder(int32_t level, const paged_decoder_args* args) {
  return paged::kLevels[level].kernels->decoder(*args);
}

// As the others; 2: the weights cannot be quantized, for NaN, Inf or numbers above 32,768.
PAGED_EXPORT int32_t paged_quantize(int32_t level, const paged_quantize_args* args) {
  return paged::kLevels[level].kernels->quantize(*args);
}

// As paged_quantize.
PAGED_EXPORT int32_t paged_quantize_groups(int32_t level, const paged_quantize_groups_args* args) {
  return paged::kLevels[level].kernels->quantize_groups(*args);
}

// As the others; 3: there is no such row.
PAGED_EXPORT int32_t paged_rows(int32_t level, const paged_rows_args* args) {
  return paged::kLevels[level].kernels->rows(*args);
}

// Packs dense numbers into panels of the format; rows past the last are zero. Returns 0.
PAGED_EXPORT int32_t paged_pack_dense(int32_t level, const paged_dense_args* args) {
  return paged::kLevels[level].kernels->pack_dense(*args);
}

// Whether the 2 MiB at `data`, a multiple of that, are a huge page now; their content stays.
PAGED_EXPORT int32_t paged_collapse_huge_page(void* data) { return paged::collapse_huge_page(data) ? 1 : 0; }

// The hash of the sources that the library was built from (sources.py), by which Python knows its own.
#ifndef PAGED_SOURCES
#define PAGED_SOURCES ""
#endif
PAGED_EXPORT const char* paged_sources() { return PAGED_SOURCES; }
