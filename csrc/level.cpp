// Owns the loops of one level. Built once for each level, with that level's flags and ONEFOLD_LOOPS as the name of its
// table. Each loop is plain code that the compiler vectorizes: one rule, one form of weights, one format of gradients.
#include "arithmetic.h"
#include "forms.h"
#include "loops.h"
#include "rules.h"

namespace onefold {
namespace {

template <class Rule, class Form, class Format>
void update(const onefold_run &run, int64_t start, int64_t stop) {
  const Rule rule(run, start);
  const Form form(run, start);
  const auto *grad = static_cast<const typename Format::Word *>(run.grad) + start;
  const float first = run.factor[0], second = run.factor[1];
  const int64_t numel = stop - start;
#pragma omp simd
  for (int64_t i = 0; i < numel; ++i) {
    form.store(i, rule.step(i, form.load(i), Format::widen(grad[i]) * first * second));
  }
}

template <class Format>
int64_t count_nonfinite(const void *values, int64_t start, int64_t stop) {
  const auto *value = static_cast<const typename Format::Word *>(values);
  int32_t count = 0;  // a tile is far smaller than 2^31
#pragma omp simd reduction(+ : count)
  for (int64_t i = start; i < stop; ++i) {
    count += (Format::raw(value[i]) & Format::exponent) == Format::exponent;
  }
  return count;
}

// 16 sums side by side, added up in a fixed order: every level gives the same bits. A product of two fp32 numbers is
// exact in double, so fusing it would change nothing.
template <class Format>
double sum_of_squares(const void *values, int64_t start, int64_t stop) {
  constexpr int kLanes = 16;
  const auto *value = static_cast<const typename Format::Word *>(values);
  double lanes[kLanes] = {};
  int64_t i = start;
  for (; i + kLanes <= stop; i += kLanes) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) {
      const double wide = Format::widen(value[i + lane]);
      lanes[lane] += wide * wide;
    }
  }
  for (int lane = 0; i < stop; ++i, ++lane) {
    const double wide = Format::widen(value[i]);
    lanes[lane] += wide * wide;
  }
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// Rows of the table, in the order of the enums in onefold.h.
#define ONEFOLD_FORMATS(rule, form) {update<rule, form, Fp32>, update<rule, form, Bf16>, update<rule, form, Fp16>}
#define ONEFOLD_RULE(rule) \
  { ONEFOLD_FORMATS(rule, Own), ONEFOLD_FORMATS(rule, Split), \
    ONEFOLD_FORMATS(rule, Copy<Bf16>), ONEFOLD_FORMATS(rule, Copy<Fp16>) }

using AdamL2 = Adam<false, false>;
using AdamL2Amsgrad = Adam<false, true>;
using AdamW = Adam<true, false>;
using AdamWAmsgrad = Adam<true, true>;

}  // namespace

extern const Loops ONEFOLD_LOOPS = {
    {ONEFOLD_RULE(AdamL2), ONEFOLD_RULE(AdamL2Amsgrad), ONEFOLD_RULE(AdamW), ONEFOLD_RULE(AdamWAmsgrad),
     ONEFOLD_RULE(Sgd), ONEFOLD_RULE(SgdMomentum<true>), ONEFOLD_RULE(SgdMomentum<false>), ONEFOLD_RULE(Lion),
     ONEFOLD_RULE(Adagrad)},
    {count_nonfinite<Fp32>, count_nonfinite<Bf16>, count_nonfinite<Fp16>},
    {sum_of_squares<Fp32>, sum_of_squares<Bf16>, sum_of_squares<Fp16>},
};

}  // namespace onefold
