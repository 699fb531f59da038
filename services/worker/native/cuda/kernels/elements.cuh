// The types that a module is compiled for: ELEMENT is the type of weights, activations and the KV cache.
// All arithmetic is in float32.
#pragma once
#include "warp.cuh"

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

// Whether scores include the rounding errors of queries. For float16, the type for users who want exactness, that lowers
// the error by an eighth and costs a tenth of attention's time.
#define REST (ELEMENT_BITS == 16 && !ELEMENT_BFLOAT)

// PACK elements are one load: 16 bytes if the width of rows allows it.
struct alignas(sizeof(ELEMENT) * PACK) Pack {
  ELEMENT of[PACK];
};

struct alignas(PACK < 4 ? 4 * PACK : 16) FloatPack {
  float of[PACK];
};

// The activation of the feed-forward part: GELU, approximated with tanh, or SiLU.
#if GELU
__device__ __forceinline__ float activate(float x) {
  return 0.5f * x * (1 + tanhf(0.7978845608f * x * (1 + 0.044715f * x * x)));
}
#else
// exp overflows to infinity, and x / infinity is 0.
__device__ __forceinline__ float activate(float x) { return x / (1 + __expf(-x)); }
#endif

// Waits until the kernel before this one on the stream has ended, and lets the next one begin. In a graph a kernel begins
// when all thread blocks of the one before have called this (`EarlyKernel` of kernels.py); all kernels before that one
// have then ended. So until it calls this a kernel may read weights and the step's integers, and writes nothing. All its
// thread blocks call it.
__device__ __forceinline__ void after_others() {
#if EARLY
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
