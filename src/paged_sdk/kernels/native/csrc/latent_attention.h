// Computes multi-head latent attention (DeepSeek-AI, 2024, arXiv 2405.04434).
//
// Over latent vectors, a query's product with a key has 576 elements and a weight's with a value as many (DeepSeek-V2),
// but they are read once for all heads: right for decodes. Over keys and values of heads, it is 192 and 128, but these
// are made of the latent vectors first, which pays if many queries see them. The caller marks such sequences.
#pragma once

#include "head_product.h"
#include "mlp.h"
#include "new_keys.h"

namespace paged {
namespace {

// Computes queries, and new latent vectors, which are written to the cache.
inline Task project_latents(Job& job, const Step& step, int index) {
  const paged_decoder_args& args = step.args;
  const paged_layer& layer = args.layers[index];
  const paged_latent& latent = layer.latent;
  const paged_heads& heads = layer.heads;
  const paged_rope& rope = args.ropes[layer.rope];
  const int64_t width = projected_width(layer);
  const int rank = query_rank(latent), query_dim = latent_query_dim(latent);
  float* const queries = step.scratch.projected;
  float* const compressed = queries + query_width(layer);
  float* const keys = compressed + rank;
  co_await project_normed(job, step, index, PAGED_QKV, 1, layer.qkv, 1, false,
                          rank > 0 ? compressed : queries);
  co_await project_normed(job, step, index, PAGED_QKV + 1, 1, &latent.down, 1,
                          share_input(layer.qkv[0], latent.down), keys + latent.rope_dim);

  const auto place = [&](int64_t t) {
    float *const key = keys + t * width, *const vector = key + latent.rope_dim;
    normalize(vector, latent.rank, latent.norm, latent.norm_eps);
    __builtin_memcpy(key, vector + latent.rank, sizeof(float) * latent.rope_dim);
    rotate(rope, key, original_row(args, t));
    store_vector(key, heads.head_dim, heads.cache_dtype, layer.cache.key, layer.cache.key_scale, args.slots[t]);
  };
  const auto rotate_queries = [&](int64_t t) {
    const int64_t row = original_row(args, t);
    float* const own = queries + t * width;
    if (rope.query_scales != nullptr) {
      const Floats scale = broadcast(rope.query_scales[row]);
      for (int c = 0; c < heads.num_heads * query_dim; c += 16) store_floats(own + c, mul(load_floats(own + c), scale));
    }
    for (int h = 0; h < heads.num_heads; ++h) rotate(rope, own + h * query_dim + latent.nope_dim, row);
  };
  co_await job.phase(args.num_rows, row_cost(static_cast<int>(width)), [&](int64_t first, int64_t last, int) {
    for (int64_t t = first; t < last; ++t) {
      place(t);
      if (rank > 0) {
        normalize(compressed + t * width, rank, latent.query_norm, latent.norm_eps);
      } else {
        rotate_queries(t);
      }
    }
  });
  if (rank == 0) co_return;
  const paged_weight& up = latent.query_up;
  const Operand rows = Operand::at(step.scratch.activations, up, args.num_rows);
  co_await prepare_rows(job, up, {compressed, width, PAGED_FLOAT32}, nullptr, 0.0f, rows);
  co_await multiply(job, &up, 1, rows, plain_output(queries, width), step.sums);
  if (step.adapted.change(index, PAGED_QKV + 2, 1))
    co_await add_updates(job, step.adapted, index, PAGED_QKV + 2, 1, {compressed, width, rank}, queries, width,
                         step.scratch.adapters.shrunk);
  co_await job.phase(args.num_rows, row_cost(query_width(layer)), [&](int64_t first, int64_t last, int) {
    for (int64_t t = first; t < last; ++t) rotate_queries(t);
  });
}

// Attends over latent vectors with the rows of a part.
inline Task attend_absorbed(Job& job, const Step& step, const paged_layer& layer, const paged_batch part) {
  const paged_latent& latent = layer.latent;
  const paged_heads& heads = layer.heads;
  const int num_threads = step.args.num_threads, rows = num_rows(part), begin = first_row(part);
  const int count = heads.num_heads, size = heads.head_dim, query_dim = latent_query_dim(latent);
  const int64_t width = projected_width(layer), of_queries = query_width(heads), of_values = attended_width(layer);
  Arena arena(step.scratch.attention);
  const AbsorbedScratch scratch = AbsorbedScratch::at(arena, layer, part, num_threads);
  float* const projected = step.scratch.projected + begin * width;
  for (int s = 0; s <= part.num_seqs; ++s) scratch.starts[s] = part.cu_seqlens_q[s] - begin;

  co_await job.phase(rows, row_cost(count * latent.rope_dim), [&](int64_t first, int64_t last, int) {
    for (int64_t t = first; t < last; ++t)
      for (int h = 0; h < count; ++h)
        __builtin_memcpy(scratch.queries + t * of_queries + h * size,
                         projected + t * width + h * query_dim + latent.nope_dim, sizeof(float) * latent.rope_dim);
  });
  co_await multiply_heads(job, HeadWeights(latent.absorbing, count), {projected, width, query_dim, PAGED_FLOAT32},
                          {scratch.queries + latent.rope_dim, of_queries, size, PAGED_FLOAT32}, rows,
                          scratch.absorbing);
  paged_batch own = part;
  own.cu_seqlens_q = scratch.starts;
  const AttentionPlan plan(heads, own, num_threads);
  co_await attend_batch(job, plan, layer.cache, {scratch.queries, of_queries, PAGED_FLOAT32},
                        plain_output(scratch.results, of_queries), AttentionScratch::at(scratch.attention, plan));
  // What attention makes of rotated elements as values is not used.
  co_await multiply_heads(job, HeadWeights(latent.values, count),
                          {scratch.results + latent.rope_dim, of_queries, size, PAGED_FLOAT32},
                          {step.scratch.attended + begin * of_values, of_values, latent.value_dim, PAGED_FLOAT32},
                          rows, scratch.values);
}

// Makes keys and values of `count` heads from `first_head` on, of all tokens of a sequence.
inline Task decompress(Job& job, const paged_layer& layer, const Pages pages, const Decompressed& shape,
                       const DecompressedScratch& scratch, int first_head, int count) {
  const paged_latent& latent = layer.latent;
  const int all = layer.heads.num_heads, rank = latent.rank, rope_dim = latent.rope_dim;
  const int size = shape.heads.head_dim, query_dim = latent_query_dim(latent);
  const int64_t width = int64_t{count} * size;
  const int32_t dtype = shape.heads.cache_dtype;
  const Output keys{scratch.keys, width, dtype, {}}, values{scratch.values, width, dtype, {}};
  const HeadWeights key_up = HeadWeights(latent.key_up, all).part(first_head, count);
  const HeadWeights value_up = HeadWeights(latent.value_up, all).part(first_head, count);
  for (int begin = 0; begin < shape.context_len; begin += kLatentsAtOnce) {
    const int num_keys = std::min(shape.context_len - begin, kLatentsAtOnce);
    co_await job.phase(num_keys, row_cost(rank) + count * row_cost(size), [&](int64_t first, int64_t last, int) {
      for (int64_t i = first; i < last; ++i) {
        const int key = begin + static_cast<int>(i);
        int64_t vector;
        pages.vectors_of(key, key + 1, &vector);
        const auto load = [&](int c) { return pages.load(pages.cache.key, pages.cache.key_scale, vector, c); };
        for (int c = 0; c < rank; c += 16) store_floats(scratch.latents + i * rank + c, load(rope_dim + c));
        for (int h = 0; h < count; ++h) {
          for (int c = 0; c < rope_dim; c += 16) keys.store(key, int64_t{h} * size + c, load(c));
          for (int c = query_dim; c < size; c += 16) keys.store(key, int64_t{h} * size + c, zero_floats());
          for (int c = latent.value_dim; c < size; c += 16) values.store(key, int64_t{h} * size + c, zero_floats());
        }
      }
    });
    const HeadVectors latents{scratch.latents, rank, 0, PAGED_FLOAT32};
    const auto from = [&](uint8_t* data, int column) {
      const int64_t element = begin * width + column;
      return HeadVectors{data + element * (shape.key_bytes() / size), width, size, dtype};
    };
    co_await multiply_heads(job, key_up, latents, from(scratch.keys, rope_dim), num_keys, scratch.key_up);
    co_await multiply_heads(job, value_up, latents, from(scratch.values, 0), num_keys, scratch.value_up);
  }
}

// Attends over decompressed keys and values with the rows of a part, which is one sequence.
inline Task attend_decompressed(Job& job, const Step& step, const paged_layer& layer, const paged_batch part) {
  const paged_latent& latent = layer.latent;
  const int num_threads = step.args.num_threads, rows = num_rows(part), begin = first_row(part);
  const int all = layer.heads.num_heads, query_dim = latent_query_dim(latent), value_dim = latent.value_dim;
  const Decompressed shape(layer, part);
  const int size = shape.heads.head_dim, together = shape.heads.num_heads;
  const int64_t width = projected_width(layer), of_queries = int64_t{all} * size, of_values = attended_width(layer);
  Arena arena(step.scratch.attention);
  const DecompressedScratch scratch = DecompressedScratch::at(arena, layer, shape, num_threads);
  const float* const projected = step.scratch.projected + begin * width;
  float* const attended = step.scratch.attended + begin * of_values;

  co_await job.phase(rows, row_cost(static_cast<int>(of_queries)), [&](int64_t first, int64_t last, int) {
    for (int64_t t = first; t < last; ++t) {
      for (int h = 0; h < all; ++h) {
        const float* const from = projected + t * width + h * query_dim;
        float* const to = scratch.queries + t * of_queries + h * size;
        __builtin_memcpy(to, from + latent.nope_dim, sizeof(float) * latent.rope_dim);
        __builtin_memcpy(to + latent.rope_dim, from, sizeof(float) * latent.nope_dim);
        std::fill(to + query_dim, to + size, 0.0f);
      }
    }
  });
  const Pages pages{layer.heads, layer.cache, part.block_tables, 0};
  const paged_cache cache{scratch.keys, scratch.values, nullptr, nullptr, nullptr, nullptr};
  const paged_batch batch = shape.batch();
  for (int head = 0; head < all; head += together) {
    const int count = std::min(together, all - head);
    const int64_t of_results = int64_t{count} * size;
    const paged_heads some = shape.of(count);
    co_await decompress(job, layer, pages, shape, scratch, head, count);
    const AttentionPlan plan(some, batch, num_threads);
    co_await attend_batch(job, plan, cache, {scratch.queries + int64_t{head} * size, of_queries, PAGED_FLOAT32},
                          plain_output(scratch.results, of_results), AttentionScratch::at(scratch.attention, plan));
    co_await job.phase(rows, row_cost(count * value_dim), [&](int64_t first, int64_t last, int) {
      for (int64_t t = first; t < last; ++t)
        for (int h = 0; h < count; ++h)
          __builtin_memcpy(attended + t * of_values + (head + h) * value_dim,
                           scratch.results + t * of_results + h * size, sizeof(float) * value_dim);
    });
  }
}

// Attends with all rows, and leaves the results of all heads in scratch memory.
inline Task attend_over_latents(Job& job, const Step& step, const paged_layer& layer) {
  const paged_batch& batch = step.args.batch;
  for (int s = 0; s < batch.num_seqs;) {
    const LatentPart part = LatentPart::from(batch, s);
    const paged_batch rows = part.of(batch);
    s = part.last;
    if (num_rows(rows) == 0) continue;
    if (part.is_decompressed) {
      co_await attend_decompressed(job, step, layer, rows);
    } else {
      co_await attend_absorbed(job, step, layer, rows);
    }
  }
}

}  // namespace
}  // namespace paged
