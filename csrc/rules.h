// Owns the optimizers' arithmetic on one element: `step` takes the exact weight and the finished gradient, gives the new
// weight and updates the state. Included once per level, like arithmetic.h.
//
// Invariant: the operations and their roundings are those of src/onefold/optim/rules.py run by torch on a CPU, one for one;
// what torch does as one fused operation is `fused` here. tests/test_native.py compares bits. Only square roots differ:
// these are correctly rounded, MKL's, which torch takes on x86, not always.
#pragma once

#include "arithmetic.h"
#include "onefold.h"

namespace onefold {
namespace {

// grad + decay * weight, but untouched without decay: 0 * inf would make a NaN.
inline float decayed(float grad, float weight, float decay) {
  return decay != 0.0f ? fused(weight, decay, grad) : grad;
}

template <bool kDecoupled, bool kAmsgrad>
struct Adam {
  float *mean, *square, *greatest;
  float blend, beta2, rest2, correction2, eps, rate, decay;
  Adam(const onefold_run &run, int64_t start)
      : mean(run.state[0] + start), square(run.state[1] + start),
        greatest(kAmsgrad ? run.state[2] + start : nullptr), blend(run.scalar[0]), beta2(run.scalar[1]),
        rest2(run.scalar[2]), correction2(run.scalar[3]), eps(run.scalar[4]), rate(run.scalar[5]),
        decay(run.scalar[6]) {}
  // torch's lerp starts from the nearer end.
  float lerp(float from, float to) const {
    const bool near = blend < 0.5f;
    return fused(near ? blend : blend - 1.0f, to - from, near ? from : to);
  }
  float step(int64_t i, float weight, float grad) const {
    if (kDecoupled) {
      weight = weight * decay;
    } else {
      grad = decayed(grad, weight, decay);
    }
    const float first = lerp(mean[i], grad);
    float second = fused(rest2 * grad, grad, square[i] * beta2);
    mean[i] = first;
    square[i] = second;
    if (kAmsgrad) {
      const float old = greatest[i];
      second = old >= second || old != old ? old : second;  // a NaN on either side stays
      greatest[i] = second;
    }
    const float denominator = root(second) / correction2 + eps;
    return weight + rate * first / denominator;
  }
};

struct Sgd {
  float rate, decay;
  Sgd(const onefold_run &run, int64_t) : rate(run.scalar[0]), decay(run.scalar[1]) {}
  float step(int64_t, float weight, float grad) const { return fused(decayed(grad, weight, decay), rate, weight); }
};

template <bool kFirst>
struct SgdMomentum {
  float *buffer;
  float rate, decay, momentum, damped;
  bool nesterov;
  SgdMomentum(const onefold_run &run, int64_t start)
      : buffer(run.state[0] + start), rate(run.scalar[0]), decay(run.scalar[1]), momentum(run.scalar[2]),
        damped(run.scalar[3]), nesterov(run.scalar[4] != 0.0f) {}
  float step(int64_t i, float weight, float grad) const {
    grad = decayed(grad, weight, decay);
    const float moved = kFirst ? grad : fused(grad, damped, buffer[i] * momentum);
    buffer[i] = moved;
    return fused(nesterov ? fused(moved, momentum, grad) : moved, rate, weight);
  }
};

struct Lion {
  float *momentum;
  float rate, decay, beta1, rest1, beta2, rest2;
  Lion(const onefold_run &run, int64_t start)
      : momentum(run.state[0] + start), rate(run.scalar[0]), decay(run.scalar[1]), beta1(run.scalar[2]),
        rest1(run.scalar[3]), beta2(run.scalar[4]), rest2(run.scalar[5]) {}
  float step(int64_t i, float weight, float grad) const {
    const float old = momentum[i];
    const float blend = fused(grad, rest1, old * beta1);
    const float sign = (blend > 0.0f ? 1.0f : 0.0f) - (blend < 0.0f ? 1.0f : 0.0f);  // 0 for a NaN, as torch has it
    momentum[i] = fused(grad, rest2, old * beta2);
    return fused(sign, rate, weight * decay);
  }
};

struct Adagrad {
  float *total;
  float rate, eps, decay;
  Adagrad(const onefold_run &run, int64_t start)
      : total(run.state[0] + start), rate(run.scalar[0]), eps(run.scalar[1]), decay(run.scalar[2]) {}
  float step(int64_t i, float weight, float grad) const {
    grad = decayed(grad, weight, decay);
    const float sum = fused(grad, grad, total[i]);
    total[i] = sum;
    return weight + rate * grad / (root(sum) + eps);
  }
};

}  // namespace
}  // namespace onefold
