// Compares every kernel of a built library on each ISA level that runs here with the portable level.
//
// Integer sums, packed codes, and results without a fused product must be bit-identical. In float results, the portable
// level rounds products that the other x86 levels fuse, so they agree within a bound. Levels that fuse (on ARM, all)
// must agree in every bit, except for dot products of bfloat16 pairs, whose rounding is the hardware's own, and for
// attention that uses 16-bit codes where float32 products are slow.
#include "levels.h"

namespace {

using namespace levels;

constexpr double kSums = 3e-6;       // different rounding of float32 sums
constexpr double kBfloat16 = 4e-3;   // one bfloat16 step
constexpr double kCodes = 2e-3;      // activations quantized after a norm: a code differs now and then
constexpr double kPairs = 2e-2;      // attention in bfloat16 where the hardware has it
constexpr double kTwoLayers = 2e-2;  // differing codes, and further codes that depend on them
constexpr int32_t kBlockFormats[] = {PAGED_Q4_0, PAGED_Q4_1, PAGED_Q5_0, PAGED_Q5_1,
                                     PAGED_Q8_0, PAGED_Q4_K, PAGED_Q5_K, PAGED_Q6_K};
constexpr int32_t grouped(int32_t kind, int cols) { return PAGED_GROUPED | kind | cols / 32 << 16; }
constexpr int32_t kGroupedFormats[] = {
    grouped(PAGED_GROUPED_2, 32),  grouped(PAGED_GROUPED_3, 64),   grouped(PAGED_GROUPED_4, 128),
    grouped(PAGED_GROUPED_5, 64),  grouped(PAGED_GROUPED_6, 96),   grouped(PAGED_GROUPED_8, 512),
    grouped(PAGED_GROUPED_LEVELS, 64), grouped(PAGED_GROUPED_LEVELS_OF_16, 32),
};
constexpr int32_t kDenseFormats[] = {PAGED_DENSE_FLOAT32, PAGED_DENSE_BFLOAT16, PAGED_DENSE_FLOAT16};
constexpr int32_t kDtypes[] = {PAGED_FLOAT32, PAGED_BFLOAT16, PAGED_FLOAT16};

std::string of(const char* kernel, int32_t format, int more) {
  return std::string(kernel) + " format " + std::to_string(format) + " / " + std::to_string(more);
}

void compare_quantize(Levels& levels) {
  Random random(1);
  constexpr int kRows = 3, kCols = 768;
  std::vector<float> x = random.normal(kRows * kCols);
  for (int c = 0; c < kCols; c += 37) x[c] *= 30.0f;
  std::fill_n(x.begin() + kCols, 64, 0.0f);
  std::vector<float> importance(kCols);
  for (int c = 0; c < kCols; ++c) importance[c] = std::max(x[c] * x[c], 1e-3f);
  for (const int32_t format : kBlockFormats) {
    for (const int32_t dtype : kDtypes) {
      const std::vector<uint8_t> raw = as_dtype(x, dtype);
      for (const float* weights : std::vector<const float*>{nullptr, importance.data()}) {
        levels.compare(of(weights == nullptr ? "quantize" : "quantize, weighted", format, dtype), {0.0},
                       [&](const Run& run) {
                         return numbers(quantized(run.level, raw, dtype, format, kRows, kCols, weights));
                       });
      }
    }
  }
}

// Every dtype to every other, with columns that do not fill a vector and rows that do not fill a panel.
void compare_pack_dense(Levels& levels) {
  Random random(4);
  constexpr int kRows = 19, kCols = 77;
  std::vector<float> x = random.normal(kRows * kCols);
  x[5] = 1e-6f, x[6] = 1e9f, x[7] = -1e-40f, x[kCols + 1] = 65519.0f, x[kCols + 2] = -65520.0f;
  for (const int32_t format : kDenseFormats) {
    for (const int32_t dtype : kDtypes) {
      const std::vector<uint8_t> raw = as_dtype(x, dtype);
      levels.compare(of("pack_dense", format, dtype), {0.0}, [&](const Run& run) {
        std::vector<uint8_t> out(paged_packed_bytes(format, kRows, kCols));
        const paged_dense_args args{raw.data(), out.data(), format, kRows, kCols, dtype, 1, 0};
        run.done(paged_pack_dense(run.level, &args));
        return numbers(out);
      });
    }
  }
}

// Full lanes of groups, a partial set, and half a group; a few weights are so large that shrinkage keeps their errors.
void compare_quantize_groups(Levels& levels) {
  Random random(3);
  constexpr int kRows = 2, kCols = 32 * (2 * 19 + 1), kGroups = (kCols + 63) / 64;
  std::vector<float> x = random.normal(kRows * kCols), between(15);
  for (int c = 0; c < kCols; c += 41) x[c] *= 100.0f;
  std::fill_n(x.begin() + kCols, 64, 0.0f);
  for (int i = 0; i < 15; ++i) between[i] = static_cast<float>(i - 7) / 8.0f;
  const std::vector<uint8_t> codes_of_levels = {7, 6, 5, 4, 3, 2, 1, 0, 8, 9, 10, 11, 12, 13, 14, 15};
  for (const int32_t fit : {PAGED_FIT_EDGE, PAGED_FIT_HALF_QUADRATIC, PAGED_FIT_LEVELS}) {
    for (const int32_t dtype : kDtypes) {
      const std::vector<uint8_t> raw = as_dtype(x, dtype);
      const bool levels_only = fit == PAGED_FIT_LEVELS;
      levels.compare(of("quantize_groups", fit, dtype), {0.0}, [&](const Run& run) {
        std::vector<uint8_t> codes(kRows * kCols);
        std::vector<float> scales(kRows * kGroups), minima(kRows * kGroups);
        const paged_quantize_groups_args args{raw.data(), codes.data(), scales.data(),
                                              levels_only ? nullptr : minima.data(),
                                              levels_only ? between.data() : nullptr,
                                              levels_only ? codes_of_levels.data() : nullptr, kCols, fit, 4, kRows,
                                              kCols, dtype, 1};
        run.done(paged_quantize_groups(run.level, &args));
        std::vector<float> all = numbers(codes);
        all.insert(all.end(), scales.begin(), scales.end());
        all.insert(all.end(), minima.begin(), minima.end());
        return all;
      });
    }
  }
}

void compare_rows(Levels& levels, int32_t format) {
  Random random(2);
  const Weight weight(format, 21, 512, random);
  const std::vector<int64_t> rows = {20, 0, 17, 17, 15};
  levels.compare(of("rows", format, 0), {0.0}, [&](const Run& run) {
    std::vector<float> out(rows.size() * 512);
    const paged_rows_args args{&weight.packed, rows.data(), out.data(), static_cast<int32_t>(rows.size()), 1};
    run.done(paged_rows(run.level, &args));
    return out;
  });
}

// Two weights with one input, the first with a bias, and a residual: every kind of tile, each dtype, with and without a
// norm.
void compare_linear(Levels& levels, int32_t format, int cols, const Bound& bound) {
  Random random(format);
  const Weight first(format, 43, cols, random), second(format, 16, cols, random);
  const std::vector<float> bias = random.normal(43), norm = random.normal(cols);
  paged_weight weights[2] = {first.packed, second.packed};
  weights[0].bias = bias.data();
  std::vector<int32_t> reversed(cols);
  for (int c = 0; c < cols; ++c) reversed[c] = cols - 1 - c;
  if (paged::is_grouped(format)) weights[0].order = weights[1].order = reversed.data();
  constexpr int kMost = 19, kWidth = 59;
  const std::vector<float> x = random.normal(kMost * cols), residual = random.normal(kMost * kWidth);
  int turn = 0;
  for (const int num_rows : {1, 2, 3, 4, 5, 7, 8, 16, kMost}) {
    const int32_t dtype = kDtypes[turn++ % 3];
    const bool normed = turn % 2 == 0;
    const std::vector<uint8_t> input = as_dtype(x, dtype), start = as_dtype(residual, dtype);
    Bound allowed = bound;
    if (normed) allowed.relative = std::max(allowed.relative, kCodes);
    if (dtype != PAGED_FLOAT32 && allowed.relative > 0.0) allowed.relative = std::max(allowed.relative, kBfloat16);
    levels.compare(of("linear", format, num_rows), allowed, [&](const Run& run) {
      std::vector<uint8_t> out = start;
      paged_linear_args args{};
      args.x = input.data();
      args.residual = args.out = out.data();
      args.norm_weight = normed ? norm.data() : nullptr;
      args.weights = weights;
      args.workspace = run.workspace;
      args.x_stride = cols;
      args.residual_stride = args.out_stride = kWidth;
      args.num_weights = 2;
      args.num_rows = num_rows;
      args.dtype = dtype;
      args.num_threads = 1;
      args.norm_eps = 1e-5f;
      run.done(paged_linear(run.level, &args));
      return as_floats(out, dtype);
    });
  }
}

void compare_attention(Levels& levels, const paged_heads& heads, bool with_offsets, bool bidirectional) {
  Random random(heads.cache_dtype + heads.head_dim + heads.window);
  // A decode, a draft, a chunk, and a short sequence.
  Batch batch({1, 5, 40, 1}, {200, 133, 70, 17}, heads.block_size, random);
  if (bidirectional) batch.bidirectional_from = {-1, 120, 10, -1};
  const Cache cache(heads, batch.num_blocks, random);
  const int tokens = batch.num_tokens(), width = heads.num_heads * heads.head_dim;
  const std::vector<float> query = random.normal(tokens * width);
  const std::vector<float> offsets = random.normal(2 * heads.num_kv_heads * heads.head_dim);
  paged_cache pages = cache.pages();
  pages.key_offsets = with_offsets ? offsets.data() : nullptr;
  const Bound bound = heads.products == PAGED_FLOAT32_PRODUCTS ? Bound{kSums} : Bound{kPairs, true, true};
  levels.compare(of("attention", heads.cache_dtype, heads.head_dim), bound, [&](const Run& run) {
    std::vector<float> out(tokens * width);
    paged_attention_args args{};
    args.query = query.data();
    args.out = out.data();
    args.workspace = run.workspace;
    args.query_stride = args.out_stride = width;
    args.heads = heads;
    args.cache = pages;
    args.batch = batch.view();
    args.dtype = PAGED_FLOAT32;
    args.num_threads = 1;
    run.done(paged_attention(run.level, &args));
    return out;
  });
}

void compare_attention(Levels& levels) {
  for (const int32_t cache : {PAGED_FLOAT32, PAGED_BFLOAT16, PAGED_FLOAT16, PAGED_FLOAT8_E4M3, PAGED_Q4}) {
    const bool coded = cache == PAGED_FLOAT8_E4M3 || cache == PAGED_Q4;
    for (const int size : {cache == PAGED_Q4 ? 96 : 48, 64}) {
      const paged_heads plain{6, 2, size, 16, cache, 0, 0, 0.125f, 0.0f, PAGED_FLOAT32_PRODUCTS, nullptr};
      const float sinks[6] = {-1.0f, 0.0f, 0.5f, 1.0f, 2.0f, 3.0f};
      paged_heads in_pairs = plain, windowed = plain, capped = plain, sunk = plain;
      in_pairs.products = PAGED_BFLOAT16_PRODUCTS;
      windowed.window = 50;
      paged_heads reaching = windowed;
      reaching.window_reaches_ahead = 1;
      capped.softcap = 3.0f;
      sunk.sinks = sinks;
      for (const paged_heads& heads : {plain, in_pairs, windowed, reaching, capped, sunk})
        for (const bool bidirectional : {false, true})
          compare_attention(levels, heads, coded && heads.window == 0, bidirectional);
    }
  }
}

constexpr int kHidden = 256, kInner = 256, kHeadDim = 64, kExperts = 3;

// The matrices of a layer. Those of the feed-forward part are stacks of experts, of which a layer without experts uses
// the first.
struct LayerWeights {
  Weight query, key, value, output, gate, up, down;

  LayerWeights(int32_t format, Random& random)
      : query(format, 4 * kHeadDim, kHidden, random),
        key(format, 2 * kHeadDim, kHidden, random),
        value(format, 2 * kHeadDim, kHidden, random),
        output(format, kHidden, 4 * kHeadDim, random),
        gate(format, kExperts * kInner, kHidden, random),
        up(format, kExperts * kInner, kHidden, random),
        down(format, kExperts * kHidden, kInner, random) {}
};

void compare_experts(Levels& levels, const LayerWeights& weights, const Bound& bound, bool gated) {
  Random random(3);
  constexpr int kTokens = 11, kSelected = 2;
  const std::vector<float> x = random.normal(kTokens * kHidden);
  std::vector<float> shares(kTokens * kSelected);
  std::vector<int64_t> ids(kTokens * kSelected);
  for (int i = 0; i < kTokens * kSelected; ++i) shares[i] = 0.1f * (1 + i % 7), ids[i] = i * i % kExperts;
  for (const int tokens : {1, 4, kTokens}) {
    const char* const what = gated ? "experts" : "experts without gates";
    levels.compare(of(what, weights.up.packed.format, tokens), bound, [&](const Run& run) {
      std::vector<float> out(tokens * kHidden);
      paged_experts_args args{};
      args.x = x.data();
      args.out = out.data();
      args.topk_weights = shares.data();
      args.topk_ids = ids.data();
      args.workspace = run.workspace;
      if (gated) args.gate = weights.gate.packed;
      args.up = weights.up.packed;
      args.down = weights.down.packed;
      args.activation = gated ? PAGED_SILU : PAGED_RELU2;
      args.x_stride = args.out_stride = kHidden;
      args.num_experts = kExperts;
      args.num_tokens = tokens;
      args.num_selected = kSelected;
      args.dtype = PAGED_FLOAT32;
      args.num_threads = 1;
      run.done(paged_experts(run.level, &args));
      return out;
    });
  }
}

// Heads with matrices of their own, those of the query's projection: each with rows of its own, or all with the same.
void compare_heads(Levels& levels, const LayerWeights& weights, const Bound& bound) {
  Random random(5);
  constexpr int kHeads = 4, kTokens = 11;
  const std::vector<float> x = random.normal(kTokens * kHeads * kHidden);
  for (const bool shared : {false, true}) {
    levels.compare(of(shared ? "heads of shared rows" : "heads", weights.query.packed.format, kTokens), bound,
                   [&](const Run& run) {
                     std::vector<float> out(kTokens * kHeads * kHeadDim);
                     paged_head_product_args args{};
                     args.x = x.data();
                     args.out = out.data();
                     args.workspace = run.workspace;
                     args.weight = weights.query.packed;
                     args.x_stride = kHeads * kHidden;
                     args.x_head_stride = shared ? 0 : kHidden;
                     args.out_stride = kHeads * kHeadDim;
                     args.out_head_stride = kHeadDim;
                     args.num_heads = kHeads;
                     args.num_rows = kTokens;
                     args.dtype = PAGED_FLOAT32;
                     args.num_threads = 1;
                     run.done(paged_head_product(run.level, &args));
                     return out;
                   });
  }
}

// The weights of chosen experts, the largest first.
void compare_routing(Levels& levels) {
  Random random(7);
  constexpr int kTokens = 9, kCount = 40, kSelected = 6;
  const std::vector<float> scores = random.normal(kTokens * kCount), bias = random.normal(kCount);
  for (const int32_t scoring : {PAGED_SOFTMAX, PAGED_SIGMOID, PAGED_SPARSE_MIXER}) {
    for (const bool in_groups : {false, true}) {
      if (in_groups && scoring == PAGED_SPARSE_MIXER) continue;
      levels.compare(of(in_groups ? "routing in groups" : "routing", scoring, kSelected), {kSums}, [&](const Run& run) {
        std::vector<float> out(kTokens * kSelected);
        std::vector<int64_t> ids(kTokens * kSelected);
        paged_route_args args{};
        args.scores = scores.data();
        args.topk_weights = out.data();
        args.topk_ids = ids.data();
        args.workspace = run.workspace;
        args.choice.bias = in_groups ? bias.data() : nullptr;
        args.choice.num_experts = kCount;
        args.choice.num_selected = kSelected;
        args.choice.scoring = scoring;
        args.choice.num_groups = in_groups ? 8 : 1;
        args.choice.num_groups_selected = in_groups ? 3 : 1;
        args.choice.group_score_size = in_groups ? 2 : 1;
        args.choice.renormalize = in_groups;
        args.choice.scale = 2.5f;
        args.choice.margin = 0.2f;
        args.num_tokens = kTokens;
        args.dtype = PAGED_FLOAT32;
        args.num_threads = 1;
        run.done(paged_route(run.level, &args));
        return out;
      });
    }
  }
}

// Tokens drawn from rows of logits. Weights are rounded otherwise on other levels, which may change a token now and then;
// not one of these, whose numbers are not so near to the edge of a token's share.
void compare_draws(Levels& levels) {
  Random random(9);
  constexpr int kVocab = 1000, kDraws = 40;
  const std::vector<float> logits = random.normal(kVocab);
  const paged_draw_settings every[] = {{0, 0.0, 1.0, 0.0, kVocab}, {0, 0.7, 1.0, 0.0, kVocab}, {0, 1.5, 1.0, 0.1, kVocab},
                                       {0, 1.0, 1.0, 0.0, 30},     {0, 0.4, 0.8, 0.0, kVocab}, {0, 1.0, 0.9, 0.2, 50}};
  for (const paged_draw_settings& settings : every) {
    levels.compare(of("draw", static_cast<int32_t>(settings.top_k), static_cast<int>(10 * settings.top_p)), {0.0},
                   [&](const Run& run) {
                     const int64_t first_draws[] = {0, kDraws};
                     std::vector<int64_t> streams(kDraws), positions(kDraws), proposed(kDraws), tokens(kDraws);
                     for (int i = 0; i < kDraws; ++i) streams[i] = i % 3, positions[i] = i, proposed[i] = 25 * i - 1;
                     paged_draw_args args{};
                     args.logits = logits.data();
                     args.settings = &settings;
                     args.first_draws = first_draws;
                     args.streams = streams.data();
                     args.positions = positions.data();
                     args.proposed = proposed.data();
                     args.tokens = tokens.data();
                     args.workspace = run.workspace;
                     args.stride = kVocab;
                     args.num_rows = 1;
                     args.num_proposed = 1;
                     args.vocab_size = kVocab;
                     args.num_threads = 1;
                     run.done(paged_draw(run.level, &args));
                     return std::vector<float>(tokens.begin(), tokens.end());
                   });
  }
}

// Logprobs of chosen and of the likeliest tokens, with ties, for fewer tokens than the row has groups and for more. Sums
// are rounded otherwise on other levels, but the order of tokens is that of their logits.
void compare_logprobs(Levels& levels) {
  Random random(10);
  constexpr int kVocab = 1003, kRows = 3, kChosen = 20;
  std::vector<float> logits = random.normal(kRows * kVocab);
  for (float& logit : logits) logit = std::round(logit * 64.0f) / 16.0f;
  for (const int top_n : {5, 50}) {
    std::vector<int64_t> rows(kChosen), chosen(kChosen), tokens(kRows * top_n);
    for (int i = 0; i < kChosen; ++i) rows[i] = i % kRows, chosen[i] = 50 * i;
    std::vector<double> logprobs(kRows * top_n), of_chosen(kChosen);
    const auto run_on = [&](const Run& run) {
      paged_logprobs_args args{};
      args.logits = logits.data();
      args.chosen_rows = rows.data(), args.chosen_tokens = chosen.data(), args.chosen_logprobs = of_chosen.data();
      args.top_tokens = tokens.data(), args.top_logprobs = logprobs.data();
      args.workspace = run.workspace;
      args.stride = kVocab;
      args.num_chosen = kChosen;
      args.num_rows = kRows;
      args.vocab_size = kVocab;
      args.top_n = top_n;
      args.num_threads = 1;
      run.done(paged_logprobs(run.level, &args));
    };
    levels.compare(of("logprobs", kVocab, top_n), {kSums}, [&](const Run& run) {
      run_on(run);
      std::vector<float> all(of_chosen.begin(), of_chosen.end());
      all.insert(all.end(), logprobs.begin(), logprobs.end());
      return all;
    });
    levels.compare(of("likeliest tokens", kVocab, top_n), {0.0}, [&](const Run& run) {
      run_on(run);
      return std::vector<float>(tokens.begin(), tokens.end());
    });
  }
}

// Two layers, optionally `normed` after each part and in each head, and then with an MLP beside experts, if there are
// any: a prompt and a decode, or a decode alone, which makes its embeddings and angles.
void compare_decoder(Levels& levels, const LayerWeights& weights, int32_t cache_dtype, const Bound& bound, bool experts,
                     bool normed, bool alone) {
  Random random(4);
  const paged_heads heads{4, 2, kHeadDim, 16, cache_dtype, 0, 0, 0.125f, 0.0f, PAGED_FLOAT32_PRODUCTS, nullptr};
  const Batch batch = alone ? Batch({1}, {40}, 16, random) : Batch({9, 1}, {9, 40}, 16, random);
  const int rows = batch.num_tokens();
  const Cache cache(heads, batch.num_blocks, random);
  const std::vector<float> router = random.normal(kExperts * kHidden), norm = random.normal(kHidden);
  const std::vector<float> head_norm = random.normal(kHeadDim), hidden = random.normal(rows * kHidden);
  std::vector<float> cosines(rows * kHeadDim / 2), sines(rows * kHeadDim / 2);
  for (size_t i = 0; i < sines.size(); ++i) cosines[i] = std::cos(0.1f * i), sines[i] = std::sin(0.1f * i);
  const std::vector<float> frequencies = random.normal(kHeadDim / 2), query_scales(rows, 1.25f);
  const std::vector<int64_t> token_ids(rows, 3), positions(rows, 1000);
  const paged_rope rope{alone ? nullptr : cosines.data(), sines.data(), alone ? nullptr : query_scales.data(),
                        frequencies.data(), 1.5f, 0.2f, 300, kHeadDim / 2, 0, 0};
  const std::vector<int64_t> slots = batch.slots(heads.block_size);
  std::vector<float> factors = random.normal(heads.num_kv_heads * kHeadDim);
  for (float& factor : factors) factor = std::exp2(factor);

  paged_layer layer{};
  layer.qkv[0] = weights.query.packed, layer.qkv[1] = weights.key.packed, layer.qkv[2] = weights.value.packed;
  layer.output = weights.output.packed;
  if (experts) {
    layer.mixture.router = router.data(), layer.mixture.router_dtype = PAGED_FLOAT32;
    layer.mixture.choice = {nullptr, nullptr, kExperts, 2, PAGED_SOFTMAX, 1, 1, 1, 1, 0.0f, 0.0f, 1.0f, 0.0f, 0};
    layer.mixture.gate = weights.gate.packed, layer.mixture.up = weights.up.packed;
    layer.mixture.down = weights.down.packed;
    layer.mixture.mlp_gate = normed ? norm.data() : nullptr;
  }
  if (!experts || normed) {
    layer.gate = weights.gate.packed, layer.up = weights.up.packed, layer.down = weights.down.packed;
    layer.gate.rows = layer.up.rows = kInner, layer.down.rows = kHidden;
  }
  layer.attention_norm = layer.mlp_norm = norm.data();
  layer.attention_output_norm = layer.mlp_output_norm = normed ? norm.data() : nullptr;
  layer.query_norm = layer.key_norm = normed ? head_norm.data() : nullptr;
  layer.heads = heads;
  layer.num_qkv = 3;
  layer.activation = normed ? PAGED_GELU_TANH : PAGED_SILU;
  layer.norm_eps = 1e-5f;
  layer.scale = 1.0f;
  levels.compare(of("decoder", weights.gate.packed.format, cache_dtype), bound, [&](const Run& run) {
    Cache first = cache, second = cache;
    paged_layer layers[2] = {layer, layer};
    layers[0].cache = first.pages(), layers[1].cache = second.pages();
    for (paged_layer& each : layers) each.cache.key_factors = cache_dtype == PAGED_Q4 ? factors.data() : nullptr;
    std::vector<float> out = hidden;
    paged_decoder_args args{};
    args.hidden = out.data();
    args.ropes = &rope, args.num_ropes = 1;
    args.token_ids = alone ? token_ids.data() : nullptr, args.positions = positions.data();
    args.embedding = weights.query.packed, args.embedding_scale = 0.5f, args.stream_scale = 2.0f;
    args.slots = slots.data();
    args.layers = layers;
    args.workspace = run.workspace;
    args.batch = batch.view();
    args.num_layers = 2;
    args.num_rows = rows, args.hidden_size = kHidden;
    args.num_threads = 1;
    run.done(paged_decoder(run.level, &args));
    return out;
  });
}

void compare_layers(Levels& levels, int32_t format) {
  Random random(format);
  const LayerWeights weights(format, random);
  const bool pairs = format == PAGED_DENSE_BFLOAT16, has_experts = format < kInHadamard;
  compare_heads(levels, weights, {kCodes, pairs});
  if (has_experts)
    for (const bool gated : {true, false}) compare_experts(levels, weights, {kCodes, pairs}, gated);
  for (const int32_t cache : {PAGED_FLOAT32, PAGED_BFLOAT16, PAGED_FLOAT8_E4M3, PAGED_Q4}) {
    const bool no_codes = format == PAGED_DENSE_FLOAT32 && cache == PAGED_FLOAT32;
    const Bound bound{no_codes ? 20 * kSums : kTwoLayers, pairs};
    for (const bool alone : {false, true}) {
      compare_decoder(levels, weights, cache, bound, false, alone, alone);
      compare_decoder(levels, weights, cache, bound, has_experts, !alone, alone);
    }
  }
}

// A layer with latent attention, and an MLP after it: a prompt whose keys are decompressed for one head at a time, and a
// decode.
void compare_latent(Levels& levels, int32_t format, int32_t form_of_many, int32_t cache_dtype) {
  Random random(11);
  constexpr int kHeads = 4, kRank = 64, kRope = 32, kNope = 32, kValues = 96, kQueryRank = 64;
  const paged_heads heads{kHeads, 1, kRope + kRank, 16, cache_dtype, 0, 0, 0.125f, 0.0f, PAGED_FLOAT32_PRODUCTS,
                          nullptr};
  const Batch batch({40, 1}, {40, 70}, 16, random);
  const int rows = batch.num_tokens();
  const Cache cache(heads, batch.num_blocks, random);
  const Weight query(format, kQueryRank, kHidden, random), down(format, kRank + kRope, kHidden, random);
  const Weight query_up(format, kHeads * (kNope + kRope), kQueryRank, random);
  const Weight absorbing(format, kHeads * kRank, kNope, random), values(format, kHeads * kValues, kRank, random);
  const Weight key_up(form_of_many, kHeads * kNope, kRank, random);
  const Weight value_up(form_of_many, kHeads * kValues, kRank, random);
  const Weight output(format, kHidden, kHeads * kValues, random), up(format, kInner, kHidden, random);
  const Weight mlp_down(format, kHidden, kInner, random);
  const std::vector<float> norm = random.normal(kHidden), hidden = random.normal(rows * kHidden);
  const std::vector<float> frequencies = random.normal(kRope / 2);
  const std::vector<int64_t> positions(rows, 3), slots = batch.slots(heads.block_size);
  const std::vector<uint8_t> decompressed = {1, 0};
  paged_layer layer{};
  layer.qkv[0] = query.packed, layer.output = output.packed, layer.up = up.packed, layer.down = mlp_down.packed;
  layer.attention_norm = layer.mlp_norm = norm.data();
  layer.heads = heads;
  layer.num_qkv = 1, layer.norm_eps = 1e-5f, layer.scale = 1.0f;
  layer.latent = {down.packed, query_up.packed, absorbing.packed, values.packed, key_up.packed, value_up.packed,
                  norm.data(), norm.data(), kRank, kRope, kNope, kValues, 1e-6f, PAGED_FLOAT32, 1};
  const bool dense = format == PAGED_DENSE_FLOAT32 && cache_dtype == PAGED_FLOAT32;
  const Bound bound{dense ? 20 * kSums : kTwoLayers, format == PAGED_DENSE_BFLOAT16};
  for (const int32_t interleaved : {0, 1}) {
    const paged_rope rope{nullptr, nullptr, nullptr, frequencies.data(), 1.5f, 0.0f, 0, kRope / 2, interleaved, 0};
    levels.compare(of("latent attention", format, cache_dtype), bound, [&](const Run& run) {
      Cache own = cache;
      paged_layer with_pages = layer;
      with_pages.cache = own.pages();
      with_pages.cache.value = with_pages.cache.key, with_pages.cache.value_scale = with_pages.cache.key_scale;
      std::vector<float> out = hidden;
      paged_decoder_args args{};
      args.hidden = out.data();
      args.ropes = &rope, args.num_ropes = 1;
      args.positions = positions.data(), args.slots = slots.data();
      args.layers = &with_pages;
      args.workspace = run.workspace;
      args.batch = batch.view();
      args.batch.decompressed = decompressed.data();
      args.num_layers = 1;
      args.num_rows = rows, args.hidden_size = kHidden;
      args.num_threads = 1;
      run.done(paged_decoder(run.level, &args));
      return out;
    });
  }
}

// A decode in the middle of a sequence and a prefill that begins one.
void compare_recurrent(Levels& levels) {
  Random random(6);
  constexpr int kTokens = 20, kTaps = 4, kChannels = 208, kKeyHeads = 2, kValueHeads = 4, kKey = 64, kValue = 48;
  constexpr int kInputs = 2 * kKeyHeads * kKey + kValueHeads * kValue, kOutputs = kValueHeads * kValue;
  const std::vector<int64_t> slots{2, 0}, first_tokens{0, 1, kTokens};
  const std::vector<uint8_t> is_new{0, 1};
  paged_recurrent_rows rows{};
  rows.slots = slots.data(), rows.first_tokens = first_tokens.data(), rows.is_new = is_new.data(), rows.num_rows = 2;
  const std::vector<float> x = random.normal(3 * kTokens * kChannels), weight = random.normal(kTaps * kChannels);
  const std::vector<float> bias = random.normal(kChannels), kept = random.normal(3 * (kTaps - 1) * kChannels);
  const std::vector<float> inputs = random.normal(kTokens * kInputs), rates = random.normal(kTokens * 2 * kValueHeads);
  const std::vector<float> gates = random.normal(kTokens * kOutputs), norm = random.normal(kValue);
  const std::vector<float> rate{0.5f, 1.0f, 4.0f, 0.1f}, step_bias{0.0f, 1.0f, -1.0f, 2.0f};
  const std::vector<float> states = random.normal(3 * kValueHeads * kKey * kValue);
  for (const int32_t dtype : kDtypes) {
    const double bound = dtype == PAGED_FLOAT32 ? 20 * kSums : 2 * kBfloat16;
    const std::vector<uint8_t> raw = as_dtype(x, dtype);
    const size_t column = raw.size() / x.size();
    // Decoder layers compute in float32, and keep inputs in the model's dtype.
    for (const int32_t pool_dtype : kDtypes) {
      if (dtype != PAGED_FLOAT32 && pool_dtype != dtype) continue;
      for (const bool gated : {false, true}) {
        const double limit = pool_dtype == PAGED_FLOAT32 ? bound : 2 * kBfloat16;
        levels.compare(of("short_conv", dtype, 2 * pool_dtype + gated), {limit}, [&](const Run& run) {
          std::vector<uint8_t> pool = as_dtype(kept, pool_dtype), out(kTokens * kChannels * column);
          const uint8_t* const data = raw.data();
          paged_short_conv_args args{};
          args.rows = rows;
          args.x = data + 2 * kChannels * column;
          args.gate_in = gated ? data : nullptr, args.gate_out = gated ? data + kChannels * column : nullptr;
          args.weight = weight.data(), args.bias = gated ? bias.data() : nullptr;
          args.pool = pool.data(), args.out = out.data();
          args.x_stride = 3 * kChannels, args.out_stride = kChannels;
          args.channels = kChannels, args.taps = kTaps, args.silu = !gated;
          args.dtype = dtype, args.pool_dtype = pool_dtype, args.num_threads = 1;
          run.done(paged_short_conv(run.level, &args));
          std::vector<float> result = as_floats(out, dtype);
          const std::vector<float> later = as_floats(pool, pool_dtype);
          result.insert(result.end(), later.begin(), later.end());
          return result;
        });
      }
    }
    const std::vector<uint8_t> own = as_dtype(inputs, dtype), given = as_dtype(rates, dtype);
    const std::vector<uint8_t> gate = as_dtype(gates, dtype);
    levels.compare(of("gated_delta", dtype, kValue), {bound}, [&](const Run& run) {
      std::vector<float> pool = states;
      std::vector<uint8_t> out(kTokens * kOutputs * column);
      paged_gated_delta_args args{};
      args.rows = rows;
      args.inputs = own.data(), args.rates = given.data(), args.gates = gate.data();
      args.rate = rate.data(), args.step_bias = step_bias.data(), args.norm_weight = norm.data();
      args.pool = pool.data(), args.out = out.data();
      args.inputs_stride = kInputs, args.rates_stride = 2 * kValueHeads, args.gates_stride = kOutputs;
      args.key_heads = kKeyHeads, args.value_heads = kValueHeads, args.key_dim = kKey, args.value_dim = kValue;
      args.dtype = dtype, args.num_threads = 1, args.norm_eps = 1e-6f;
      run.done(paged_gated_delta(run.level, &args));
      std::vector<float> result = as_floats(out, dtype);
      result.insert(result.end(), pool.begin(), pool.end());
      return result;
    });
    // Four heads of 48 columns and two groups of 64: of the numbers above, with the widths of queries, keys and values.
    levels.compare(of("mamba2", dtype, kValue), {bound}, [&](const Run& run) {
      std::vector<float> pool = states, read(kTokens * kOutputs);
      std::vector<uint8_t> out(kTokens * kOutputs * column);
      paged_mamba2_args args{};
      args.rows = rows;
      args.inputs = own.data(), args.steps = given.data(), args.gates = gate.data();
      args.rate = rate.data(), args.step_bias = step_bias.data(), args.skip = step_bias.data();
      args.norm_weight = weight.data();
      args.pool = pool.data(), args.read = read.data(), args.out = out.data();
      args.inputs_stride = kInputs, args.steps_stride = 2 * kValueHeads, args.gates_stride = kOutputs;
      args.heads = kValueHeads, args.head_dim = kValue, args.groups = kKeyHeads, args.state_size = kKey;
      args.norm_size = kOutputs / kKeyHeads, args.gate_first = 1;
      args.dtype = dtype, args.num_threads = 1, args.norm_eps = 1e-6f;
      run.done(paged_mamba2(run.level, &args));
      std::vector<float> result = as_floats(out, dtype);
      result.insert(result.end(), pool.begin(), pool.end());
      return result;
    });
  }
}

void compare_all(Levels& levels) {
  compare_quantize(levels);
  compare_pack_dense(levels);
  compare_quantize_groups(levels);
  for (const int32_t format : kBlockFormats) compare_rows(levels, format);
  for (const int32_t format : kGroupedFormats) compare_rows(levels, format);
  for (const int32_t format : kBlockFormats) compare_linear(levels, format, 512, {kSums});
  // Within one block of columns, codes and products are identical; sums over several blocks are fused or not.
  for (const int32_t format : kBlockFormats) compare_linear(levels, kInHadamard + format, 256, {0.0});
  compare_linear(levels, kInHadamard + PAGED_Q4_1, 96, {0.0});
  compare_linear(levels, kInHadamard + PAGED_Q4_K, 768, {kSums});
  for (const int32_t format : kGroupedFormats) {
    compare_linear(levels, format, 512, {kSums});
    compare_linear(levels, kInHadamard + format, 256, {0.0});
  }
  for (const int32_t format : kDenseFormats)
    for (const int cols : {201, 256}) compare_linear(levels, format, cols, {kSums, format == PAGED_DENSE_BFLOAT16});
  compare_attention(levels);
  compare_routing(levels);
  compare_draws(levels);
  compare_logprobs(levels);
  compare_recurrent(levels);
  for (const int32_t format : {int32_t{PAGED_Q4_K}, kInHadamard + PAGED_Q4_K}) compare_layers(levels, format);
  compare_layers(levels, grouped(PAGED_GROUPED_4, 128));
  for (const int32_t format : kDenseFormats) compare_layers(levels, format);
  for (const int32_t cache : {PAGED_FLOAT32, PAGED_BFLOAT16, PAGED_FLOAT8_E4M3}) {
    compare_latent(levels, PAGED_Q8_0, kInHadamard + PAGED_Q8_0, cache);
    for (const int32_t format : kDenseFormats) compare_latent(levels, format, format, cache);
  }
}

}  // namespace

int main() {
  Levels levels;
  compare_all(levels);
  return levels.report();
}
