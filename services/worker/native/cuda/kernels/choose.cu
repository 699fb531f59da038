// Draws tokens from rows of logits (rows, vocab) float32 as native/sampler.py does, by inverting the cumulative
// distribution at one Philox number. A row with a logit that is not finite gives -1.
//
// The rows' settings, masks and lists lie in pinned host memory, `tokens` there or on the device.
#include "sampling.cuh"

// The settings of a row; cuda/sampler.py has the same fields.
struct Row {
  unsigned long long seed, draw;
  double top_p, repetition, presence, frequency;
  float coldness;   // 1 / temperature, or 0 for the greatest logit (the lowest id of equal ones)
  float min_p;
  int special;      // whether `choose_special` draws it
  int top_k;        // 0 if it removes nothing
  int first, biased;  // where its biases begin, and how many they are
  int slot;         // of its counts; -1 if it has no penalties
  int mask;         // its row of masks; -1 if it has none
};

// Draws for rows that need only the greatest logit, or a draw from the model's distribution at some temperature.
extern "C" __global__ void __launch_bounds__(THREADS)
    choose(int* tokens, const float* logits, const Row* rows, int vocab) {
  const Row* own = rows + blockIdx.x;
  const float cold = own->coldness;  // read early: it comes from host memory
  if (own->special) return;
  const float* row = logits + (long long)blockIdx.x * vocab;
  float value = -INFINITY;
  int id = vocab, broken = 0;
  each(row, vocab, [&](int at, float logit) {
    broken |= !isfinite(logit);
    if (logit > value) value = logit, id = at;
  });
  broken = __syncthreads_or(broken);
  const Top top = block_top(value, id);
  if (broken || cold == 0) {
    if (threadIdx.x == 0) tokens[blockIdx.x] = broken ? -1 : top.id;
    return;
  }
  const auto weight_of = [&](int at) { return expf((row[at] - top.value) * cold); };
  invert(tokens + blockIdx.x, weight_of, vocab, uniform(own->seed, own->draw), top.id);
}

// Returns the least key for which the measure of all numbers of a row with keys up to it reaches `target`, which the
// measure of all numbers does. `key_of` gives a number's key, of 31 bits, `measure_of` its measure. Finds three bits of the
// key in each pass. Measures are integers, so that sums do not depend on the order of threads.
template <class Key, class Measure>
__device__ unsigned least_key(const float* row, int vocab, Key key_of, Measure measure_of, unsigned long long target) {
  __shared__ unsigned long long sums[8];
  unsigned prefix = 0;
  unsigned long long below = 0;
  for (int shift = 30; shift >= 0; shift -= 3) {
    unsigned long long bins[8] = {};
    each(row, vocab, [&](int, float x) {
      const unsigned key = key_of(x);
      if (((key ^ prefix) >> shift) >> 3) return;
      const unsigned digit = key >> shift & 7;
      const unsigned long long measure = measure_of(x);
#pragma unroll
      for (int bin = 0; bin < 8; bin++) bins[bin] += digit == bin ? measure : 0;
    });
    __syncthreads();
    if (threadIdx.x < 8) sums[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int bin = 0; bin < 8; bin++) {
      if (!__any_sync(EVERY_LANE, bins[bin] != 0)) continue;
      for (int step = WARP / 2; step > 0; step /= 2) bins[bin] += __shfl_xor_sync(EVERY_LANE, bins[bin], step);
      if (threadIdx.x % WARP == 0) atomicAdd(&sums[bin], bins[bin]);
    }
    __syncthreads();
    unsigned digit = 0;
    while (digit < 7 && below + sums[digit] < target) below += sums[digit++];
    prefix |= digit << shift;
  }
  return prefix;
}

#define SEEN 0x80000000u  // a token is in prompt or output; the other bits count it in the output
#define LOGIT_LIMIT 1e30
#define ONE_BITS 0x3F800000u  // 1.0f
#define FIXED 0x1p44f         // weights as integers: a sum of 2^18 has 62 bits

__device__ float penalised(float x, unsigned count, const Row& own) {
  if (own.repetition != 1) {
    const double changed = x > 0 ? x / own.repetition : x * own.repetition;
    x = (float)fmin(fmax(changed, -LOGIT_LIMIT), LOGIT_LIMIT);
  }
  const unsigned produced = count & ~SEEN;
  return produced ? x - (float)__dadd_rn(__dmul_rn(own.frequency, produced), own.presence) : x;
}

// Draws for the other rows: biases, penalties and masks, then temperature, top_k, top_p and min_p. `room` (rows, vocab)
// is overwritten; the logits are not. `counts` (slots, vocab) are those of `count_tokens`; `masks` (rows, ⌈vocab / 32⌉)
// have a bit for each token that may be drawn.
extern "C" __global__ void __launch_bounds__(THREADS)
    choose_special(int* tokens, const float* logits, float* room, const Row* rows, const int* biased, const float* biases,
                   const unsigned* counts, const unsigned* masks, int vocab) {
  __shared__ Row own;
  static_assert(sizeof(Row) % 4 == 0 && sizeof(Row) / 4 <= THREADS, "one word a thread");
  if (threadIdx.x < sizeof(Row) / 4) ((int*)&own)[threadIdx.x] = ((const int*)(rows + blockIdx.x))[threadIdx.x];
  __syncthreads();
  if (!own.special) return;
  const float* given = logits + (long long)blockIdx.x * vocab;
  float* row = room + (long long)blockIdx.x * vocab;
  int* drawn = tokens + blockIdx.x;
  int broken = 0;
  each(given, vocab, [&](int at, float logit) {
    broken |= !isfinite(logit);
    row[at] = logit;
  });
  if (__syncthreads_or(broken)) {
    if (threadIdx.x == 0) *drawn = -1;
    return;
  }
  for (int at = own.first + threadIdx.x; at < own.first + own.biased; at += THREADS) row[biased[at]] += biases[at];
  __syncthreads();

  const unsigned* count = counts + (long long)own.slot * vocab;
  const unsigned* mask = masks + (long long)own.mask * ((vocab + 31) / 32);
  float value = -INFINITY;
  int id = vocab;
  each(row, vocab, [&](int at, float x) {
    if (own.slot >= 0 && count[at]) row[at] = x = penalised(x, count[at], own);
    if (own.mask >= 0 && !(mask[at / 32] >> at % 32 & 1)) row[at] = x = -INFINITY;
    if (x > value) value = x, id = at;
  });
  const Top top = block_top(value, id);
  if (own.coldness == 0) {
    if (threadIdx.x == 0) *drawn = top.id;
    return;
  }

  // Every filter keeps all tokens that tie with the last one it keeps.
  const auto distance = [&](float x) { return fabsf((x - top.value) * own.coldness); };
  unsigned farthest = 0x7FFFFFFF;
  if (own.top_k) {
    const auto key_of = [&](float x) { return __float_as_uint(distance(x)); };
    farthest = least_key(row, vocab, key_of, [](float) { return 1; }, own.top_k);
  }
  const auto fixed = [](float weight) { return __float2ull_rn(weight * FIXED); };
  unsigned long long total = 0;
  each(row, vocab, [&](int at, float x) {
    const float far = distance(x);
    const float weight = __float_as_uint(far) <= farthest ? expf(-far) : 0;
    row[at] = weight;
    total += fixed(weight);
  });
  float least = own.min_p;
  if (own.top_p < 1) {
    total = block_sum(total);
    const auto key_of = [](float weight) { return ONE_BITS - __float_as_uint(weight); };
    const auto removed = min((unsigned long long)((1 - own.top_p) * total), total - 1);  // the product may round up
    least = fmaxf(least, __uint_as_float(ONE_BITS - least_key(row, vocab, key_of, fixed, total - removed)));
  }
  __syncthreads();  // a thread reads the weights of others
  const auto weight_of = [&](int at) { return row[at] < least ? 0.0f : row[at]; };
  invert(drawn, weight_of, vocab, uniform(own.seed, own.draw), top.id);
}

// What a sequence's counts do not have yet.
struct News {
  int slot;
  int fresh;   // whether the slot has the counts of another sequence, which are removed
  int first, size;  // its tokens in `ids`
  int prompt;  // how many of them are of the prompt
};

// Counts tokens: one block for each sequence. `counts` (slots, vocab) has for each token SEEN and how often it was produced.
extern "C" __global__ void __launch_bounds__(THREADS)
    count_tokens(unsigned* counts, const News* news, const int* ids, int vocab) {
  const News own = news[blockIdx.x];
  unsigned* row = counts + (long long)own.slot * vocab;
  if (own.fresh) {
    for (int at = threadIdx.x; at < vocab; at += THREADS) row[at] = 0;
    __syncthreads();
  }
  for (int at = threadIdx.x; at < own.size; at += THREADS) {
    const int id = ids[own.first + at];
    atomicOr(&row[id], SEEN);
    if (at >= own.prompt) atomicAdd(&row[id], 1);
  }
}
