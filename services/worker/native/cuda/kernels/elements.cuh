// The types a module is compiled for: ELEMENT is what weights, activations and the KV cache are stored as.
// All arithmetic is in float32.
#pragma once

#if ELEMENT_BITS == 32
typedef float ELEMENT;
__device__ __forceinline__ float wide(ELEMENT x) { return x; }
__device__ __forceinline__ ELEMENT narrow(float x) { return x; }
#elif ELEMENT_BFLOAT
#include <cuda_bf16.h>
typedef __nv_bfloat16 ELEMENT;
__device__ __forceinline__ float wide(ELEMENT x) { return __bfloat162float(x); }
__device__ __forceinline__ ELEMENT narrow(float x) { return __float2bfloat16_rn(x); }
#else
#include <cuda_fp16.h>
typedef __half ELEMENT;
__device__ __forceinline__ float wide(ELEMENT x) { return __half2float(x); }
__device__ __forceinline__ ELEMENT narrow(float x) { return __float2half_rn(x); }
#endif

// Whether scores are of queries with what rounding took from them: that takes an eighth off the error of float16, which
// is for those who want exactness, and costs a tenth of attention's time.
#define REST (ELEMENT_BITS == 16 && !ELEMENT_BFLOAT)

#ifndef INFINITY  // NVRTC brings no math.h
#define INFINITY __int_as_float(0x7f800000)
#endif
#define WARP 32
#define EVERY_LANE 0xffffffffu

// One PACK of elements is one load: 16 bytes where rows allow it.
struct alignas(sizeof(ELEMENT) * PACK) Pack {
  ELEMENT of[PACK];
};

struct alignas(PACK < 4 ? 4 * PACK : 16) FloatPack {
  float of[PACK];
};

// exp overflows to infinity, and x / infinity is 0.
__device__ __forceinline__ float silu(float x) { return x / (1 + __expf(-x)); }

__device__ __forceinline__ float warp_sum(float x) {
  for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(EVERY_LANE, x, step);
  return x;
}
