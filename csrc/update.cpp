// Owns the C ABI: checks the numbers it is given, picks the level's loop, and hands tiles to threads.
//
// Invariant: which thread takes a tile changes nothing. Elements are independent, and sums are kept per tile and added
// in the order of the tiles.
#include "onefold.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "loops.h"

namespace {

constexpr int64_t kTile = 1 << 15;

const onefold::Loops *loops_of(int32_t level) {
  switch (level) {
    case ONEFOLD_BASE:
      return &onefold::base_loops;
#if defined(ONEFOLD_X86_LEVELS)
    case ONEFOLD_AVX2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &onefold::avx2_loops : nullptr;
    case ONEFOLD_AVX512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("fma")
                 ? &onefold::avx512_loops
                 : nullptr;
#endif
    default:
      return nullptr;
  }
}

int64_t tiles_of(int64_t numel) { return (numel + kTile - 1) / kTile; }

bool is_in(int32_t value, int32_t count) { return value >= 0 && value < count; }

// Call `work(tile, start, stop)` for every tile; a thread takes a few more when it is done with its last, so that one
// that shares its core with something else holds up no other.
template <class Work>
void for_each_tile(int64_t numel, int32_t num_threads, const Work &work) {
  const int64_t tiles = tiles_of(numel);
  if (tiles == 0) return;  // an empty shard; OpenMP has no team of no threads
  const int threads = num_threads < 1 ? 1 : num_threads < tiles ? num_threads : static_cast<int>(tiles);
  (void)threads;  // not read in a build without OpenMP
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (threads > 1)
#endif
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t start = tile * kTile;
    work(tile, start, numel - start < kTile ? numel : start + kTile);
  }
}

}  // namespace

extern "C" {

int32_t onefold_abi(void) { return ONEFOLD_ABI; }

const char *onefold_sources(void) { return ONEFOLD_SOURCES; }

int32_t onefold_has_threads(void) {
#if defined(_OPENMP)
  return 1;
#else
  return 0;
#endif
}

int32_t onefold_binds_threads(void) {
#if defined(_OPENMP)
  return omp_get_proc_bind() != omp_proc_bind_false;
#else
  return 0;
#endif
}

int32_t onefold_has_level(int32_t level) { return loops_of(level) != nullptr; }

int64_t onefold_tile(void) { return kTile; }

int32_t onefold_update(const onefold_run *run, int32_t level, int32_t num_threads) {
  const onefold::Loops *loops = loops_of(level);
  if (loops == nullptr || run->numel < 0 || !is_in(run->rule, ONEFOLD_NUM_RULES) ||
      !is_in(run->form, ONEFOLD_NUM_FORMS) || !is_in(run->grad_format, ONEFOLD_NUM_FORMATS)) {
    return -1;
  }
  const onefold::UpdateLoop loop = loops->update[run->rule][run->form][run->grad_format];
  for_each_tile(run->numel, num_threads, [=](int64_t, int64_t start, int64_t stop) { loop(*run, start, stop); });
  return 0;
}

int64_t onefold_count_nonfinite(const void *values, int64_t numel, int32_t format, int32_t level,
                                int32_t num_threads) {
  const onefold::Loops *loops = loops_of(level);
  if (loops == nullptr || numel < 0 || !is_in(format, ONEFOLD_NUM_FORMATS)) return -1;
  const onefold::CountLoop loop = loops->count_nonfinite[format];
  int64_t count = 0;
  int64_t *total = &count;
  for_each_tile(numel, num_threads, [=](int64_t, int64_t start, int64_t stop) {
    const int64_t found = loop(values, start, stop);
    if (found != 0) __atomic_fetch_add(total, found, __ATOMIC_RELAXED);
  });
  return count;
}

int32_t onefold_sum_of_squares(const void *values, int64_t numel, int32_t format, int32_t level, int32_t num_threads,
                               double *partial, double *sum) {
  const onefold::Loops *loops = loops_of(level);
  if (loops == nullptr || numel < 0 || !is_in(format, ONEFOLD_NUM_FORMATS)) return -1;
  const onefold::SumLoop loop = loops->sum_of_squares[format];
  for_each_tile(numel, num_threads,
                [=](int64_t tile, int64_t start, int64_t stop) { partial[tile] = loop(values, start, stop); });
  double total = 0.0;
  for (int64_t tile = 0; tile < tiles_of(numel); ++tile) total += partial[tile];
  *sum = total;
  return 0;
}

}  // extern "C"
