// Exports the functions: workspaces, and each kernel at the ISA level that the caller selects.
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
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
// Features that the processor has and whose registers the system saves. __builtin_cpu_supports is not used, because it
// reads a table of the compiler's runtime that is empty in Zig's.
struct Features {
  bool avx2 = false, avx_vnni = false, avx512_vnni = false, avx512_bf16 = false, amx = false;
};

// Requests permission to use AMX tiles, which Linux grants per process since 5.16; other systems are not asked.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Features find_features() {
  Features found;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const auto has = [](unsigned word, int bit) { return (word >> bit & 1) != 0; };
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || !has(ecx, 27)) return found;
  const bool fma = has(ecx, 12), f16c = has(ecx, 29);
  unsigned saved = 0, high = 0;
  asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if ((saved & 0x06) != 0x06 || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return found;
  found.avx2 = has(ebx, 5) && fma && f16c;
  const bool foundation = has(ebx, 16) && has(ebx, 17) && has(ebx, 30) && has(ebx, 31);  // F, DQ, BW, VL
  // AMX-BF16, AMX-TILE, AMX-INT8, and tile configuration and data saved by the system
  const bool tiles = has(edx, 22) && has(edx, 24) && has(edx, 25) && (saved & 0x60000) == 0x60000;
  found.avx512_vnni = (saved & 0xe6) == 0xe6 && found.avx2 && foundation && has(ecx, 11);
  if (eax == 0 || __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) == 0) return found;
  found.avx_vnni = found.avx2 && has(eax, 4);
  found.avx512_bf16 = found.avx512_vnni && has(eax, 5);
  found.amx = found.avx512_bf16 && tiles && may_use_tiles();
  return found;
}

const Features& features() {
  static const Features found = find_features();
  return found;
}
#elif defined(__aarch64__)
#if defined(__linux__)
// HWCAP bits of the Linux kernel, which headers older than the instructions do not define.
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
    {"amx", &kAmxKernels, [] { return features().amx; }},
    {"avx512_bf16", &kAvx512Bf16Kernels, [] { return features().avx512_bf16; }},
    {"avx512_vnni", &kAvx512Kernels, [] { return features().avx512_vnni; }},
    {"avx_vnni", &kAvxVnniKernels, [] { return features().avx_vnni; }},
    {"avx2", &kAvx2Kernels, [] { return features().avx2; }},
#elif defined(__aarch64__)
    {"neon_i8mm", &kNeonI8mmKernels, has_i8mm},
    {"neon_dotprod", &kNeonDotProductKernels, has_dot_product},
#endif
    {"portable", &kPortableKernels, [] { return true; }},
};
constexpr int kNumLevels = sizeof(kLevels) / sizeof(kLevels[0]);

bool exists(int32_t level) { return level >= 0 && level < kNumLevels; }

// Aborts if there is no such level, rather than call whatever lies beside the table.
const Level& level_at(int32_t level) {
  if (!exists(level)) std::abort();
  return kLevels[level];
}

}  // namespace

uint8_t* reserve(paged_workspace& workspace, size_t bytes) {
  if (workspace.data != nullptr && bytes <= workspace.capacity) return workspace.data;
  free_pages(workspace.data);
  const size_t rounded = (bytes + bytes / 2 + kSmallPage) & ~(kSmallPage - 1);  // at least a page, even for no rows
  workspace.data = static_cast<uint8_t*>(allocate_pages(rounded));
  workspace.capacity = workspace.data != nullptr ? rounded : 0;
  return workspace.data;
}

}  // namespace paged

// Returns the name of ISA level `level` (0 is the best), or null past the last.
PAGED_EXPORT const char* paged_level_name(int32_t level) {
  return paged::exists(level) ? paged::kLevels[level].name : nullptr;
}

PAGED_EXPORT int32_t paged_level_runs_here(int32_t level) { return paged::level_at(level).runs_here(); }

// Returns the maximum elements of a head that an interleaved rotary embedding rotates.
PAGED_EXPORT int32_t paged_max_interleaved() { return kMaxInterleaved; }

PAGED_EXPORT paged_workspace* paged_workspace_new() { return new (std::nothrow) paged_workspace{}; }

PAGED_EXPORT void paged_workspace_delete(paged_workspace* workspace) {
  if (workspace == nullptr) return;
  paged::free_pages(workspace->data);
  delete workspace;
}

// Whether many rows are multiplied faster with in_hadamard, for weights of this packed format.
PAGED_EXPORT int32_t paged_gains_in_hadamard(int32_t level, int32_t format) {
  return paged::level_at(level).kernels->gains_in_hadamard(format) ? 1 : 0;
}

// Each kernel returns 0, or 1 if its scratch memory cannot be allocated.
PAGED_EXPORT int32_t paged_linear(int32_t level, const paged_linear_args* args) {
  return paged::level_at(level).kernels->linear(*args);
}

PAGED_EXPORT int32_t paged_head_product(int32_t level, const paged_head_product_args* args) {
  return paged::level_at(level).kernels->head_product(*args);
}

// Also returns 3 if an expert id is out of range.
PAGED_EXPORT int32_t paged_experts(int32_t level, const paged_experts_args* args) {
  return paged::level_at(level).kernels->experts(*args);
}

PAGED_EXPORT int32_t paged_route(int32_t level, const paged_route_args* args) {
  return paged::level_at(level).kernels->route(*args);
}

PAGED_EXPORT int32_t paged_attention(int32_t level, const paged_attention_args* args) {
  return paged::level_at(level).kernels->attention(*args);
}

PAGED_EXPORT int32_t paged_decoder(int32_t level, const paged_decoder_args* args) {
  return paged::level_at(level).kernels->decoder(*args);
}

// Also returns 2 if the weights contain NaN, Inf or numbers above 32,768 and cannot be quantized.
PAGED_EXPORT int32_t paged_quantize(int32_t level, const paged_quantize_args* args) {
  return paged::level_at(level).kernels->quantize(*args);
}

// Returns the same as paged_quantize.
PAGED_EXPORT int32_t paged_quantize_groups(int32_t level, const paged_quantize_groups_args* args) {
  return paged::level_at(level).kernels->quantize_groups(*args);
}

// Also returns 3 if a row index is out of range.
PAGED_EXPORT int32_t paged_rows(int32_t level, const paged_rows_args* args) {
  return paged::level_at(level).kernels->rows(*args);
}

// Returns 0.
PAGED_EXPORT int32_t paged_norm(int32_t level, const paged_norm_args* args) {
  return paged::level_at(level).kernels->norm(*args);
}

// Returns 0.
PAGED_EXPORT int32_t paged_argmax(int32_t level, const paged_argmax_args* args) {
  return paged::level_at(level).kernels->argmax(*args);
}

PAGED_EXPORT int32_t paged_draw(int32_t level, const paged_draw_args* args) {
  return paged::level_at(level).kernels->draw(*args);
}

PAGED_EXPORT int32_t paged_logprobs(int32_t level, const paged_logprobs_args* args) {
  return paged::level_at(level).kernels->logprobs(*args);
}

// Returns 0.
PAGED_EXPORT int32_t paged_short_conv(int32_t level, const paged_short_conv_args* args) {
  return paged::level_at(level).kernels->short_conv(*args);
}

// Returns 0.
PAGED_EXPORT int32_t paged_gated_delta(int32_t level, const paged_gated_delta_args* args) {
  return paged::level_at(level).kernels->gated_delta(*args);
}

// Returns 0.
PAGED_EXPORT int32_t paged_mamba2(int32_t level, const paged_mamba2_args* args) {
  return paged::level_at(level).kernels->mamba2(*args);
}

// Packs a dense matrix into panels of the format, padded with zero rows. Returns 0.
PAGED_EXPORT int32_t paged_pack_dense(int32_t level, const paged_dense_args* args) {
  return paged::level_at(level).kernels->pack_dense(*args);
}

// Collapses the 2 MiB at `data`, 2 MiB aligned, into a huge page and keeps its contents; returns whether the system
// did.
PAGED_EXPORT int32_t paged_collapse_huge_page(void* data) { return paged::collapse_huge_page(data) ? 1 : 0; }

// Returns the hash of the sources that the library was built from (sources.py), by which Python detects a library built
// from other sources.
#ifndef PAGED_SOURCES
#define PAGED_SOURCES ""
#endif
PAGED_EXPORT const char* paged_sources() { return PAGED_SOURCES; }
