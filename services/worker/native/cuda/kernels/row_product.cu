// Products of a single row, for decoding one sequence. Reading the weights once bounds their time. Warps read two weight
// rows together in 16-byte pieces; enough warps share a pair of rows to keep the memory busy. On an H200 the products of
// a layer of an 8B model take 112 µs, SwiGLU included. They take 121 µs with cuBLAS, which splits some of them and needs
// a second kernel to add the parts.
#include "elements.cuh"

#define WARPS 8
#define AHEAD 4  // pieces of each weight row in flight in a lane
#define REACH (WARP * PACK)
#define CHUNK (AHEAD * REACH)

// Reads a piece of a weight without L1. The load is volatile: otherwise the compiler moves loads down to their uses to
// save registers, and too few are in flight.
__device__ __forceinline__ Pack streamed(const ELEMENT* from) {
  Pack pack;
  if constexpr (sizeof(Pack) == 16) {
    uint4& words = *(uint4*)&pack;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
  } else {
    pack = *(const Pack*)from;
  }
  return pack;
}

// Reads AHEAD pieces of two weight rows.
__device__ __forceinline__ void read_ahead(Pack (&left)[AHEAD], Pack (&right)[AHEAD], const ELEMENT* first,
                                           const ELEMENT* second) {
#pragma unroll
  for (int n = 0; n < AHEAD; n++) {
    left[n] = streamed(first + n * REACH);
    right[n] = streamed(second + n * REACH);
  }
}

__device__ __forceinline__ void add_products(float2& sums, const Pack& x, const Pack& first, const Pack& second) {
#pragma unroll
  for (int i = 0; i < PACK; i++) {
    const float factor = wide(x.of[i]);
    sums.x += factor * wide(first.of[i]);
    sums.y += factor * wide(second.of[i]);
  }
}

// Computes x · first and x · second. `share` consecutive warps of the block take pieces of these rows in turn; the first
// of them returns the sums. The kernel before writes x, so the first pieces of the weights are on their way by then.
__device__ __forceinline__ float2 two_products(const ELEMENT* x, const ELEMENT* first, const ELEMENT* second, int inputs,
                                               int share) {
  __shared__ float2 parts[WARPS];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  float2 sums = {0, 0};
  Pack left[AHEAD], right[AHEAD];
  const int begin = warp % share * CHUNK;
  if (begin + CHUNK <= inputs) read_ahead(left, right, first + begin + lane * PACK, second + begin + lane * PACK);
  after_others();
  for (int chunk = begin; chunk < inputs; chunk += share * CHUNK) {
    int at = chunk + lane * PACK;
    if (chunk + CHUNK <= inputs) {
      if (chunk != begin) read_ahead(left, right, first + at, second + at);
      Pack factors[AHEAD];
#pragma unroll
      for (int n = 0; n < AHEAD; n++) factors[n] = *(const Pack*)(x + at + n * REACH);
#pragma unroll
      for (int n = 0; n < AHEAD; n++) add_products(sums, factors[n], left[n], right[n]);
    } else {
      for (; at < inputs; at += REACH)
        add_products(sums, *(const Pack*)(x + at), *(const Pack*)(first + at), *(const Pack*)(second + at));
    }
  }
  sums = {warp_sum(sums.x), warp_sum(sums.y)};
  if (share == 1) return sums;
  if (lane == 0) parts[warp] = sums;
  __syncthreads();
  for (int other = 1; other < share && warp % share == 0; other++)
    sums.x += parts[warp + other].x, sums.y += parts[warp + other].y;
  return sums;
}

// out (outputs) float32 = x (inputs) · weight (outputs, inputs)ᵀ; with `add`, `factor` times the product is added to out.
extern "C" __global__ void __launch_bounds__(WARPS * WARP)
    row_product(float* out, const ELEMENT* x, const ELEMENT* weight, int inputs, int outputs, int share, int add,
                float factor) {
  const int warp = threadIdx.x / WARP, first = 2 * (blockIdx.x * (WARPS / share) + warp / share);
  const int left = min(first, outputs - 1), right = min(first + 1, outputs - 1);  // all warps stay, to meet the barrier
  const float2 sums =
      two_products(x, weight + (long long)left * inputs, weight + (long long)right * inputs, inputs, share);
  if (threadIdx.x % WARP || warp % share || first >= outputs) return;
  out[first] = add ? out[first] + factor * sums.x : sums.x;
  if (right > first) out[right] = add ? out[right] + factor * sums.y : sums.y;
}

// activated (width) = activate(x · gateᵀ) · (x · upᵀ), where weight (2 · width, inputs) holds the gate, then up.
extern "C" __global__ void __launch_bounds__(WARPS * WARP)
    row_swiglu(ELEMENT* activated, const ELEMENT* x, const ELEMENT* weight, int inputs, int width, int share) {
  const int warp = threadIdx.x / WARP, which = blockIdx.x * (WARPS / share) + warp / share;
  const ELEMENT* gate = weight + (long long)min(which, width - 1) * inputs;
  const float2 sums = two_products(x, gate, gate + (long long)width * inputs, inputs, share);
  if (threadIdx.x % WARP || warp % share || which >= width) return;
  activated[which] = narrow(activate(sums.x) * sums.y);
}
