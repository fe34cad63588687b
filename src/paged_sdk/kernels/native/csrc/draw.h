// Draws tokens from a row of logits by temperature, top-k, top-p and min-p, without sorting the row (paged_draw_args).
//
// The row is read in groups (row_groups.h), whose weights are kept too: a group is read again only if tokens of it can
// be drawn. With top-k or top-p, the tokens that may be kept are collected, and their order is only established where a
// draw needs it, by halving.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "abi_sampling.h"
#include "argmax.h"
#include "functions.h"
#include "row_groups.h"
#include "workspace.h"

namespace paged {
namespace {

// A token that may be kept. The type is local, and so are the sorts of it: those of different instruction sets must not
// become one.
struct Candidate {
  float logit;
  float weight;
  int32_t token;
};

// Returns the number in [0, 1) at a position in a stream, with 53 bits.
inline double uniform_at(int64_t stream, int64_t position) {
  uint64_t bits = static_cast<uint64_t>(stream) + 0x9E3779B97F4A7C15u * (static_cast<uint64_t>(position) + 1);
  bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
  return static_cast<double>((bits ^ bits >> 31) >> 11) * 0x1p-53;
}

struct DrawScratch {
  float* maxima;  // of each group
  float* sorted;  // a copy of them
  float* masses;  // sums of the weights of each group
  Candidate* candidates;

  static DrawScratch at(Arena& arena, int vocab_size) {
    DrawScratch out{};
    for (float** each : {&out.maxima, &out.sorted, &out.masses})
      *each = arena.take<float>(RowGroups::count_of(vocab_size));
    out.candidates = arena.take<Candidate>(static_cast<size_t>(vocab_size));
    return out;
  }
  static size_t bytes(int vocab_size) {
    Arena arena(nullptr);
    at(arena, vocab_size);
    return arena.used();
  }
};

// Draws from one row. Weights are relative to the row's largest logit, whose weight is 1.
class RowDistribution {
 public:
  RowDistribution(const float* row, int vocab_size, const paged_draw_settings& settings, const DrawScratch& scratch)
      : row_(row), vocab_size_(vocab_size), groups_(row, vocab_size, scratch.maxima), settings_(settings),
        scratch_(scratch) {
    largest_ = groups_.find_maxima();
    // Finite, so that a difference of 0 stays 0.
    rate_ = static_cast<float>(std::min(kLog2E / settings.temperature, double{std::numeric_limits<float>::max()}));
    if (!is_good()) return;
    in_order_ = settings.top_k >= vocab_size && settings.top_p >= 1.0;
    if (settings.top_k >= vocab_size) weigh_groups();
    if (!in_order_) collect();
  }

  // Returns whether tokens can be drawn: no logit is NaN, and the largest is finite.
  bool is_good() const { return std::isfinite(largest_); }

  int64_t draw(double number) { return in_order_ ? draw_in_order(number) : draw_likeliest(number); }

  bool keeps(int64_t token) const {
    const float logit = row_[token], weight = weight_of(logit);
    if (in_order_) return weight > least_weight();
    return weight > 0.0f && !IsLikelier{}(last_kept_, {logit, weight, static_cast<int32_t>(token)});
  }

 private:
  Floats weights_of(Floats logits) const {
    return exponential2(mul(sub(logits, broadcast(largest_)), broadcast(rate_)));
  }
  float weight_of(float logit) const {
    alignas(64) float weights[16];
    store_floats(weights, weights_of(broadcast(logit)));
    return weights[0];
  }
  // Weights up to this are not kept by min-p.
  float least_weight() const {
    return std::max(0.0f, std::nextafter(static_cast<float>(settings_.min_p), -1.0f));
  }

  // Sums the weights of each group, without those that min-p leaves out unless top-p counts them.
  void weigh_groups() {
    const float least = in_order_ ? least_weight() : 0.0f;
    total_ = 0.0;
    for (int g = 0; g < groups_.count(); ++g) {
      Floats sum = zero_floats();
      for (int col = g * RowGroups::kSize; col < groups_.end_of(g); col += 16) {
        const Floats weights = weights_of(groups_.load(col));
        sum = add(sum, zero_unless_above(weights, least, weights));
      }
      scratch_.masses[g] = sum_of(sum);
      total_ += scratch_.masses[g];
    }
  }

  int64_t draw_in_order(double number) const {
    const double target = std::min(number * total_, std::nextafter(total_, 0.0));  // the product may be rounded up
    double before = 0.0;
    int group = 0;
    for (; before + scratch_.masses[group] <= target; ++group) before += scratch_.masses[group];
    alignas(64) float weights[RowGroups::kSize];
    const int first = group * RowGroups::kSize, count = groups_.end_of(group) - first;
    double sum = 0.0;
    for (int i = 0; i < count; i += 16) {
      const Floats own = weights_of(groups_.load(first + i));
      store_floats(weights + i, zero_unless_above(own, least_weight(), own));
    }
    for (int i = 0; i < count; ++i) sum += weights[i];
    // The sum in doubles may differ from the group's in the last bits.
    const double within = (target - before) / scratch_.masses[group] * sum;
    double so_far = 0.0;
    int found = 0;
    for (int i = 0; i < count; ++i) {
      if (weights[i] == 0.0f) continue;
      found = i;
      so_far += weights[i];
      if (so_far > within) break;
    }
    return first + found;
  }

  // Collects the tokens that top-k and top-p keep, and leaves those out that min-p does not.
  void collect() {
    if (settings_.top_k < vocab_size_) {
      collect_likeliest();
    } else {
      collect_share();
    }
    const float least = least_weight();
    count_ = std::partition(scratch_.candidates, scratch_.candidates + count_,
                            [least](const Candidate& each) { return each.weight > least; }) -
             scratch_.candidates;
    const double enough = settings_.top_p * total_;
    if (settings_.top_p < 1.0) count_ = std::min(1 + reach<false>(enough), count_);
    mass_ = 0.0;
    last_kept_ = scratch_.candidates[0];
    for (int64_t i = 0; i < count_; ++i) {
      const Candidate& each = scratch_.candidates[i];
      mass_ += each.weight;
      if (IsLikelier{}(last_kept_, each)) last_kept_ = each;
    }
  }

  // Collects the top_k likeliest tokens.
  void collect_likeliest() {
    const int64_t top_k = settings_.top_k;
    gather(groups_.reached_by(top_k, scratch_.sorted));
    if (count_ > top_k) {
      std::nth_element(scratch_.candidates, scratch_.candidates + top_k - 1, scratch_.candidates + count_,
                       IsLikelier{});
      count_ = top_k;
    }
    total_ = 0.0;
    for (int64_t i = 0; i < count_; ++i) total_ += scratch_.candidates[i].weight;
  }

  // Collects the likeliest tokens with a share of top_p, and more: mostly those with 1/256 of the largest weight or
  // more are enough.
  void collect_share() {
    for (const float bits : {8.0f, 12.0f, 16.0f}) {
      gather(largest_ - bits / rate_);
      double sum = 0.0;
      for (int64_t i = 0; i < count_; ++i) sum += scratch_.candidates[i].weight;
      if (sum >= settings_.top_p * total_) return;
    }
    gather(-std::numeric_limits<float>::max());
  }

  // Collects the tokens whose logit is at least `least`, and not -inf.
  void gather(float least) {
    least = std::max(least, -std::numeric_limits<float>::max());
    count_ = 0;
    groups_.visit(least, [this, least](int first, Floats own) {
      alignas(64) float logits[16], weights[16];
      store_floats(logits, own);
      store_floats(weights, weights_of(own));
      for (int i = 0; i < 16; ++i)
        if (logits[i] >= least) scratch_.candidates[count_++] = {logits[i], weights[i], first + i};
    });
  }

  // Returns how many candidates, from the likeliest on, have together less than `sum`, or as much if `kOrEqual`; moves
  // them to the front.
  template <bool kOrEqual>
  int64_t reach(double sum) {
    const auto fits = [sum](double weight) { return kOrEqual ? weight <= sum : weight < sum; };
    Candidate* const all = scratch_.candidates;
    int64_t first = 0, last = count_;  // the answer is in between
    double before = 0.0;
    while (last - first > 8) {
      const int64_t middle = (first + last) / 2;
      std::nth_element(all + first, all + middle, all + last, IsLikelier{});
      double half = 0.0;
      for (int64_t i = first; i < middle; ++i) half += all[i].weight;
      if (fits(before + half)) {
        before += half;
        first = middle;
      } else {
        last = middle;
      }
    }
    std::sort(all + first, all + last, IsLikelier{});
    while (first < last && fits(before + all[first].weight)) before += all[first++].weight;
    return first;
  }

  int64_t draw_likeliest(double number) {
    // Sums in another order may be rounded otherwise.
    const int64_t found = std::min(reach<true>(number * mass_), count_ - 1);
    if (found == count_ - 1) return last_kept_.token;
    return scratch_.candidates[found].token;
  }

  const float* row_;
  int vocab_size_;
  RowGroups groups_;
  const paged_draw_settings& settings_;
  DrawScratch scratch_;
  float largest_, rate_;
  bool in_order_ = false;
  double total_ = 0.0;  // weight of all tokens, or of the top k; without those that min-p leaves out if in_order_
  double mass_ = 0.0;   // weight of the candidates
  int64_t count_ = 0;   // of candidates
  Candidate last_kept_{};
};

// Draws the tokens of one row.
inline void draw_row(const paged_draw_args& args, int64_t row, const DrawScratch& scratch) {
  const int64_t first = args.first_draws != nullptr ? args.first_draws[row] : row;
  const int64_t last = args.first_draws != nullptr ? args.first_draws[row + 1] : row + 1;
  if (first == last) return;
  const float* const logits = args.logits + row * args.stride;
  const paged_draw_settings& settings = args.settings[row];
  if (settings.temperature == 0.0) {
    std::fill(args.tokens + first, args.tokens + last, argmax_of(logits, args.vocab_size));
    return;
  }
  RowDistribution from(logits, args.vocab_size, settings, scratch);
  if (!from.is_good()) {
    std::fill(args.tokens + first, args.tokens + last, int64_t{-1});
    return;
  }
  for (int64_t i = first; i < last; ++i) {
    const int64_t* const proposed = args.proposed + i * args.num_proposed;
    int64_t token = -1;
    for (int p = 0; p < args.num_proposed && token < 0; ++p)
      if (proposed[p] >= 0 && from.keeps(proposed[p])) token = proposed[p];
    const int64_t stream = args.streams != nullptr ? args.streams[i] : settings.stream;
    args.tokens[i] = token >= 0 ? token : from.draw(uniform_at(stream, args.positions[i]));
  }
}

// Cost of drawing from a row, in byte multiply-adds (pool.h): 0.5 to 1 ns per logit; from flat distributions, of which
// top-p or top-k keeps most tokens, up to 65 ns. Rows are claimed as if all were flat: a claim takes half a
// microsecond, a row 25 at least.
inline int64_t draw_cost(int vocab_size) { return int64_t{32'500} * vocab_size; }

}  // namespace
}  // namespace paged
