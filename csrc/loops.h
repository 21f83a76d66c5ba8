// Owns the table of loops that a level offers. Invariant: [start, stop) is one tile; a loop touches no other element.
#pragma once

#include "onefold.h"

namespace onefold {

using UpdateLoop = void (*)(const onefold_run &run, int64_t start, int64_t stop);
using CountLoop = int64_t (*)(const void *values, int64_t start, int64_t stop);
using SumLoop = double (*)(const void *values, int64_t start, int64_t stop);

struct Loops {
  UpdateLoop update[ONEFOLD_NUM_RULES][ONEFOLD_NUM_FORMS][ONEFOLD_NUM_FORMATS];
  CountLoop count_nonfinite[ONEFOLD_NUM_FORMATS];
  SumLoop sum_of_squares[ONEFOLD_NUM_FORMATS];
};

extern const Loops base_loops;
#if defined(ONEFOLD_X86_LEVELS)
extern const Loops avx2_loops;
extern const Loops avx512_loops;
#endif

}  // namespace onefold
