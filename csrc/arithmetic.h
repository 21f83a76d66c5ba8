// Owns number formats and the few operations whose rounding matters, for one level.
//
// Included into one namespace per level and compiled with that level's flags, so nothing here may be shared between
// levels: a linker that merged two copies would run AVX-512 code on a machine that has none. Hence the anonymous
// namespace, and no std:: templates.
//
// torch's CPU kernels use a fused multiply-add wherever an operation has the shape a + b * c and the processor has one.
// `fused` does the same, and -ffp-contract=off keeps the compiler from adding others: so a run equals torch bit for bit.
#pragma once

#include <cstdint>
#include <cstring>

namespace onefold {
namespace {

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// sqrt is correctly rounded everywhere; -fno-math-errno makes it one instruction.
inline float root(float value) { return __builtin_sqrtf(value); }

inline bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

struct Fp32 {
  using Word = float;
  static constexpr uint32_t exponent = 0x7f800000u;
  static float widen(float value) { return value; }
  static uint32_t raw(float value) { return to_bits(value); }
};

struct Bf16 {
  using Word = uint16_t;
  static constexpr uint32_t exponent = 0x7f80u;
  static float widen(uint16_t half) { return from_bits(static_cast<uint32_t>(half) << 16); }
  static uint32_t raw(uint16_t half) { return half; }
  // Round to nearest, ties to even.
  static uint16_t narrow(float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>(is_nan(bits) ? 0x7fc0u : rounded);
  }
};

struct Fp16 {
  using Word = uint16_t;
  static constexpr uint32_t exponent = 0x7c00u;
  static uint32_t raw(uint16_t half) { return half; }
  // Without branches or tables, so that it vectorizes: the multiplication by 2^112 moves the exponent, denormals too.
  static float widen(uint16_t half) {
    const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
    const uint32_t finite = to_bits(from_bits(magnitude) * 0x1p112f);
    const uint32_t bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
    return from_bits(bits | static_cast<uint32_t>(half & 0x8000u) << 16);
  }
  // Round to nearest, ties to even; what is too large becomes infinite. Adding 0.5 lets the adder round denormals.
  static uint16_t narrow(float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t denormal = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t half = magnitude < 0x38800000u ? denormal : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;
    half = is_nan(bits) ? 0x7e00u : half;
    return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
  }
};

}  // namespace
}  // namespace onefold
