// Draws one token for each row of logits (rows, vocab) float32: the greatest, or by inverting the cumulative distribution
// at one Philox number of (seed, index of the draw), as sampler.py does. A row with a logit that is not finite gives -1.
#include "elements.cuh"

#define THREADS 1024

__device__ double uniform(unsigned long long seed, unsigned long long draw) {  // Philox4x32-10, as in sampler.py
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

// coldness is 1 / temperature, or 0 for the greatest logit (the lowest id of equal ones). All arrays but the logits may
// lie in host memory.
extern "C" __global__ void __launch_bounds__(THREADS)
    choose(int* drawn, const float* logits, const float* coldness, const unsigned long long* seeds,
           const unsigned long long* draws, int vocab) {
  const float* row = logits + (long long)blockIdx.x * vocab;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const float cold = coldness[blockIdx.x];  // read early: it comes from host memory
  __shared__ float tops[WARP];
  __shared__ int ids[WARP];
  float top = -INFINITY;
  int id = vocab, broken = 0;
  for (int at = threadIdx.x; at < vocab; at += THREADS) {
    const float logit = row[at];
    broken |= !isfinite(logit);
    if (logit > top) top = logit, id = at;
  }
  broken = __syncthreads_or(broken);
  for (int pass = 0; pass < 2; pass++) {  // within each warp, then over the warps
    for (int step = WARP / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(EVERY_LANE, top, step);
      const int other_id = __shfl_xor_sync(EVERY_LANE, id, step);
      if (other > top || (other == top && other_id < id)) top = other, id = other_id;
    }
    if (pass == 0) {
      if (lane == 0) tops[warp] = top, ids[warp] = id;
      __syncthreads();
      top = tops[lane], id = ids[lane];
    }
  }
  if (broken || cold == 0) {
    if (threadIdx.x == 0) drawn[blockIdx.x] = broken ? -1 : id;
    return;
  }
  // Each thread has a run of consecutive tokens; their weights are summed in float64, as on the CPU.
  const int each = (vocab + THREADS - 1) / THREADS;
  const int begin = min((int)threadIdx.x * each, vocab), end = min(begin + each, vocab);
  double mass = 0;
  for (int at = begin; at < end; at++) mass += expf((row[at] - top) * cold);
  __shared__ double sums[THREADS];
  sums[threadIdx.x] = mass;
  __syncthreads();
  for (int step = 1; step < THREADS; step *= 2) {
    const double before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
    __syncthreads();
  }
  const double total = sums[THREADS - 1];
  const double target = fmin(uniform(seeds[blockIdx.x], draws[blockIdx.x]) * total, nextafter(total, 0.0));
  double reached = threadIdx.x ? sums[threadIdx.x - 1] : 0;
  if (target < reached || target >= sums[threadIdx.x]) return;
  int choice = begin;
  for (int at = begin; at < end; at++) {
    const float weight = expf((row[at] - top) * cold);
    if (weight > 0) choice = at;  // if rounding keeps the sum too small, the last token with weight
    reached += weight;
    if (reached > target) break;
  }
  drawn[blockIdx.x] = choice;
}
