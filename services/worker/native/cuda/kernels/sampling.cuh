// What the kernels that draw and rate tokens have in common. One block of THREADS threads has one row of logits. They
// depend on no model, so that all models of a cache share them.
#pragma once
#include "warp.cuh"

#define THREADS 1024

// Calls `use` with the index and the value of each of a row's numbers, which the block's threads share. Eight loads of a
// thread are under way at once, also where `use` writes to the row.
template <class Use>
__device__ void each(const float* row, int count, Use use) {
  int at = threadIdx.x;
  for (; at + 7 * THREADS < count; at += 8 * THREADS) {
    float values[8];
#pragma unroll
    for (int n = 0; n < 8; n++) values[n] = row[at + n * THREADS];
#pragma unroll
    for (int n = 0; n < 8; n++) use(at + n * THREADS, values[n]);
  }
  for (; at < count; at += THREADS) use(at, row[at]);
}

struct Top {
  float value;
  int id;
};

// Returns the greatest value of the block with its id, the lowest one of equals, to all threads.
__device__ Top block_top(float value, int id) {
  __shared__ float values[WARP];
  __shared__ int ids[WARP];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  for (int pass = 0; pass < 2; pass++) {  // within each warp, then over the warps
    for (int step = WARP / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(EVERY_LANE, value, step);
      const int other_id = __shfl_xor_sync(EVERY_LANE, id, step);
      if (other > value || (other == value && other_id < id)) value = other, id = other_id;
    }
    if (pass == 0) {
      __syncthreads();  // the arrays may still be read by the call before
      if (lane == 0) values[warp] = value, ids[warp] = id;
      __syncthreads();
      value = values[lane], id = ids[lane];
    }
  }
  return {value, id};
}

// Returns the sum over the block, added in the same order each time, to all threads.
template <class Number>
__device__ Number block_sum(Number x) {
  __shared__ Number sums[WARP];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  for (int pass = 0; pass < 2; pass++) {
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(EVERY_LANE, x, step);
    if (pass == 0) {
      __syncthreads();
      if (lane == 0) sums[warp] = x;
      __syncthreads();
      x = sums[lane];
    }
  }
  return x;
}

// Philox4x32-10 of (seed, index of the draw) as a number of [0, 1), as in native/sampler.py.
__device__ double uniform(unsigned long long seed, unsigned long long draw) {
  unsigned c0 = (unsigned)draw, c1 = (unsigned)(draw >> 32), c2 = 0, c3 = 0;
  unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const unsigned long long p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
    const unsigned n0 = (unsigned)(p1 >> 32) ^ c1 ^ k0, n2 = (unsigned)(p0 >> 32) ^ c3 ^ k1;
    c1 = (unsigned)p1, c3 = (unsigned)p0, c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return (double)(((unsigned long long)c0 << 21) | (c1 >> 11)) * 0x1p-53;
}

// Inverts the cumulative distribution of `weight_of` (a float for each token id) at `number`, of [0, 1). One thread
// writes the token. Each thread has a run of consecutive tokens, whose weights are summed in float64 as on the CPU. If
// rounding leaves a gap between two runs and the number lies in it, `likeliest` is drawn.
template <class Weight>
__device__ void invert(int* drawn, Weight weight_of, int vocab, double number, int likeliest) {
  __shared__ double sums[THREADS];
  const int each = (vocab + THREADS - 1) / THREADS;
  const int begin = min((int)threadIdx.x * each, vocab), end = min(begin + each, vocab);
  double mass = 0;
#pragma unroll 8
  for (int at = begin; at < end; at++) mass += weight_of(at);
  sums[threadIdx.x] = mass;
  if (threadIdx.x == 0) *drawn = likeliest;
  __syncthreads();
  for (int step = 1; step < THREADS; step *= 2) {
    const double before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
    __syncthreads();
  }
  const double total = sums[THREADS - 1];
  const double target = fmin(number * total, nextafter(total, 0.0));
  double reached = threadIdx.x ? sums[threadIdx.x - 1] : 0;
  if (target < reached || target >= sums[threadIdx.x]) return;
  int choice = -1;
  for (int at = begin; at < end; at++) {
    const float weight = weight_of(at);
    if (weight > 0) choice = at;  // if rounding keeps the sum too small, the last token with weight
    reached += weight;
    if (reached > target) break;
  }
  if (choice >= 0) *drawn = choice;
}
