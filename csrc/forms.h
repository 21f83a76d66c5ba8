// Owns the four ways a run keeps its exact weights. `load` gives the fp32 value, `store` keeps it and refreshes the
// compute weight in the same pass. Included once per level, like arithmetic.h.
#pragma once

#include "arithmetic.h"
#include "onefold.h"

namespace onefold {
namespace {

struct Own {
  float *weight;
  explicit Own(const onefold_run &run, int64_t start) : weight(static_cast<float *>(run.weight) + start) {}
  float load(int64_t i) const { return weight[i]; }
  void store(int64_t i, float value) const { weight[i] = value; }
};

// The weight is the value rounded half up in magnitude on the 16 bits it drops, so the low half's top bit tells whether
// it was rounded up. A NaN's low half could carry past the NaNs: its weight is set, its payload given up. No value is
// rounded up to zero: a zero beside such a low half was written since, and stays one.
struct Split {
  uint16_t *weight;
  uint16_t *low;
  explicit Split(const onefold_run &run, int64_t start)
      : weight(static_cast<uint16_t *>(run.weight) + start), low(static_cast<uint16_t *>(run.exact) + start) {}
  float load(int64_t i) const {
    const bool is_zero = (weight[i] & 0x7fffu) == 0 && low[i] >> 15 != 0;
    const uint32_t bottom = is_zero ? 0u : low[i];
    const uint32_t top = weight[i] - (bottom >> 15);
    return from_bits(top << 16 | bottom);
  }
  void store(int64_t i, float value) const {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits >> 16) + ((bits >> 15) & 1u);
    low[i] = static_cast<uint16_t>(bits);
    weight[i] = static_cast<uint16_t>(is_nan(bits) ? 0x7fc0u : rounded);
  }
};

template <class Format>
struct Copy {
  uint16_t *weight;
  float *exact;
  explicit Copy(const onefold_run &run, int64_t start)
      : weight(static_cast<uint16_t *>(run.weight) + start), exact(static_cast<float *>(run.exact) + start) {}
  float load(int64_t i) const { return exact[i]; }
  void store(int64_t i, float value) const {
    exact[i] = value;
    weight[i] = Format::narrow(value);
  }
};

}  // namespace
}  // namespace onefold
