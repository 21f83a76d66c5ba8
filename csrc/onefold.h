// Owns the C ABI of the host kernels: what host.py calls, and nothing of PyTorch or Python.
//
// Invariant: every function reads and writes only the arrays it is given. Nothing is allocated, kept or thrown. Results
// do not depend on the number of threads, and not on the level but for fused multiply-adds (see arithmetic.h).
#pragma once

#include <stdint.h>

#if defined(__GNUC__)
#define ONEFOLD_EXPORT __attribute__((visibility("default")))
#else
#define ONEFOLD_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Raised by one whenever anything below changes; host.py refuses a library of another number.
enum { ONEFOLD_ABI = 1 };

// Instruction sets the loops are compiled for. BASE is the compiler's default for the machine (SSE2, NEON, ...).
enum { ONEFOLD_BASE = 0, ONEFOLD_AVX2 = 1, ONEFOLD_AVX512 = 2, ONEFOLD_NUM_LEVELS = 3 };

// Number formats of a gradient.
enum { ONEFOLD_FP32 = 0, ONEFOLD_BF16 = 1, ONEFOLD_FP16 = 2, ONEFOLD_NUM_FORMATS = 3 };

// Where the exact fp32 weight is, and what is written beside it.
enum {
  ONEFOLD_OWN = 0,        // weight: float; exact: unused
  ONEFOLD_SPLIT = 1,      // weight: bf16, exact: the int16 low bits that rounding the weight dropped
  ONEFOLD_COPY_BF16 = 2,  // weight: bf16, written only; exact: float
  ONEFOLD_COPY_FP16 = 3,  // weight: fp16, written only; exact: float
  ONEFOLD_NUM_FORMS = 4
};

// Optimizers. The comments give `state` and then `scalar`, in order; all state is float, as long as the run.
enum {
  ONEFOLD_ADAM = 0,           // mean, square; 1-beta1, beta2, 1-beta2, sqrt(1-beta2^t), eps, -lr/(1-beta1^t), decay
  ONEFOLD_ADAM_AMSGRAD = 1,   // mean, square, greatest square; as ADAM
  ONEFOLD_ADAMW = 2,          // as ADAM, but decay holds 1 - lr*weight_decay
  ONEFOLD_ADAMW_AMSGRAD = 3,  // as ADAM_AMSGRAD, but decay holds 1 - lr*weight_decay
  ONEFOLD_SGD = 4,            // none; -lr, weight_decay
  ONEFOLD_SGD_FIRST = 5,      // momentum, whose old values are not read; -lr, weight_decay, momentum, 1-dampening, nesterov
  ONEFOLD_SGD_MOMENTUM = 6,   // momentum; as SGD_FIRST
  ONEFOLD_LION = 7,           // momentum; -lr, 1 - lr*weight_decay, beta1, 1-beta1, beta2, 1-beta2
  ONEFOLD_ADAGRAD = 8,        // sum of squares; -lr/(1 + (t-1)*lr_decay), eps, weight_decay
  ONEFOLD_NUM_RULES = 9
};

typedef struct {
  int64_t numel;
  void *weight;
  void *exact;
  const void *grad;
  float *state[3];
  float factor[2];  // the gradient is multiplied by both, one after the other
  float scalar[8];
  int32_t rule, form, grad_format;
} onefold_run;

ONEFOLD_EXPORT int32_t onefold_abi(void);

// The digest of the files this library was built from, as CMakeLists.txt computes it.
ONEFOLD_EXPORT const char *onefold_sources(void);

// Whether this build was made with OpenMP.
ONEFOLD_EXPORT int32_t onefold_has_threads(void);

// Whether OpenMP was told to bind its threads to cores: it does so with a caller's, too, wherever that was bound before.
ONEFOLD_EXPORT int32_t onefold_binds_threads(void);

// Whether the loops of `level` were built and this processor runs them.
ONEFOLD_EXPORT int32_t onefold_has_level(int32_t level);

// Elements of the pieces that threads take; sums are made piece by piece.
ONEFOLD_EXPORT int64_t onefold_tile(void);

// `num_threads` below: how many threads a call may use; less than 1 counts as 1.

// Update one run in place. Returns 0, or -1 if a number in `run` or `level` names nothing; then nothing was changed.
ONEFOLD_EXPORT int32_t onefold_update(const onefold_run *run, int32_t level, int32_t num_threads);

// How many of `values` are infinite or NaN, by their bits. -1 if `format` or `level` names nothing.
ONEFOLD_EXPORT int64_t onefold_count_nonfinite(const void *values, int64_t numel, int32_t format, int32_t level,
                                               int32_t num_threads);

// The sum of squares, every product and sum in double. `partial` has one double for each tile begun.
ONEFOLD_EXPORT int32_t onefold_sum_of_squares(const void *values, int64_t numel, int32_t format, int32_t level,
                                              int32_t num_threads, double *partial, double *sum);

#ifdef __cplusplus
}
#endif
