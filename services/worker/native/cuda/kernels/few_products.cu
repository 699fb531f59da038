// Products of 2 to 32 rows, for decoding several sequences, for 16-bit types. Reading the weights once bounds their time.
//
//     out (rows, outputs)     a thread block: 128 outputs, 16 for each warp, and one of PARTS parts of the inputs
//                             a cluster of PARTS thread blocks adds up their sums, in the same order each time
//
// The inputs of all rows come to shared memory piece by piece. Weights go from memory into the tensor core's registers, 16 bytes of
// a row at once: a sum over inputs may be taken in any order if both factors have the same order.
#include "tensor_cores.cuh"

#define WARPS 8
#define OUTPUTS 128  // of a thread block
#define AHEAD 4      // steps of 32 inputs whose weights are on their way
#define PIECE 1024   // inputs in shared memory at a time
#define PADDING 4    // of a row in shared memory, in 16 bytes, so that rows lie in different banks

__device__ __forceinline__ uint4 streamed(const ELEMENT* from) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}

// Waits until all thread blocks of the cluster are here; what they have written to shared memory is seen then.
__device__ __forceinline__ void meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Reads a float at `at` in the shared memory of another thread block of the cluster.
__device__ __forceinline__ float read_of(const float* at, int part) {
  unsigned address = (unsigned)__cvta_generic_to_shared(at), theirs;
  float value;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(address), "r"(part));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(theirs) : "memory");
  return value;
}

// out (rows, outputs) float32 = x (rows, inputs) · weight (outputs, inputs)ᵀ; with `add`, `factor` times the product is
// added to out. The grid is (PARTS, outputs / OUTPUTS); there are at most 8 · TILES rows.
template <int TILES, int PARTS>
__device__ __forceinline__ void few_products(float* out, const ELEMENT* x, const ELEMENT* weight, int rows, int inputs,
                                             int outputs, int add, float factor) {
  extern __shared__ uint4 room[];  // a piece (8 · TILES, pitch), and at the end the sums (8 · TILES, OUTPUTS) float32
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, c = lane % 4;
  const int part = blockIdx.x, span = inputs / PARTS, pitch = min(PIECE, span) / 8 + PADDING;
  const ELEMENT* low = weight + (long long)(blockIdx.y * OUTPUTS + warp * 16 + g) * inputs + part * span + 8 * c;
  const ELEMENT* high = low + 8LL * inputs;
  uint4 lows[AHEAD], highs[AHEAD];
#pragma unroll
  for (int n = 0; n < AHEAD; n++) lows[n] = streamed(low + 32 * n), highs[n] = streamed(high + 32 * n);
  after_others();
  float sums[TILES][4] = {};
  for (int piece = 0; piece < span; piece += PIECE) {
    const int width = min(PIECE, span - piece), columns = width / 8;
    for (int which = threadIdx.x; which < 8 * TILES * columns; which += WARPS * WARP) {
      const int row = which / columns, column = which % columns;
      const ELEMENT* from = x + (long long)row * inputs + part * span + piece + 8 * column;
      room[row * pitch + column] = row < rows ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    for (int at = 0; at < width; at += 32 * AHEAD) {
#pragma unroll
      for (int n = 0; n < AHEAD; n++) {
        const uint4 a = lows[n], b = highs[n];
        const int next = piece + at + 32 * (n + AHEAD);
        if (next < span) lows[n] = streamed(low + next), highs[n] = streamed(high + next);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          const uint4 k = room[(8 * t + g) * pitch + (at + 32 * n) / 8 + c];
          multiply(sums[t], a.x, b.x, a.y, b.y, k.x, k.y);
          multiply(sums[t], a.z, b.z, a.w, b.w, k.z, k.w);
        }
      }
    }
    __syncthreads();
  }
  float* all = (float*)room;
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) all[(8 * t + 2 * c + i % 2) * OUTPUTS + warp * 16 + g + 8 * (i / 2)] = sums[t][i];
  meet();
  for (int which = part * WARPS * WARP + threadIdx.x; which < rows * OUTPUTS; which += PARTS * WARPS * WARP) {
    float sum = 0;
#pragma unroll
    for (int other = 0; other < PARTS; other++) sum += read_of(all + which, other);
    float* to = out + (long long)(which / OUTPUTS) * outputs + blockIdx.y * OUTPUTS + which % OUTPUTS;
    *to = add ? *to + factor * sum : sum;
  }
  meet();  // nobody leaves while others read its shared memory
}

#define KERNEL(TILES, PARTS)                                                                                            \
  extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(WARPS * WARP)                               \
      few_products_##TILES##_##PARTS(float* out, const ELEMENT* x, const ELEMENT* weight, int rows, int inputs,          \
                                     int outputs, int add, float factor) {                                              \
    few_products<TILES, PARTS>(out, x, weight, rows, inputs, outputs, add, factor);                                     \
  }
KERNEL(1, 4)
KERNEL(2, 4)
KERNEL(4, 4)
KERNEL(1, 8)
KERNEL(2, 8)
KERNEL(4, 8)
